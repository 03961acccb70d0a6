"""Llama 4, the text decoders: mixtures of experts with attention in chunks."""

from torchtune.models._family import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "decoder_only_tp_plan": "_parallelism",
    },
)
