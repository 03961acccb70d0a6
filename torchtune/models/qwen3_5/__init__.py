"""Qwen 3.5 and 3.6, the dense text decoders."""

from torchtune._lazy import attach
from torchtune.models.qwen3_5._model_builders import BUILDERS, SPEC

__getattr__, __dir__, __all__ = attach(__name__, dict.fromkeys(BUILDERS, "_model_builders"))
__all__ += ["SPEC"]
