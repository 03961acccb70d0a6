"""Datasets of text and images."""

from torchtune._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "llava_instruct_dataset": "_builders",
        "multimodal_chat_dataset": "_builders",
        "the_cauldron_dataset": "_builders",
        "the_cauldron_transform": "_builders",
        "vqa_dataset": "_builders",
    },
)
