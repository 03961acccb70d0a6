"""Post-training: losses of preferences and rewards, and what recipes of reinforcement learning are made of."""

from torchtune.rlhf import loss, reward_functions, utils
from torchtune.rlhf._advantages import GroupAdvantages, has_variance
from torchtune.rlhf._experience import (
    Prompt,
    PromptBatch,
    RolloutRecord,
    ScoredRollouts,
    check_prompts,
    check_rollout_settings,
    collate_prompts,
    make_advantages,
    score_rollouts,
    setup_policy_loss,
)
from torchtune.rlhf._local_sampler import LocalSampler
from torchtune.rlhf._reference import Reference, ReferenceScores, setup_reference
from torchtune.rlhf._rollouts import (
    Rollout,
    RolloutError,
    Sampler,
    collate_rollouts,
    prompt_seed,
    rollout_batches,
    texts_of,
)
from torchtune.rlhf._teacher import Teacher, setup_kd_loss, setup_teacher
from torchtune.rlhf._types import ChosenRejectedOutputs, PPOStats, Trajectory
from torchtune.rlhf.loss import document_log_probs, pooled_scores
from torchtune.rlhf.reward_functions import RewardSum
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
    "GroupAdvantages",
    "LocalSampler",
    "PPOStats",
    "Prompt",
    "PromptBatch",
    "Reference",
    "ReferenceScores",
    "RewardSum",
    "Rollout",
    "RolloutError",
    "RolloutRecord",
    "Sampler",
    "ScoredRollouts",
    "Teacher",
    "Trajectory",
    "batched_logits_to_logprobs",
    "check_prompts",
    "check_rollout_settings",
    "collate_prompts",
    "collate_rollouts",
    "document_log_probs",
    "estimate_advantages",
    "get_batch_log_probs",
    "get_reward_penalty_mask",
    "get_rewards_ppo",
    "has_variance",
    "logits_to_logprobs",
    "loss",
    "make_advantages",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "pooled_scores",
    "prompt_seed",
    "reward_functions",
    "rollout_batches",
    "score_rollouts",
    "setup_kd_loss",
    "setup_policy_loss",
    "setup_reference",
    "setup_teacher",
    "texts_of",
    "truncate_sequence_at_first_stop_token",
    "truncate_sequence_for_logprobs",
    "utils",
    "whiten",
]
