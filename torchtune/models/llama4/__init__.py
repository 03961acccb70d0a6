"""Llama 4, the text decoders: mixtures of experts with attention in chunks."""

from torchtune._lazy import attach
from torchtune.models.llama4._model_builders import BUILDERS, SPEC

__getattr__, __dir__, __all__ = attach(
    __name__, {**dict.fromkeys(BUILDERS, "_model_builders"), "decoder_only_tp_plan": "_parallelism"}
)
__all__ += ["SPEC"]
