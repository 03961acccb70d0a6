"""Settings as YAML: for the log, and for a file that runs again."""

import dataclasses
import enum
import functools
import operator
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from torchtune.config._errors import KeyPath
from torchtune.config._interpolate import texts_from_environment
from torchtune.config._reader import Document, leaves
from torchtune.config._secrets import REDACTED, escape, is_secret, redact_shapes, remember_environment, stands_for
from torchtune.utils import atomic_write, get_logger, log_rank_zero


class _Written(str):
    """A text with references that is saved as it was written, not as what it stands for."""


class _Dumper(yaml.SafeDumper):
    """Floats that every YAML reader takes for floats; lists indented below their key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_str(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    """Quote what YAML 1.2 would read as a number, such as ``1e5``."""
    number = re.fullmatch(r"[-+]?[0-9._]+([eE][-+]?[0-9]+)?", text)
    style = "|" if "\n" in text else "'" if number else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_str)
_Dumper.add_representer(_Written, _represent_str)


def keep_references(settings: Any, document: Document) -> None:
    """Remember in ``settings``, made from ``document``, what is to be saved as it was written."""
    if document.environment:
        vars(settings)["_from_environment"] = document.environment


def _restore(value: Any, environment: dict[KeyPath, tuple[str, Any]], path: KeyPath = ()) -> Any:
    """``value`` with what came from the environment as it was written, unless it was changed since."""
    text, resolved = environment.get(path, (None, None))
    if text is not None and (value == resolved or str(value) == str(resolved)):
        return _Written(text)
    if isinstance(value, dict):
        return {key: _restore(item, environment, (*path, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_restore(item, environment, (*path, index)) for index, item in enumerate(value)]
    return value


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {item.name: getattr(value, item.name) for item in dataclasses.fields(value) if item.init}
    elif type(value).__module__.startswith("omegaconf"):
        from omegaconf import OmegaConf

        value = OmegaConf.to_container(value, resolve=True)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def _redact(value: Any, secret: bool = False) -> Any:
    """``value`` without secrets; below a name of one every text is one. References to the environment stay."""
    if isinstance(value, dict):
        return {
            key: item if key == "_component_" else _redact(item, secret or is_secret(str(key), _first(item)))
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_redact(item, secret) for item in value]
    if isinstance(value, _Written) or value in ("", "???"):
        return value
    if secret and (isinstance(value, str) or type(value) in (int, float)):
        return REDACTED
    if isinstance(value, str) and len(value) >= 6 and (written := stands_for(value)):
        return _Written(written)  # settings that were copied, or put together by hand
    return redact_shapes(value) if isinstance(value, str) else value


def _first(value: Any) -> Any:
    """What decides whether all of ``value`` is of the kind that secrets are: its first text, or its first value."""
    found = [leaf for _, leaf in leaves(value)] if isinstance(value, (dict, list)) else [value]
    return next((leaf for leaf in found if isinstance(leaf, str)), found[0] if found else None)


def _environment_of(settings: Any) -> dict[KeyPath, tuple[str, Any]]:
    if not type(settings).__module__.startswith("omegaconf"):
        return getattr(settings, "_from_environment", {})
    from omegaconf import OmegaConf

    raw, resolved = (OmegaConf.to_container(settings, resolve=resolve) for resolve in (False, True))
    texts = texts_from_environment(raw)
    remember_environment(texts.values())
    return {path: (text, functools.reduce(operator.getitem, path, resolved)) for path, text in texts.items()}


def to_dict(settings: Any, *, redact: bool = False) -> dict[str, Any]:
    """Settings (a dataclass instance or a ``DictConfig``) as resolved plain values, ``recipe`` first.

    Args:
        settings: see above.
        redact: leave out secrets: what is named or looks like one, and what came from ``${oc.env:…}``, which is given
            as it was written.
    """
    values = _plain(settings)
    recipe = getattr(settings, "recipe", None) if dataclasses.is_dataclass(settings) else None
    values = {"recipe": recipe, **values} if recipe is not None else values
    return _redact(_restore(values, _environment_of(settings))) if redact else values


def to_yaml(settings: Any, *, sort_keys: bool = False) -> str:
    """Settings as YAML text, secrets replaced; a ``$`` that stood for itself stays so when it is read again."""
    values = escape(to_dict(settings, redact=True))
    return yaml.dump(values, Dumper=_Dumper, sort_keys=sort_keys, allow_unicode=True, width=1000)


def save_config(settings: Any, path: str | Path) -> None:
    """Write the resolved settings as YAML that runs again unchanged, readable by their owner alone.

    What came from ``${oc.env:…}`` is written so again, other secrets are replaced.

    Raises:
        UserError: the file cannot be written.
    """
    text = to_yaml(settings)
    with atomic_write(path, "w", private=True) as file:
        file.write(text)


def log_config(recipe_name: str, cfg: Any) -> None:
    """Log the resolved settings, keys sorted and secrets replaced, on rank zero."""
    text = to_yaml(cfg, sort_keys=True)
    log_rank_zero(get_logger("INFO"), f"Running {recipe_name} with resolved config:\n\n{text}")
