"""Qwen3-Next, mixtures of experts with linear attention."""

from torchtune._lazy import attach
from torchtune.models.qwen3_next._model_builders import BUILDERS, SPEC

__getattr__, __dir__, __all__ = attach(__name__, dict.fromkeys(BUILDERS, "_model_builders"))
__all__ += ["SPEC"]
