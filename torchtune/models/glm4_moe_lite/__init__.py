"""GLM-4.7-Flash, a mixture of experts with latent attention."""

from torchtune._lazy import attach
from torchtune.models.glm4_moe_lite._model_builders import BUILDERS, SPEC

__getattr__, __dir__, __all__ = attach(__name__, dict.fromkeys(BUILDERS, "_model_builders"))
__all__ += ["SPEC"]
