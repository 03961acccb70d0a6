"""Post-training: preference and reward losses, and building blocks of reinforcement learning recipes."""

from torchtune._lazy import former_names
from torchtune.rlhf import environments, loss, reward_functions
from torchtune.rlhf._log_prob_cache import cache_reference, cache_teacher
from torchtune.rlhf._ppo import (
    AnswerTokens,
    TokenAdvantages,
    check_ppo_models,
    check_ppo_settings,
    evaluate_rollouts,
    ppo_advantages,
    ppo_updates,
    setup_ppo_loss,
    steps_per_epoch,
    token_values,
)
from torchtune.rlhf._prompts import (
    NumberedPrompts,
    Prompt,
    PromptBatch,
    SharingError,
    can_share_prefixes,
    check_prompts,
    collate_prompts,
    images_of,
    numbered_prompts,
    share_pairs,
)
from torchtune.rlhf._reference import Reference, ReferenceScores, check_pairs, load_reference
from torchtune.rlhf._reward_model import RewardModel, judge_rollouts
from torchtune.rlhf._rollouts import (
    Rollout,
    RolloutError,
    collate_rollouts,
    prompt_seed,
    rollout_batches,
    texts_of,
)
from torchtune.rlhf._samplers import LocalSampler, Sampler, ServerSampler
from torchtune.rlhf._scored_rollouts import (
    GroupAdvantages,
    RolloutRecord,
    ScoredRollouts,
    check_rollout_settings,
    has_variance,
    make_advantages,
    score_rollouts,
    setup_policy_loss,
)
from torchtune.rlhf._teacher import Teacher, check_teacher, load_teacher, setup_kd_loss
from torchtune.rlhf.environments import setup_environments
from torchtune.rlhf.loss import document_log_probs, pooled_scores
from torchtune.rlhf.loss.dpo import ChosenRejectedOutputs
from torchtune.rlhf.reward_functions import RewardSum
from torchtune.rlhf.rewards import (
    PPOStats,
    Trajectory,
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
    "AnswerTokens",
    "ChosenRejectedOutputs",
    "GroupAdvantages",
    "LocalSampler",
    "NumberedPrompts",
    "PPOStats",
    "Prompt",
    "PromptBatch",
    "Reference",
    "ReferenceScores",
    "RewardModel",
    "RewardSum",
    "Rollout",
    "RolloutError",
    "RolloutRecord",
    "Sampler",
    "ScoredRollouts",
    "ServerSampler",
    "SharingError",
    "Teacher",
    "TokenAdvantages",
    "Trajectory",
    "batched_logits_to_logprobs",
    "cache_reference",
    "cache_teacher",
    "can_share_prefixes",
    "check_pairs",
    "check_ppo_models",
    "check_ppo_settings",
    "check_prompts",
    "check_rollout_settings",
    "check_teacher",
    "collate_prompts",
    "collate_rollouts",
    "document_log_probs",
    "environments",
    "estimate_advantages",
    "evaluate_rollouts",
    "get_batch_log_probs",
    "get_reward_penalty_mask",
    "get_rewards_ppo",
    "has_variance",
    "images_of",
    "judge_rollouts",
    "load_reference",
    "load_teacher",
    "logits_to_logprobs",
    "loss",
    "make_advantages",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "numbered_prompts",
    "pooled_scores",
    "ppo_advantages",
    "ppo_updates",
    "prompt_seed",
    "reward_functions",
    "rollout_batches",
    "score_rollouts",
    "setup_environments",
    "setup_kd_loss",
    "setup_policy_loss",
    "setup_ppo_loss",
    "share_pairs",
    "steps_per_epoch",
    "texts_of",
    "token_values",
    "truncate_sequence_at_first_stop_token",
    "truncate_sequence_for_logprobs",
    "whiten",
]

__getattr__ = former_names(__name__)
