"""Phi-3."""

from torchtune._lazy import attach
from torchtune.models.phi3._model_builders import BUILDERS, SPEC

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        **dict.fromkeys(BUILDERS, "_model_builders"),
        **dict.fromkeys(("phi3", "lora_phi3"), "_component_builders"),
        "Phi3RotaryPositionalEmbeddings": "_position_embeddings",
        "phi3_hf_to_tune": "_convert_weights",
        "phi3_tune_to_hf": "_convert_weights",
        "Phi3MiniTokenizer": "_tokenizer",
        "phi3_mini_tokenizer": "_tokenizer",
    },
)
__all__ += ["SPEC"]
