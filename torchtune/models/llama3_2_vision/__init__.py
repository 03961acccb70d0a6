"""Llama 3.2 Vision: text and images."""

from torchtune._lazy import attach

_MODELS = [f"{way}llama3_2_vision_{size}" for way in ("", "lora_", "qlora_") for size in ("11b", "90b")]

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        **dict.fromkeys(("Llama3VisionTransform", "llama3_2_vision_transform"), "_transform"),
        **dict.fromkeys(("Llama3VisionEncoder", "Llama3VisionProjectionHead"), "_encoder"),
        **dict.fromkeys(
            (
                "llama3_2_vision_decoder",
                "llama3_2_vision_encoder",
                "lora_llama3_2_vision_decoder",
                "lora_llama3_2_vision_encoder",
            ),
            "_component_builders",
        ),
        **dict.fromkeys(("SPEC", *_MODELS), "_model_builders"),
    },
    between_rooms={"SIZES": "_model_builders"},
)
