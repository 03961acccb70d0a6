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
        size = len(self.rollouts) // max(len(self.prompts), 1)
        real = [i for i in range(len(self.rollouts)) if not self.prompts[i // size].is_blank]
        values = self.rewards.flatten().tolist()
        found = {"rewards/total": [values[i] for i in real]}
        found |= {f"rewards/{name}": [part[i] for i in real] for name, part in self.parts.items()}
        sums = {name: (sum(v for v in part if not math.isnan(v)), _count_finite(part)) for name, part in found.items()}
        answers = [self.rollouts[i] for i in real]
        episodes = [one for one in answers if isinstance(one, Episode)]
        if size > 1:
            groups = [i for i, prompt in enumerate(self.prompts) if not prompt.is_blank]
            flat = ~has_variance(self.rewards)[groups]
            sums["groups/without_variance"] = (float(flat.sum()), len(groups))
        if episodes:
            counts = {f"ends/{end}": sum(one.end == end for one in episodes) for end in ENDS}
            counts |= {
                f"tools/{name}": sum(getattr(one, name) for one in episodes) for name in ("turns", "calls", "errors")
            }
            sums |= {name: (float(count), len(episodes)) for name, count in counts.items()}
        return sums | {
            "answers/tokens": (float(sum(_num_sampled(one) for one in answers)), len(answers)),
            "answers/unfinished": (float(sum(not one.finished for one in answers)), len(answers)),
            "answers/dropped": (float(len(real) - _count_finite(found["rewards/total"])), len(answers)),
        }

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
        counts = ~self.rewards.isnan()
        if loss.needs_rewards:
            counts = counts & has_variance(self.rewards)[:, None]
        found = counts.flatten().nonzero().flatten().tolist()
        kept = [i for i in found if self.rollouts[i].finished or not drop_unfinished]
        parts = [(part, advantages.flatten()[i].item()) for i in kept for part in self.rollouts[i].parts]
        batches, terms, labels = rollout_batches(
            [part for part, _ in parts],
            [advantage for _, advantage in parts],
            tokens_per_batch=tokens_per_batch,
            dims=dims,
            blank=self.prompts[0].tokens,
            count_documents=loss.normalize != "tokens",
            share_prefix=share_prefix,
        )
        if loss.ce_coeff:  # weights that turn the mean over all terms into a mean over the tokens of good answers
            good = [
                (batch.per_token["advantages"] > 0) & (batch.labels != CROSS_ENTROPY_IGNORE_IDX) for batch in batches
            ]
            (count,) = dims.sum(sum(int(one.sum()) for one in good))
            for batch, one in zip(batches, good, strict=True):
                batch["ce"] = one * (terms / max(count, 1))
        return batches, terms, labels


def _num_sampled(rollout: Rollout) -> int:
    return sum(part.num_sampled for part in rollout.parts)


def _count_finite(values: Sequence[float]) -> int:
    return sum(not math.isnan(value) for value in values)


def score_rollouts(
    prompts: Sequence[Prompt], rollouts: Sequence[Rollout], rewards: RewardSum, tokenizer: Any
) -> ScoredRollouts:
    """Score answers by reward functions, and add the rewards of environments.

    Empty answers, answers to blank prompts and invalid episodes get no reward.
    """
    size = len(rollouts) // max(len(prompts), 1)
    texts = texts_of(rollouts, tokenizer)
    answered = [i for i, rollout in enumerate(rollouts) if rollout.answer and not prompts[i // size].is_blank]
    real = [i for i in answered if getattr(rollouts[i], "is_valid", True)]
    of = [prompts[i // size] for i in real]
    scores = rewards([one.row for one in of], [texts[i] for i in real], [one.number for one in of])
    total = torch.full((len(rollouts),), math.nan, dtype=torch.float64)
    total[real] = torch.tensor(scores.total, dtype=torch.float64)
    parts = {name: [math.nan] * len(rollouts) for name in scores.parts}
    for name, values in scores.parts.items():
        for i, value in zip(real, values, strict=True):
            parts[name][i] = value
    for i in real:
        if isinstance(rollouts[i], Episode) and rollouts[i].reward is not None:
            parts.setdefault(rollouts[i].environment, [math.nan] * len(rollouts))[i] = rollouts[i].reward
            total[i] += rollouts[i].reward
    return ScoredRollouts(list(prompts), list(rollouts), texts, total.view(len(prompts), size), parts)
