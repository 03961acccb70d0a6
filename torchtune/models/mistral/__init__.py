"""Mistral."""

from torchtune.models._family import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "MistralTokenizer": "_tokenizer",
        "mistral_tokenizer": "_tokenizer",
        "MistralInstructTokenizer": "_instruct_tokenizer",
        "mistral_instruct_tokenizer": "_instruct_tokenizer",
        "MistralChatTemplate": "_prompt_template",
    },
)
