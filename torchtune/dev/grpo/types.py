"""Former records of a step."""

from typing import Any, NamedTuple

from torch import Tensor


class GRPOTrajectory(NamedTuple):
    """Padded answers of a step; :class:`torchtune.rlhf.Rollout` is the padding-free successor."""

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
    """Metrics of a step."""

    loss: Tensor
    policy_loss: Tensor
    kl_loss: Tensor
    ratios: Tensor
    clipfrac: Tensor
    approx_policy_kls: Tensor
    metadata: dict[str, Any] | None = None
