"""Loss of proximal policy optimisation."""

import torch
from torch import nn

from torchtune.rlhf.rewards import masked_mean


def _mean(values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return values.mean() if mask is None else masked_mean(values, mask)


class PPOLoss(nn.Module):
    """Clipped policy loss and clipped value loss (Schulman et al. 2017, arXiv:1707.06347).

    Args:
        epsilon: the ratio of new and old probability is clipped to ``1 ± epsilon``.
        value_clip_range: values are clipped to so much around the old ones.
        value_coeff: weight of the value loss.
    """

    def __init__(self, epsilon: float = 0.1, value_clip_range: float = 0.2, value_coeff: float = 0.1) -> None:
        super().__init__()
        self.epsilon, self.value_clip_range, self.value_coeff = epsilon, value_clip_range, value_coeff

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
        """Compute the loss of some responses.

        Args:
            pi_old_logprobs: of the policy that sampled ``[b, r]``.
            pi_logprobs: of the policy that is trained ``[b, r]``.
            advantages: ``[b, r]``.
            phi_old_values: of the value model at sampling ``[b, r]``.
            phi_values: of the value model that is trained ``[b, r]``.
            returns: ``[b, r]``.
            padding_masks: bool ``[b, r]``, True where a token counts for the policy.
            value_padding_masks: bool ``[b, r]``, True where a token counts for the value model.

        Returns:
            loss, policy loss, value loss, mean ratio and share of clipped tokens, scalars; all but the first are
            detached.
        """
        ratios = torch.exp(pi_logprobs - pi_old_logprobs)
        unclipped = -advantages * ratios
        clipped = -advantages * ratios.clamp(1.0 - self.epsilon, 1.0 + self.epsilon)
        policy_loss = _mean(torch.maximum(clipped, unclipped), padding_masks)
        near = phi_old_values + (phi_values - phi_old_values).clamp(-self.value_clip_range, self.value_clip_range)
        errors = torch.maximum((phi_values - returns).square(), (near - returns).square())
        value_loss = 0.5 * _mean(errors, value_padding_masks)
        clip_share = _mean((clipped > unclipped).to(ratios.dtype), padding_masks)
        loss = policy_loss + self.value_coeff * value_loss
        ratio = _mean(ratios, padding_masks)
        return loss, policy_loss.detach(), value_loss.detach(), ratio.detach(), clip_share.detach()
