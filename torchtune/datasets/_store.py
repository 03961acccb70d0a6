"""Token rows, kept in a few large arrays instead of millions of small objects."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX

_FIRST_CAPACITY = 1 << 16


class TokenStore:
    """Rows of tokens and pre-shifted labels: int32 tokens and labels, int64 boundaries; about 8 bytes a token."""

    def __init__(self) -> None:
        self._tokens = np.empty(_FIRST_CAPACITY, dtype=np.int32)
        self._labels = np.empty(_FIRST_CAPACITY, dtype=np.int32)
        self._ends: list[int] = [0]
        self._boundaries: np.ndarray | None = None
        self._fingerprint: int | None = None

    def append(self, tokens: Sequence[int], labels: Sequence[int]) -> None:
        """Add a row."""
        start, end = self._ends[-1], self._ends[-1] + len(tokens)
        if end > len(self._tokens):
            capacity = max(end, 2 * len(self._tokens))
            for name in ("_tokens", "_labels"):
                grown = np.empty(capacity, dtype=np.int32)
                grown[:start] = getattr(self, name)[:start]
                setattr(self, name, grown)
        self._tokens[start:end] = tokens
        self._labels[start:end] = labels
        self._ends.append(end)

    def finish(self) -> None:
        """Give back what was reserved for more rows."""
        self._boundaries = np.array(self._ends, dtype=np.int64)
        self._tokens = self._tokens[: self._ends[-1]].copy()
        self._labels = self._labels[: self._ends[-1]].copy()
        self._ends = []

    def __len__(self) -> int:
        return len(self._boundaries) - 1

    @property
    def lengths(self) -> np.ndarray:
        """int64 [rows]: tokens of every row."""
        return np.diff(self._boundaries)

    @property
    def fingerprint(self) -> int:
        """Changes when any token or label does."""
        if self._fingerprint is None:
            crc = 0
            for array in (self._boundaries, self._tokens, self._labels):
                crc = zlib.crc32(memoryview(np.ascontiguousarray(array)).cast("B"), crc)
            self._fingerprint = crc
        return self._fingerprint

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


def shifted_labels(tokens: Sequence[int], mask: Sequence[bool]) -> list[int]:
    """Pre-shifted labels: position i carries token i + 1 unless that is masked; the last carries none."""
    following = [
        CROSS_ENTROPY_IGNORE_IDX if masked else token for token, masked in zip(tokens[1:], mask[1:], strict=True)
    ]
    return [*following, CROSS_ENTROPY_IGNORE_IDX]


def has_label(sample: Mapping[str, Any]) -> bool:
    """Whether any position of a sample is trained on."""
    return any(label != CROSS_ENTROPY_IGNORE_IDX for label in sample["labels"])
