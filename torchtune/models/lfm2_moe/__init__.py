"""LFM2 and LFM2.5, the mixtures of experts."""

from torchtune._lazy import attach
from torchtune.models.lfm2_moe._model_builders import BUILDERS, SPEC

__getattr__, __dir__, __all__ = attach(__name__, dict.fromkeys(BUILDERS, "_model_builders"))
__all__ += ["SPEC"]
