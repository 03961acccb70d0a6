"""Llama 4: mixtures of experts with attention in chunks, and a vision tower."""

from torchtune._lazy import attach

_BUILDERS = [
    f"{way}llama4_{size}" for size in ("scout_17b_16e", "maverick_17b_128e") for way in ("", "lora_", "qlora_")
]

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "SPEC": "_text",
        "Llama4Tokenizer": "_text",
        **dict.fromkeys(
            (
                *_BUILDERS,
                "Llama4Transform",
                "Llama4VisionEncoder",
                "Llama4VisionProjectionHead",
                "decoder_only_tp_plan",
                "llama4_decoder",
                "llama4_transform",
                "llama4_vision_encoder",
                "llama4_vision_projection_head",
            ),
            "_earlier",
        ),
    },
    between_rooms={"BUILDERS": "_earlier", "FORMAT": "_text", "LlamaImages": "_processor", "SIZES": "_text"},
)
