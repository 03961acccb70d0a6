"""Llama 3.1."""

from torchtune._lazy import attach
from torchtune.models.llama3_1._model_builders import BUILDERS, SPEC

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        **dict.fromkeys(BUILDERS, "_model_builders"),
        **dict.fromkeys(("llama3_1", "lora_llama3_1"), "_component_builders"),
        "Llama3ScaledRoPE": "_position_embeddings",
    },
)
__all__ += ["SPEC"]
