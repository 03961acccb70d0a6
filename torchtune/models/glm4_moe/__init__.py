"""GLM-4.5, 4.6 and 4.7, mixtures of experts."""

from torchtune._lazy import attach
from torchtune.models.glm4_moe._model_builders import BUILDERS, SPEC

__getattr__, __dir__, __all__ = attach(__name__, dict.fromkeys(BUILDERS, "_model_builders"))
__all__ += ["SPEC"]
