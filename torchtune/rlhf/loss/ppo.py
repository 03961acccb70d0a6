"""PPO loss."""

import torch
from torch import Tensor, nn

from torchtune.data import Batch, DataError
from torchtune.modules.loss import LossError
from torchtune.rlhf.loss._base import Metrics, TokenLoss
from torchtune.rlhf.rewards import masked_mean

_ENTRIES = ("sampled", "advantages", "returns", "values")


def _mean(values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return values.mean() if mask is None else masked_mean(values, mask)


class PPOLoss(TokenLoss):
    """Clipped policy loss and clipped value loss (Schulman et al. 2017, arXiv:1707.06347).

    For a token with advantage A, return R, probability ratio ρ, value V, and value V' at sampling, the policy loss is
    −min(ρA, clip(ρ, 1 − epsilon, 1 + epsilon) A), and the value loss is the maximum of ½(V − R)² and
    ½(V' + clip(V − V', ± value_clip_range) − R)².

    Args:
        epsilon: clip of the probability ratio to ``1 ± epsilon``.
        value_clip_range: maximum change of the value V from V'.
        value_coeff: weight of the value loss.

    Example:
        >>> torchtune.rlhf.loss.PPOLoss(epsilon=0.1, value_clip_range=0.2, value_coeff=0.1).value_coeff
        0.1
    """

    needs_reference = False

    def __init__(self, epsilon: float = 0.1, value_clip_range: float = 0.2, value_coeff: float = 0.1) -> None:
        super().__init__()
        if min(epsilon, value_clip_range) <= 0:
            raise ValueError(f"epsilon is {epsilon} and value_clip_range {value_clip_range}: both must be above 0.")
        self.epsilon, self.value_clip_range, self.value_coeff = epsilon, value_clip_range, value_coeff

    def check_model(self, model: nn.Module) -> None:
        """Check that there is a policy and a trainable value model. Raises :class:`LossError`."""
        if not isinstance(model, nn.ModuleDict) or not {"policy", "value"} <= set(model):
            raise LossError(
                "loss: PPOLoss trains a policy and a value model: run the recipe ppo, or take a loss "
                "of torchtune.rlhf.loss that needs one model."
            )
        super().check_model(model["policy"])
        head = model["value"].output.weight
        if head.shape[0] != 1:
            raise LossError(
                f"reward_and_value_model: a value is one number, but the model ends in {head.shape[0]:,} outputs: set "
                "_component_ to torchtune.modules.classifier_model with num_classes=1 and base_model_path the builder."
            )
        if not head.requires_grad or self.value_coeff <= 0:
            why = f"loss.value_coeff is {self.value_coeff}" if head.requires_grad else "its output layer is frozen"
            raise LossError(
                f"value_checkpointer: the value model would not be trained, since {why}: advantages would be noise, so "
                "train it, or run the recipe grpo, which needs no values."
            )

    def sum_and_metrics(
        self, batch: Batch, scores: Tensor, reference: Tensor | None = None, baseline: Tensor | None = None
    ) -> tuple[Tensor, Metrics]:
        """Sum losses and metrics, see :meth:`AnswerLoss.sum_and_metrics`.

        Args:
            batch: batch with the per-token entries ``sampled``, ``advantages``, ``returns`` and ``values``.
            scores: log-probs and values of the trained models, ``[2, b, s]``; see :meth:`score` and
                :func:`torchtune.rlhf.token_values`.
            reference: not used, because the log-ratio to the reference is part of the rewards.
            baseline: not used.
        """
        if missing := set(_ENTRIES) - batch.per_token.keys():
            raise DataError(f"The batch has no '{min(missing)}' per token: make it with torchtune.rlhf.ppo_updates.")
        index = batch.find_labels()
        count = len(index)
        if count == 0:  # filler of a rank with fewer answers: the loss is 0, of all positions
            index = torch.arange(batch.labels.numel(), device=batch.labels.device)
        log_probs, values = (part.flatten().index_select(0, index) for part in scores)
        old, advantages, returns, old_values = (batch[name].flatten().index_select(0, index) for name in _ENTRIES)
        found = self(old, log_probs, advantages, old_values, values, returns)
        total = found[0] * count
        sums = dict(zip(("policy_loss", "value_loss", "ratios", "clipfrac"), found[1:], strict=True))
        difference = (log_probs - old).detach()
        sums["approx_policy_kl"] = 0.5 * difference.square().mean()
        if "is_first" in batch.per_document:
            sums["policy/sampler_difference"] = difference.abs().mean()
        if self.balance is not None:
            total = self.balance.add_to(total, count)
        return total, {name: (value.float() * count, count) for name, value in sums.items()}

    def forward(
        self,
        pi_old_logprobs: torch.Tensor,
        pi_logprobs: torch.Tensor,
        advantages: torch.Tensor,
        phi_old_values: torch.Tensor,
        phi_values: torch.Tensor,
        returns: torch.Tensor,
        padding_masks: torch.Tensor | None = None,
        value_padding_masks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute the loss of padded responses.

        Args:
            pi_old_logprobs: log-probs of the policy at sampling ``[b, r]``.
            pi_logprobs: log-probs of the trained policy ``[b, r]``.
            advantages: ``[b, r]``.
            phi_old_values: values of the value model at sampling ``[b, r]``.
            phi_values: values of the trained value model ``[b, r]``.
            returns: ``[b, r]``.
            padding_masks: bool ``[b, r]``, True at tokens that count for the policy.
            value_padding_masks: bool ``[b, r]``, True at tokens that count for the value model.

        Returns:
            Loss, policy loss, value loss, mean ratio and fraction of clipped tokens, as scalars; all except the loss
            are detached.
        """
        ratios = torch.exp(pi_logprobs - pi_old_logprobs)
        losses, clipped = self.clip(ratios, advantages, self.epsilon, self.epsilon)
        policy_loss = _mean(losses, padding_masks)
        near = phi_old_values + (phi_values - phi_old_values).clamp(-self.value_clip_range, self.value_clip_range)
        errors = torch.maximum((phi_values - returns).square(), (near - returns).square())
        value_loss = 0.5 * _mean(errors, value_padding_masks)
        clip_share = _mean(clipped.to(ratios.dtype), padding_masks)
        loss = policy_loss + self.value_coeff * value_loss
        ratio = _mean(ratios, padding_masks)
        return loss, policy_loss.detach(), value_loss.detach(), ratio.detach(), clip_share.detach()
