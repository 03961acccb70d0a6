"""Mixtures of experts."""

from torchtune._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "BalancingLoss": "balance",
        "ClampedExperts": "experts",
        "ExpertLoad": "balance",
        "GroupedExperts": "experts",
        "LoRAGroupedExperts": "torchtune.modules.peft.lora_experts",
        "LossFreeBalancing": "balance",
        "MoE": "moe",
        "TokenChoiceTopKRouter": "moe",
        "UngatedExperts": "experts",
        "load_balancing_loss": "balance",
        "tokens_per_expert": "balance",
    },
)
