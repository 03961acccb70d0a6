"""Resolve references between settings, ``${key}``; errors name the file and line."""

import functools
import re
from collections.abc import Iterator
from typing import Any

from torchtune.config._errors import KeyPath, did_you_mean, join_key, truncate_text
from torchtune.config._reader import Document, iter_scalars
from torchtune.config._secrets import record_environment

UNRESOLVED = "\0"  # value of a reference that could not be resolved; the checks skip it
_REFERENCE = re.compile(r"\$\{\s*(\.*[\w.\-]+)\s*\}")


def texts_with_references(data: Any) -> dict[KeyPath, str]:
    """Return every text in ``data`` that contains ``${``, by path."""
    return {path: text for path, text in iter_scalars(data) if isinstance(text, str) and "${" in text}


def resolve_texts(config: Any, paths: list[KeyPath]) -> Iterator[tuple[KeyPath, Any, bool]]:
    """Resolve texts of a ``DictConfig``.

    Yields:
        The path of each text, its value or the exception of a text without a value, and whether the value depends on
        ``${oc.env:…}``, directly or through other references.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    with record_environment() as variables:
        for path in paths:
            variables.clear()
            try:
                value = parent_of(config, path)[path[-1]]
                value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            except (OmegaConfBaseException, RecursionError) as error:
                value = error
            yield path, value, bool(variables)


def interpolate(document: Document, defaults: dict[str, Any]) -> set[str]:
    """Replace every ``${…}`` in the document by its value.

    References may name ``defaults``, which are not added to the document.

    Returns:
        The dotted names in all references.
    """
    from omegaconf import OmegaConf

    written = texts_with_references(document.data)
    for path, text in list(written.items()):
        if not _is_valid(text):
            reason = "is not a valid interpolation: write ${key} or ${section.key}"
            document.add(path, f"'{truncate_text(text)}' {reason}")
            parent_of(document.data, path)[path[-1]] = UNRESOLVED
            del written[path]
    if not written:
        return set()
    config = OmegaConf.create({**defaults, **document.data})
    resolved = list(resolve_texts(config, list(written)))
    names = [join_key(path[:end]) for path, _ in iter_scalars(document.data) for end in range(1, len(path) + 1)]
    failed = {path: str(value) for path, value, _ in resolved if isinstance(value, Exception)}
    for path, error in failed.items():
        others = {join_key(other) for other in failed if other != path}
        if others.isdisjoint(_REFERENCE.findall(written[path])) or "Recursive" in error:  # else a consequence
            text = truncate_text(written[path])
            document.add(path, f"'{text}' {_explain_error(error, [*names, *defaults])}")
    for path, value, from_environment in resolved:
        value = UNRESOLVED if path in failed else value
        parent_of(document.data, path)[path[-1]] = value
        if from_environment and path not in failed:
            document.environment[path] = (written[path], value)
    return {name for text in written.values() for name in _REFERENCE.findall(text)}


def _is_valid(text: str) -> bool:
    """Return whether a text has the syntax of references."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        OmegaConf.create({"value": text})
    except (OmegaConfBaseException, RecursionError):
        return False
    return True


def parent_of(tree: Any, path: KeyPath) -> Any:
    """Return the container of the last key of ``path``."""
    return functools.reduce(lambda node, key: node[key], path[:-1], tree)


def _explain_error(error: str, names: list[str]) -> str:
    missing = re.search(r"Interpolation key '([^']*)' not found", error)
    if missing:
        return f"refers to '{missing[1]}', which does not exist{did_you_mean(missing[1], names)}"
    if "Recursive" in error:
        return "cannot be resolved: it refers to itself"
    return f"cannot be resolved: {error.partition(chr(10))[0].rpartition('resolving interpolation: ')[2]}"
