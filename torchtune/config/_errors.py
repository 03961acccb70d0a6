"""Mistakes in a config: where they are, what is wrong, and the nearest right name."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torchtune.utils import UserError

KeyPath = tuple[str | int, ...]
MAX_MISTAKES = 50  # that are told at once
_LONGEST = 100  # letters of a name that is compared with others


@dataclass(frozen=True)
class Mistake:
    """One mistake: ``place`` is ``file:line`` or ``command line``, ``key`` the dotted path of the value."""

    place: str
    key: str
    reason: str
    order: int = field(default=0, compare=False, repr=False)  # of its line among all

    def __str__(self) -> str:
        return ": ".join(part for part in (self.place, self.key, self.reason) if part)


class ConfigError(UserError, ValueError):
    """Everything that is wrong with a config, found before anything was opened; ``errors`` lists the mistakes.

    ``remark`` is a sentence about all of them, which comes last.
    """

    def __init__(self, errors: Sequence[object], remark: str | None = None) -> None:
        self.errors = list(errors)
        count = "1 mistake" if len(self.errors) == 1 else f"{len(self.errors)} mistakes"
        head = f"the config has {count}{' or more' if len(self.errors) >= MAX_MISTAKES else ''}:"
        super().__init__("\n  ".join([head, *map(str, self.errors)]) + (f"\n{remark}" if remark else ""))


class InstantiationError(UserError):
    """A component cannot be found or is not named."""


class ArgumentError(InstantiationError, ValueError):
    """A component does not take the value of an argument."""


def dotted(path: KeyPath) -> str:
    """``("dataset", 0, "split")`` -> ``"dataset.0.split"``."""
    return ".".join(map(str, path))


def brief(text: str, width: int = 60) -> str:
    """``text`` on one line, cut where it is longer than ``width``."""
    line = " ".join(text[: 4 * width].split())
    return line if len(line) <= width and len(text) <= 4 * width else f"{line[:width]}…"


def _distance(left: str, right: str) -> int:
    """Edits (insert, delete, replace, swap of neighbours) between two words."""
    before: list[int] = []
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        before, row, above = row, [i], before
        for j, b in enumerate(right, 1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b)))
            if i > 1 and j > 1 and a == right[j - 2] and b == left[i - 2]:
                row[j] = min(row[j], above[j - 2] + 1)
    return row[-1]


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that ``name`` most likely means, or ``None`` when none is near.

    Few edits count first (a third of the letters at most), then the same words in another order or a part of them.
    """
    if len(name) > _LONGEST:
        return None
    pool = sorted({candidate for candidate in candidates if len(candidate) <= _LONGEST} - {name})
    word = name.lower()

    edits = {candidate: _distance(word, candidate.lower()) for candidate in pool}

    # A first letter that agrees is worth more than half an edit: people mistype the middle of a word.
    def rank(candidate: str) -> tuple[int, bool, float]:
        ratio = difflib.SequenceMatcher(None, word, candidate.lower()).ratio()
        return edits[candidate], candidate[:1].lower() != word[:1], -ratio

    close = [c for c in pool if edits[c] <= max(1, min(len(c), len(name)) // 3)]
    if close:
        return min(close, key=rank)
    similar = difflib.get_close_matches(name, pool, n=1, cutoff=0.7)
    return similar[0] if similar else None


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, or nothing."""
    found = nearest(name, candidates)
    return f"; did you mean '{found}'?" if found else ""
