"""Llama 2."""

from torchtune._lazy import attach
from torchtune.models.llama2._model_builders import BUILDERS, SPEC

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        **dict.fromkeys(BUILDERS, "_model_builders"),
        **dict.fromkeys(
            ("llama2", "llama2_classifier", "lora_llama2", "lora_llama2_classifier"), "_component_builders"
        ),
        "Llama2Tokenizer": "_tokenizer",
        "llama2_tokenizer": "_tokenizer",
        "Llama2ChatTemplate": "_prompt_template",
    },
)
__all__ += ["SPEC"]
