"""Tokens per second, and where the time goes."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torchtune.training.measure._flops import count_flops, document_spans, peak_flops
from torchtune.utils import Activity, get_logger, log_once, watched_activity

if TYPE_CHECKING:
    import torch
    from torch import nn

    from torchtune.training.parallel._parallel_dims import ParallelDims


class Throughput:
    """Tokens per second over the last steps: all that were processed, and those that carry a label.

    Time inside ``paused`` (saving, validation) does not count. With ``dims`` and ``model`` it also tells which shares
    of the time are lost, and how much of what the device can do the model makes use of (docs/observability.rst).

    Args:
        window: steps that the figures are taken over.
        clock: seconds, monotonic.
        model: that is trained; with it :attr:`activity` moves with every forward pass, on a device that is known the
            model's operations are counted (MFU).
        dims: the processes of the run.
        device: that the model is trained on.
        step: optimizer steps that were done before, by a run that goes on.

    Attributes:
        activity: what the process is doing.
        processed: tokens so far.
        trained: labels so far.

    Example:
        >>> throughput = torchtune.training.Throughput()
        >>> throughput.step(processed=512, trained=128)
    """

    def __init__(
        self,
        window: int = 10,
        clock: Callable[[], float] = time.perf_counter,
        *,
        model: "nn.Module | None" = None,
        dims: "ParallelDims | None" = None,
        device: "torch.device | None" = None,
        step: int = 0,
    ) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}.")
        self._clock = clock
        self._window: deque[tuple[float, int, int, float]] = deque(maxlen=window)
        self._mark = self._logged = clock()
        self._dims, self._device = dims, device
        self._waited = self._dims_waited()
        self._lost: dict[str, float] = {} if dims is None or dims.world_size == 1 else {"waiting": 0.0}
        self._peak = None if model is None or device is None else _peak(model, device)
        self._flops = None if self._peak is None else count_flops(model, labels_only=True)
        self._pair_flops = 0.0  # of attention, by token, in the step that is worked on
        self._expert_load = None if model is None else _expert_load(model)
        self.activity = watched_activity() or Activity(step)
        self.activity.step = step
        self.activity.move("training")
        self.processed = 0
        self.trained = 0
        if model is not None:
            model.register_forward_pre_hook(self._seen, with_kwargs=True)

    def _seen(self, model: "nn.Module", args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = args[0] if args else kwargs.get("tokens")
        self.activity.shape = getattr(tokens, "shape", None)
        self.activity.move()

    def _dims_waited(self) -> float:
        return 0.0 if self._dims is None else self._dims.waited

    def loading(self, loader: Iterable[list[Any]]) -> Iterator[list[Any]]:
        """What ``loader`` yields; the time that it takes counts as lost to data.

        Args:
            loader: yields the micro-batches of each step.
        """
        self._lost.setdefault("data", 0.0)
        batches = iter(loader)
        while True:
            try:
                with self._waiting_for_data("loading data"):
                    loaded = next(batches)
            except StopIteration:
                return
            if self._flops is not None:
                self._pair_flops = self._attention_by_token(loaded)
            self.activity.move("training")
            yield loaded

    @contextmanager
    def loading_ahead(self) -> Iterator[None]:
        """Context manager: the time inside counts as lost to data, unless the device is busy all the while."""
        with self._waiting_for_data("loading ahead", while_computing=True):
            yield
        self.activity.move("training")

    @contextmanager
    def _waiting_for_data(self, phase: str, while_computing: bool = False) -> Iterator[None]:
        start = self._clock()
        self.activity.move(phase)
        try:
            yield
        finally:
            if not (while_computing and self._device_is_busy()):
                self._lost["data"] = self._lost.get("data", 0.0) + self._clock() - start

    def _device_is_busy(self) -> bool:
        """Whether a GPU still works on what it was given, so that it waits for nothing."""
        if self._device is None or self._device.type != "cuda":
            return False
        import torch

        return not torch.cuda.current_stream(self._device).query()

    def _attention_by_token(self, batches: list[Any]) -> float:
        spans = [span for batch in batches if isinstance(batch, Mapping) for span in document_spans(batch)]
        lengths, before = zip(*spans, strict=True) if spans else ((), ())
        return self._flops.attention(lengths, before) / max(sum(lengths), 1)

    def step(self, *, processed: int, trained: int) -> None:
        """Count one optimizer step.

        Args:
            processed: tokens that went through the model, of this process.
            trained: tokens that carry a label, of all processes.
        """
        now = self._clock()
        flops = 0.0
        if self._flops is not None:
            labels = trained / (1 if self._dims is None else self._dims.world_size)
            flops = (self._flops.token + self._pair_flops) * processed + self._flops.label * labels
        self._window.append((now - self._mark, processed, trained, flops))
        self._mark = now
        self.processed += processed
        self.trained += trained
        self.activity.step += 1
        self.activity.move()

    @contextmanager
    def paused(self, phase: str | None = None) -> Iterator[None]:
        """Leave the time inside the block out.

        Args:
            phase: what it is lost to, ``"saving"`` or ``"validation"``; without a name it is not in the metrics.
        """
        start, waited, before = self._clock(), self._dims_waited(), self.activity.phase
        self.activity.move(phase)
        try:
            yield
        finally:
            seconds = self._clock() - start
            self._mark += seconds
            if phase is not None:
                self._lost[phase] = self._lost.get(phase, 0.0) + seconds
            self._waited += self._dims_waited() - waited  # is part of the phase
            self.activity.move(before)

    def metrics(self) -> dict[str, float]:
        """Figures of the window, and shares of the time since this was last called.

        ``tokens_per_second_per_gpu`` (processed), ``trained_tokens_per_second``, ``mfu`` where the device is known,
        and ``lost_to_data``, ``lost_to_waiting`` (for other processes) and what ``paused`` has named so far; of a
        mixture of experts ``expert_load_max`` and ``expert_load_min``, for which all processes call this together.
        """
        seconds, processed, trained, flops = (sum(column) for column in zip((0, 0, 0, 0), *self._window, strict=True))
        seconds = seconds if seconds > 0 else float("inf")
        found = {"tokens_per_second_per_gpu": processed / seconds, "trained_tokens_per_second": trained / seconds}
        if self._flops is not None:
            found["mfu"] = flops / seconds / self._peak
        if self._expert_load is not None:
            found |= self._expert_load.metrics()
        return found | self._shares()

    def _shares(self) -> dict[str, float]:
        now, waited = self._clock(), self._dims_waited()
        if "waiting" in self._lost:
            self._lost["waiting"] = waited - self._waited
        wall = now - self._logged
        shares = {f"lost_to_{kind}": lost / wall if wall > 0 else 0.0 for kind, lost in self._lost.items()}
        self._lost = dict.fromkeys(self._lost, 0.0)
        self._logged, self._waited = now, waited
        return shares


def _peak(model: "nn.Module", device: "torch.device") -> float | None:
    """What the device can do in the model's type; None on a CPU, in float32, or if it is not known."""
    import torch

    parameter = next(model.parameters(), None)
    if device.type != "cuda" or parameter is None or parameter.dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(device)
    peak = peak_flops(name)
    if peak is None:
        log_once(get_logger(), f"There is no MFU: what '{name}' can do at most is not known here.")
    return peak


def _expert_load(model: "nn.Module") -> Any:
    """What tells how evenly the experts of ``model`` are used; None where there are none."""
    from torchtune.modules.moe import ExpertLoad, TokenChoiceTopKRouter

    return ExpertLoad(model) if any(isinstance(part, TokenChoiceTopKRouter) for part in model.modules()) else None
