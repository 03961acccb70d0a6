"""Qwen 2."""

from torchtune._lazy import attach
from torchtune.models.qwen2._model_builders import BUILDERS, SPEC

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        **dict.fromkeys(BUILDERS, "_model_builders"),
        **dict.fromkeys(("qwen2", "lora_qwen2"), "_component_builders"),
        "Qwen2Tokenizer": "_tokenizer",
        "qwen2_tokenizer": "_tokenizer",
        "Qwen2RotaryPositionalEmbeddings": "_positional_embeddings",
        "qwen2_hf_to_tune": "_convert_weights",
        "qwen2_tune_to_hf": "_convert_weights",
    },
)
__all__ += ["SPEC"]
