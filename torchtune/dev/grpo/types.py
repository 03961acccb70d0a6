"""Former records of a step."""

from typing import Any, NamedTuple

from torch import Tensor


class GRPOTrajectory(NamedTuple):
    """Answers of a step, padded; :class:`torchtune.rlhf.Rollout` has one without padding."""

    query_responses: Tensor = None
    logprobs: Tensor = None
    ref_logprobs: Tensor = None
    advantages: Tensor = None
    masks: Tensor = None
    position_ids: Tensor = None
    response_padding_masks: Tensor = None
    seq_lens: Tensor = None
    answers: str = None


class GRPOStats(NamedTuple):
    """Figures of a step."""

    loss: Tensor
    policy_loss: Tensor
    kl_loss: Tensor
    ratios: Tensor
    clipfrac: Tensor
    approx_policy_kls: Tensor
    metadata: dict[str, Any] | None = None
