"""Llama 4: mixtures of experts with attention in chunks, and a vision tower."""

from torchtune._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Llama4Tokenizer": "_text",
        "Llama4Transform": "_earlier",
        "Llama4VisionEncoder": "_earlier",
        "Llama4VisionProjectionHead": "_earlier",
        "SPEC": "_text",
        "decoder_only_tp_plan": "_earlier",
        "llama4_decoder": "_earlier",
        "llama4_maverick_17b_128e": "_earlier",
        "llama4_scout_17b_16e": "_earlier",
        "llama4_transform": "_earlier",
        "llama4_vision_encoder": "_earlier",
        "llama4_vision_projection_head": "_earlier",
        "lora_llama4_maverick_17b_128e": "_earlier",
        "lora_llama4_scout_17b_16e": "_earlier",
        "qlora_llama4_maverick_17b_128e": "_earlier",
        "qlora_llama4_scout_17b_16e": "_earlier",
    },
    between_rooms={"BUILDERS": "_earlier", "FORMAT": "_text", "LlamaImages": "_processor", "SIZES": "_text"},
)
