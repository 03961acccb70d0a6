"""Values that are logged of every step: sums and counts by name, added up over micro-batches and processes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, Batch
from torchtune.modules.loss import keep_row_losses
from torchtune.training.parallel._parallel_dims import ParallelDims
from torchtune.utils import get_logger, log_once

# Metrics that say whether a run gets anywhere, and what a report calls them.
COURSE = {"loss": "loss", "rewards/total": "reward", "rewards/accuracies": "accuracy"}
# Name -> (sum, count).
Figures = Mapping[str, tuple[torch.Tensor | float, torch.Tensor | int]]


class Means:
    """Sums and counts by name, for means over all ranks, with ``prefix`` before each name.

    Ranks may add other names than others, in another order: :meth:`agree` makes one list of them.
    """

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._sums: dict[str, list[Any]] = {}
        self._names: list[str] = []  # that all ranks know, in their order

    def add(self, figures: Figures) -> None:
        """Add the sums and counts of a micro-batch, without a host sync."""
        for name, pair in figures.items():
            sums = self._sums.setdefault(self._prefix + name, [0.0, 0.0])
            sums[:] = [before + _wide(value) for before, value in zip(sums, pair, strict=True)]

    @property
    def has_new_names(self) -> bool:
        """Whether this rank has names that :meth:`agree` has not seen."""
        return not self._sums.keys() <= set(self._names)

    def agree(self, dims: ParallelDims) -> list[str]:
        """Add the new names of all ranks to the list of names; returns them. A collective."""
        found = set().union(*dims.gather(sorted(self._sums.keys() - set(self._names))))
        self._names += (new := sorted(found - set(self._names)))
        return new

    def numbers(self, names: list[str] | None = None) -> list[Any]:
        """Sum and count of names, by default of all that were agreed on, for an all-reduce."""
        return [number for name in names or self._names for number in self._sums.get(name, (0.0, 0.0))]

    def over(self, dims: ParallelDims) -> dict[str, float]:
        """The means over all ranks; a collective."""
        self.agree(dims)
        return self.of(dims.exchange(self.numbers())[0])

    def of(self, sums: list[float]) -> dict[str, float]:
        """The means, from the all-reduced :meth:`numbers`; names with a count of 0 are left out."""
        pairs = zip(self._names, sums[::2], sums[1::2], strict=True)
        return {name: total / count for name, total, count in pairs if count}

    def clear(self) -> None:
        """Remove all values."""
        self._sums = {}


def _wide(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return float(value)
    return value.detach().to(torch.float32 if value.device.type == "mps" else torch.float64)


class StepMetrics:
    """The losses of a step's micro-batches on this rank, and what else is logged of them.

    Nothing here waits for a device or for another process: :meth:`RunControl.synchronize` does, once a step, and calls
    :meth:`total`.

    Attributes:
        losses: losses of the micro-batches of the step, scalars.
        history: name -> the first (step, value) since start or resume, and the last, of ``loss``, ``rewards/total`` and
            ``rewards/accuracies``.

    Example:
        >>> metrics = torchtune.training.StepMetrics()
        >>> metrics.add_loss(torch.tensor(2.0))
        >>> metrics.log_mean({"accuracy": (torch.tensor(3.0), 4)})
        >>> metrics.total([2.0, *metrics.new_sums(torchtune.training.ParallelDims())])
        {'loss': 2.0, 'accuracy': 0.75}
    """

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self._means = Means()
        self._is_new = True  # the next loss is that of another step
        self.history: dict[str, tuple[tuple[int, float], tuple[int, float]]] = {}

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch, a scalar; the loss of the step is the sum over all of them and all ranks."""
        if self._is_new:
            self.losses, self._is_new = [], False
        self.losses.append(loss.detach())

    def log_mean(self, figures: Figures) -> None:
        """Add further values of a micro-batch; their means over the step, or over the validation data, are logged.

        Args:
            figures: name -> (sum, count). The count is 0 where a micro-batch has nothing to say.
        """
        self._means.add(figures)

    @contextmanager
    def by_source(self, batch: Batch) -> Iterator[None]:
        """Context manager: of a batch of a mixture, the losses computed inside are noted by dataset, ``loss/<name>``.

        A loss that gives a mean alone cannot be told by dataset; that is logged once.

        Args:
            batch: on the device of the losses.
        """
        if not batch.sources:
            yield
            return
        with keep_row_losses() as kept:
            yield
        labelled = batch.labels.flatten() != CROSS_ENTROPY_IGNORE_IDX
        source = batch.per_token["source"].flatten()[labelled]
        losses = torch.cat(kept) if kept else source.new_zeros(0, dtype=torch.float32)
        if len(losses) == len(labelled):  # the loss was asked for positions without a label, too
            losses = losses[labelled]
        if len(losses) != len(source):
            log_once(get_logger(), "loss/<name> is not logged: this loss gives no losses of single tokens.")
            losses, source = losses[:0], source[:0]  # other ranks may have no label: all note the same names
        count = len(batch.sources)
        sums = _wide(losses.new_zeros(count))
        sums.index_add_(0, source, losses.to(sums.dtype))
        counts = torch.bincount(source, minlength=count)
        self.log_mean({f"loss/{name}": (sums[i], counts[i]) for i, name in enumerate(batch.sources)})

    @contextmanager
    def validation(self) -> Iterator[Means]:
        """Context manager: values logged inside go to the returned ``Means``, with the prefix ``val_``."""
        training, self._means = self._means, Means("val_")
        try:
            yield self._means
        finally:
            self._means = training

    def numbers(self) -> list[Any]:
        """The loss of the step, and sum and count of every other value, for an all-reduce."""
        if self._is_new:  # no micro-batch in this step
            self.losses = []
        return [torch.stack(self.losses).sum() if self.losses else 0.0, *self._means.numbers()]

    @property
    def has_new_names(self) -> bool:
        """Whether this rank has logged a name that is not in :meth:`numbers` yet."""
        return self._means.has_new_names

    def new_sums(self, dims: ParallelDims) -> list[float]:
        """Make one list of the names of all ranks; returns what belongs behind :meth:`numbers`. A collective."""
        new = self._means.agree(dims)
        return dims.exchange(self._means.numbers(new))[0] if new else []

    def total(self, sums: list[float]) -> dict[str, float]:
        """The metrics of the step, from the all-reduced :meth:`numbers`; the next loss begins another step."""
        found = {"loss": sums[0], **self._means.of(sums[1:])}
        self._means.clear()
        self._is_new = True
        return found

    def record(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the first and the last values of a run into :attr:`history`.

        Args:
            step: number of completed steps.
            metrics: of the step.
        """
        for name in COURSE.keys() & metrics.keys():
            now = (step, metrics[name])
            self.history[name] = (self.history[name][0] if name in self.history else now, now)
