"""Llama 3.2, the text models."""

from torchtune._lazy import attach
from torchtune.models.llama3_2._model_builders import BUILDERS, SPEC

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        **dict.fromkeys(BUILDERS, "_model_builders"),
        **dict.fromkeys(("llama3_2", "lora_llama3_2"), "_component_builders"),
    },
)
__all__ += ["SPEC"]
