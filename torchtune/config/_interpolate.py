"""References between settings: ``${key}``, resolved with the place of every one that fails."""

import functools
import re
from typing import Any

from torchtune.config._errors import KeyPath, did_you_mean, dotted
from torchtune.config._reader import Document, leaves

UNRESOLVED = "\0"  # what stands where a reference failed; the checks pass over it
_REFERENCE = re.compile(r"\$\{\s*(\.*[\w.\-]+)\s*\}")


def interpolate(document: Document, defaults: dict[str, Any]) -> set[str]:
    """Replace every ``${…}`` by its value; ``defaults`` are seen by references, but stay out of the document.

    Returns the dotted names that are referred to.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    written = [(path, text) for path, text in leaves(document.data) if isinstance(text, str) and "${" in text]
    for path, text in written:
        try:
            OmegaConf.create({"value": text})
        except OmegaConfBaseException:
            document.add(path, f"'{text}' is not a valid interpolation: write ${{key}} or ${{section.key}}")
            _inside(document.data, path)[path[-1]] = UNRESOLVED
    config = OmegaConf.create({**defaults, **document.data}) if written else None
    names = [dotted(path[:end]) for path, _ in leaves(document.data) for end in range(1, len(path) + 1)]
    values: list[tuple[KeyPath, Any]] = []
    for path, text in written:
        try:
            value = _inside(config, path)[path[-1]]
            values.append((path, OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value))
        except OmegaConfBaseException as error:
            document.add(path, f"'{text}' {_reason(str(error), [*names, *defaults])}")
            values.append((path, UNRESOLVED))
            continue
        whole = _REFERENCE.fullmatch(text)
        if whole and not whole[1].startswith("."):
            document.copies[path] = tuple(int(part) if part.isdigit() else part for part in whole[1].split("."))
    for path, resolved in values:  # only now: what stands in the document is what references are resolved against
        _inside(document.data, path)[path[-1]] = resolved
    return {name for _, text in written for name in _REFERENCE.findall(text)}


def _inside(tree: Any, path: KeyPath) -> Any:
    """What holds the last key of ``path``."""
    return functools.reduce(lambda node, key: node[key], path[:-1], tree)


def _reason(error: str, names: list[str]) -> str:
    missing = re.search(r"Interpolation key '([^']*)' not found", error)
    if missing:
        return f"refers to '{missing[1]}', which does not exist{did_you_mean(missing[1], names)}"
    return f"cannot be resolved: {error.partition(chr(10))[0].rpartition('resolving interpolation: ')[2]}"
