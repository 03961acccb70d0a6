"""Batch loader with an order determined by seed and epoch, so that epoch and step define the position."""

import copy
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from torchtune.data._batch import check_shifted
from torchtune.data._dataset import as_example_dataset
from torchtune.data._rows import CROSS_ENTROPY_IGNORE_IDX, DataError
from torchtune.utils import kept_random_state

Collated = Any  # the return value of collate_fn
_PREFETCH_EXAMPLES = 64  # number of examples announced to a stream in advance


class BatchLoader:
    """Loader that yields this rank's micro-batches of each optimizer step.

    A step consists of the next ``batch_size * accumulation_steps * world_size`` examples in the epoch's order. Each
    micro-batch is a slice of ``batch_size * world_size`` examples, split among the ranks. The order depends only on
    ``seed`` and the epoch, so any position can be reached directly, and the steps do not depend on the number of ranks
    if the number of examples per step is the same. No example is dropped: the last step of an epoch may be smaller. A
    rank without an example in that step gets an example without labels, so that all ranks run the same number of
    forward passes.

    Iteration starts at the current position and stops at the end of the epoch; :attr:`epoch` is then the next one. The
    position advances before a step is yielded, so a state saved during a step continues after it. :meth:`peek` loads
    the next step without advancing. Random numbers drawn by a dataset depend only on the seed, the position and the
    rank, so prefetching or resuming does not change them.

    Args:
        dataset: map-style dataset, for example a list. A mixture defines the indices of an epoch by ``order(seed,
            epoch, shuffle)``, with ``examples_per_epoch`` entries. A stream (``is_stream``) has no length, and its
            indices continue from epoch to epoch; ``begin``, ``state_at`` and ``go_to`` set and save its position, and
            ``read_ahead`` announces the next examples.
        batch_size: examples (or packs) per micro-batch and rank.
        collate_fn: converts a list of examples to a batch.
        shuffle: visit the examples in random order.
        seed: seed of the order.
        accumulation_steps: micro-batches per optimizer step.
        max_steps_per_epoch: maximum number of steps per epoch.
        rank: data-parallel rank of this process.
        world_size: number of data-parallel ranks.

    Raises:
        DataError: the dataset is empty, or a number is below 1.

    Example:
        >>> rows = [{"tokens": [n, n], "labels": [n, n]} for n in range(5)]
        >>> collate = torchtune.data.collate_documents
        >>> loader = torchtune.data.BatchLoader(rows, batch_size=2, collate_fn=collate, shuffle=False, seed=0)
        >>> [batch.tokens.tolist() for (batch,) in loader]
        [[[0, 0, 1, 1]], [[2, 2, 3, 3]], [[4, 4]]]
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Collated],
        shuffle: bool,
        seed: int,
        accumulation_steps: int = 1,
        max_steps_per_epoch: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        numbers = {"batch_size": batch_size, "accumulation_steps": accumulation_steps, "world_size": world_size}
        if max_steps_per_epoch is not None:
            numbers["max_steps_per_epoch"] = max_steps_per_epoch
        for name, number in numbers.items():
            if number < 1:
                raise DataError(f"{name} must be at least 1, not {number}.")
        if not 0 <= rank < world_size:
            raise DataError(f"rank {rank} is not one of {world_size} ranks.")
        self.dataset = as_example_dataset(dataset)
        self.batch_size = batch_size
        self.collate_fn = collate_fn
        self.shuffle = shuffle
        self.seed = seed
        self.accumulation_steps = accumulation_steps
        self.max_steps_per_epoch = max_steps_per_epoch
        self.rank = rank
        self.world_size = world_size
        if self.dataset.is_stream:
            if max_steps_per_epoch is None:
                raise DataError(
                    "A dataset with streaming=True has no end: set max_steps_per_epoch, each epoch goes on where the "
                    "last one stopped; dataset_val cannot be streamed."
                )
            self.examples_per_epoch = max_steps_per_epoch * self.examples_per_step
            self.dataset.begin(seed, shuffle=shuffle)
        else:  # an epoch of a mixture may skip or repeat examples
            self.examples_per_epoch = self.dataset.examples_per_epoch or len(self.dataset)
        if self.examples_per_epoch == 0:
            raise DataError("The dataset is empty: there is nothing to train on.")
        self.epoch = 0
        self._step = 0  # the next one of the epoch
        self._indices = np.empty(0, dtype=np.int64)  # of the last yielded step
        self._epoch_order: tuple[int, np.ndarray] | None = None  # (epoch, its order)
        self._peeked: tuple[tuple[int, int], list[Collated]] | None = None  # ((epoch, step), its micro-batches)
        self._num_announced = 0  # number of steps announced to the stream
        if self.dataset.is_stream:
            self._announce_next_steps()  # prefetch during set-up

    @property
    def examples_per_step(self) -> int:
        """Number of examples per optimizer step, over all ranks."""
        return self.batch_size * self.accumulation_steps * self.world_size

    def __len__(self) -> int:
        """Return the number of optimizer steps per epoch."""
        steps = math.ceil(self.examples_per_epoch / self.examples_per_step)
        if self.max_steps_per_epoch is None:
            return steps
        return min(steps, self.max_steps_per_epoch)

    @property
    def smallest_batch(self) -> int:
        """Number of examples in the smallest micro-batch of any rank in an epoch."""
        return max(self.smallest_micro_batch // self.world_size, 1)

    @property
    def smallest_micro_batch(self) -> int:
        """Number of examples in the smallest micro-batch in an epoch, over all ranks."""
        num_visited = min(len(self.dataset), len(self) * self.examples_per_step)
        micro_batch_size = self.batch_size * self.world_size
        return num_visited % micro_batch_size or micro_batch_size

    def set_epoch(self, epoch: int) -> None:
        """Set the position to the start of an epoch."""
        self.epoch = epoch
        self._step = 0

    def __iter__(self) -> Iterator[list[Collated]]:
        """Yield this rank's micro-batches for every remaining step of the epoch."""
        while self._step < len(self):
            batches = self.peek()
            self._peeked = None
            self._indices = self._indices_of(self._step)
            self._step += 1
            yield batches
        self.set_epoch(self.epoch + 1)

    @property
    def at_epoch_end(self) -> bool:
        """Whether the last yielded step is the last one of its epoch."""
        return self._step >= len(self)

    def peek(self) -> list[Collated] | None:
        """Load the micro-batches of the next step, without advancing the position; ``None`` at the end of the epoch.

        The micro-batches are cached until iteration yields them; a state saved now resumes with these micro-batches.
        """
        if self.at_epoch_end:
            return None
        position = (self.epoch, self._step)
        if self._peeked is None or self._peeked[0] != position:
            if self.dataset.is_stream:
                self._announce_next_steps()
            with seeded_generators(self.seed, *position, self.rank):
                parts = self._split_step(self._indices_of(self._step), self.rank)
                self._peeked = (position, [self._load_batch(part) for part in parts])
        return self._peeked[1]

    def peek_counts(self) -> tuple[int, int, float] | None:
        """Load the next step and count its tokens, labeled tokens and terms on this rank; see :meth:`peek`."""
        batches = self.peek()
        if batches is None:
            return None
        return self.count(batches)

    @staticmethod
    def count(batches: Sequence[Any]) -> tuple[int, int, float]:
        """Count the tokens, labeled tokens and terms in a step's micro-batches on this rank.

        Args:
            batches: batches with ``tokens`` and ``labels``; see :attr:`Batch.num_terms` for terms.
        """
        num_tokens = 0
        num_labels = 0
        num_terms = 0.0  # not an integer where labels have weights, perhaps on other ranks only
        for batch in batches:
            batch_labels = int((batch["labels"] != CROSS_ENTROPY_IGNORE_IDX).sum())
            num_tokens += batch["tokens"].numel()
            num_labels += batch_labels
            num_terms += getattr(batch, "num_terms", batch_labels)  # a dict of a collate_fn has none
        return num_tokens, num_labels, num_terms

    def derive(
        self, *, dataset: Any = None, collate_fn: Callable[[list[Any]], Collated] | None = None
    ) -> "BatchLoader":
        """Copy the loader with another dataset or collate function, at the same position and in the same order.

        Args:
            dataset: dataset with the same examples and additional entries; ``None`` for the same dataset.
            collate_fn: ``None`` for the same collate function.
        """
        loader = copy.copy(self)
        if dataset is not None:
            loader.dataset = as_example_dataset(dataset)
        if collate_fn is not None:
            loader.collate_fn = collate_fn
        loader._peeked = None
        return loader

    def _announce_next_steps(self) -> None:
        """Announce the examples of the next steps to a stream, so that it tokenizes them while a step is computed."""
        current_step = self.epoch * len(self) + self._step
        num_ahead = max(2, math.ceil(_PREFETCH_EXAMPLES / (self.batch_size * self.accumulation_steps)))
        if not current_step < self._num_announced <= current_step + num_ahead:
            self._num_announced = current_step
        if self._num_announced - current_step > num_ahead // 2:  # announcing many steps at once is faster
            return
        indices: list[int] = []
        for step in range(self._num_announced, current_step + num_ahead):
            examples = np.arange(step * self.examples_per_step, (step + 1) * self.examples_per_step)
            for part, _ in self._split_step(examples, self.rank):
                indices += part.tolist()
        self.dataset.read_ahead(indices)
        self._num_announced = current_step + num_ahead

    def _indices_of(self, step: int) -> np.ndarray:
        """Return the indices of the examples of a step of this epoch, for all ranks."""
        if self._epoch_order is None or self._epoch_order[0] != self.epoch:
            self._epoch_order = (self.epoch, self._order(self.epoch))
        start = step * self.examples_per_step
        return self._epoch_order[1][start : start + self.examples_per_step]

    def _order(self, epoch: int) -> np.ndarray:
        """Return the example indices of an epoch in order, int64 ``[examples_per_epoch]``."""
        if self.dataset.is_stream:
            return epoch * self.examples_per_epoch + np.arange(self.examples_per_epoch)
        return self.dataset.order(self.seed, epoch, self.shuffle)

    def visited_indices(self, epochs: int) -> np.ndarray:
        """Return the sorted indices of the examples visited in the first ``epochs`` epochs by all ranks."""
        num_visited = len(self) * self.examples_per_step  # in each epoch
        num_orders = epochs
        if not self.shuffle:  # all epochs have the same order
            num_orders = 1
        visited = [self._order(epoch)[:num_visited] for epoch in range(num_orders)]
        return np.unique(np.concatenate(visited))

    @property
    def step_indices(self) -> np.ndarray:
        """Indices of the examples of the last yielded step, for all ranks."""
        return self._indices

    def rows(
        self, parts: Sequence[tuple[int, int]] | None = None, step_indices: np.ndarray | None = None
    ) -> list[dict[str, Any]]:
        """Return the dataset rows of the last yielded step, or of an earlier one.

        Args:
            parts: (micro-batch, rank) pairs to look up; by default all micro-batches of all ranks.
            step_indices: :attr:`step_indices` after the earlier step was yielded.

        Returns:
            One dict per row, with ``row`` (from 0) and, if known, ``source``.
        """
        indices = step_indices
        if indices is None:
            indices = self._indices
        if parts is not None:
            micro_batches = [list(self._split_step(indices, rank)) for rank in range(self.world_size)]
            indices_of_parts = []
            for number, rank in parts:
                indices_of_part, _ = micro_batches[rank][number]
                indices_of_parts.append(indices_of_part)
            indices = np.concatenate(indices_of_parts)
        origins = []  # of all documents of the examples: a pack has several
        for index in indices:
            origins += self.dataset.origins(int(index))
        return origins

    def _split_step(self, step: np.ndarray, rank: int) -> Iterator[tuple[np.ndarray, bool]]:
        """Yield (indices, whether the labels are removed) for a rank's micro-batches of one step."""
        examples_per_micro_batch = self.batch_size * self.world_size
        for start in range(0, len(step), examples_per_micro_batch):
            examples = step[start : start + examples_per_micro_batch]
            local_examples = np.array_split(examples, self.world_size)[rank]
            if len(local_examples):
                yield local_examples, False
            else:  # every rank runs the same number of forward passes
                yield examples[:1], True

    def _load_batch(self, part: tuple[np.ndarray, bool]) -> Collated:
        """Read and collate the examples of a micro-batch, without their labels if it is a filler."""
        indices, removes_labels = part
        examples = [self.dataset[int(index)] for index in indices]
        if removes_labels:
            examples = [_without_labels(example) for example in examples]
        batch = self.collate_fn(examples)
        # Of a copied recipe, whose collate function returns a dict: a `Batch` was checked when it was made.
        if type(batch) is dict and isinstance(batch.get("tokens"), torch.Tensor):
            labels = batch.get("labels")
            if isinstance(labels, torch.Tensor) and labels.shape == batch["tokens"].shape:
                check_shifted(batch["tokens"], labels)
        return batch

    def _fingerprint(self) -> dict[str, Any]:
        """Return what determines the order of the examples and their content, which a resumed run must not change."""
        fingerprint = {
            "dataset_length": self.examples_per_epoch,
            "examples_per_step": self.examples_per_step,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }
        if self.dataset.fingerprint is not None:
            # Older states have dataset_content, in another format.
            fingerprint["dataset_digest"] = self.dataset.fingerprint
        if self.dataset.mixture is not None:
            fingerprint["mixture"] = self.dataset.mixture
        return fingerprint

    def state_dict(self) -> dict[str, Any]:
        """Return the position: epoch, next step, and a fingerprint of the data and the order."""
        epoch = self.epoch
        step = self._step
        if self.at_epoch_end:
            epoch += 1
            step = 0
        state = {"epoch": epoch, "step": step, "fingerprint": self._fingerprint()}
        if self.dataset.is_stream:
            state["stream"] = self.dataset.state_at(epoch * self.examples_per_epoch + step * self.examples_per_step)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved position.

        Raises:
            DataError: the data or the order differs from the saved state; the message lists the differences.
        """
        names = {
            "dataset_length": "the number of examples (or packs)",
            "examples_per_step": "examples per step (batch_size x gradient_accumulation_steps x ranks)",
            "shuffle": "shuffle",
            "seed": "seed",
            "dataset_digest": "the content of the dataset",
            "mixture": "the mixture",
        }
        # Only what both have is compared: a state of an earlier release lacks facts that were added since.
        current = self._fingerprint()
        saved = state["fingerprint"]
        changes = []
        for key, value in current.items():
            if key in saved and saved[key] != value:
                changes.append(f"{names.get(key, key)} was {saved[key]}, now {value}")
        if changes:
            raise DataError(
                f"Cannot continue at the saved data position: {'; '.join(changes)}; "
                "resume with what the run was started with, or start a new run."
            )
        self.epoch = int(state["epoch"])
        self._step = int(state["step"])
        if self.dataset.is_stream:
            self.dataset.go_to(state["stream"])  # forgets what was announced
            self._num_announced = 0
            self._announce_next_steps()


@contextmanager
def seeded_generators(*words: int) -> Iterator[None]:
    """Context manager that seeds all host generators with ``words`` and restores their states afterward."""
    seed = int(np.random.SeedSequence(words).generate_state(1)[0])
    with kept_random_state():
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)  # not `torch.manual_seed`, which also seeds accelerators
        yield


def _without_labels(example: Any) -> Any:
    """Return the example (or pack) with all labels set to the ignore index."""
    if isinstance(example, Mapping):
        blank = dict(example)
        for key, value in example.items():
            if key.endswith("labels"):
                blank[key] = torch.full((len(value),), CROSS_ENTROPY_IGNORE_IDX)
        return blank
    if isinstance(example, Sequence):
        return [_without_labels(document) for document in example]
    raise DataError(f"An example must be a mapping or a list of mappings, not {type(example).__name__}.")
