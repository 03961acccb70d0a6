"""Gemma 2."""

from torchtune._lazy import attach
from torchtune.models.gemma2._model_builders import BUILDERS, SPEC

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        **dict.fromkeys(BUILDERS, "_model_builders"),
        **dict.fromkeys(("gemma2", "lora_gemma2"), "_component_builders"),
        **dict.fromkeys(("GemmaTokenizer", "gemma_tokenizer"), "_tokenizer"),
    },
)
__all__ += ["SPEC"]
