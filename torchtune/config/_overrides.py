"""Overrides of the command line: ``key=value`` and ``~key``."""

from collections.abc import Sequence
from typing import Any

import yaml

from torchtune.config._errors import KeyPath, brief, did_you_mean, dotted
from torchtune.config._limits import MAX_DEPTH, TooLarge
from torchtune.config._reader import BadValue, Document, Place, read_value, syntax_reason
from torchtune.config._secrets import REDACTED, hide, is_secret
from torchtune.config._values import is_component, shown

COMMAND_LINE = "command line"
_AFTER_FILES = 10**9  # mistakes of the command line are listed after those of the file


class _Refused(Exception):
    """An override cannot be applied; carries the reason."""


def apply(document: Document, overrides: Sequence[str]) -> None:
    """Apply overrides in order; what cannot be applied is noted as a mistake of the command line."""
    for index, token in enumerate(overrides):
        place = Place(COMMAND_LINE, _AFTER_FILES + index, token.partition("=")[2])
        key, equals, text = token.removeprefix("~").partition("=")
        keys = key.split(".")
        try:
            if token.startswith("--"):
                raise _Refused("is not an option of a recipe: settings are written key=value")
            if not token.isascii() and token.encode(errors="ignore").decode() != token:
                raise _Refused("is not UTF-8 text")
            if len(keys) > MAX_DEPTH:
                raise _Refused(f"nests more than {MAX_DEPTH} levels deep")
            if not all(keys):
                raise _Refused("needs a key: write key=value or section.key=value")
            if token.startswith("~"):
                if equals:
                    raise _Refused("a removal takes no value: write ~key")
                _remove(document, keys)
            elif not equals:
                raise _Refused("is not of the form key=value" + did_you_mean(key, map(str, document.data)))
            else:
                _assign(document, keys, text, place)
        except _Refused as refused:
            document.places[(key or token,)] = place
            document.add((key or token,), str(refused))


def _step(node: Any, key: str, so_far: KeyPath) -> str | int:
    """``key`` as it indexes ``node``."""
    if isinstance(node, list):
        if not key.isdigit() or int(key) >= len(node):
            raise _Refused(f"{dotted(so_far)} is a list of {len(node)}: write {dotted(so_far)}.0 for its first item")
        return int(key)
    if not isinstance(node, dict):
        raise _Refused(f"{dotted(so_far)} is {shown(node, so_far)}, not a section")
    return int(key) if key.isdigit() and int(key) in node else key


def _assign(document: Document, keys: list[str], text: str, place: Place) -> None:
    try:
        value = text if "max_filename" in keys[-1] else read_value(text)
    except (TooLarge, BadValue) as error:
        raise _Refused(syntax_reason(error)) from error
    except yaml.YAMLError as error:
        quoted = REDACTED if is_secret(keys[-1]) else f"'{brief(hide(text))}'"
        raise _Refused(f"{quoted} is not a complete list or mapping: put quotation marks around text") from error
    node: Any = document.data
    path: KeyPath = ()
    for key in keys[:-1]:
        step = _step(node, key, path)
        path = (*path, step)
        if isinstance(node, dict) and node.get(step) is None:
            document.set(path, {}, place)
        node = node[step]
    path = (*path, _step(node, keys[-1], path))
    old = node[path[-1]] if isinstance(node, list) or path[-1] in node else None
    if is_component(old) and isinstance(value, str) and "${" not in value:
        path = (*path, "_component_")
    document.set(path, value, place)


def _remove(document: Document, keys: list[str]) -> None:
    nodes: list[Any] = [document.data]
    path: KeyPath = ()
    for key in keys:
        step = _step(nodes[-1], key, path)
        if isinstance(nodes[-1], dict) and step not in nodes[-1]:
            hint = did_you_mean(key, map(str, nodes[-1]))
            raise _Refused("cannot be removed: it is not in the config" + hint)
        path = (*path, step)
        nodes.append(nodes[-1][step])
    if path[-1] == "_component_":
        raise _Refused("cannot be removed: a component without a name is nothing; remove the whole section")
    for end in range(len(path), 0, -1):  # a section that is left empty goes too
        del nodes[end - 1][path[end - 1]]
        document.forget(path[:end])
        if nodes[end - 1] or not isinstance(nodes[end - 1], dict):
            break
