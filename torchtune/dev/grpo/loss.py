"""Former names of losses, as components of a config; see :class:`torchtune.rlhf.loss.GRPOLoss`."""

from torchtune.rlhf import loss


class GRPOLoss(loss.GRPOLoss):
    """The first GRPO: a clip of ``epsilon`` both ways, a mean over each answer, then over the answers."""

    def __init__(self, epsilon: float = 0.1, kl_coeff: float = 0.1) -> None:
        super().__init__(epsilon, epsilon, kl_coeff=kl_coeff, normalize="sequences")


class GRPOCompletionLoss(loss.GRPOLoss):
    """The same with one mean over the tokens of all answers."""

    def __init__(self, epsilon: float = 0.1, kl_coeff: float = 0.1) -> None:
        super().__init__(epsilon, epsilon, kl_coeff=kl_coeff)


class GRPOSimpleLoss(GRPOLoss):
    """The same as :class:`GRPOLoss`, whose ratio is 1, and nothing clipped, with ``num_iterations: 1``."""
