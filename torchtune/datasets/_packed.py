"""Packing of documents."""

import heapq
import itertools
import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

from torchtune.data import (
    CROSS_ENTROPY_IGNORE_IDX,
    DataError,
    ExampleDataset,
    as_example_dataset,
    documents_of,
)
from torchtune.utils import get_logger, log_rank_zero

# (row, start, end): a slice of a row's tokens.
Piece = tuple[int, int, int]
_MOST_TRIES = 16  # full packs that are passed over for a row, before it gets a new pack: many would take long


def spread_images(lengths: np.ndarray, capacity: int, image_tokens: np.ndarray) -> list[list[int]]:
    """Assign rows with images to packs so that the vision tower has about equal work in every pack.

    Args:
        lengths: int64 ``[rows]``, each at most ``capacity``.
        capacity: maximum number of tokens per pack.
        image_tokens: int64 ``[rows]``, number of tokens of images.

    Returns:
        rows with images of each pack, for at least as many packs as all tokens fill; rows without images are left to
        the caller.
    """
    num_packs = math.ceil(int(lengths.sum()) / capacity)  # rows without images fill the packs up
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    rooms = [capacity] * num_packs  # free tokens of each pack
    # The row with the most image tokens goes into the pack with the fewest, and so on, as long as it has space.
    heap = [(0, pack) for pack in range(num_packs)]  # (image tokens, pack)
    most_first = np.argsort(-image_tokens, kind="stable")
    for row in most_first[: np.count_nonzero(image_tokens)].tolist():
        length = int(lengths[row])
        full_entries = []  # packs with fewer image tokens, but without space
        while heap and rooms[heap[0][1]] < length and len(full_entries) < _MOST_TRIES:
            full_entries.append(heapq.heappop(heap))
        if not heap or rooms[heap[0][1]] < length:
            heapq.heappush(heap, (-1, len(packs)))  # a new pack, which comes first
            packs.append([])
            rooms.append(capacity)
        tokens, pack = heapq.heappop(heap)
        packs[pack].append(row)
        rooms[pack] -= length
        tokens = max(tokens, 0) + int(image_tokens[row])  # a new pack has no image tokens, and not -1
        for entry in [*full_entries, (tokens, pack)]:
            heapq.heappush(heap, entry)
    return packs


def best_fit(lengths: np.ndarray, capacity: int, image_tokens: np.ndarray | None = None) -> list[list[int]]:
    """Pack rows by best-fit decreasing: longest row first, each into the fullest pack with enough space.

    Args:
        lengths: int64 ``[rows]``, each at most ``capacity``.
        capacity: maximum number of tokens per pack.
        image_tokens: int64 ``[rows]``, number of tokens of images; rows with images are placed first, and evenly.

    Returns:
        rows of each pack, sorted; packs are sorted by their first row.
    """
    if image_tokens is None:
        image_tokens = np.zeros_like(lengths)
    packs: list[list[int]] = []
    if image_tokens.any():
        packs = spread_images(lengths, capacity, image_tokens)
    with_room: dict[int, list[int]] = defaultdict(list)  # free tokens -> packs
    for pack, rows in enumerate(packs):
        room = capacity - int(lengths[rows].sum())
        if room > 0:
            with_room[room].append(pack)
    rooms = sorted(with_room)  # so that the fullest pack with enough space is found by bisection
    longest_first = np.argsort(-lengths, kind="stable")
    for row in longest_first.tolist():
        if image_tokens[row]:  # placed above
            continue
        length = int(lengths[row])
        position = bisect_left(rooms, length)
        if position == len(rooms):  # no pack has enough space
            room = capacity
            pack = len(packs)
            packs.append([])
        else:
            room = rooms[position]
            pack = with_room[room].pop()
            if not with_room[room]:
                del with_room[room]
                del rooms[position]
        packs[pack].append(row)
        room -= length
        if room > 0:
            if room not in with_room:
                insort(rooms, room)
            with_room[room].append(pack)
    return sorted(sorted(rows) for rows in packs if rows)  # packs for images may have stayed empty


def split_evenly(lengths: np.ndarray, capacity: int, longest: int | None = None) -> list[list[Piece]]:
    """Concatenate all rows and cut every ``capacity`` tokens; only the last pack may have fewer.

    Args:
        lengths: int64 ``[rows]``.
        capacity: number of tokens per pack.
        longest: maximum number of tokens per piece; None for no limit within a pack.
    """
    packs: list[list[Piece]] = []
    room = 0
    for row, length in enumerate(lengths.tolist()):
        start = 0
        while start < length:
            if not room:
                packs.append([])
                room = capacity
            end = min(length, start + room)
            if longest is not None:
                end = min(end, start + longest)
            packs[-1].append((row, start, end))
            room -= end - start
            start = end
    return packs


