"""Settings as YAML: for the log, and for a file that runs again."""

import dataclasses
import enum
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from torchtune.utils import atomic_write, get_logger, log_rank_zero

REDACTED = "<redacted>"
_SECRET = re.compile(r"(^|_)(token|api_?key|password|passwd|secret)($|_)|apikey|password|secret", re.IGNORECASE)
# "token" is also what tokenizers speak of: eos_token is no secret, nor is a number of them.
_NO_SECRET = re.compile(
    r"(^|_)(bos|eos|pad|unk|sep|cls|mask|image|video|audio|special|start|end|stop|begin|first|last|next|per|extra"
    r"|ignore|header|role|user|system|assistant|think|tool|patch|tile|added|new|max|min|num)_token",
    re.IGNORECASE,
)


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


def is_secret(key: str) -> bool:
    """Whether a key's name says that its value must not be written down."""
    return bool(_SECRET.search(key)) and not _NO_SECRET.search(key)


def _plain(value: Any, redact: bool) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {item.name: getattr(value, item.name) for item in dataclasses.fields(value) if item.init}
    elif type(value).__module__.startswith("omegaconf"):
        from omegaconf import OmegaConf

        value = OmegaConf.to_container(value, resolve=True)
    if isinstance(value, Mapping):
        return {
            key: REDACTED if redact and isinstance(item, str) and item and is_secret(str(key)) else _plain(item, redact)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_plain(item, redact) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def to_dict(settings: Any, *, redact: bool = False) -> dict[str, Any]:
    """Settings (a dataclass instance or a ``DictConfig``) as resolved plain values, ``recipe`` first."""
    values = _plain(settings, redact)
    recipe = getattr(settings, "recipe", None) if dataclasses.is_dataclass(settings) else None
    return {"recipe": recipe, **values} if recipe is not None else values


def to_yaml(settings: Any, *, sort_keys: bool = False) -> str:
    """Settings as YAML text, secrets replaced; a ``$`` that stood for itself stays so when it is read again."""
    values = _escape(to_dict(settings, redact=True))
    return yaml.dump(values, Dumper=_Dumper, sort_keys=sort_keys, allow_unicode=True, width=1000)


def _escape(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escape(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def save_config(settings: Any, path: str | Path) -> None:
    """Write the resolved settings as YAML that runs again unchanged; secrets are replaced.

    Raises:
        UserError: the file cannot be written.
    """
    text = to_yaml(settings)
    with atomic_write(path, "w") as file:
        file.write(text)


def log_config(recipe_name: str, cfg: Any) -> None:
    """Log the resolved settings, keys sorted and secrets replaced, on rank zero."""
    text = to_yaml(cfg, sort_keys=True)
    log_rank_zero(get_logger("INFO"), f"Running {recipe_name} with resolved config:\n\n{text}")
