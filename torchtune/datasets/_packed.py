"""Documents put together into packs of nearly equal length."""

from bisect import bisect_left, insort
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from tqdm import tqdm

from torchtune.data import DataError
from torchtune.datasets._sft import document_of
from torchtune.utils import get_logger, log_rank_zero

# A piece of a row: (row, start, end).
Piece = tuple[int, int, int]


def best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Put rows into packs: longest first, each into the fullest pack that still holds it.

    Args:
        lengths: int64 [rows], each at most ``capacity``.
        capacity: tokens of a pack.

    Returns:
        rows of every pack, in order; packs in the order of their first rows.
    """
    packs: list[list[int]] = []
    with_room: dict[int, list[int]] = defaultdict(list)
    rooms: list[int] = []  # the keys of with_room, sorted
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        place = bisect_left(rooms, length)
        if place == len(rooms):
            pack, room = len(packs), capacity
            packs.append([])
        else:
            room = rooms[place]
            pack = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
        packs[pack].append(row)
        left = room - length
        if left:
            if left not in with_room:
                insort(rooms, left)
            with_room[left].append(pack)
    return sorted(map(sorted, packs))


def split_evenly(lengths: np.ndarray, capacity: int) -> list[list[Piece]]:
    """Lay all rows one after another and cut every ``capacity`` tokens: packs of pieces, all but the last full."""
    packs: list[list[Piece]] = []
    room = 0
    for row, length in enumerate(lengths.tolist()):
        start = 0
        while start < length:
            if not room:
                packs.append([])
                room = capacity
            end = min(length, start + room)
            packs[-1].append((row, start, end))
            room -= end - start
            start = end
    return packs


class Packs:
    """The pieces of every pack, 12 bytes each.

    Args:
        packs: pieces by pack.
    """

    def __init__(self, packs: list[list[Piece]]) -> None:
        self._ends = np.cumsum([0, *map(len, packs)])
        self._pieces = np.array([piece for pack in packs for piece in pack], np.int32).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> list[Piece]:
        """The pieces of a pack."""
        index = range(len(self))[index]
        return [tuple(piece) for piece in self._pieces[self._ends[index] : self._ends[index + 1]].tolist()]

    @property
    def lengths(self) -> np.ndarray:
        """int64 [packs]: tokens of every pack."""
        return np.add.reduceat(self._pieces[:, 2] - self._pieces[:, 1], self._ends[:-1], dtype=np.int64)


class PackedDataset(Dataset):
    """Packs of documents: every token of ``ds`` exactly once, nothing padded.

    An item is a list of documents (``tokens`` and pre-shifted ``labels``) that :func:`torchtune.data.collate_documents`
    lays one after another. Attention and positions stay inside a document.

    Args:
        ds: dataset of rows with ``tokens`` and ``labels``.
        max_seq_len: tokens of a pack at most.
        padding_idx: accepted for compatibility; nothing is padded.
        max_packs: keep only so many packs.
        split_across_pack: fill every pack to the last token by cutting documents; the pieces are documents of their
            own. False packs whole documents by best fit.

    Raises:
        DataError: a row is longer than ``max_seq_len`` and may not be cut, or there are no rows.

    Example:
        >>> rows = [{"tokens": [n] * n, "labels": [n] * n} for n in (3, 1, 2, 2)]
        >>> packs = torchtune.datasets.PackedDataset(rows, max_seq_len=4)
        >>> sorted(sum(len(document["tokens"]) for document in packs[i]) for i in range(len(packs)))
        [4, 4]
    """

    def __init__(
        self,
        ds: Dataset,
        *,
        max_seq_len: int,
        padding_idx: int = 0,
        max_packs: int | None = None,
        split_across_pack: bool = False,
    ) -> None:
        self.ds = ds
        self.max_seq_len = max_seq_len
        self.padding_idx = padding_idx
        if getattr(ds, "on_reading", False):
            raise DataError("Rows with images cannot be packed: leave packed out.")
        lengths = _lengths(ds)
        if not len(lengths):
            raise DataError("There is nothing to pack: the dataset is empty.")
        if split_across_pack:
            packs = split_evenly(lengths, max_seq_len)
        else:
            too_long = np.flatnonzero(lengths > max_seq_len)
            if len(too_long):
                shown = ", ".join(map(str, too_long[:10].tolist()))
                raise DataError(
                    f"{len(too_long)} rows are longer than max_seq_len={max_seq_len} and fit into no pack (rows "
                    f"{shown}, counted from 0): raise max_seq_len, or cut them with split_across_pack=True."
                )
            rows = best_fit(lengths, max_seq_len)
            packs = [[(row, 0, int(lengths[row])) for row in pack] for pack in rows]
        self.packs = Packs(packs[:max_packs])
        self.lengths = self.packs.lengths
        self.fill = float(self.lengths.sum() / (len(self.packs) * max_seq_len))
        log_rank_zero(
            get_logger(),
            f"Packed {len(lengths)} examples into {len(self.packs)} packs of up to {max_seq_len} tokens, "
            f"{100 * self.fill:.1f} % full.",
        )

    @property
    def fingerprint(self) -> int | None:
        """Changes when any token or label of the packed dataset does."""
        return getattr(self.ds, "fingerprint", None)

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, idx: int) -> list[dict[str, torch.Tensor]]:
        """The documents of a pack: dicts of int64 tensors ``tokens`` and ``labels``."""
        return [document_of(self.ds, row, start, end) for row, start, end in self.packs[idx]]

    def origins(self, idx: int) -> list[dict[str, Any]]:
        """``source`` and ``row`` of every document of a pack."""
        rows = [row for row, _, _ in self.packs[idx]]
        if not hasattr(self.ds, "origins"):
            return [{"row": row} for row in rows]
        return [origin for row in rows for origin in self.ds.origins(row)]


def _lengths(ds: Any) -> np.ndarray:
    if hasattr(ds, "lengths"):
        return np.asarray(ds.lengths)
    return np.array([len(ds[index]["tokens"]) for index in tqdm(range(len(ds)), desc="Measuring", disable=None)])
