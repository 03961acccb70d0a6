"""Qwen 3, the dense models."""

from torchtune._lazy import attach
from torchtune.models.qwen3._model_builders import BUILDERS, SPEC

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        **dict.fromkeys(BUILDERS, "_model_builders"),
        **dict.fromkeys(("qwen3", "lora_qwen3"), "_component_builders"),
        "Qwen3Tokenizer": "_tokenizer",
        "qwen3_tokenizer": "_tokenizer",
    },
)
__all__ += ["SPEC"]
