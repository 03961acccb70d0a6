"""Mixtures of experts."""

from torchtune._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "GroupedExperts": "experts",
        "LoRAGroupedExperts": "lora_experts",
        "MoE": "moe",
        "TokenChoiceTopKRouter": "moe",
    },
)
