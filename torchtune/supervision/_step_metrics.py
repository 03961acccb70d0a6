"""Values logged per step: sums and counts by name, over micro-batches and ranks."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from torchtune.data import Batch
from torchtune.training.parallel import ParallelDims
from torchtune.utils import get_logger, log_once

# Name -> (sum, count).
Figures = Mapping[str, tuple[torch.Tensor | float, torch.Tensor | int]]


class Means:
    """Sums and counts by name, for means over all ranks; ``prefix`` precedes each name.

    Ranks may add different names in a different order; :meth:`sync_names` builds a common list.

    Args:
        prefix: prefix of the names.
        names: names that all ranks know from the start, with the prefix.
    """

    def __init__(self, prefix: str = "", names: Sequence[str] = ()) -> None:
        self._prefix = prefix
        self._sums: dict[str, list[Any]] = {}
        self._names = list(names)  # known to all ranks, in a common order

    def add(self, figures: Figures) -> None:
        """Add the sums and counts of a micro-batch, without a host sync."""
        for name, (total, count) in figures.items():
            sums = self._sums.setdefault(self._prefix + name, [0.0, 0.0])
            sums[0] = sums[0] + _to_float64(total)
            sums[1] = sums[1] + _to_float64(count)

    @property
    def names(self) -> list[str]:
        """The common list of names, as it is now."""
        return list(self._names)

    @property
    def has_new_names(self) -> bool:
        """Whether this rank has names that are not in the common list."""
        return not self._sums.keys() <= set(self._names)

    def sync_names(self, dims: ParallelDims) -> list[str]:
        """Add the new names of all ranks to the common list, and return them. A collective."""
        names_of_ranks = dims.gather(sorted(self._sums.keys() - set(self._names)))
        # Sorted, so that all ranks append the same names in the same order.
        new_names = sorted(set().union(*names_of_ranks) - set(self._names))
        self._names += new_names
        return new_names

    def sums_and_counts(self, names: list[str] | None = None) -> list[Any]:
        """Return sum and count of names (by default the common list) for an all-reduce."""
        numbers = []
        for name in names or self._names:
            numbers += self._sums.get(name, (0.0, 0.0))
        return numbers

    def over(self, dims: ParallelDims) -> dict[str, float]:
        """Return the means over all ranks. A collective."""
        self.sync_names(dims)
        return self.from_sums(dims.exchange(self.sums_and_counts())[0])

    def from_sums(self, sums: list[float]) -> dict[str, float]:
        """Return the means from the all-reduced :meth:`sums_and_counts`; names with a count of 0 are omitted."""
        return means_of(self._names, sums)

    def clear(self) -> None:
        """Remove all values."""
        self._sums = {}


def means_of(names: Sequence[str], sums: Sequence[float]) -> dict[str, float]:
    """Return the means from sums and counts, which alternate; names with a count of 0 are omitted."""
    pairs = zip(names, sums[::2], sums[1::2], strict=True)
    return {name: total / count for name, total, count in pairs if count}


def _to_float64(value: Any) -> Any:
    """Return a number or tensor in float64, in which the sum over many tokens keeps its digits."""
    if not isinstance(value, torch.Tensor):
        return float(value)
    dtype = torch.float64
    if value.device.type == "mps":  # which has no float64
        dtype = torch.float32
    return value.detach().to(dtype)


class StepMetrics:
    """Losses and other logged values of a step's micro-batches on this rank.

    Only :meth:`RunControl.synchronize` waits for the device and for other ranks; it calls :meth:`total` once per step.

    Args:
        names: names of values that all ranks log. For other names, ranks exchange a message when they first appear.

    Attributes:
        losses: losses of the step's micro-batches, scalars.
        history: first and last (step, value) since start or resume, by name, for ``loss``, ``rewards/total`` and
            ``rewards/accuracies``.

    Example:
        >>> metrics = torchtune.supervision.StepMetrics()
        >>> metrics.add_loss(torch.tensor(2.0))
        >>> metrics.log_mean({"accuracy": (torch.tensor(3.0), 4)})
        >>> metrics.total([2.0, *metrics.new_sums(torchtune.training.ParallelDims())])
        {'loss': 2.0, 'accuracy': 0.75}
    """

    # Metrics that show the progress of a run, and their labels in a report.
    PROGRESS: ClassVar[dict[str, str]] = {
        "loss": "loss",
        "rewards/total": "reward",
        "rewards/accuracies": "accuracy",
    }

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.losses: list[torch.Tensor] = []
        self._means = Means(names=names)
        self._is_new = True  # the next loss begins another step
        self.history: dict[str, tuple[tuple[int, float], tuple[int, float]]] = {}

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add the scalar loss of a micro-batch; the loss of the step is the sum over micro-batches and ranks."""
        if self._is_new:
            self.losses = []
            self._is_new = False
        self.losses.append(loss.detach())

    def log_mean(self, figures: Figures) -> None:
        """Add other values of a micro-batch; their means over the step, or over the validation data, are logged.

        Args:
            figures: name -> (sum, count); the count is 0 if a micro-batch has no value.
        """
        self._means.add(figures)

    @contextmanager
    def by_source(self, batch: Batch) -> Iterator[list[torch.Tensor] | None]:
        """Log the losses of single tokens per source dataset, as ``loss/<name>``, if the batch is from a mixture.

        It yields the list that ``sum_and_count`` of a loss takes as ``row_losses``, and logs what it holds after the
        block. A loss that only returns a mean cannot be split; a message about it is logged once.

        Args:
            batch: batch on the device of the losses.

        Yields:
            An empty list; None if the batch is not from a mixture.
        """
        if not batch.sources:  # one dataset, whose loss is that of the step
            yield None
            return
        row_losses: list[torch.Tensor] = []  # [n] of each chunk
        yield row_losses
        positions = batch.find_labels()
        source = batch.per_token["source"].flatten().index_select(0, positions)
        if row_losses:
            losses = torch.cat(row_losses)  # [n]
        else:  # the loss has given none
            losses = source.new_zeros(0, dtype=torch.float32)
        if len(losses) == batch.labels.numel():  # the loss also covers unlabeled positions
            losses = losses.index_select(0, positions)
        if len(losses) != len(source):
            log_once(
                get_logger(),
                "loss/<name> is not logged, because the loss gave no losses of single tokens: let its sum_and_count "
                "append them to row_losses, the list that the recipe takes from by_source.",
            )
            # All ranks log the same names, even without labels.
            losses = losses[:0]
            source = source[:0]
        count = len(batch.sources)
        sums = _to_float64(losses.new_zeros(count))  # many tokens are added up
        sums.index_add_(0, source, losses.to(sums.dtype))
        # Not `bincount`, for which the host waits.
        counts = torch.zeros_like(sums).index_add_(0, source, torch.ones_like(losses, dtype=sums.dtype))
        for index, name in enumerate(batch.sources):
            self.log_mean({f"loss/{name}": (sums[index], counts[index])})

    @contextmanager
    def validation(self) -> Iterator[Means]:
        """Log values inside the block to the yielded ``Means``, with the prefix ``val_``."""
        training = self._means
        self._means = Means("val_")
        try:
            yield self._means
        finally:
            self._means = training

    def sums_and_counts(self) -> list[Any]:
        """Return the loss of the step, and sum and count of every other value, for an all-reduce."""
        if self._is_new:  # no micro-batch in this step
            self.losses = []
        loss = 0.0
        if self.losses:
            loss = torch.stack(self.losses).sum()
        return [loss, *self._means.sums_and_counts()]

    @property
    def has_new_names(self) -> bool:
        """Whether this rank has logged a name that is not in :meth:`sums_and_counts` yet."""
        return self._means.has_new_names

    def new_sums(self, dims: ParallelDims) -> list[float]:
        """Extend the common list of names, and return the sums to append to :meth:`sums_and_counts`. A collective."""
        new_names = self._means.sync_names(dims)
        if not new_names:
            return []
        sums, _ = dims.exchange(self._means.sums_and_counts(new_names))
        return sums

    def total(self, sums: list[float]) -> dict[str, float]:
        """Return the metrics of the step from the all-reduced :meth:`sums_and_counts`; the next loss begins a step."""
        names = self.end_step()
        return {"loss": sums[0], **means_of(names, sums[1:])}

    def end_step(self) -> list[str]:
        """Return the names of :meth:`sums_and_counts` after the loss; the next loss begins another step."""
        self._means.clear()
        self._is_new = True
        return self._means.names

    def record(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Update :attr:`history` with the values of a step.

        Args:
            step: number of completed steps.
            metrics: metrics of the step.
        """
        for name in self.PROGRESS.keys() & metrics.keys():
            last = (step, metrics[name])
            first, _ = self.history.get(name, (last, last))
            self.history[name] = (first, last)
