"""Token rows in Arrow files, memory-mapped by all processes of a machine."""

import json
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, DataError
from torchtune.utils import sign_of_life

_INT32 = np.iinfo(np.int32)
_IDS = pa.list_(pa.int32())


class TokenStore:
    """Rows of tokens and pre-shifted labels. Mapped files are in the page cache, once per machine.

    Args:
        batches: at least one batch, with the columns ``<name>.tokens`` and ``<name>.labels``.
        name: name of the store.
        fingerprint: changes with any token or label.
    """

    def __init__(self, batches: Sequence[pa.RecordBatch], name: str = "rows", fingerprint: int = 0) -> None:
        table = pa.Table.from_batches(batches)
        self._columns = [table.column(f"{name}.{kind}") for kind in ("tokens", "labels")]
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self._columns[0])

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each row, int64 ``[rows]``."""
        chunks = [chunk.value_lengths().to_numpy() for chunk in self._columns[0].chunks]
        return np.concatenate(chunks, dtype=np.int64)

    def count(self, ids: Sequence[int]) -> np.ndarray:
        """Return how often tokens occur in each row, int64 ``[rows]``."""
        counts = []
        for chunk in self._columns[0].chunks:
            offsets = chunk.offsets.to_numpy()
            found = np.isin(chunk.values.to_numpy()[offsets[0] : offsets[-1]], ids)
            before = np.concatenate([[0], np.cumsum(found)])
            counts.append(np.diff(before[offsets - offsets[0]]))
        return np.concatenate(counts, dtype=np.int64)

    def arrays(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return views of the tokens and labels of a row, int32 ``[s]``."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        tokens, labels = (column[index].values.to_numpy() for column in self._columns)
        return tokens, labels

    def document(self, index: int, start: int = 0, end: int | None = None) -> dict[str, torch.Tensor]:
        """Return int64 ``tokens`` and ``labels`` of a row, or of a slice of it."""
        tokens, labels = self.arrays(index)
        return {
            "tokens": torch.from_numpy(tokens[start:end].astype(np.int64)),
            "labels": torch.from_numpy(labels[start:end].astype(np.int64)),
        }


def make_batch(columns: Mapping[str, Sequence[np.ndarray]]) -> pa.RecordBatch:
    """Build a record batch from rows of int32 arrays, by column name."""
    return pa.RecordBatch.from_arrays([pa.array(rows, _IDS) for rows in columns.values()], list(columns))


def _checksum(batch: pa.RecordBatch, facts: Mapping[str, Any]) -> int:
    crc = zlib.crc32(json.dumps(facts["notes"]).encode())
    for column in batch.columns:
        for values in (column.value_lengths(), column.values):
            crc = zlib.crc32(values.to_numpy(), crc)
    return crc


def _read_batches(path: Path) -> Iterator[tuple[pa.RecordBatch, dict[str, Any]]]:
    """Yield the batches of a file with their facts, up to the first damaged or incomplete one."""
    try:
        mapped = pa.ipc.open_stream(pa.memory_map(str(path)))
        copied = pa.ipc.open_stream(pa.OSFile(str(path)))  # copies for the checksums do not stay in memory
        for batch, (copy, metadata) in zip(mapped, copied.iter_batches_with_custom_metadata(), strict=True):
            sign_of_life()
            facts = json.loads(metadata["facts"])
            copy.validate()
            if facts["crc"] != _checksum(copy, facts):
                return
            yield batch, facts
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, pa.ArrowException):
        return


def fingerprint_of(sums: Sequence[Sequence[int]]) -> int:
    """Return the fingerprint of the row counts and checksums of all batches."""
    return zlib.crc32(json.dumps(sums).encode())


class PreparedRows:
    """Batches of a folder, verified by their checksums (about a second per GB).

    Each batch has facts: ``rows``, its number of source rows; ``bad``, number and reason of each row that cannot be
    trained on; ``cut``, the number of rows of maximum length; ``notes``, plain data of the remaining rows; ``several``,
    the number of each row that gives several samples, and how many.

    Args:
        folder: folder of the files.

    Attributes:
        files: number of files.
        sums: number of source rows and checksum of each batch.
        info: metadata of the rows, as plain data.
    """

    def __init__(self, folder: Path) -> None:
        paths = sorted(folder.glob("*.arrow"))
        found = [one for path in paths for one in _read_batches(path)]
        self.files = len(paths)
        self.sums = [[facts["rows"], facts["crc"]] for _, facts in found]
        self.cut = sum(facts["cut"] for _, facts in found)
        self.bad = [(row, reason) for _, facts in found for row, reason in facts["bad"]]
        self.notes = [note for _, facts in found for note in facts["notes"]]
        self.several = dict(pair for _, facts in found for pair in facts.get("several", ()))
        self.info: dict[str, Any] = {}
        self._batches = [batch for batch, _ in found]

    @property
    def fingerprint(self) -> int:
        """Changes with any token, label or note."""
        return fingerprint_of(self.sums)

    def store(self, name: str) -> TokenStore:
        """Return the rows of a store."""
        return TokenStore(self._batches, name, self.fingerprint)


class RowWriter:
    """Writer of a folder's batches, which continues after the complete batches of a killed process.

    Args:
        folder: output folder.

    Attributes:
        before: rows that were already in the folder.
        sums: see :class:`PreparedRows`.
    """

    def __init__(self, folder: Path) -> None:
        self.before = PreparedRows(folder)
        self.sums = self.before.sums.copy()
        self._path = folder / f"{self.before.files:04}.arrow"
        self._file = self._path.open("wb")
        self._stream: Any = None

    def write(self, batch: pa.RecordBatch, facts: Mapping[str, Any]) -> None:
        """Append a batch."""
        if self._stream is None:
            self._stream = pa.ipc.new_stream(self._file, batch.schema)
        facts = {**facts, "crc": _checksum(batch, facts)}
        self.sums.append([facts["rows"], facts["crc"]])
        self._stream.write_batch(batch, {"facts": json.dumps(facts)})
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def check_row(tokens: Any, labels: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return both as int32 ``[s]``; raise :class:`DataError` unless they are sequences of ids of the same length."""
    for name, values in (("tokens", tokens), ("labels", labels)):
        if not hasattr(values, "__len__") or isinstance(values, str | bytes | Mapping):
            raise DataError(f"{name} must be a list of token ids, not {type(values).__name__}")
    if len(tokens) != len(labels):
        raise DataError(f"a row has {len(tokens)} tokens but {len(labels)} labels")
    ids, targets = _array(tokens), _array(labels)
    for name, values in (("tokens", ids), ("labels", targets)):
        if len(values) and values.dtype.kind not in "iu":
            raise DataError(f"{name} must be a flat list of whole numbers, not of {values.dtype}")
    if len(ids) and (ids.min() < 0 or ids.max() > _INT32.max):
        raise DataError(f"token id {ids.min() if ids.min() < 0 else ids.max()} is none")
    odd = targets[(targets < 0) & (targets != CROSS_ENTROPY_IGNORE_IDX)]
    if len(odd):
        raise DataError(f"label {odd.min()} is neither a token id nor {CROSS_ENTROPY_IGNORE_IDX}")
    return ids.astype(np.int32, copy=False), targets.astype(np.int32, copy=False)


