"""Qwen 2.5."""

from torchtune._lazy import attach
from torchtune.models.qwen2_5._model_builders import BUILDERS, SPEC

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        **dict.fromkeys(BUILDERS, "_model_builders"),
        "Qwen2_5Tokenizer": "_tokenizer",
        "qwen2_5_tokenizer": "_tokenizer",
    },
)
__all__ += ["SPEC"]
