"""Post-training: losses of preferences and rewards, and what recipes of reinforcement learning are made of."""

from torchtune.rlhf import loss, utils
from torchtune.rlhf._reference import Reference, ReferenceScores, setup_reference
from torchtune.rlhf._types import ChosenRejectedOutputs, PPOStats, Trajectory
from torchtune.rlhf.loss import document_log_probs, pooled_scores
from torchtune.rlhf.rewards import (
    estimate_advantages,
    get_reward_penalty_mask,
    get_rewards_ppo,
    masked_mean,
    masked_sum,
    masked_var,
    whiten,
)
from torchtune.rlhf.sequence_processing import (
    batched_logits_to_logprobs,
    get_batch_log_probs,
    logits_to_logprobs,
    truncate_sequence_at_first_stop_token,
    truncate_sequence_for_logprobs,
)

__all__ = [
    "ChosenRejectedOutputs",
    "PPOStats",
    "Reference",
    "ReferenceScores",
    "Trajectory",
    "batched_logits_to_logprobs",
    "document_log_probs",
    "estimate_advantages",
    "get_batch_log_probs",
    "get_reward_penalty_mask",
    "get_rewards_ppo",
    "logits_to_logprobs",
    "loss",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "pooled_scores",
    "setup_reference",
    "truncate_sequence_at_first_stop_token",
    "truncate_sequence_for_logprobs",
    "utils",
    "whiten",
]
