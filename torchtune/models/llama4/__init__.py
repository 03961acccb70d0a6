"""Llama 4: mixtures of experts with attention in chunks, and a vision tower."""

from torchtune.models._family import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "Llama4Tokenizer": "_tokenizer",
        **dict.fromkeys(("Llama4Transform", "llama4_transform"), "_transform"),
        **dict.fromkeys(
            (
                *("Llama4VisionEncoder", "Llama4VisionProjectionHead"),
                *("llama4_decoder", "llama4_vision_encoder", "llama4_vision_projection_head"),
            ),
            "_component_builders",
        ),
        "decoder_only_tp_plan": "_parallelism",
    },
)
