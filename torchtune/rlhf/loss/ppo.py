"""PPO loss."""

import torch
from torch import Tensor, nn

from torchtune.data import Batch, DataError
from torchtune.modules.loss import LossError
from torchtune.rlhf.loss._base import Metrics, TokenLoss
from torchtune.rlhf.rewards import masked_mean

# Per-token entries of a batch, from `torchtune.rlhf.ppo_updates`.
_ENTRIES = ("sampled", "advantages", "returns", "values")


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
        if epsilon <= 0 or value_clip_range <= 0:
            raise ValueError(f"epsilon is {epsilon} and value_clip_range {value_clip_range}: both must be above 0.")
        self.epsilon = epsilon
        self.value_clip_range = value_clip_range
        self.value_coeff = value_coeff

    def check_model(self, model: nn.Module) -> None:
        """Check that there is a policy and a trainable value model. Raises :class:`LossError`."""
        if not isinstance(model, nn.ModuleDict) or not {"policy", "value"} <= set(model):
            raise LossError(
                "loss: PPOLoss trains a policy and a value model: run the recipe ppo, or take a loss "
                "of torchtune.rlhf.loss that needs one model."
            )
        super().check_model(model["policy"])
        value_head = model["value"].output.weight
        num_outputs = value_head.shape[0]
        if num_outputs != 1:
            raise LossError(
                f"reward_and_value_model: a value is one number, but the model ends in {num_outputs:,} outputs: set "
                "_component_ to torchtune.modules.classifier_model with num_classes=1 and base_model_path the builder."
            )
        obstacle = None
        if not value_head.requires_grad:
            obstacle = "its output layer is frozen"
        elif self.value_coeff <= 0:
            obstacle = f"loss.value_coeff is {self.value_coeff}"
        if obstacle is not None:
            raise LossError(
                f"value_checkpointer: the value model would not be trained, since {obstacle}: advantages would be "
                "noise, so train it, or run the recipe grpo, which needs no values."
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
        missing = set(_ENTRIES) - batch.per_token.keys()
        if missing:
            raise DataError(f"The batch has no '{min(missing)}' per token: make it with torchtune.rlhf.ppo_updates.")
        label_positions = batch.find_labels()  # [t], indices into the flattened batch
        num_tokens = len(label_positions)
        if num_tokens == 0:  # filler of a rank with fewer answers: the loss is 0, of all positions
            label_positions = torch.arange(batch.labels.numel(), device=batch.labels.device)

        def at_labels(values: Tensor) -> Tensor:
            """Select the labeled positions: ``[b, s]`` to ``[t]``."""
            return values.flatten().index_select(0, label_positions)

        log_probs, values = scores
        log_probs = at_labels(log_probs)
        old_log_probs = at_labels(batch["sampled"])
        loss, policy_loss, value_loss, ratio, clip_fraction = self(
            old_log_probs,
            log_probs,
            at_labels(batch["advantages"]),
            at_labels(batch["values"]),
            at_labels(values),
            at_labels(batch["returns"]),
        )
        log_ratios = (log_probs - old_log_probs).detach()
        means = {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "ratios": ratio,
            "clipfrac": clip_fraction,
            "approx_policy_kl": 0.5 * log_ratios.square().mean(),  # the k2 estimator
        }
        if "is_first" in batch.per_document:  # the policy has not changed since sampling
            means["policy/sampler_difference"] = log_ratios.abs().mean()
        total = loss * num_tokens  # a sum: the recipe divides by the labels of all ranks
        if self.balance is not None:
            total = self.balance.add_to(total, num_tokens)
        metrics = {}
        for name, mean in means.items():
            metrics[name] = (mean.float() * num_tokens, num_tokens)
        return total, metrics

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
        policy_losses, is_clipped = self.clip(ratios, advantages, self.epsilon, self.epsilon)
        policy_loss = _mean(policy_losses, padding_masks)

        value_change = (phi_values - phi_old_values).clamp(-self.value_clip_range, self.value_clip_range)
        clipped_values = phi_old_values + value_change
        errors = (phi_values - returns).square()
        clipped_errors = (clipped_values - returns).square()
        squared_errors = torch.maximum(errors, clipped_errors)
        value_loss = 0.5 * _mean(squared_errors, value_padding_masks)

        loss = policy_loss + self.value_coeff * value_loss
        ratio = _mean(ratios, padding_masks)
        clip_fraction = _mean(is_clipped.to(ratios.dtype), padding_masks)
        return loss, policy_loss.detach(), value_loss.detach(), ratio.detach(), clip_fraction.detach()


def _mean(values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the mean of the values where the mask is True, of all without a mask."""
    if mask is None:
        return values.mean()
    return masked_mean(values, mask)
