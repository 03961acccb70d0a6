"""Kernel time by kind of layer, and the places at which the host waits for the device."""

import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

PREFIX = "kind: "
BACKWARD = 1  # at::RecordScope of a node of the graph that autograd calls ...
ENGINE = "autograd::engine::evaluate_function: "  # ... inside an event of this name


@contextmanager
def labelled(parts: Mapping[str, nn.Module]) -> Iterator[None]:
    """Name the forward pass of these modules after their type, for the profiler."""
    with ExitStack() as stack:
        for module in parts.values():
            open_marks: list[Any] = []

            def enter(module: nn.Module, _: Any, marks: list[Any] = open_marks) -> None:
                mark = record_function(PREFIX + type(module).__name__)
                mark.__enter__()
                marks.append(mark)

            def leave(_: nn.Module, inputs: Any, output: Any, marks: list[Any] = open_marks) -> None:
                marks.pop().__exit__(None, None, None)

            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        yield


def time_by_kind(step: Callable[[], Any], update: Any, parts: Mapping[str, nn.Module]) -> dict[str, float]:
    """Milliseconds of kernels of one uncompiled step by kind of layer, forward and backward together.

    An operator belongs to the innermost labeled module around it. One of the backward pass belongs to the operator
    of the forward pass that autograd recorded under the same sequence number. On a CPU, an operator's own time counts.

    Args:
        step: forward, backward and update.
        update: optimizer, of which a step counts apart.
        parts: modules to label.
    """
    on_cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    original = update.step

    def step_of_optimizer(*args: Any, **kwargs: Any) -> Any:
        with record_function(PREFIX + "optimizer"):
            return original(*args, **kwargs)

    update.step = step_of_optimizer
    try:
        with labelled(parts), profile(activities=activities) as profiler:
            step()
            if on_cuda:
                torch.cuda.synchronize()
    finally:
        del update.step
    return _summed(profiler.events(), on_cuda)


def _summed(events: list[FunctionEvent], on_cuda: bool) -> dict[str, float]:
    events = [event for event in events if event.device_type.name == "CPU" and not event.is_async]
    forward: dict[tuple[int, int], FunctionEvent] = {}
    for event in sorted(events, key=lambda event: event.time_range.start):
        if event.sequence_nr >= 0 and _backward_of(event) is None:
            forward[event.thread, event.sequence_nr] = event  # the last one made the node of the graph
    found: dict[str, float] = defaultdict(float)
    for event in events:
        if on_cuda:  # a label has a "kernel" of its own name, which spans those below it
            spent = sum(kernel.duration for kernel in event.kernels if kernel.name != event.name)
        else:
            spent = event.self_cpu_time_total
        if spent:
            found[_kind(event, forward)] += spent / 1000
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _kind(event: FunctionEvent, forward: Mapping[tuple[int, int], FunctionEvent]) -> str:
    own = _label(event)
    if own is not None:
        return own
    backward = _backward_of(event)
    if backward is None:
        return "loss and others"
    origin = forward.get((backward.fwd_thread, backward.sequence_nr))
    return "loss and others" if origin is None else _label(origin) or "loss and others"


def _label(event: FunctionEvent | None) -> str | None:
    while event is not None:
        if event.name.startswith(PREFIX):
            return event.name.removeprefix(PREFIX)
        event = event.cpu_parent
    return None


def _backward_of(event: FunctionEvent | None) -> FunctionEvent | None:
    """The node of the graph that an operator of the backward pass belongs to."""
    while event is not None and event.scope != BACKWARD:
        if event.name.startswith(ENGINE):
            return next((child for child in event.cpu_children if child.scope == BACKWARD), event)
        event = event.cpu_parent
    return event


def host_syncs(step: Callable[[], Any]) -> dict[str, int]:
    """Number of synchronizations of the host with a CUDA device in ``step``, by file and line.

    Torch's debug mode sees operators that wait (``item``, ``nonzero``, copies to pageable memory), and not
    ``torch.cuda.synchronize`` itself.
    """
    if not torch.cuda.is_available():
        step()
        return {}
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    places = Counter(
        f"{os.sep.join(warning.filename.split(os.sep)[-3:])}:{warning.lineno}"
        for warning in caught
        if "called a synchronizing" in str(warning.message)
    )
    return dict(places.most_common())
