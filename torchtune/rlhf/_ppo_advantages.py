"""Values and advantages of PPO, per token of an answer."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, Batch
from torchtune.generation import evaluating
from torchtune.modules.loss import Projection, token_log_probs
from torchtune.rlhf._rollouts import collate_rollouts, equal_chunks
from torchtune.rlhf._scored_rollouts import ScoredRollouts
from torchtune.rlhf.rewards import estimate_advantages, get_rewards_ppo, whiten
from torchtune.training import ParallelDims


def token_values(hidden: Tensor, batch: Batch, projection: Projection) -> Tensor:
    """Compute the values of the states before the labeled tokens.

    Args:
        hidden: hidden states of the value model ``[b, s, d]``.
        batch: the batch; only labeled positions are projected.
        projection: ``[..., d]`` -> ``[..., 1]``.

    Returns:
        ``[b, s]``, float32 or wider; 0 at positions without a label.
    """
    positions = batch.find_labels()  # [n], indices into the flattened batch
    labeled = hidden.flatten(0, 1).index_select(0, positions)  # [n, d]
    values = projection(labeled).squeeze(-1)  # [n]
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    all_values = values.new_zeros(batch.labels.numel()).index_copy(0, positions, values)
    return all_values.view(batch.labels.shape)


class AnswerTokens(NamedTuple):
    """Per-token quantities of ``n`` answers, float64 ``[n, r]``, on the host, right-padded with 0.

    Attributes:
        mask: bool, True at tokens, False at padding.
        log_probs: log-probs of the policy at sampling.
        reference: log-probs of the reference.
        values: values of the states before the tokens, from the value model.

    Example:
        >>> zeros = torch.zeros(1, 3, dtype=torch.float64)
        >>> torchtune.rlhf.AnswerTokens(torch.ones(1, 3, dtype=torch.bool), zeros, zeros, zeros).mask.sum()
        tensor(3)
    """

    mask: Tensor
    log_probs: Tensor
    reference: Tensor
    values: Tensor


@torch.no_grad()
def evaluate_rollouts(
    scored: ScoredRollouts,
    reference: nn.Module,
    value: nn.Module,
    temperature: float,
    batch_size: int | None = None,
    *,
    dims: ParallelDims,
) -> AnswerTokens:
    """Run the reference and the value model on answers, in evaluation mode.

    Args:
        scored: ``n`` answers with log-probs; answers to blank prompts are masked.
        reference: the frozen reference.
        value: the trained value model.
        temperature: sampling temperature.
        batch_size: number of answers per forward pass; None runs all answers in one pass.
        dims: parallel dims of the sharded models; all ranks must call this function.
    """
    rollouts = scored.rollouts
    device = value.tok_embeddings.weight.device
    reference_log_probs = []  # one tensor per answer
    values = []
    with evaluating(reference), evaluating(value):
        for chunk in equal_chunks(rollouts, batch_size, dims):
            batch = collate_rollouts(chunk, advantages=[0.0] * len(chunk)).to(device)  # advantages are not read
            labeled = batch.labels != CROSS_ENTROPY_IGNORE_IDX  # [1, s]
            lengths = [len(rollout.tokens) - rollout.prompt_len for rollout in chunk]
            hidden = reference(**batch.model_inputs(), output="hidden")  # [1, s, d]
            log_probs = token_log_probs(hidden, batch.labels, reference.output, temperature)
            reference_log_probs.extend(log_probs[labeled].double().cpu().split(lengths))
            hidden = value(**batch.model_inputs(), output="hidden")
            chunk_values = token_values(hidden, batch, value.output)
            values.extend(chunk_values[labeled].double().cpu().split(lengths))

    answer_lengths = []
    for prompt, rollout in zip(scored.prompts, rollouts, strict=True):
        answer_lengths.append(0 if prompt.is_blank else len(rollout.answer))
    # Chunks after the last rollout are fillers, for ranks with fewer rollouts than others.
    padded_values = pad_sequence(values[: len(rollouts)], batch_first=True)  # [n, r]
    positions = torch.arange(padded_values.shape[1])
    return AnswerTokens(
        mask=positions < torch.tensor(answer_lengths)[:, None],
        log_probs=pad_sequence([rollout.log_probs.double() for rollout in rollouts], batch_first=True),
        reference=pad_sequence(reference_log_probs[: len(rollouts)], batch_first=True),
        values=padded_values,
    )


class TokenAdvantages(NamedTuple):
    """Per-token advantages and returns of ``n`` answers, float64 ``[n, r]``, and metrics.

    Attributes:
        advantages: whitened over all tokens of all answers.
        returns: targets of the value model.
        figures: name -> (sum, count).

    Example:
        >>> ones = torch.ones(1, 2, dtype=torch.float64)
        >>> torchtune.rlhf.TokenAdvantages(ones, ones, {"return": (2.0, 2.0)}).figures["return"]
        (2.0, 2.0)
    """

    advantages: Tensor
    returns: Tensor
    figures: dict[str, tuple[float, float]]


def ppo_advantages(
    tokens: AnswerTokens,
    scored: ScoredRollouts,
    kl_coeff: float,
    gamma: float,
    lmbda: float,
    whiten_rewards: bool,
    *,
    dims: ParallelDims,
) -> TokenAdvantages:
    """Compute generalized advantage estimates (GAE) per token.

    The reward of a token is −``kl_coeff`` (log π − log π_ref). The last token of an answer also gets the score.

    Args:
        tokens: per-token quantities of the answers.
        scored: the answers with their scores.
        kl_coeff: weight of the log-ratio to the reference.
        gamma: discount factor.
        lmbda: GAE λ, from one-step returns (0) to full returns (1).
        whiten_rewards: whether to divide the rewards by their standard deviation; the mean does not change.
        dims: parallel dims; all ranks must call this function, which computes means and variances over all ranks.
    """
    # Whitening and the metrics are over the answers of all ranks: [n, r] now has the rows of every rank.
    rows, start = _gather_rows({**tokens._asdict(), "scores": scored.rewards[:, 0]}, dims)
    mask = rows["mask"]
    values = rows["values"]
    scores = rows["scores"]
    lengths = mask.sum(1)  # [n]
    last_token = (lengths - 1).clamp(min=0)  # the score's position; an empty answer is masked altogether
    rewards, log_ratios, kl_rewards = get_rewards_ppo(
        scores, rows["log_probs"], rows["reference"], kl_coeff, last_token
    )
    total_rewards = rewards.sum(1)  # before whitening, for the metrics
    if whiten_rewards:
        rewards = whiten(rewards, mask)
    rewards = rewards.masked_fill(~mask, 0.0)
    advantages, returns = estimate_advantages(values, rewards, gamma, lmbda, mask, shift_mean=False)
    returns = returns.masked_fill(~mask, 0.0)

    # Sums and counts over this rank's answers; empty answers and answers to blank prompts do not count.
    stop = start + len(scored.rollouts)
    answered = [row for row in range(start, stop) if lengths[row]]
    num_stops = sum(scored.rollouts[row - start].finished for row in answered)
    quantities = {
        "scores": scores,
        "rlhf_reward": total_rewards,
        "kl": log_ratios,
        "kl_reward": kl_rewards,
        "response_lengths": lengths,
    }
    metrics = {}
    for name, quantity in quantities.items():
        metrics[name] = (float(quantity[answered].sum()), len(answered))
    # The counts of all ranks add up to 1, so this is a sum over the step, not a mean.
    metrics["num_stop_tokens"] = (float(num_stops), 1 / dims.data_size)
    variance = returns[mask].var(correction=0)
    if variance > 0:
        unexplained = (returns - values)[mask].var(correction=0) / variance
        metrics["value/explained_variance"] = (1.0 - unexplained.item(), 1)

    longest = tokens.mask.shape[1]  # of this rank; other ranks may have longer answers
    return TokenAdvantages(advantages[start:stop, :longest], returns[start:stop, :longest], metrics)


def _gather_rows(local_rows: dict[str, Tensor], dims: ParallelDims) -> tuple[dict[str, Tensor], int]:
    """All-gather rows over the data ranks, zero-padded to one length.

    Args:
        local_rows: name -> rows of this rank, ``[n]`` or ``[n, r]``, with ``mask``.
        dims: parallel dims; all ranks must call this function.

    Returns:
        The rows of all ranks, in the order of the data ranks; index of this rank's first row.
    """
    # By data rank: tensor-parallel ranks have the same answers, of which one is kept.
    gathered = dict(dims.gather((dims.data_rank, local_rows)))
    rank_rows = [gathered[rank] for rank in range(dims.data_size)]
    longest = max(rows["mask"].shape[1] for rows in rank_rows)
    all_rows = {}
    for name in local_rows:
        tensors = []
        for rows in rank_rows:
            tensor = rows[name]
            if tensor.dim() == 2:
                tensor = F.pad(tensor, (0, longest - tensor.shape[1]))
            tensors.append(tensor)
        all_rows[name] = torch.cat(tensors)
    start = sum(len(rows["mask"]) for rows in rank_rows[: dims.data_rank])
    return all_rows, start
