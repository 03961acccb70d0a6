"""Values and advantages of PPO, per token of an answer."""

from contextlib import ExitStack
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
    index = batch.find_labels()
    values = projection(hidden.flatten(0, 1).index_select(0, index)).squeeze(-1)
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return values.new_zeros(batch.labels.numel()).index_copy(0, index, values).view(batch.labels.shape)


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
    found: dict[str, list[Tensor]] = {"reference": [], "values": []}
    with ExitStack() as stack:
        for model in (reference, value):
            stack.enter_context(evaluating(model))
        for part in equal_chunks(rollouts, batch_size, dims):
            batch = collate_rollouts(part, [0.0] * len(part)).to(device)
            lengths = [len(rollout.tokens) - rollout.prompt_len for rollout in part]
            labelled = batch.labels != CROSS_ENTROPY_IGNORE_IDX
            hidden = reference(**batch.model_inputs(), output="hidden")
            log_probs = token_log_probs(hidden, batch.labels, reference.output, temperature)
            found["reference"] += log_probs[labelled].double().cpu().split(lengths)
            hidden = value(**batch.model_inputs(), output="hidden")
            values = token_values(hidden, batch, value.output)
            found["values"] += values[labelled].double().cpu().split(lengths)
    found["log_probs"] = [rollout.log_probs.double() for rollout in rollouts]
    rows = {name: pad_sequence(parts[: len(rollouts)], batch_first=True) for name, parts in found.items()}
    answers = zip(scored.prompts, rollouts, strict=True)
    lengths = torch.tensor([0 if prompt.is_blank else len(one.answer) for prompt, one in answers])
    return AnswerTokens(torch.arange(rows["values"].shape[1]) < lengths[:, None], **rows)


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
    every, place = _gather_rows({**tokens._asdict(), "scores": scored.rewards[:, 0]}, dims)
    mask, values, scores = every["mask"], every["values"], every["scores"]
    lengths = mask.sum(1)
    last = (lengths - 1).clamp(min=0)
    rewards, ratios, of_kl = get_rewards_ppo(scores, every["log_probs"], every["reference"], kl_coeff, last)
    totals = rewards.sum(1)
    if whiten_rewards:
        rewards = whiten(rewards, mask)
    rewards = rewards.masked_fill(~mask, 0.0)
    advantages, returns = estimate_advantages(values, rewards, gamma, lmbda, mask, shift_mean=False)
    returns = returns.masked_fill(~mask, 0.0)
    own = slice(place, place + len(scored.rollouts))
    real = [i for i in range(own.start, own.stop) if lengths[i]]
    num_stops = sum(scored.rollouts[i - place].finished for i in real)
    sums = {"scores": scores, "rlhf_reward": totals, "kl": ratios, "kl_reward": of_kl, "response_lengths": lengths}
    figures = {name: (float(rows[real].sum()), len(real)) for name, rows in sums.items()}
    figures["num_stop_tokens"] = (float(num_stops), 1 / dims.data_size)  # a sum over the step, not a mean
    spread = returns[mask].var(correction=0)
    if spread > 0:
        unexplained = (returns - values)[mask].var(correction=0) / spread
        figures["value/explained_variance"] = (1.0 - unexplained.item(), 1)
    longest = tokens.mask.shape[1]
    return TokenAdvantages(advantages[own, :longest], returns[own, :longest], figures)


def _gather_rows(mine: dict[str, Tensor], dims: ParallelDims) -> tuple[dict[str, Tensor], int]:
    """All-gather rows over the data ranks, zero-padded to one length; also return this rank's first row index."""
    found = dict(sorted(dims.gather((dims.data_rank, mine))))  # tensor-parallel ranks have the same answers
    longest = max(rows["mask"].shape[1] for rows in found.values())

    def padded(rows: Tensor) -> Tensor:
        return rows if rows.dim() == 1 else F.pad(rows, (0, longest - rows.shape[1]))

    every = {name: torch.cat([padded(rows[name]) for rows in found.values()]) for name in mine}
    return every, sum(len(found[rank]["mask"]) for rank in range(dims.data_rank))
