"""Command-line overrides: ``key=value`` and ``~key``."""

from collections.abc import Sequence
from typing import Any

import yaml

from torchtune.config._errors import KeyPath, did_you_mean, join_key, truncate_text
from torchtune.config._reader import BadValue, Document, Place, read_value, syntax_reason
from torchtune.config._secrets import REDACTED, is_secret, redact_secrets
from torchtune.config._values import format_value, is_component

COMMAND_LINE = "command line"
_AFTER_FILES = 10**9  # command-line mistakes are sorted after mistakes of the file


class _InvalidOverride(Exception):
    """Override that cannot be applied; the message is the reason."""


def apply_overrides(document: Document, overrides: Sequence[str]) -> None:
    """Apply overrides in order; each one that fails becomes a mistake of the document."""
    for index, token in enumerate(overrides):
        place = Place(COMMAND_LINE, _AFTER_FILES + index, token.partition("=")[2])
        key, equals, text = token.removeprefix("~").partition("=")
        keys = key.split(".")
        try:
            if token.startswith("--"):
                raise _InvalidOverride("is not an option of a recipe: settings are written key=value")
            if not all(keys):
                raise _InvalidOverride("needs a key: write key=value or section.key=value")
            if token.startswith("~"):
                if equals:
                    raise _InvalidOverride("a removal takes no value: write ~key")
                _remove(document, keys)
            elif not equals:
                raise _InvalidOverride("is not of the form key=value" + did_you_mean(key, map(str, document.data)))
            else:
                _assign(document, keys, text, place)
        except _InvalidOverride as refused:
            document.places[(key or token,)] = place
            document.add((key or token,), str(refused))


def _convert_key(node: Any, key: str, so_far: KeyPath) -> str | int:
    """Convert ``key`` to an index or key of ``node``."""
    if isinstance(node, list):
        if not key.isdigit() or int(key) >= len(node):
            raise _InvalidOverride(
                f"{join_key(so_far)} is a list of {len(node)}: write {join_key(so_far)}.0 for its first item"
            )
        return int(key)
    if not isinstance(node, dict):
        raise _InvalidOverride(f"{join_key(so_far)} is {format_value(node, so_far)}, not a section")
    return int(key) if key.isdigit() and int(key) in node else key


def _assign(document: Document, keys: list[str], text: str, place: Place) -> None:
    try:
        value = text if "max_filename" in keys[-1] else read_value(text)
    except BadValue as error:
        raise _InvalidOverride(syntax_reason(error)) from error
    except yaml.YAMLError as error:
        quoted = REDACTED if is_secret(keys[-1]) else f"'{truncate_text(redact_secrets(text))}'"
        raise _InvalidOverride(
            f"{quoted} is not a complete list or mapping: put quotation marks around text"
        ) from error
    node: Any = document.data
    path: KeyPath = ()
    for key in keys[:-1]:
        step = _convert_key(node, key, path)
        path = (*path, step)
        if isinstance(node, dict) and node.get(step) is None:
            document.set(path, {}, place)
        node = node[step]
    path = (*path, _convert_key(node, keys[-1], path))
    old = node[path[-1]] if isinstance(node, list) or path[-1] in node else None
    if is_component(old) and isinstance(value, str) and "${" not in value:
        path = (*path, "_component_")
    document.set(path, value, place)


def _remove(document: Document, keys: list[str]) -> None:
    nodes: list[Any] = [document.data]
    path: KeyPath = ()
    for key in keys:
        step = _convert_key(nodes[-1], key, path)
        if isinstance(nodes[-1], dict) and step not in nodes[-1]:
            hint = did_you_mean(key, map(str, nodes[-1]))
            raise _InvalidOverride("cannot be removed: it is not in the config" + hint)
        path = (*path, step)
        nodes.append(nodes[-1][step])
    if path[-1] == "_component_":
        raise _InvalidOverride("cannot be removed: a component without a name is nothing; remove the whole section")
    for end in range(len(path), 0, -1):  # a section that becomes empty is removed, too
        del nodes[end - 1][path[end - 1]]
        document.drop_places(path[:end])
        if nodes[end - 1] or not isinstance(nodes[end - 1], dict):
            break
