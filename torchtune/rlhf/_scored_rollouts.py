"""Answers with their rewards: metrics and training batches."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, Batch
from torchtune.rlhf._advantages import has_variance
from torchtune.rlhf._prompts import Prompt
from torchtune.rlhf._rollouts import ENDS, Episode, Rollout, rollout_batches, texts_of
from torchtune.rlhf.loss.grpo import GRPOLoss
from torchtune.rlhf.reward_functions import RewardSum
from torchtune.training import ParallelDims


@dataclass(frozen=True)
class ScoredRollouts:
    """Groups of answers with their rewards.

    Attributes:
        prompts: one prompt per group.
        rollouts: ``g`` answers per prompt, sorted by group.
        texts: texts of the answers.
        rewards: ``[n, g]``, float64; NaN for dropped answers.
        parts: reward name -> reward of every answer.

    Example:
        >>> rollout = torchtune.rlhf.Rollout(torch.tensor([5, 6, 7]), prompt_len=2, log_probs=None, finished=True)
        >>> prompt = torchtune.rlhf.Prompt(tokens=[5, 6], row={}, number=0)
        >>> rewards, parts = torch.tensor([[1.0]]), {"exact": [1.0]}
        >>> scored = torchtune.rlhf.ScoredRollouts([prompt], [rollout], ["the"], rewards, parts)
        >>> scored.parts["exact"]
        [1.0]
    """

    prompts: list[Prompt]
    rollouts: list[Rollout]
    texts: list[str]
    rewards: Tensor
    parts: dict[str, list[float]]

    def figures(self) -> dict[str, tuple[float, int]]:
        """Return metrics: name -> (sum, count)."""
        num_samples = self._num_samples
        answered = [i for i in range(len(self.rollouts)) if not self.prompts[i // num_samples].is_blank]
        answers = [self.rollouts[i] for i in answered]
        totals = self.rewards.flatten().tolist()  # [n * g], as the rollouts are sorted
        metrics = {"rewards/total": _sum_and_count([totals[i] for i in answered])}
        for name, values in self.parts.items():
            metrics[f"rewards/{name}"] = _sum_and_count([values[i] for i in answered])
        num_scored = metrics["rewards/total"][1]

        if num_samples > 1:
            groups = [i for i, prompt in enumerate(self.prompts) if not prompt.is_blank]
            without_variance = ~has_variance(self.rewards)[groups]
            metrics["groups/without_variance"] = (float(without_variance.sum()), len(groups))

        episodes = [answer for answer in answers if isinstance(answer, Episode)]
        if episodes:
            for end in ENDS:
                num_ended = sum(episode.end == end for episode in episodes)
                metrics[f"ends/{end}"] = (float(num_ended), len(episodes))
            for name in ("turns", "calls", "errors"):
                count = sum(getattr(episode, name) for episode in episodes)
                metrics[f"tools/{name}"] = (float(count), len(episodes))

        num_tokens = sum(num_sampled_tokens(answer) for answer in answers)
        num_unfinished = sum(not answer.finished for answer in answers)
        metrics["answers/tokens"] = (float(num_tokens), len(answers))
        metrics["answers/unfinished"] = (float(num_unfinished), len(answers))
        metrics["answers/dropped"] = (float(len(answers) - num_scored), len(answers))
        return metrics

    @property
    def _num_samples(self) -> int:
        """Number of answers per prompt."""
        return len(self.rollouts) // max(len(self.prompts), 1)

    def batches(
        self,
        advantages: Tensor,
        loss: GRPOLoss,
        dims: ParallelDims,
        tokens_per_batch: int,
        drop_unfinished: bool = False,
        share_prefix: bool = False,
    ) -> tuple[list[Batch], int, int]:
        """Build micro-batches of the answers with an advantage; leave out groups with equal rewards.

        Args:
            advantages: ``[n, g]``.
            loss: determines whether rewards are used, and the normalization.
            dims: parallel dims; all ranks must call this method.
            tokens_per_batch: maximum tokens per micro-batch; a longer answer is a micro-batch by itself.
            drop_unfinished: leave out unfinished answers.
            share_prefix: see :func:`collate_rollouts`.

        Returns:
            The micro-batches, the same number on every rank and none without a learning signal; the number of terms and
            the number of labels, summed over all ranks.
        """
        has_reward = ~self.rewards.isnan()  # [n, g]
        trained = has_reward
        if loss.needs_rewards:  # equal rewards have the advantage 0, so that their group has no gradient
            trained = has_reward & has_variance(self.rewards)[:, None]
        flat_advantages = advantages.flatten()
        samples = []
        sample_advantages = []
        for index in trained.flatten().nonzero().flatten().tolist():
            rollout = self.rollouts[index]
            if drop_unfinished and not rollout.finished:
                continue
            # An episode has several samples if the template omits the reasoning of earlier turns.
            for sample in rollout.parts:
                samples.append(sample)
                sample_advantages.append(flat_advantages[index].item())
        batches, terms, labels = rollout_batches(
            samples,
            sample_advantages,
            tokens_per_batch=tokens_per_batch,
            dims=dims,
            blank=self.prompts[0].tokens,
            count_documents=loss.normalize != "tokens",
            share_prefix=share_prefix,
        )
        if loss.ce_coeff:
            _add_cross_entropy_weights(batches, terms, dims)
        return batches, terms, labels


def _add_cross_entropy_weights(batches: list[Batch], terms: int, dims: ParallelDims) -> None:
    """Add ``ce`` ``[1, s]`` to the batches: weights that turn a mean over terms into one over tokens of good answers.

    Good answers have a positive advantage. The loss divides a sum by the number of terms of all ranks.
    """
    masks = []
    for batch in batches:
        is_good = batch.per_token["advantages"] > 0
        is_label = batch.labels != CROSS_ENTROPY_IGNORE_IDX
        masks.append(is_good & is_label)
    (num_tokens,) = dims.sum(sum(int(mask.sum()) for mask in masks))
    weight = terms / max(num_tokens, 1)
    for batch, mask in zip(batches, masks, strict=True):
        batch["ce"] = mask * weight


def num_sampled_tokens(rollout: Rollout) -> int:
    """Return the number of sampled tokens, of an episode over all of its samples."""
    return sum(sample.num_sampled for sample in rollout.parts)


def _sum_and_count(values: Sequence[float]) -> tuple[float, int]:
    """Return the sum and the number of the values that are not NaN."""
    scored = [value for value in values if not math.isnan(value)]
    return sum(scored), len(scored)


def score_rollouts(
    prompts: Sequence[Prompt], rollouts: Sequence[Rollout], rewards: RewardSum, tokenizer: Any
) -> ScoredRollouts:
    """Score answers by reward functions, and add the rewards of environments.

    Empty answers, answers to blank prompts and invalid episodes get no reward.
    """
    num_samples = len(rollouts) // max(len(prompts), 1)
    texts = texts_of(rollouts, tokenizer)
    scored = []  # indices of the answers that get a reward
    for i, rollout in enumerate(rollouts):
        is_invalid = isinstance(rollout, Episode) and not rollout.is_valid
        if rollout.answer and not is_invalid and not prompts[i // num_samples].is_blank:
            scored.append(i)

    answered = [prompts[i // num_samples] for i in scored]
    scores = rewards(
        [prompt.row for prompt in answered],
        [texts[i] for i in scored],
        [prompt.number for prompt in answered],
    )
    # NaN stands for no reward.
    totals = torch.full((len(rollouts),), math.nan, dtype=torch.float64)  # [n * g]
    totals[scored] = torch.tensor(scores.total, dtype=torch.float64)
    parts = {}
    for name, values in scores.parts.items():
        parts[name] = [math.nan] * len(rollouts)
        for i, value in zip(scored, values, strict=True):
            parts[name][i] = value

    for i in scored:
        episode = rollouts[i]
        if not isinstance(episode, Episode) or episode.reward is None:
            continue
        if episode.environment not in parts:
            parts[episode.environment] = [math.nan] * len(rollouts)
        parts[episode.environment][i] = episode.reward
        totals[i] += episode.reward
    return ScoredRollouts(list(prompts), list(rollouts), texts, totals.view(len(prompts), num_samples), parts)
