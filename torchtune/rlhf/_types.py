"""Records of post-training."""

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass
class ChosenRejectedOutputs:
    """Scores of a model for the two answers of ``p`` pairs.

    Attributes:
        chosen_logps: log-probs of the chosen answers ``[p]``: sums over tokens if the lengths are set, otherwise the
            quantity that the loss compares (for some losses a mean).
        rejected_logps: log-probs of the rejected answers ``[p]``.
        chosen_logits: logits of the chosen answers, for metrics; losses do not use them.
        rejected_logits: logits of the rejected answers.
        chosen_lengths: number of labeled tokens in the chosen answers ``[p]``.
        rejected_lengths: number of labeled tokens in the rejected answers ``[p]``.

    Example:
        >>> lengths = torch.tensor([2])
        >>> pairs = torchtune.rlhf.ChosenRejectedOutputs(
        ...     torch.tensor([-4.0]), torch.tensor([-6.0]), chosen_lengths=lengths, rejected_lengths=lengths
        ... )
        >>> pairs.chosen_mean
        tensor([-2.])
    """

    chosen_logps: torch.Tensor
    rejected_logps: torch.Tensor
    chosen_logits: torch.Tensor | None = None
    rejected_logits: torch.Tensor | None = None
    chosen_lengths: torch.Tensor | None = None
    rejected_lengths: torch.Tensor | None = None

    @property
    def chosen_mean(self) -> torch.Tensor:
        """Per-token mean log-probs of the chosen answers ``[p]``; ``chosen_logps`` if there are no lengths."""
        return _mean(self.chosen_logps, self.chosen_lengths)

    @property
    def rejected_mean(self) -> torch.Tensor:
        """Per-token mean log-probs of the rejected answers ``[p]``; ``rejected_logps`` if there are no lengths."""
        return _mean(self.rejected_logps, self.rejected_lengths)


def _mean(sums: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    return sums if lengths is None else sums / lengths.clamp(min=1)


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
