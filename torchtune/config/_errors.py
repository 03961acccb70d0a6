"""Errors in a config: place, reason, and suggestions for misspelt names."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torchtune.utils import UserError

KeyPath = tuple[str | int, ...]
MAX_MISTAKES = 50  # reported at once
_LONGEST = 100  # characters of a name to compare
# Similarity of a suggestion; of a name that is taken for a misspelt setting, one wrong letter in five; and of one that
# is taken for a misspelt argument of a component, of which there are hundreds. `model_dir`, a common name for a
# variable, is about as similar to `model` as `num_epochs` is to `epochs`: 0.71 and 0.75.
SIMILAR, MISSPELT, MISSPELT_ARGUMENT = 0.65, 0.8, 0.9


@dataclass(frozen=True)
class Mistake:
    """One mistake: ``place`` is ``file:line`` or ``command line``, ``key`` the dotted path of the value."""

    place: str
    key: str
    reason: str
    order: int = field(default=0, compare=False, repr=False)  # line number, for sorting

    def __str__(self) -> str:
        return ": ".join(part for part in (self.place, self.key, self.reason) if part)


class ConfigError(UserError, ValueError):
    """All mistakes of a config, raised before anything is opened; ``errors`` lists them.

    ``remark`` is a sentence about all mistakes, printed last.
    """

    raised_on_all = True

    def __init__(self, errors: Sequence[object], remark: str | None = None) -> None:
        self.errors = list(errors)
        count = "1 mistake" if len(self.errors) == 1 else f"{len(self.errors)} mistakes"
        head = f"the config has {count}{' or more' if len(self.errors) >= MAX_MISTAKES else ''}:"
        super().__init__("\n  ".join([head, *map(str, self.errors)]) + (f"\n{remark}" if remark else ""))


class InstantiationError(UserError):
    """Component that has no ``_component_`` key or cannot be found."""


class ArgumentError(InstantiationError, ValueError):
    """Value that a component rejects."""


def join_key(path: KeyPath) -> str:
    """Join a key path: ``("dataset", 0, "split")`` -> ``"dataset.0.split"``."""
    return ".".join(map(str, path))


def truncate_text(text: str, width: int = 60) -> str:
    """Return ``text`` on one line, truncated to ``width`` characters."""
    line = " ".join(text[: 4 * width].split())
    return line if len(line) <= width and len(text) <= 4 * width else f"{line[:width]}…"


def nearest(name: str, candidates: Iterable[str], similarity: float = SIMILAR) -> str | None:
    """Return the candidate that ``name`` most likely means, or ``None`` if none is close.

    ``similarity`` is difflib's ratio: twice the number of common characters, divided by the length of both names.
    """
    by_case = sorted(set(candidates) - {name}, key=lambda candidate: (len(set(candidate) & set(name)), candidate))
    pool = {candidate.lower(): candidate for candidate in by_case}  # for AdamZ, suggest Adam rather than adam
    close = difflib.get_close_matches(name[:_LONGEST].lower(), pool, n=1, cutoff=similarity)
    return pool[close[0]] if close else None


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"``, or an empty string."""
    found = nearest(name, candidates)
    return f"; did you mean '{found}'?" if found else ""
