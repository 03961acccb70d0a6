"""Gemma."""

from torchtune._lazy import attach
from torchtune.models.gemma._model_builders import BUILDERS, SPEC

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        **dict.fromkeys(BUILDERS, "_model_builders"),
        **dict.fromkeys(("gemma", "lora_gemma"), "_component_builders"),
        "GemmaChatTemplate": "_prompt_template",
        "GemmaTokenizer": "_tokenizer",
        "gemma_tokenizer": "_tokenizer",
    },
)
__all__ += ["SPEC"]
