"""Gemma."""

from torchtune.models._family import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "GemmaChatTemplate": "_prompt_template",
        "GemmaTokenizer": "_tokenizer",
        "gemma_tokenizer": "_tokenizer",
    },
)
