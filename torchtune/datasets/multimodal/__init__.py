"""Datasets of text and images."""

from torchtune._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "llava_instruct_dataset": "_llava_instruct",
        "multimodal_chat_dataset": "_multimodal",
        "the_cauldron_dataset": "_the_cauldron",
        "the_cauldron_transform": "_the_cauldron",
        "vqa_dataset": "_vqa",
    },
)
