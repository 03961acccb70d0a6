"""Llama 2."""

from torchtune.models._family import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "Llama2ChatTemplate": "_prompt_template",
        "Llama2Tokenizer": "_tokenizer",
        "llama2_tokenizer": "_tokenizer",
    },
)
