"""Aliases for recipes copied from earlier releases."""

from torchtune._lazy import former_names
from torchtune.config._document import is_component as _has_component
from torchtune.config._locate import locate as _get_component_from_path
from torchtune.config._save import log_config

__all__ = ["_get_component_from_path", "_has_component", "log_config"]

__getattr__ = former_names(__name__)
