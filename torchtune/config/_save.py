"""Write settings as YAML, for the log and for a config file that can be run again."""

import dataclasses
import enum
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from torchtune.config._components import as_written
from torchtune.config._document import iter_scalars
from torchtune.config._errors import KeyPath
from torchtune.config._references import resolve_texts, texts_with_references
from torchtune.config._secrets import (
    MIN_REDACTED,
    REDACTED,
    environment_reference,
    escape,
    is_secret,
    redact_tokens,
)
from torchtune.utils import atomic_write, get_logger, log_rank_zero


class _Reference(str):
    """Text that is saved with its references unresolved."""


class _Dumper(yaml.SafeDumper):
    """YAML dumper without aliases that indents lists below their key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_str(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    """Quote texts that YAML 1.2 reads as numbers, such as ``1e5``."""
    style = None
    if "\n" in text:
        style = "|"
    elif re.fullmatch(r"[-+]?[0-9._]+([eE][-+]?[0-9]+)?", text):
        style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_str)
_Dumper.add_representer(_Reference, _represent_str)


def _to_plain(value: Any) -> Any:
    """Convert settings to mappings, lists and scalars that YAML can represent."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field for field in dataclasses.fields(value) if field.init]  # others are computed from them
        value = {field.name: getattr(value, field.name) for field in fields}
    elif type(value).__module__.startswith("omegaconf"):
        from omegaconf import OmegaConf

        value = OmegaConf.to_container(value, resolve=True)
    if isinstance(value, Mapping):
        return {key: _to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if type(value) is str:  # a component of the recipe's file, which the checks have qualified by its module
        return as_written(value)
    return value


def _redact(
    value: Any, environment: dict[KeyPath, tuple[str, Any]], path: KeyPath = (), is_secret_key: bool = False
) -> Any:
    """Replace secrets in ``value``; every text below a key with a secret's name is a secret.

    Values from the environment become references, unless they have changed since.
    """
    text, resolved = environment.get(path, (None, None))
    # Compared as texts, too: the checks may have converted the number 1 to the text "1".
    if text is not None and (value == resolved or str(value) == str(resolved)):
        return _Reference(text)
    if isinstance(value, dict):
        redacted = {}
        for key, item in value.items():
            if key == "_component_":  # the name of a class holds no secret, whatever section it is in
                redacted[key] = item
                continue
            is_secret_item = is_secret_key or is_secret(str(key), _deciding_scalar(item))
            redacted[key] = _redact(item, environment, (*path, key), is_secret_item)
        return redacted
    if isinstance(value, list):
        return [_redact(item, environment, (*path, index), is_secret_key) for index, item in enumerate(value)]
    if value in ("", "???"):
        return value
    if is_secret_key and (isinstance(value, str) or type(value) in (int, float)):
        return REDACTED
    if not isinstance(value, str):
        return value
    # `environment` is empty for settings that were copied or built by hand, but the value may be of a variable.
    reference = environment_reference(value)
    if reference is not None and len(value) >= MIN_REDACTED:
        return _Reference(reference)
    return redact_tokens(value)


def _deciding_scalar(value: Any) -> Any:
    """Return the value that decides whether ``value`` holds secrets: its first text, or else its first scalar."""
    scalars = [scalar for _, scalar in iter_scalars(value)]
    for scalar in scalars:
        if isinstance(scalar, str):
            return scalar
    if not scalars:
        return None
    return scalars[0]


def _environment_of(settings: Any) -> dict[KeyPath, tuple[str, Any]]:
    """Return the values that depend on ``${oc.env:…}``, by path: the text as written, and the value."""
    if not type(settings).__module__.startswith("omegaconf"):
        return getattr(settings, "_from_environment", {})
    from omegaconf import OmegaConf

    texts = texts_with_references(OmegaConf.to_container(settings, resolve=False))
    environment = {}
    for path, value, from_environment in resolve_texts(settings, list(texts)):
        if from_environment:
            environment[path] = (texts[path], value)
    return environment


def to_dict(settings: Any, *, redact: bool = False) -> dict[str, Any]:
    """Convert settings to resolved plain values, ``recipe`` first.

    Args:
        settings: a dataclass instance or a ``DictConfig``.
        redact: replace secrets (found by name or format), and keep ``${oc.env:…}`` unresolved.
    """
    values = _to_plain(settings)
    # `parse` adds the recipe's name to settings that have no such field.
    if dataclasses.is_dataclass(settings) and getattr(settings, "recipe", None) is not None:
        values = {"recipe": settings.recipe, **values}
    if not redact:
        return values
    # Kept references may name keys that are no settings: these are saved as well.
    variables = getattr(settings, "_variables", {})
    return _redact({**values, **variables}, _environment_of(settings))


def to_yaml(settings: Any, *, sort_keys: bool = False) -> str:
    """Return settings as YAML text with secrets redacted and each literal ``${`` escaped.

    Args:
        settings: a dataclass instance or a ``DictConfig``.
        sort_keys: sort the keys of every section.

    Example:
        >>> print(torchtune.config.to_yaml({"epochs": 2, "optimizer": {"lr": 1e-4}}), end="")
        epochs: 2
        optimizer:
          lr: 0.0001
    """
    values = escape(to_dict(settings, redact=True))
    return yaml.dump(values, Dumper=_Dumper, sort_keys=sort_keys, allow_unicode=True, width=1000)


def save_config(settings: Any, path: str | Path) -> None:
    """Save the resolved settings as a YAML config that can be run again, with permissions for the owner only.

    References ``${oc.env:…}`` stay unresolved; other secrets are redacted.

    Raises:
        UserError: the file cannot be written.
    """
    text = to_yaml(settings)
    with atomic_write(path, "w", private=True) as file:
        file.write(text)


def log_config(recipe_name: str, cfg: Any) -> None:
    """Log the resolved settings on rank 0, with sorted keys and redacted secrets."""
    text = to_yaml(cfg, sort_keys=True)
    log_rank_zero(get_logger("INFO"), f"Running {recipe_name} with resolved config:\n\n{text}")
