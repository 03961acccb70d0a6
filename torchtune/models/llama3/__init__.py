"""Llama 3."""

from torchtune._lazy import attach
from torchtune.models.llama3._model_builders import BUILDERS, SPEC

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        **dict.fromkeys(BUILDERS, "_model_builders"),
        **dict.fromkeys(("llama3", "lora_llama3"), "_component_builders"),
        "Llama3Tokenizer": "_tokenizer",
        "base_llama_tp_plan": "_parallelism",
        "llama3_tokenizer": "_tokenizer",
    },
)
__all__ += ["SPEC"]