def whole_rows(packs: list[list[int]], lengths: np.ndarray) -> list[list[Piece]]:
    """Return the pieces of packs of whole rows."""
    pieces_of_packs = []
    for rows in packs:
        pieces_of_packs.append([(row, 0, int(lengths[row])) for row in rows])
    return pieces_of_packs


def document_of(example: Mapping[str, Any], start: int, end: int) -> dict[str, torch.Tensor]:
    """Return int64 ``tokens`` and ``labels``, and float32 ``label_weights`` if any, of a slice of an example."""
    document = {}
    for name in ("tokens", "labels"):
        ids = np.asarray(example[name])[start:end]
        document[name] = torch.from_numpy(ids.astype(np.int64))
    if "label_weights" in example:
        weights = np.array(example["label_weights"][start:end], np.float32)  # a copy: the file is read-only
        document["label_weights"] = torch.from_numpy(weights)
    return document


def pack_length(tokenizer: Any) -> int:
    """Return the tokenizer's ``max_seq_len`` as pack length; raise :class:`DataError` if it is not set."""
    length = getattr(tokenizer, "max_seq_len", None)
    if length is None:
        raise DataError("packed=True needs the length of a pack: set the tokenizer's max_seq_len.")
    return length


class Packs:
    """Compact list of packs, 12 bytes per piece.

    Args:
        packs: pieces of each pack.
    """

    def __init__(self, packs: list[list[Piece]]) -> None:
        self._ends = np.cumsum([0, *map(len, packs)])
        pieces = list(itertools.chain.from_iterable(packs))
        self._pieces = np.array(pieces, np.int32).reshape(-1, 3)  # (row, start, end)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> list[Piece]:
        """Return the pieces of a pack."""
        index = range(len(self))[index]
        pieces = self._pieces[self._ends[index] : self._ends[index + 1]]
        return [tuple(piece) for piece in pieces.tolist()]

    @property
    def longest_piece(self) -> int:
        """Number of tokens of the longest piece."""
        return int((self._pieces[:, 2] - self._pieces[:, 1]).max())

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each pack, int64 ``[packs]``."""
        piece_lengths = self._pieces[:, 2] - self._pieces[:, 1]
        return np.add.reduceat(piece_lengths, self._ends[:-1], dtype=np.int64)


class Pack(list):
    """Documents of a pack, which are also read as the padded row that packs were in earlier releases.

    As a list, the documents: dicts of ``tokens``, ``labels`` and, if there are images, their patches. As a mapping,
    tensors of ``max_seq_len`` tokens (``pack["tokens"]``, ``dict(pack)``): ``tokens``, padded with ``padding_idx``,
    ``labels``, padded with the ignore index, ``input_pos``, which counts from 0 in each document and goes on in the
    padding, and ``seq_lens``, the lengths of the documents and of the padding.

    Args:
        documents: the documents.
        max_seq_len: length of the padded row.
        padding_idx: token id of the padding.
    """

    def __init__(self, documents: Iterable[dict[str, Any]], max_seq_len: int, padding_idx: int) -> None:
        super().__init__(documents)
        self.max_seq_len = max_seq_len
        self.padding_idx = padding_idx

    def keys(self) -> list[str]:
        """Return the names of the tensors of the padded row."""
        return ["tokens", "labels", "input_pos", "seq_lens"]

    def __getitem__(self, key: Any) -> Any:
        """Return a document by index, or a tensor of the padded row by name."""
        if not isinstance(key, str):
            return super().__getitem__(key)
        lengths = [len(document["tokens"]) for document in self]
        num_padding = self.max_seq_len - sum(lengths)
        if key == "seq_lens":
            if num_padding > 0:
                lengths.append(num_padding)
            return torch.tensor(lengths)
        if key == "input_pos":  # as in earlier releases: positions go on in the padding, which seq_lens counts apart
            lengths[-1] += num_padding
            return torch.cat([torch.arange(length) for length in lengths])
        paddings = {"tokens": self.padding_idx, "labels": CROSS_ENTROPY_IGNORE_IDX}
        if key not in paddings:
            raise KeyError(key)
        documents = documents_of(self)  # raises for label_weights, which a padded row has no tensor for
        values = torch.cat([torch.as_tensor(document[key]) for document in documents])
        return F.pad(values, (0, num_padding), value=paddings[key])


class PackedDataset(ExampleDataset):
    """Dataset of packs of documents, with every token of ``ds`` exactly once and no padding.

    An item is a list of documents (``tokens`` and pre-shifted ``labels``, and images), which
    :func:`torchtune.data.collate_documents` concatenates. It can also be read as a mapping of padded tensors
    (``tokens``, ``labels``, ``input_pos``, ``seq_lens``). Attention and positions are per document. Rows with images
    are never split; they are distributed so that all packs have about the same number of image tokens.

    Args:
        ds: dataset of rows with ``tokens`` and ``labels``.
        max_seq_len: maximum number of tokens per pack.
        padding_idx: token id of the padding where an item is read as a mapping.
        max_packs: number of packs to keep; ``None`` keeps all.
        split_across_pack: fill every pack completely by splitting documents; each piece is a separate document. False
            packs whole documents by best fit.

    Raises:
        DataError: a row is longer than ``max_seq_len`` without ``split_across_pack``, there are no rows, or rows have
            images and either ``split_across_pack`` is set or the model has no image tokens.

    Example:
        >>> rows = [{"tokens": [n] * n, "labels": [n] * n} for n in (3, 1, 2, 2)]
        >>> packs = torchtune.datasets.PackedDataset(rows, max_seq_len=4)
        >>> sorted(sum(len(document["tokens"]) for document in packs[i]) for i in range(len(packs)))
        [4, 4]
        >>> packs[0]["labels"]
        tensor([3, 3, 3, 1])
    """

    is_packed = True

    def __init__(
        self,
        ds: Dataset,
        *,
        max_seq_len: int,
        padding_idx: int = 0,
        max_packs: int | None = None,
        split_across_pack: bool = False,
    ) -> None:
        self.ds = as_example_dataset(ds)
        self.max_seq_len = max_seq_len
        self.padding_idx = padding_idx
        self._max_packs = max_packs
        self._splits = split_across_pack
        if self.ds.on_reading and self.ds.image_tokens is None:
            raise DataError("Rows with images of this tokenizer cannot be packed: leave packed out.")
        if self.ds.on_reading and split_across_pack:
            raise DataError("split_across_pack would cut rows inside their images: leave it out.")
        self._pack(self.ds.measure())

    def _pack(self, lengths: np.ndarray, longest: int | None = None) -> None:
        """Assign rows to packs, and log how full they are.

        Args:
            lengths: number of tokens of each row, int64 ``[rows]``.
            longest: maximum number of tokens of a piece of a row; None until :meth:`limit_rows` sets it.
        """
        if not len(lengths):
            raise DataError("There is nothing to pack: the dataset is empty.")
        if self._splits:
            packs = split_evenly(lengths, self.max_seq_len, longest)
        else:
            too_long = np.flatnonzero(lengths > self.max_seq_len)
            if len(too_long):
                rows = ", ".join(map(str, too_long[:10].tolist()))
                raise DataError(
                    f"{len(too_long)} rows are longer than max_seq_len={self.max_seq_len} and fit into no pack (rows "
                    f"{rows}, counted from 0): raise max_seq_len, or cut them with split_across_pack=True."
                )
            image_tokens = None
            if self.ds.on_reading:  # such rows have images, which packs share evenly
                image_tokens = self.ds.image_tokens
            packs = whole_rows(best_fit(lengths, self.max_seq_len, image_tokens), lengths)
        self.packs = Packs(packs[: self._max_packs])
        self.fill = float(self.lengths.sum() / (len(self.packs) * self.max_seq_len))
        log_rank_zero(
            get_logger(),
            f"Packed {len(lengths)} examples into {len(self.packs)} packs of up to {self.max_seq_len} tokens, "
            f"{100 * self.fill:.1f} % full.",
        )

    def limit_rows(self, longest: int) -> None:
        """See :meth:`torchtune.data.ExampleDataset.limit_rows`; split rows are cut instead."""
        num_rows = len(self.ds)
        self.ds.limit_rows(longest)
        must_cut = self._splits and self.packs.longest_piece > longest
        if must_cut or len(self.ds) < num_rows:
            self._pack(self.ds.measure(), longest)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each pack, int64 ``[packs]``."""
        return self.packs.lengths

    @property
    def known_lengths(self) -> np.ndarray:
        """See :class:`torchtune.data.ExampleDataset`."""
        return self.packs.lengths

    @property
    def fingerprint(self) -> Any:
        """Fingerprint of ``ds``."""
        return self.ds.fingerprint

    @property
    def num_images(self) -> int | None:
        """Number of images of all rows; None for text."""
        return self.ds.num_images

    @property
    def may_have_images(self) -> bool:
        """See :class:`torchtune.data.ExampleDataset`."""
        return self.ds.may_have_images

    def row_datasets(self) -> list[ExampleDataset]:
        """See :class:`torchtune.data.ExampleDataset`."""
        return self.ds.row_datasets()

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, idx: int) -> Pack:
        """Return the documents of a pack: dicts of ``tokens``, ``labels`` and, if there are images, their patches."""
        documents = []
        for row, start, end in self.packs[idx]:
            if self.ds.on_reading:  # a row with images, which is never split
                documents.append(self.ds[row])
            else:
                documents.append(document_of(self.ds.token_row(row), start, end))
        return Pack(documents, self.max_seq_len, self.padding_idx)

    def origins(self, idx: int) -> list[dict[str, Any]]:
        """Return ``source`` and ``row`` of each document of a pack."""
        origins = []
        for row, _, _ in self.packs[idx]:
            origins += self.ds.origins(row)
        return origins
