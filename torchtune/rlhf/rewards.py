"""Token rewards and advantages of padded answers, and records of a step, for PPO recipes."""

from typing import NamedTuple

import torch


class Trajectory(NamedTuple):
    """Answers of a policy with the inputs of PPO.

    Shapes: ``b`` answers, ``s`` tokens of query and response, ``r`` tokens of the response.

    Attributes:
        query_responses: tokens ``[b, s]``.
        logprobs: log-probs of the policy ``[b, r]``.
        ref_logprobs: log-probs of the reference ``[b, r]``.
        values: values of the value model ``[b, r]``.
        masks: attention masks ``[b, s, s]``.
        position_ids: ``[b, s]``.
        response_padding_masks: bool ``[b, r]``, True at padding.
        value_padding_masks: bool ``[b, r]``, True at padding, one token later.
        value_seq_idxs: position of the last value ``[b]``.
        scores: scores of the reward model ``[b]``.
        seq_lens: position of the last token of the response ``[b]``.

    Example:
        >>> torchtune.rlhf.Trajectory(*[torch.zeros(1, 2)] * 11).values.shape
        torch.Size([1, 2])
    """

    query_responses: torch.Tensor
    logprobs: torch.Tensor
    ref_logprobs: torch.Tensor
    values: torch.Tensor
    masks: torch.Tensor
    position_ids: torch.Tensor
    response_padding_masks: torch.Tensor
    value_padding_masks: torch.Tensor
    value_seq_idxs: torch.Tensor
    scores: torch.Tensor
    seq_lens: torch.Tensor


class PPOStats(NamedTuple):
    """Metrics of a PPO step; each is a scalar.

    Attributes:
        loss: sum of the policy loss and the weighted value loss.
        policy_loss: clipped policy loss.
        value_loss: clipped value loss.
        ratios: mean probability ratio.
        clipfrac: fraction of tokens with a clipped ratio.
        approx_policy_kls: estimated KL divergence of the old and the new policy.

    Example:
        >>> torchtune.rlhf.PPOStats(*torch.zeros(6)).loss
        tensor(0.)
    """

    loss: torch.Tensor
    policy_loss: torch.Tensor
    value_loss: torch.Tensor
    ratios: torch.Tensor
    clipfrac: torch.Tensor
    approx_policy_kls: torch.Tensor


def get_reward_penalty_mask(
    padding_masks: torch.Tensor,
    seq_lens: torch.Tensor,
    penalise_no_eos: bool = True,
    min_response_length: int | None = None,
) -> torch.Tensor:
    """Select the responses that get a penalty instead of a reward.

    Args:
        padding_masks: bool ``[b, r]``, True after the end of the response.
        seq_lens: length of every response ``[b]``.
        penalise_no_eos: whether to penalize responses without padding, which are unfinished.
        min_response_length: minimum length; shorter responses are penalized.

    Returns:
        Bool ``[b]``, True for responses that get a penalty.

    Example:
        >>> padding = torch.tensor([[False, False, True], [False, False, False]])
        >>> torchtune.rlhf.get_reward_penalty_mask(padding, torch.tensor([1, 2]), penalise_no_eos=True)
        tensor([...])
    """
    penalized = torch.zeros_like(seq_lens, dtype=torch.bool)
    if penalise_no_eos:
        penalized = penalized | ~padding_masks.any(dim=-1)
    if min_response_length is not None:
        penalized = penalized | (seq_lens < min_response_length)
    return penalized


