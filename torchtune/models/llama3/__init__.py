"""Llama 3."""

from torchtune.models._family import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "Llama3Tokenizer": "_tokenizer",
        "base_llama_tp_plan": "_parallelism",
        "llama3_tokenizer": "_tokenizer",
    },
)
