"""Phi-4."""

from torchtune._lazy import attach
from torchtune.models.phi4._model_builders import BUILDERS, SPEC

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        **dict.fromkeys(BUILDERS, "_model_builders"),
        "Phi4Tokenizer": "_tokenizer",
        "phi4_tokenizer": "_tokenizer",
    },
)
__all__ += ["SPEC"]