def get_rewards_ppo(
    scores: torch.Tensor,
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    kl_coeff: float,
    valid_score_idxs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute token rewards: the score at the last token, minus the weighted log-ratio to the reference at every token.

    Args:
        scores: scores of the reward model ``[b]``.
        logprobs: log-probs of the policy ``[b, r]``.
        ref_logprobs: log-probs of the reference ``[b, r]``.
        kl_coeff: weight of the log-ratio.
        valid_score_idxs: position of the score ``[b]``; by default the last one.

    Returns:
        Total rewards, log-ratios, and the part of the rewards from the log-ratios, ``[b, r]`` each.

    Example:
        >>> log_probs = torch.zeros(1, 3)
        >>> torchtune.rlhf.get_rewards_ppo(torch.tensor([2.0]), log_probs, log_probs, kl_coeff=0.1)[0]
        tensor([[-0., -0., 2.]])
    """
    log_ratios = logprobs - ref_logprobs
    kl_rewards = -kl_coeff * log_ratios
    if valid_score_idxs is None:
        valid_score_idxs = torch.full_like(scores, logprobs.shape[1] - 1, dtype=torch.int64)
    score_rewards = scores[:, None].to(kl_rewards.dtype)  # [b, 1]
    total = kl_rewards.scatter_add(1, valid_score_idxs[:, None], score_rewards)
    return total, log_ratios, kl_rewards


def masked_sum(x: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Compute the sum of ``x`` where ``mask`` is True.

    Example:
        >>> torchtune.rlhf.masked_sum(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]))
        tensor(4.)
    """
    return (x * mask).sum(dim=dim)


def masked_mean(x: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Compute the mean of ``x`` where ``mask`` is True; return 0 if ``mask`` is False everywhere.

    Example:
        >>> torchtune.rlhf.masked_mean(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]))
        tensor(2.)
    """
    return masked_sum(x, mask, dim) / (mask.sum(dim=dim) + 1e-8)


def masked_var(centered_values: torch.Tensor, mask: torch.Tensor, unbiased: bool = True) -> torch.Tensor:
    """Compute the variance of masked values with mean 0; ``unbiased`` divides by the number of values minus 1.

    Example:
        >>> torchtune.rlhf.masked_var(torch.tensor([1.0, -1.0, 9.0]), torch.tensor([True, True, False]), unbiased=False)
        tensor(1.)
    """
    variance = masked_mean(centered_values.square(), mask)
    if not unbiased:
        return variance
    count = mask.sum()
    return variance * count / (count - 1).clamp(min=1)


def whiten(x: torch.Tensor, mask: torch.Tensor | None = None, shift_mean: bool = True) -> torch.Tensor:
    """Scale ``x`` to variance 1 and, with ``shift_mean=False``, to mean 0.

    Args:
        x: tensor of any shape.
        mask: bool, same shape as ``x``; values are ignored at False.
        shift_mean: whether to keep the original mean.

    Example:
        >>> torchtune.rlhf.whiten(torch.tensor([1.0, 2.0, 3.0]), shift_mean=False).std().round().item()
        1.0
    """
    if mask is None:
        mean = x.mean()
        variance = x.var()
    else:
        mean = masked_mean(x, mask)
        variance = masked_var(x - mean, mask)
    whitened = (x - mean) * torch.rsqrt(variance + 1e-8)
    if shift_mean:
        return whitened + mean
    return whitened


def estimate_advantages(
    values: torch.Tensor,
    rewards: torch.Tensor,
    gamma: float,
    lmbda: float,
    masks: torch.Tensor | None = None,
    shift_mean: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute generalized advantage estimates (Schulman et al. 2015, arXiv:1506.02438), whitened, and returns.

    Args:
        values: values of the value model ``[b, r]``.
        rewards: token rewards ``[b, r]``.
        gamma: discount factor.
        lmbda: GAE λ, from one-step returns (0) to full returns (1).
        masks: bool ``[b, r]``, True at tokens that count; advantages are 0 at other tokens.
        shift_mean: see :func:`whiten`; False centers the advantages, as a policy gradient requires.

    Returns:
        Advantages and returns, ``[b, r]`` each.

    Example:
        >>> values, rewards = torch.zeros(1, 3), torch.tensor([[0.0, 0.0, 1.0]])
        >>> torchtune.rlhf.estimate_advantages(values, rewards, gamma=1.0, lmbda=1.0)[1]  # returns
        tensor([[1., 1., 1.]])
    """
    value_after_end = torch.zeros_like(values[:, :1])
    next_values = torch.cat([values[:, 1:], value_after_end], dim=1)  # [b, r]
    deltas = rewards + gamma * next_values - values
    # The advantage of a token is its delta plus the discounted advantage of the next token: from the last to the first.
    advantage = torch.zeros_like(values[:, 0])  # [b]
    reversed_advantages = []
    for delta in reversed(deltas.unbind(dim=1)):
        advantage = delta + gamma * lmbda * advantage
        reversed_advantages.append(advantage)
    advantages = torch.stack(reversed_advantages[::-1], dim=1)  # [b, r]
    returns = advantages + values
    advantages = whiten(advantages, masks, shift_mean)
    if masks is not None:
        advantages = advantages.masked_fill(~masks, 0.0)
    return advantages, returns
