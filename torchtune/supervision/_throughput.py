"""Tokens per second, and shares of lost time."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torchtune.supervision._flops import FlopCount, count_flops, document_spans, peak_flops
from torchtune.utils import Activity, ObserverGuard, get_logger, log_once, watched_activity

if TYPE_CHECKING:
    import torch
    from torch import nn

    from torchtune.training.parallel import ParallelDims


class _MeasuredStep(NamedTuple):
    """Seconds, processed tokens, labeled tokens and FLOPs of a step."""

    seconds: float
    processed: int
    trained: int
    flops: float


class Throughput:
    """Tokens per second over the last steps: processed tokens and labeled tokens.

    Time inside ``paused`` (saving, validation) does not count. With ``dims`` and ``model``, the metrics also include
    the shares of lost time and the MFU (docs/observability.rst).

    Args:
        window: number of steps to average over.
        clock: monotonic time in seconds.
        model: the trained model; every forward pass updates :attr:`activity`, and on a device with known peak FLOPs the
            MFU is measured.
        dims: the processes of the run.
        device: device of the model.
        step: number of completed optimizer steps of a resumed run.

    Attributes:
        activity: current activity of the process.
        processed: number of processed tokens.
        trained: number of labeled tokens.

    Example:
        >>> throughput = torchtune.supervision.Throughput()
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
        self._window: deque[_MeasuredStep] = deque(maxlen=window)
        self._started = clock()
        self._step_start = self._started
        self._logged = self._started  # time of the last metrics
        self._dims = dims
        self._world_size = 1
        if dims is not None:
            self._world_size = dims.world_size
        self._device = device
        self._waited = self._dims_waited()  # at the last metrics
        self._lost_seconds: dict[str, float] = {}  # since the last metrics
        if self._world_size > 1:
            self._lost_seconds["waiting"] = 0.0
        self._guard = ObserverGuard("throughput: the MFU")
        self._peak_flops: float | None = None
        self._flops: FlopCount | None = None
        if model is not None and device is not None:

            def prepare_mfu() -> None:
                self._peak_flops = _peak_flops(model, device)
                if self._peak_flops is not None:
                    # The losses of recipes compute the logits of labeled tokens alone.
                    self._flops = count_flops(model, labels_only=True)

            self._guard.call(prepare_mfu)  # a model that cannot be measured is trained without an MFU
        self._attention_flops = 0.0  # per token in the current step
        self._expert_load = None
        if model is not None:
            self._expert_load = _expert_load(model)
        self.activity = watched_activity() or Activity(step)  # that of the watchdog, if there is one
        self.activity.step = step
        self.activity.move("training")
        self.processed = 0
        self.trained = 0
        if model is not None:
            model.register_forward_pre_hook(self._on_forward, with_kwargs=True)

    def _on_forward(self, model: "nn.Module", args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the shape of the tokens, for the message if memory runs out; a sign of life."""
        tokens = kwargs.get("tokens")
        if args:
            tokens = args[0]
        self.activity.shape = getattr(tokens, "shape", None)
        self.activity.move()

    def _dims_waited(self) -> float:
        """Return the seconds that this process has waited for others."""
        if self._dims is None:
            return 0.0
        return self._dims.waited

    def loading(self, loader: Iterable[list[Any]]) -> Iterator[list[Any]]:
        """Yield the items of ``loader``; the time spent loading counts as lost to data.

        Args:
            loader: iterable over the micro-batches of each step.
        """
        self._lost_seconds.setdefault("data", 0.0)
        batches = iter(loader)
        while True:
            try:
                with self._waiting_for_data("loading data"):
                    loaded = next(batches)
            except StopIteration:
                return
            if self._flops is not None:  # attention depends on the lengths of the documents
                self._attention_flops = self._guard.call(partial(self._attention_flops_per_token, loaded), default=0.0)
            self.activity.move("training")
            yield loaded

    @contextmanager
    def loading_ahead(self) -> Iterator[None]:
        """Count the time inside the block as lost to data, unless the device stays busy."""
        with self._waiting_for_data("loading ahead", while_computing=True):
            yield
        self.activity.move("training")

    @contextmanager
    def _waiting_for_data(self, phase: str, while_computing: bool = False) -> Iterator[None]:
        """Count the time inside the block as lost to data; with ``while_computing``, not while a GPU has work."""
        start = self._clock()
        self.activity.move(phase)
        try:
            yield
        finally:
            device_is_busy = False
            if while_computing and self._device is not None and self._device.type == "cuda":
                import torch

                # A GPU with queued work does not wait for the data.
                device_is_busy = not torch.cuda.current_stream(self._device).query()
            if not device_is_busy:
                self._lost_seconds["data"] = self._lost_seconds.get("data", 0.0) + self._clock() - start

    def _attention_flops_per_token(self, batches: list[Any]) -> float:
        """Return the attention FLOPs per token of a step."""
        lengths = []
        nums_before = []  # earlier positions that each document continues from
        for batch in batches:
            if isinstance(batch, Mapping):
                for length, num_before in document_spans(batch):
                    lengths.append(length)
                    nums_before.append(num_before)
        return self._flops.attention(lengths, nums_before) / max(sum(lengths), 1)

    def step(self, *, processed: int, trained: int) -> None:
        """Count one optimizer step.

        Args:
            processed: number of tokens of this process that passed through the model.
            trained: number of labeled tokens of all processes.
        """
        now = self._clock()
        flops = 0.0
        if self._flops is not None:
            labels = trained / self._world_size  # of this process, on average
            flops = (self._flops.token + self._attention_flops) * processed + self._flops.label * labels
        self._window.append(_MeasuredStep(now - self._step_start, processed, trained, flops))
        self._step_start = now
        self.processed += processed
        self.trained += trained
        self.activity.step += 1
        self.activity.move()

    @contextmanager
    def paused(self, phase: str | None = None) -> Iterator[None]:
        """Context manager that excludes the time inside it.

        Args:
            phase: name under which the time counts as lost, ``"saving"`` or ``"validation"``; None omits it from the
                metrics.
        """
        start = self._clock()
        waited = self._dims_waited()
        outer_phase = self.activity.phase
        self.activity.move(phase)
        try:
            yield
        finally:
            seconds = self._clock() - start
            self._step_start += seconds  # as if the step had begun later
            if phase is not None:
                self._lost_seconds[phase] = self._lost_seconds.get(phase, 0.0) + seconds
            self._waited += self._dims_waited() - waited  # part of the phase
            self.activity.move(outer_phase)

    def metrics(self) -> dict[str, float]:
        """Return averages over the window, and shares of the time since the last call.

        Metrics: ``tokens_per_second_per_gpu`` (processed), ``trained_tokens_per_second``; since the start or resume,
        ``processed_tokens`` and ``trained_tokens`` of all processes and ``elapsed_seconds``; ``mfu`` on a known device,
        ``lost_to_data``, ``lost_to_waiting`` (for other processes) and ``lost_to_<phase>`` for each phase of
        ``paused``. For a mixture of experts also ``expert_load_max`` and ``expert_load_min`` (a collective).
        """
        seconds = sum(step.seconds for step in self._window)
        if seconds <= 0:  # before the first step, the speeds are 0
            seconds = float("inf")
        metrics = {
            "tokens_per_second_per_gpu": sum(step.processed for step in self._window) / seconds,
            "trained_tokens_per_second": sum(step.trained for step in self._window) / seconds,
            "processed_tokens": self.processed * self._world_size,
            "trained_tokens": self.trained,
            "elapsed_seconds": self._clock() - self._started,
        }
        if self._flops is not None and not self._guard.has_failed:
            metrics["mfu"] = sum(step.flops for step in self._window) / seconds / self._peak_flops
        if self._expert_load is not None:
            metrics |= self._expert_load.metrics()
        return metrics | self._lost_shares()

    def _lost_shares(self) -> dict[str, float]:
        """Return the shares of the time since the last call that were lost, and count from now on."""
        now = self._clock()
        waited = self._dims_waited()
        if "waiting" in self._lost_seconds:  # of several processes; that inside phases is theirs
            self._lost_seconds["waiting"] = waited - self._waited
        elapsed = now - self._logged
        shares = {}
        for kind, seconds in self._lost_seconds.items():
            share = 0.0
            if elapsed > 0:
                share = seconds / elapsed
            shares[f"lost_to_{kind}"] = share
            self._lost_seconds[kind] = 0.0
        self._logged = now
        self._waited = waited
        return shares


def _peak_flops(model: "nn.Module", device: "torch.device") -> float | None:
    """Return peak FLOPs per second in the model's dtype; None on a CPU, in float32, or for an unknown device."""
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
    """Return the meter of how evenly ``model`` uses its experts; None without experts."""
    from torchtune.modules.moe import ExpertLoad, TokenChoiceTopKRouter

    for module in model.modules():
        if isinstance(module, TokenChoiceTopKRouter):
            return ExpertLoad(model)
    return None
