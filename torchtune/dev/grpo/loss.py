"""Former names of losses, for configs; see :class:`torchtune.rlhf.loss.GRPOLoss`."""

from torchtune._lazy import former_names
from torchtune.rlhf import loss


class GRPOLoss(loss.GRPOLoss):
    """Original GRPO loss: clips by ``epsilon`` on both sides, averages over each answer, then over answers."""

    def __init__(self, epsilon: float = 0.1, kl_coeff: float = 0.1) -> None:
        super().__init__(epsilon, epsilon, kl_coeff=kl_coeff, normalize="sequences")


class GRPOCompletionLoss(loss.GRPOLoss):
    """GRPO loss averaged over the tokens of all answers."""

    def __init__(self, epsilon: float = 0.1, kl_coeff: float = 0.1) -> None:
        super().__init__(epsilon, epsilon, kl_coeff=kl_coeff)


class GRPOSimpleLoss(GRPOLoss):
    """Alias of :class:`GRPOLoss`; with ``num_iterations: 1`` its ratio is 1 and nothing is clipped."""


__getattr__ = former_names(__name__)
