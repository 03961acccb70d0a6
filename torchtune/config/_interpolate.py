"""Resolve references between settings, ``${key}``; errors name the file and line."""

import contextlib
import functools
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

from torchtune.config._document import Document, iter_scalars
from torchtune.config._errors import KeyPath, did_you_mean, join_key, truncate_text
from torchtune.config._secrets import record_environment

UNRESOLVED = "\0"  # value of a reference that could not be resolved; the checks skip it
_REFERENCE = re.compile(r"\$\{\s*(\.*[\w.\-]+)\s*\}")
# The key of a reference in any form: ${key}, ${.key}, ${section[0].key}, ${section.${name}}, ${oc.select:key,default}.
_ANY_REFERENCE = re.compile(r"""\$\{\s*(?:oc\.(?:select|dict\.keys|dict\.values)\s*:\s*["']?)?([^$\\{}():\s'",]+)""")
# Limits of a config with its references resolved. Each reference takes about 0.1 ms.
_MAX_REFERENCES, _MAX_CHARACTERS = 20_000, 2**20


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
        The top-level keys that the values of other top-level keys refer to.

    Raises:
        ConfigError: the references would expand to more than a config may hold.
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
    references = {path: _referenced_paths(path, text) for path, text in written.items()}
    _check_expansion(document, references)
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
    return {str(target[0]) for path, targets in references.items() for target in targets if target[0] != path[0]}


def _referenced_paths(path: KeyPath, text: str) -> list[KeyPath]:
    """Return the absolute path of each reference in the text at ``path``.

    The path of a reference with a computed part, ``${section.${name}}``, ends before that part.
    """
    found = []
    for name in _ANY_REFERENCE.findall(text):
        relative = name.lstrip(".")
        levels = len(name) - len(relative)  # one dot is the section of the text itself, two are the section around it
        section = path[:-levels] if levels else ()
        keys = [int(key) if key.isdigit() else key for key in re.split(r"[.\[\]]+", relative) if key]
        if section or keys:
            found.append((*section, *keys))
    return found


def _check_expansion(document: Document, references: dict[KeyPath, list[KeyPath]]) -> None:
    """Raise ``ConfigError`` if the references expand to more than a config may hold.

    A text that refers twice to a text that refers twice to a third one … doubles with every line.
    """
    # What a section and what a text with references consist of, with repetitions.
    parts: dict[KeyPath, list[KeyPath]] = {}
    for path, _ in iter_scalars(document.data):
        for end in range(len(path)):
            items = parts.setdefault(path[:end], [])
            if path[: end + 1] not in parts:
                items.append(path[: end + 1])
        parts[path] = []
    for path, targets in references.items():
        for target in targets:
            while target not in parts:  # a default, a missing key, or an item of a section that is a reference itself
                target = target[:-1]
            if target:
                parts[path].append(target)
    order = TopologicalSorter(parts)
    with contextlib.suppress(
        CycleError
    ):  # nodes without a cycle are sorted all the same; OmegaConf explains the others
        order.prepare()
    counts: dict[KeyPath, int] = {}
    lengths: dict[KeyPath, int] = {}
    all_references = all_characters = 0
    while order.is_active():
        ready = order.get_ready()
        order.done(*ready)
        for path in ready:
            value = document.data if not path else parent_of(document.data, path)[path[-1]]
            counts[path] = len(references.get(path, ())) + sum(counts[part] for part in parts[path])
            lengths[path] = sum(lengths[part] for part in parts[path])
            if not isinstance(value, dict | list):
                lengths[path] += len(str(value))
            if path in references:
                all_references += counts[path]
                all_characters += lengths[path]
            if all_references > _MAX_REFERENCES or all_characters > _MAX_CHARACTERS:
                text = truncate_text(str(value))
                reason = f"resolving it takes the config over {_MAX_REFERENCES:,} references or 1 MiB of text"
                document.add(path, f"'{text}' refers to too much: {reason}")
                document.check()


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