def _array(values: Any) -> np.ndarray:
    try:
        found = np.asarray(values)
    except ValueError:  # ragged lists
        found = np.empty((0, 0))
    if found.ndim != 1:
        raise DataError("tokens and labels must be flat lists of token ids")
    return found


def shifted_labels(tokens: Sequence[int], mask: Sequence[bool]) -> list[int] | np.ndarray:
    """Return pre-shifted labels: label i is token i + 1, or ignored if that token is masked; the last is ignored.

    Returns:
        a list; int32 ``[s]`` if ``tokens`` is an ``array("i")``.

    Raises:
        DataError: tokens and mask differ in length.
    """
    if len(tokens) != len(mask):
        raise DataError(f"the model transform gives {len(tokens)} tokens but {len(mask)} elements of a mask")
    ids, is_trained = _array(tokens), ~np.asarray(mask, bool)[1:]
    labels = np.full_like(ids, CROSS_ENTROPY_IGNORE_IDX)
    labels[:-1][is_trained] = ids[1:][is_trained]
    return labels if isinstance(tokens, array) else labels.tolist()


def has_label(sample: Mapping[str, Any]) -> bool:
    """Return whether a sample has a label that is not ignored."""
    return bool((np.asarray(sample["labels"]) != CROSS_ENTROPY_IGNORE_IDX).any())
