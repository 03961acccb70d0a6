"""Falcon-H1."""

from torchtune._lazy import attach
from torchtune.models.falcon_h1._model_builders import BUILDERS, SPEC

__getattr__, __dir__, __all__ = attach(__name__, dict.fromkeys(BUILDERS, "_model_builders"))
__all__ += ["SPEC"]
