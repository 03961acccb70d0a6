"""Errors in a config: place, reason, and suggestions for misspelt names."""

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torchtune.utils import UserError

KeyPath = tuple[str | int, ...]
MAX_MISTAKES = 50  # reported at once
_MAX_COMPARED = 100  # characters of a name; difflib is quadratic in them

# Smallest similarity (see `nearest`) for each conclusion from a name. `model_dir`, a common name for a variable, is
# about as similar to `model` as `num_epochs` is to `epochs`: 0.71 and 0.75.
SIMILAR = 0.65  # worth a suggestion
MISSPELT = 0.8  # a misspelt setting: one wrong letter in five
MISSPELT_ARGUMENT = 0.9  # a misspelt argument of a component; stricter, because there are hundreds of them


@dataclass(frozen=True)
class Mistake:
    """One mistake: ``place`` is ``file:line`` or ``command line``, ``key`` the dotted path of the value."""

    place: str
    key: str
    reason: str
    order: int = field(default=0, compare=False, repr=False)  # line number, for sorting

    def __str__(self) -> str:
        parts = (self.place, self.key, self.reason)
        return ": ".join(part for part in parts if part)


class ConfigError(UserError, ValueError):
    """All mistakes of a config, raised before anything is opened; ``errors`` lists them.

    ``remark`` is a sentence about all mistakes, printed last.
    """

    raised_on_all = True

    def __init__(self, errors: Sequence[object], remark: str | None = None) -> None:
        self.errors = list(errors)
        count = "1 mistake" if len(self.errors) == 1 else f"{len(self.errors)} mistakes"
        if len(self.errors) >= MAX_MISTAKES:
            count += " or more"
        message = f"the config has {count}:"
        for error in self.errors:
            message += f"\n  {error}"
        if remark:
            message += f"\n{remark}"
        super().__init__(message)


class InstantiationError(UserError):
    """Component that has no ``_component_`` key or cannot be found."""


class ArgumentError(InstantiationError, ValueError):
    """Value that a component rejects."""


def join_key(path: KeyPath) -> str:
    """Join a key path: ``("dataset", 0, "split")`` -> ``"dataset.0.split"``."""
    return ".".join(map(str, path))


def split_key(text: str) -> KeyPath:
    """Split a dotted key: ``"dataset.0.split"`` or ``"dataset[0].split"`` -> ``("dataset", 0, "split")``."""
    path: list[str | int] = []
    for part in re.split(r"[.\[\]]+", text):
        if part.isdigit():
            path.append(int(part))
        elif part:
            path.append(part)
    return tuple(path)


def truncate_text(text: str, width: int = 60) -> str:
    """Return ``text`` on one line, truncated to ``width`` characters."""
    max_characters = 4 * width  # more than enough for one line, however much whitespace is collapsed
    line = " ".join(text[:max_characters].split())
    if len(line) <= width and len(text) <= max_characters:
        return line
    return f"{line[:width]}…"


def nearest(name: str, candidates: Iterable[str], similarity: float = SIMILAR) -> str | None:
    """Return the candidate that ``name`` most likely means, or ``None`` if none is close.

    ``similarity`` is difflib's ratio: twice the number of common characters, divided by the length of both names.
    """

    def same_case(candidate: str) -> tuple[bool, int, str]:
        return candidate[:1].isupper() == name[:1].isupper(), len(set(candidate) & set(name)), candidate

    # Case is ignored. Of names that differ in case alone, the last one stays: for Adamw, the class AdamW rather than
    # the module adamw.
    by_lower_case = {}
    for candidate in sorted(set(candidates) - {name}, key=same_case):
        by_lower_case[candidate.lower()] = candidate
    matches = difflib.get_close_matches(name[:_MAX_COMPARED].lower(), by_lower_case, n=1, cutoff=similarity)
    if not matches:
        return None
    return by_lower_case[matches[0]]


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest candidate, to end a message; an empty string if none is near.

    Example:
        >>> torchtune.config.did_you_mean("ouput_dir", ["output_dir", "device"])
        "; did you mean 'output_dir'?"
    """
    return suggestion(nearest(name, candidates))


def suggestion(name: str | None) -> str:
    """Return ``"; did you mean 'x'?"`` for the name ``x``, or an empty string."""
    if not name:
        return ""
    return f"; did you mean '{name}'?"
