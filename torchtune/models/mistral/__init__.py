"""Mistral."""

from torchtune._lazy import attach
from torchtune.models.mistral._model_builders import BUILDERS, SPEC

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        **dict.fromkeys(BUILDERS, "_model_builders"),
        **dict.fromkeys(
            ("mistral", "mistral_classifier", "lora_mistral", "lora_mistral_classifier"), "_component_builders"
        ),
        "MistralTokenizer": "_tokenizer",
        "mistral_tokenizer": "_tokenizer",
        "MistralInstructTokenizer": "_instruct_tokenizer",
        "mistral_instruct_tokenizer": "_instruct_tokenizer",
        "MistralChatTemplate": "_prompt_template",
    },
)
__all__ += ["SPEC"]
