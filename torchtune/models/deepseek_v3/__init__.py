"""DeepSeek V3 and models of its architecture, mixtures of experts with latent attention."""

from torchtune._lazy import attach
from torchtune.models.deepseek_v3._model_builders import BUILDERS, SPEC

__getattr__, __dir__, __all__ = attach(__name__, dict.fromkeys(BUILDERS, "_model_builders"))
__all__ += ["SPEC"]
