"""Token rows in Arrow files, memory-mapped by all processes of a machine."""

import copy
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from torchtune.utils import sign_of_life

_COLUMN_TYPES = {
    "tokens": pa.list_(pa.int32()),
    "labels": pa.list_(pa.int32()),
    "label_weights": pa.list_(pa.float32()),  # empty lists for rows whose labels all have weight 1
}


class TokenStore:
    """Rows of tokens, pre-shifted labels and label weights. The page cache holds memory-mapped files once per machine.

    Args:
        batches: at least one batch, with the columns ``<name>.tokens``, ``<name>.labels`` and ``<name>.label_weights``.
        name: name of the store.
        fingerprint: digest of all tokens and labels.
    """

    def __init__(self, batches: Sequence[pa.RecordBatch], name: str = "rows", fingerprint: int = 0) -> None:
        table = pa.Table.from_batches(batches)
        self._columns = {kind: table.column(f"{name}.{kind}") for kind in _COLUMN_TYPES}
        self.fingerprint = fingerprint
        self._selected: np.ndarray | None = None  # rows of the batches that belong to the store; None: all

    def __len__(self) -> int:
        if self._selected is None:
            return len(self._columns["tokens"])
        return len(self._selected)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each row, int64 ``[rows]``."""
        chunks = [chunk.value_lengths().to_numpy() for chunk in self._columns["tokens"].chunks]
        return self._of_selected(np.concatenate(chunks, dtype=np.int64))

    def count(self, ids: Sequence[int]) -> np.ndarray:
        """Return how often tokens occur in each row, int64 ``[rows]``."""
        counts = []
        for chunk in self._columns["tokens"].chunks:
            offsets = chunk.offsets.to_numpy()  # [rows + 1]; a sliced chunk does not begin at 0
            tokens = chunk.values.to_numpy()[offsets[0] : offsets[-1]]
            # The count of a row is the difference of the cumulative counts at its ends.
            cumulative = np.concatenate([[0], np.cumsum(np.isin(tokens, ids))])
            counts.append(np.diff(cumulative[offsets - offsets[0]]))
        return self._of_selected(np.concatenate(counts, dtype=np.int64))

    def select(self, rows: np.ndarray) -> "TokenStore":
        """Return a store with some of the rows, int64 ``[selected]``, and another fingerprint."""
        store = copy.copy(self)
        if self._selected is None:
            store._selected = rows
        else:  # rows are counted among those that an earlier selection left
            store._selected = self._selected[rows]
        store.fingerprint = zlib.crc32(store._selected.tobytes(), self.fingerprint)
        return store

    def _of_selected(self, values: np.ndarray) -> np.ndarray:
        """Return the values of the selected rows, of one value for each row of the batches."""
        if self._selected is None:
            return values
        return values[self._selected]

    def digests(self) -> np.ndarray:
        """Return a digest of the tokens of each row, uint64 ``[rows]``."""
        digests = []
        for chunk in self._columns["tokens"].chunks:
            offsets = chunk.offsets.to_numpy()
            tokens = chunk.values.to_numpy()[offsets[0] : offsets[-1]]
            digests.append(digest_tokens(tokens, offsets - offsets[0]))
        return self._of_selected(np.concatenate(digests, dtype=np.uint64))

    def duplicates(self) -> np.ndarray:
        """Return the rows that equal an earlier row in tokens, labels and weights, int64 ``[duplicates]``."""
        first_rows: dict[int, list[int]] = {}  # digest -> rows that differ from each other
        duplicates = []
        for row, digest in enumerate(self.digests().tolist()):
            # Different rows may have the same digest, so that rows with equal ones are compared.
            candidates = first_rows.setdefault(digest, [])
            if any(_are_equal(self[row], self[candidate]) for candidate in candidates):
                duplicates.append(row)
            else:
                candidates.append(row)
        return np.array(duplicates, np.int64)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return views of the ``tokens`` and ``labels`` of a row, int32 ``[s]``.

        A row with label weights other than 1 also has ``label_weights``, float32 ``[s]``.
        """
        row = index
        if self._selected is not None:
            row = int(self._selected[index])
        values = {name: column[row].values.to_numpy() for name, column in self._columns.items()}
        if not len(values["label_weights"]):
            del values["label_weights"]
        return values

    def lists(self, index: int) -> dict[str, list[Any]]:
        """Return the values of a row as lists; see :meth:`__getitem__`."""
        return {name: values.tolist() for name, values in self[index].items()}


