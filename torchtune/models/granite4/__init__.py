"""Granite 4 and 4-H."""

from torchtune._lazy import attach
from torchtune.models.granite4._model_builders import BUILDERS, SPEC

__getattr__, __dir__, __all__ = attach(__name__, dict.fromkeys(BUILDERS, "_model_builders"))
__all__ += ["SPEC"]
