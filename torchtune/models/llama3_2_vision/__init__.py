"""Llama 3.2 Vision: text and images."""

from torchtune._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Llama3VisionEncoder": "_model",
        "Llama3VisionProjectionHead": "_model",
        "Llama3VisionTransform": "_transform",
        "SPEC": "_model",
        "llama3_2_vision_11b": "_model",
        "llama3_2_vision_90b": "_model",
        "llama3_2_vision_decoder": "_model",
        "llama3_2_vision_encoder": "_model",
        "llama3_2_vision_transform": "_transform",
        "lora_llama3_2_vision_11b": "_model",
        "lora_llama3_2_vision_90b": "_model",
        "lora_llama3_2_vision_decoder": "_model",
        "lora_llama3_2_vision_encoder": "_model",
        "qlora_llama3_2_vision_11b": "_model",
        "qlora_llama3_2_vision_90b": "_model",
    },
    between_rooms={"SIZES": "_model", "llama3_2_vision_projection_head": "_model"},
)