def _are_equal(row: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    """Return whether two rows have the same tokens, labels and label weights."""
    if row.keys() != other.keys():
        return False
    return all(np.array_equal(values, other[name]) for name, values in row.items())


def digest_tokens(tokens: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return a digest of each row, uint64 ``[rows]``: the sum of its tokens, each times a factor of its position.

    Args:
        tokens: tokens of all rows, one after the other.
        offsets: first token of each row, and the end of the last, ``[rows + 1]``.
    """
    offsets = offsets.astype(np.int64)
    lengths = np.diff(offsets)
    longest = int(lengths.max(initial=0))
    # SplitMix64 of the position, modulo 2**64 as all that follows: the factors of two positions are unrelated, so that
    # rows with the same tokens in another order have other digests.
    factors = np.arange(1, longest + 1, dtype=np.uint64)
    factors *= np.uint64(0x9E3779B97F4A7C15)
    factors ^= factors >> np.uint64(30)
    factors *= np.uint64(0xBF58476D1CE4E5B9)
    factors ^= factors >> np.uint64(27)
    factors *= np.uint64(0x94D049BB133111EB)
    row_starts = np.repeat(offsets[:-1], lengths)  # of each token
    positions = np.arange(len(tokens)) - row_starts
    terms = tokens.astype(np.uint64)
    terms += np.uint64(1)  # so that the number of zeros at the end matters
    terms *= factors[positions]
    # The sum of a row is the difference of the cumulative sums at its ends, also where these have wrapped around.
    cumulative = np.zeros(len(terms) + 1, dtype=np.uint64)
    np.cumsum(terms, out=cumulative[1:])
    return cumulative[offsets[1:]] - cumulative[offsets[:-1]]


def make_batch(columns: Mapping[str, Sequence[np.ndarray]]) -> pa.RecordBatch:
    """Build a record batch from rows of arrays, by column name (``<store>.<kind>``)."""
    arrays = []
    for name, rows in columns.items():
        kind = name.rpartition(".")[2]
        arrays.append(pa.array(rows, _COLUMN_TYPES[kind]))
    return pa.RecordBatch.from_arrays(arrays, list(columns))


def _checksum(batch: pa.RecordBatch, facts: Mapping[str, Any]) -> int:
    """Return the checksum of the notes and of all columns of a batch: the lengths of its rows and their values."""
    crc = zlib.crc32(json.dumps(facts["notes"]).encode())
    for column in batch.columns:
        for values in (column.value_lengths(), column.values):
            crc = zlib.crc32(values.to_numpy(), crc)
    return crc


def read_batches(path: Path) -> Iterator[tuple[pa.RecordBatch, dict[str, Any]]]:
    """Yield the batches of a file with their facts, up to the first damaged or incomplete batch."""
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

    Each batch has facts: ``rows`` (number of source rows), ``numbers`` (source row of each token row), ``bad`` (number
    and reason of each row that cannot be trained on), ``notes`` (plain data for each token row) and ``omitted`` (kind
    of text that the chat template leaves out -> source rows that lose such a text).

    Args:
        folder: folder of the files.

    Attributes:
        paths: the files.
        sums: number of source rows and checksum of each batch.
        total: number of source rows.
        numbers: source row of each token row, int64 ``[rows]``.
        bad: (row, reason) of the source rows that cannot be trained on.
        notes: plain data for the token rows, if their transform returns any.
        omitted: kind of text that the chat template leaves out -> number of source rows that lose such a text.
    """

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*.arrow"))
        self.sums: list[list[int]] = []
        self.bad: list[tuple[int, str]] = []
        self.notes: list[Any] = []
        self.omitted: Counter[str] = Counter()
        self._batches: list[pa.RecordBatch] = []
        numbers: list[int] = []
        # Batches behind a damaged one are not read, so that RowWriter goes on there.
        for path in self.paths:
            for batch, facts in read_batches(path):
                self._batches.append(batch)
                self.sums.append([facts["rows"], facts["crc"]])
                self.bad += map(tuple, facts["bad"])  # JSON has lists
                self.notes += facts["notes"]
                for kind, rows in facts["omitted"].items():
                    self.omitted[kind] += len(rows)
                numbers += facts["numbers"]
        self.numbers = np.array(numbers, np.int64)
        self.total = sum(rows for rows, _ in self.sums)

    @property
    def fingerprint(self) -> int:
        """Digest of all tokens, labels and notes."""
        return fingerprint_of(self.sums)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all stores."""
        count = 0
        for batch in self._batches:
            for name in batch.schema.names:
                if name.endswith(".tokens"):
                    count += len(batch.column(name).flatten())
        return count

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
        self._file = (folder / f"{len(self.before.paths):04}.arrow").open("wb")
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
