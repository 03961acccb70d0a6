"""Token rows in a few large files that all processes of a machine map into their memory."""

import json
import os
import time
import zlib
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, DataError
from torchtune.utils import sign_of_life

_BUFFER = 1 << 18  # tokens that are kept before they are written
_SECONDS = 5.0  # between two notes of a journal
_INT32 = np.iinfo(np.int32)


class TokenStore:
    """Rows of tokens and pre-shifted labels, read from mapped files: the page cache holds them once a machine.

    Args:
        tokens: int32 [all tokens].
        labels: int32 [all tokens].
        boundaries: int64 [rows + 1].
        fingerprint: changes when any token or label does.
    """

    def __init__(self, tokens: np.ndarray, labels: np.ndarray, boundaries: np.ndarray, fingerprint: int) -> None:
        self._tokens, self._labels, self._boundaries = tokens, labels, boundaries
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self._boundaries) - 1

    @property
    def lengths(self) -> np.ndarray:
        """int64 [rows]: tokens of every row."""
        return np.diff(self._boundaries)

    def arrays(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Views, int32 [s], of the tokens and labels of a row."""
        rows = len(self)
        if not -rows <= index < rows:
            raise IndexError(f"row {index} of {rows}")
        index %= rows
        part = slice(self._boundaries[index], self._boundaries[index + 1])
        return self._tokens[part], self._labels[part]

    def document(self, index: int, start: int = 0, end: int | None = None) -> dict[str, torch.Tensor]:
        """int64 tensors of (a piece of) a row."""
        tokens, labels = self.arrays(index)
        return {
            "tokens": torch.from_numpy(tokens[start:end].astype(np.int64)),
            "labels": torch.from_numpy(labels[start:end].astype(np.int64)),
        }


def _paths(folder: Path, name: str) -> dict[str, tuple[Path, type]]:
    kinds = {"tokens": np.int32, "labels": np.int32, "boundaries": np.int64}
    return {kind: (folder / f"{name}.{kind}", dtype) for kind, dtype in kinds.items()}


def _lengths(rows: int, tokens: int) -> dict[str, int]:
    """Numbers in each file."""
    return {"tokens": tokens, "labels": tokens, "boundaries": rows + 1}


def _is_there(folder: Path, name: str, size: Sequence[int]) -> bool:
    """Whether files have at least so many (rows, tokens)."""
    least = _lengths(*size)
    return all(
        path.exists() and path.stat().st_size >= least[kind] * np.dtype(dtype).itemsize
        for kind, (path, dtype) in _paths(folder, name).items()
    )


def _fingerprint(paths: Mapping[str, tuple[Path, type]]) -> int:
    """Checksum of the content of all files of a store; about a second per GB."""
    crc = 0
    for kind in ("boundaries", "tokens", "labels"):
        with paths[kind][0].open("rb") as file:
            while chunk := file.read(1 << 22):
                crc = zlib.crc32(chunk, crc)
                sign_of_life()
    return crc


class StoreWriter:
    """Writes the files of a :class:`TokenStore`, row after row; about 8 bytes a token.

    Args:
        folder: where the files go.
        name: what they begin with.
        rows: of the files that are there, to go on behind; ``tokens`` is how many these have.
        tokens: see ``rows``.
    """

    def __init__(self, folder: Path, name: str, rows: int = 0, tokens: int = 0) -> None:
        self._paths = _paths(folder, name)
        self._files: dict[str, IO[bytes]] = {}
        for kind, (path, dtype) in self._paths.items():
            self._files[kind] = file = path.open("r+b" if rows else "wb")
            file.truncate(_lengths(rows, tokens)[kind] * np.dtype(dtype).itemsize if rows else 0)
            file.seek(0, os.SEEK_END)
        self._buffers: dict[str, list[Any]] = {"tokens": [], "labels": [], "boundaries": [] if rows else [[0]]}
        self._buffered = 0
        self._written = tokens
        self.rows = rows

    def append(self, tokens: Sequence[int], labels: Sequence[int]) -> None:
        """Add a row. Raises :class:`DataError` where the two differ in length or are no token ids."""
        ids, targets = check_row(tokens, labels)
        self.extend(ids, targets, np.array([len(ids)]))

    def extend(self, tokens: np.ndarray, labels: np.ndarray, lengths: np.ndarray) -> None:
        """Add rows that have been checked: int32 tokens and labels of all, and how many each has."""
        ends = self._written + np.cumsum(lengths)
        self._written += len(tokens)
        self._buffered += len(tokens)
        for kind, values in (("tokens", tokens), ("labels", labels), ("boundaries", ends)):
            self._buffers[kind].append(values)
        self.rows += len(lengths)
        if self._buffered >= _BUFFER:
            self._flush()

    def sync(self) -> tuple[int, int]:
        """Have all rows on the disk; return how many rows and tokens these are."""
        self._flush()
        for file in self._files.values():
            os.fsync(file.fileno())
        return self.rows, self._written

    def _flush(self) -> None:
        for kind, (_, dtype) in self._paths.items():
            if self._buffers[kind]:
                self._files[kind].write(np.concatenate(self._buffers[kind]).astype(dtype).tobytes())
                self._files[kind].flush()
            self._buffers[kind] = []
        self._buffered = 0

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def finish(self) -> dict[str, int]:
        """Write what is left; return what :func:`open_store` needs to know."""
        self._flush()
        return {"rows": self.rows, "tokens": self._written, "fingerprint": _fingerprint(self._paths)}


def _checksum(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text)


class Writers(dict[str, StoreWriter]):
    """The writers of a folder by name, and a journal: a preparation that is killed goes on where it was.

    Args:
        folder: where the files go.
        names: of the stores.
        goes_on: keep a journal, and go on behind the rows that the one of the folder speaks of.

    Attributes:
        before: what :meth:`note` was given before, in order.
    """

    def __init__(self, folder: Path, names: Sequence[str], goes_on: bool = False) -> None:
        self._path, self._keeps = folder / "journal.jsonl", goes_on
        self._noted = time.monotonic()
        self.before: list[dict[str, Any]] = []
        sizes = dict.fromkeys(names, (0, 0))
        whole = 0
        for line in self._path.read_bytes().splitlines(keepends=True) if goes_on and self._path.exists() else []:
            checksum, _, text = line.partition(b" ")
            if not line.endswith(b"\n") or checksum != _checksum(text):
                break  # it was killed here, or the file is damaged
            record = json.loads(text)
            if not all(_is_there(folder, *size) for size in record["sizes"].items()):
                break
            sizes = record.pop("sizes")
            self.before.append(record)
            whole += len(line)
        if self._path.exists():
            os.truncate(self._path, whole)
        super().__init__({name: StoreWriter(folder, name, *sizes[name]) for name in names})

    def is_due(self) -> bool:
        """Whether a note is worth its time."""
        return self._keeps and time.monotonic() > self._noted + _SECONDS

    def note(self, record: Mapping[str, Any]) -> None:
        """Have all rows on the disk, and then plain data that speak of those since the last note."""
        sizes = {name: writer.sync() for name, writer in self.items()}
        text = json.dumps({**record, "sizes": sizes}).encode() + b"\n"
        with self._path.open("ab") as file:
            file.write(_checksum(text) + b" " + text)
            file.flush()
            os.fsync(file.fileno())
        self._noted = time.monotonic()

    def finish(self) -> dict[str, dict[str, int]]:
        """Write what is left; return what :func:`open_store` needs to know, by name."""
        meta = {name: writer.finish() for name, writer in self.items()}
        self._path.unlink(missing_ok=True)
        return meta

    def close(self) -> None:
        """Close the files."""
        for writer in self.values():
            writer.close()


def open_store(folder: Path, name: str, meta: Mapping[str, int], checks: bool = False) -> TokenStore | None:
    """Map the files of a store; None where their sizes or, with ``checks``, their content are not those of ``meta``."""
    sizes = _lengths(meta["rows"], meta["tokens"])
    arrays = {}
    for kind, (path, dtype) in _paths(folder, name).items():
        if path.stat().st_size != sizes[kind] * np.dtype(dtype).itemsize:
            return None
        mapped = np.memmap(path, dtype=dtype, mode="r") if sizes[kind] else np.empty(0, dtype)
        arrays[kind] = np.asarray(mapped)  # slices of the subclass are slow
    if checks and _fingerprint(_paths(folder, name)) != meta["fingerprint"]:
        return None
    return TokenStore(arrays["tokens"], arrays["labels"], arrays["boundaries"], meta["fingerprint"])


def check_row(tokens: Any, labels: Any) -> tuple[np.ndarray, np.ndarray]:
    """Both as int32 [s]. Raises :class:`DataError` unless they are sequences of ids of one length."""
    for name, values in (("tokens", tokens), ("labels", labels)):
        if not hasattr(values, "__len__") or isinstance(values, str | bytes | Mapping):
            raise DataError(f"{name} must be a list of token ids, not {type(values).__name__}")
    if len(tokens) != len(labels):
        raise DataError(f"a row has {len(tokens)} tokens but {len(labels)} labels")
    try:
        ids, targets = _as_int32(tokens), _as_int32(labels)
    except (TypeError, OverflowError):
        pass  # told below
    else:
        negative = np.count_nonzero(targets < 0)
        if not (ids < 0).any() and negative == np.count_nonzero(targets == CROSS_ENTROPY_IGNORE_IDX):
            return ids, targets
    try:
        ids, targets = np.asarray(tokens), np.asarray(labels)
    except ValueError as error:
        raise DataError("tokens and labels must be flat lists of token ids") from error
    for name, values in (("tokens", ids), ("labels", targets)):
        if len(values) and (values.ndim != 1 or values.dtype.kind not in "iu"):
            shape = json.dumps(list(values.shape))
            raise DataError(f"{name} must be a flat list of whole numbers, not of shape {shape} and {values.dtype}")
    if len(ids) and (ids.min() < 0 or ids.max() > _INT32.max):
        raise DataError(f"token id {ids.min() if ids.min() < 0 else ids.max()} is none")
    ignored = targets != CROSS_ENTROPY_IGNORE_IDX
    if len(targets) and (targets[ignored] < 0).any():
        raise DataError(f"label {targets[ignored].min()} is neither a token id nor {CROSS_ENTROPY_IGNORE_IDX}")
    return ids.astype(np.int32), targets.astype(np.int32)


def _as_int32(values: Any) -> np.ndarray:
    """What almost every row is. Raises ``TypeError`` or ``OverflowError`` for anything else."""
    if type(values) is np.ndarray and values.dtype == np.int32 and values.ndim == 1:
        return values
    if type(values) is list:
        values = array("i", values)
    if type(values) is not array or values.typecode != "i":
        raise TypeError
    return np.frombuffer(values, np.int32)


def shifted_labels(tokens: Sequence[int], mask: Sequence[bool]) -> list[int] | np.ndarray:
    """Pre-shifted labels: position i carries token i + 1 unless that is masked; the last carries none.

    Returns:
        a list; of the arrays that some tokenizers give (``array("i")`` and ``bytearray``) int32 [s].

    Raises:
        DataError: there are more tokens than elements of the mask, or fewer.
    """
    if len(tokens) != len(mask):
        raise DataError(f"the model transform gives {len(tokens)} tokens but {len(mask)} elements of a mask")
    if isinstance(tokens, array) and isinstance(mask, bytearray):
        labels = np.full(len(tokens), CROSS_ENTROPY_IGNORE_IDX, np.int32)
        is_trained = np.frombuffer(mask, np.uint8)[1:] == 0
        np.copyto(labels[:-1], np.frombuffer(tokens, np.int32)[1:], where=is_trained)
        return labels
    labels, end = [*tokens[1:], CROSS_ENTROPY_IGNORE_IDX], 1
    masked = [bool(flag) for flag in mask] if not isinstance(mask, list) else mask
    while end < len(masked) and (start := _index(masked, True, end)) < len(masked):  # runs of masked tokens
        end = _index(masked, False, start)
        labels[start - 1 : end - 1] = [CROSS_ENTROPY_IGNORE_IDX] * (end - start)
    return labels


def _index(values: list[bool], value: bool, start: int) -> int:
    try:
        return values.index(value, start)
    except ValueError:
        return len(values)


def has_label(sample: Mapping[str, Any]) -> bool:
    """Whether any position of a sample is trained on."""
    labels = sample["labels"]
    if type(labels) is list:
        return labels.count(CROSS_ENTROPY_IGNORE_IDX) < len(labels)
    if type(labels) is np.ndarray:
        return bool((labels != CROSS_ENTROPY_IGNORE_IDX).any())
    return any(label != CROSS_ENTROPY_IGNORE_IDX for label in labels)
