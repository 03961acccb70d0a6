"""Replace references in a config, such as ``${output_dir}/logs`` and ``${oc.env:HOME}``, by their values.

OmegaConf resolves them. Before that, texts without the syntax of a reference become mistakes, and references that would
expand to more than a config may hold raise.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from typing import Any

from torchtune.config._document import Document, iter_scalars, parent_of
from torchtune.config._errors import KeyPath, did_you_mean, join_key, split_key, truncate_text
from torchtune.config._secrets import record_environment

UNRESOLVED = "\0"  # value of a reference that could not be resolved; the checks skip it
_REFERENCE = re.compile(r"\$\{\s*(\.*[\w.\-]+)\s*\}")
# The key of a reference in any form: ${key}, ${.key}, ${section[0].key}, ${section.${name}}, ${oc.select:key,default}.
# A name before a colon is a resolver's, as in ${oc.env:HOME}.
_ANY_REFERENCE = re.compile(
    r"""\$\{\s*(?:oc\.(?:select|dict\.keys|dict\.values)\s*:\s*["']?)?([^$\\{}():\s'",]+)(?![^$\\{}():\s'",]|\s*:)"""
)
# Limits of a config with its references resolved. Each reference takes about 0.1 ms.
_MAX_REFERENCES = 20_000
_MAX_CHARACTERS = 2**20


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
            variables.clear()  # it then has those that this text reads
            try:
                value = parent_of(config, path)[path[-1]]
                if OmegaConf.is_config(value):
                    value = OmegaConf.to_container(value, resolve=True)
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
            document.add_mistake(path, f"'{truncate_text(text)}' {reason}")
            parent_of(document.data, path)[path[-1]] = UNRESOLVED
            del written[path]
    if not written:
        return set()
    references = {path: _referenced_paths(path, text) for path, text in written.items()}
    _check_expansion(document, references)
    config = OmegaConf.create({**defaults, **document.data})
    resolved = list(resolve_texts(config, list(written)))
    errors = {path: str(value) for path, value, _ in resolved if isinstance(value, Exception)}
    _add_reference_mistakes(document, written, errors, defaults)
    for path, value, from_environment in resolved:
        if path in errors:
            value = UNRESOLVED
        elif from_environment:  # saved as written, because the value may be a secret
            document.environment[path] = (written[path], value)
        parent_of(document.data, path)[path[-1]] = value

    for path, targets in references.items():
        # What is copied as a whole keeps its text on the command line: an output_dir=007 stays 007 where it is named.
        if len(targets) == 1 and _REFERENCE.fullmatch(written[path]):
            raw = document.position(targets[0]).raw
            document.positions[path] = replace(document.position(path), raw=raw)

    referenced_keys = set()
    for path, targets in references.items():
        for target in targets:
            if target[0] != path[0]:
                referenced_keys.add(str(target[0]))
    return referenced_keys


def _add_reference_mistakes(
    document: Document, written: dict[KeyPath, str], errors: dict[KeyPath, str], defaults: dict[str, Any]
) -> None:
    """Add a mistake for each text without a value, unless it only refers to another such text."""
    if not errors:
        return
    names = set(defaults)
    for path, _ in iter_scalars(document.data):
        for end in range(1, len(path) + 1):
            names.add(join_key(path[:end]))
    failed_keys = {join_key(path) for path in errors}
    for path, error in errors.items():
        causes = failed_keys.intersection(_REFERENCE.findall(written[path])) - {join_key(path)}
        if causes and "Recursive" not in error:  # the texts of a cycle refer to each other: each is named
            continue
        document.add_mistake(path, f"'{truncate_text(written[path])}' {_explain_error(error, names)}")


def _referenced_paths(path: KeyPath, text: str) -> list[KeyPath]:
    """Return the absolute path of each reference in the text at ``path``.

    The path of a reference with a computed part, ``${section.${name}}``, ends before that part.
    """
    paths: list[KeyPath] = []
    for name in _ANY_REFERENCE.findall(text):
        relative = name.lstrip(".")
        section: KeyPath = ()
        num_dots = len(name) - len(relative)
        if num_dots:  # one is the section of the text itself, two are the section around it
            section = path[:-num_dots]
        target = (*section, *split_key(relative))
        if target:
            paths.append(target)
    return paths


def _check_expansion(document: Document, references: dict[KeyPath, list[KeyPath]]) -> None:
    """Raise ``ConfigError`` if the references expand to more than a config may hold.

    A text that refers twice to a text that refers twice to a third one … doubles with every line.
    """
    # A graph whose nodes are the sections and values of the document. The children of a section are its items; the
    # children of a text are the nodes that it refers to, once for each reference.
    children: dict[KeyPath, list[KeyPath]] = {}
    for path, _ in iter_scalars(document.data):
        for end in range(len(path)):
            items = children.setdefault(path[:end], [])
            if path[: end + 1] not in children:
                items.append(path[: end + 1])
        children[path] = []
    for path, targets in references.items():
        for target in targets:
            # Not a node: a default, a missing key, or an item of a section that is a reference itself.
            while target not in children:
                target = target[:-1]
            if target:
                children[path].append(target)

    # A reference is resolved after what it refers to, so the sizes of children are known before those of their parent.
    order = TopologicalSorter(children)
    # Nodes outside a cycle are sorted all the same; OmegaConf explains the others.
    with contextlib.suppress(CycleError):
        order.prepare()
    counts: dict[KeyPath, int] = {}  # references to resolve for a node
    lengths: dict[KeyPath, int] = {}  # characters of its value
    all_references = 0
    all_characters = 0
    while order.is_active():
        ready = order.get_ready()
        order.done(*ready)
        for path in ready:
            value = document.data
            if path:
                value = parent_of(document.data, path)[path[-1]]
            counts[path] = len(references.get(path, ()))
            lengths[path] = 0
            for child in children[path]:
                counts[path] += counts[child]
                lengths[path] += lengths[child]
            if not isinstance(value, dict | list):
                lengths[path] += len(str(value))
            if path in references:
                all_references += counts[path]
                all_characters += lengths[path]
            if all_references > _MAX_REFERENCES or all_characters > _MAX_CHARACTERS:
                text = truncate_text(str(value))
                reason = f"resolving it takes the config over {_MAX_REFERENCES:,} references or 1 MiB of text"
                document.add_mistake(path, f"'{text}' refers to too much: {reason}")
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


def _explain_error(error: str, names: Iterable[str]) -> str:
    """Return an error of OmegaConf as the end of a sentence."""
    missing = re.search(r"Interpolation key '([^']*)' not found", error)
    if missing:
        return f"refers to '{missing[1]}', which does not exist{did_you_mean(missing[1], names)}"
    if "Recursive" in error:
        return "cannot be resolved: it refers to itself"
    first_line = error.partition("\n")[0]
    return f"cannot be resolved: {first_line.rpartition('resolving interpolation: ')[2]}"
