"""Policy-gradient losses for sampled answers with advantages."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from torchtune.data import Batch, DataError
from torchtune.rlhf.loss._base import Metrics, TokenLoss


class GRPOLoss(TokenLoss):
    """GRPO loss: the sum of a policy gradient, a cross-entropy, and a divergence to a reference over sampled tokens.

    * ``rl`` is −min(ρA, clip(ρ, 1 − epsilon, 1 + epsilon_high)A), with advantage A and the probability ratio
      ρ = π / π_old of the current policy and the policy at sampling (GRPO, arXiv:2402.03300). The default clip values
      are from DAPO (arXiv:2503.14476).
    * ``ce`` is −log π of good answers, which have an advantage above 0: supervised fine-tuning on good answers, as a
      mean over their tokens.
    * ``ref_kl`` is the KL divergence to the reference.

    The entries ``rl``, ``ce`` and ``ref_kl`` in ``per_token`` of a batch weight each token in the respective part.

    Args:
        epsilon: lower clip: the ratio is at least ``1 - epsilon``.
        epsilon_high: upper clip: the ratio is at most ``1 + epsilon_high``.
        kind: ``ppo``, the formula above; or ``cispo`` (arXiv:2506.13585), −min(ρ, 1 + epsilon_high) A log π with a
            detached weight, so that every token has a gradient.
        ratio: ratio per ``token``, or per ``sequence``, the geometric mean over its tokens (GSPO, arXiv:2507.18071).
        normalize: mean over all ``tokens`` of the step; mean over ``sequences`` of the mean over each sequence's
            tokens; or sum divided by the number of sequences times ``constant`` (Dr. GRPO, arXiv:2503.20783).
        constant: divisor for ``normalize: constant``, usually the maximum number of new tokens.
        kl_coeff: weight of the KL divergence to the reference; 0 needs no reference.
        kl: estimator of the divergence: ``k3`` adds ρ (π_ref / π − log(π_ref / π) − 1), which has the gradient of the
            divergence; ``k1`` subtracts log(π_old / π_ref) of a token from its advantage.
        rl_coeff: weight of the policy gradient; 0 trains only on good answers, with ``ce_coeff``.
        ce_coeff: weight of the cross-entropy.
        importance_cap: cap of the importance weight that corrects differences between sampler and trainer: each token
            is weighted by min(π_old / π_sampler, cap), with π_old from the trainer. None uses the sampler's log-probs
            as π_old, without weights.

    Attributes:
        needs_rewards: whether the loss uses the advantages.

    Raises:
        ValueError: a number is out of range, or ``constant`` does not match ``normalize``.

    Example:
        >>> loss = torchtune.rlhf.loss.GRPOLoss(epsilon=0.2, epsilon_high=0.28, kl_coeff=0.04)
        >>> loss.needs_reference
        True
    """

    needs_rewards = True

    def __init__(
        self,
        epsilon: float = 0.2,
        epsilon_high: float = 0.28,
        *,
        kind: Literal["ppo", "cispo"] = "ppo",
        ratio: Literal["token", "sequence"] = "token",
        normalize: Literal["tokens", "sequences", "constant"] = "tokens",
        constant: float | None = None,
        kl_coeff: float = 0.0,
        kl: Literal["k3", "k1"] = "k3",
        rl_coeff: float = 1.0,
        ce_coeff: float = 0.0,
        importance_cap: float | None = None,
    ) -> None:
        super().__init__()
        choices = {
            "kind": (kind, ("ppo", "cispo")),
            "ratio": (ratio, ("token", "sequence")),
            "normalize": (normalize, ("tokens", "sequences", "constant")),
            "kl": (kl, ("k3", "k1")),
        }
        for name, (value, supported) in choices.items():
            if value not in supported:
                raise ValueError(f"{name} is {value!r}: it must be one of {', '.join(supported)}.")
        if min(epsilon, epsilon_high, kl_coeff, rl_coeff, ce_coeff) < 0:
            raise ValueError("epsilon, epsilon_high and the coefficients must not be below 0.")
        if importance_cap is not None and importance_cap <= 0:
            raise ValueError(f"importance_cap is {importance_cap}: it must be above 0.")
        if normalize == "constant" and (constant is None or constant <= 0):
            raise ValueError(f"constant is {constant}: normalize='constant' needs a constant above 0.")
        if normalize != "constant" and constant is not None:
            raise ValueError(f"constant is {constant}: only normalize='constant' uses it, so leave it out.")
        self.epsilon = epsilon
        self.epsilon_high = epsilon_high
        self.kind = kind
        self.ratio = ratio
        self.normalize = normalize
        self.constant = constant
        self.kl_coeff = kl_coeff
        self.kl = kl
        self.rl_coeff = rl_coeff
        self.ce_coeff = ce_coeff
        self.importance_cap = importance_cap

    @property
    def needs_reference(self) -> bool:
        """Whether the loss uses a reference model."""
        return self.kl_coeff > 0

    def check_batch(self, batch: Batch) -> None:
        """Check that the batch has answers with advantages. Raises :class:`DataError`."""
        if "advantages" not in batch.per_token:
            raise DataError(
                f"loss: {type(self).__name__} reads advantages of sampled answers, and a batch has none: run a recipe "
                "of GRPO, or make it with torchtune.rlhf.collate_rollouts."
            )

    def num_terms(self, num_tokens: int, num_sequences: int) -> int:
        """Return the number of terms, by which the summed loss is divided."""
        if self.normalize == "tokens":
            return num_tokens
        return num_sequences

    def forward(
        self,
        log_probs: Tensor,
        old: Tensor,
        advantages: Tensor,
        sequences: Tensor,
        reference: Tensor | None = None,
        sampled: Tensor | None = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute per-token losses; divide their sum by :meth:`num_terms`.

        Args:
            log_probs: log-probs of the trained model ``[t]``.
            old: log-probs at sampling ``[t]``.
            advantages: advantage of each token's answer ``[t]``.
            sequences: index of each token's answer, int64 ``[t]``.
            reference: log-probs of the reference ``[t]``.
            sampled: log-probs from the sampler ``[t]``, for ``importance_cap``.
            weights: weights of each token ``[t]``, by part (``rl``, ``ce``, ``ref_kl``).

        Returns:
            Losses ``[t]``, and detached metrics by name, ``[t]`` each.
        """
        weights = weights or {}
        if not self.needs_rewards:  # on-policy distillation: the k1 divergence is added below
            advantages = torch.zeros_like(advantages)
        ce_weights = weights.get("ce", advantages > 0)  # before the k1 divergence changes the advantages
        if self.ratio == "sequence" or self.normalize == "sequences":
            # Two searches instead of `bincount`, for which the host waits: it must know the number of answers.
            ordered = sequences.sort().values
            first = torch.searchsorted(ordered, sequences)  # [t], the same for all tokens of an answer, less than t
            lengths = torch.searchsorted(ordered, sequences, right=True) - first  # [t]

        # Probability ratio, with a gradient.
        log_ratio = log_probs - old.detach()
        if self.ratio == "sequence":
            sums = log_ratio.new_zeros(len(first)).index_add(0, first, log_ratio)
            log_ratio = sums.index_select(0, first) / lengths.to(sums.dtype)
        ratio = log_ratio.exp()

        # Policy gradient.
        if reference is not None and self.kl == "k1":
            advantages = advantages - self.kl_coeff * (old - reference).detach()
        if self.kind == "cispo":
            highest_ratio = 1.0 + self.epsilon_high
            losses = -ratio.clamp(max=highest_ratio).detach() * advantages * log_probs
            is_clipped = ratio > highest_ratio
        else:
            losses, is_clipped = self.clip(ratio, advantages, self.epsilon, self.epsilon_high)
        losses = self.rl_coeff * weights.get("rl", 1.0) * losses
        metrics = {"ratio": ratio, "clipped": is_clipped.to(ratio.dtype)}

        # Divergence to the reference.
        if reference is not None:
            reference_log_ratio = reference.detach() - log_probs
            k3 = reference_log_ratio.exp() - reference_log_ratio - 1.0
            metrics["kl"] = k3
            if self.kl == "k3":
                token_ratio = (log_probs - old.detach()).exp()  # per token, also for a ratio per sequence
                losses = losses + self.kl_coeff * weights.get("ref_kl", 1.0) * token_ratio * k3

        if self.importance_cap is not None and sampled is not None:
            importance = (old - sampled).exp().clamp(max=self.importance_cap).detach()
            metrics["importance"] = importance
            losses = importance * losses
        if self.normalize == "sequences":
            losses = losses / lengths.to(losses.dtype)
        elif self.normalize == "constant":
            losses = losses / self.constant
        # The cross-entropy comes last: its weights are already normalized, see `ScoredRollouts.batches`.
        if self.ce_coeff:
            losses = losses - self.ce_coeff * ce_weights * log_probs
        return losses, {name: values.detach() for name, values in metrics.items()}

    def sum_and_metrics(
        self, batch: Batch, scores: Tensor, reference: Tensor | None = None, baseline: Tensor | None = None
    ) -> tuple[Tensor, Metrics]:
        """Sum losses and metrics, see :meth:`AnswerLoss.sum_and_metrics`; scores are per token ``[b, s]``.

        Args:
            batch: batch from :func:`torchtune.rlhf.collate_rollouts`. The first pass over the batch stores the
                log-probs in the entry ``old`` for later passes.
            scores: see :meth:`score`.
            reference: scores of the reference model.
            baseline: not used.
        """
        self.check_batch(batch)
        label_positions = batch.find_labels()  # [t], indices into the flattened batch
        num_tokens = len(label_positions)
        sampled = batch.per_token.get("sampled")
        is_first_pass = "old" not in batch.per_token  # the model has not been updated since sampling
        if is_first_pass:
            # π_old is of the sampler; of the trainer if the sampler has none, or if an importance weight corrects the
            # difference of the two.
            if sampled is None or self.importance_cap is not None:
                batch["old"] = scores.detach()
            else:
                batch["old"] = sampled

        def at_labels(values: Tensor | None) -> Tensor | None:
            """Select the labeled positions: ``[b, s]`` to ``[t]``."""
            if values is None:
                return None
            return values.flatten().index_select(0, label_positions)

        log_probs = at_labels(scores)
        sampled_log_probs = at_labels(sampled)
        weights = {}
        for name in ("rl", "ce", "ref_kl"):
            if name in batch.per_token:
                weights[name] = at_labels(batch.per_token[name])
        losses, token_metrics = self(
            log_probs,
            at_labels(batch["old"]),
            at_labels(batch.per_token["advantages"]),
            batch.documents.document_ids().index_select(0, label_positions),
            at_labels(reference),
            sampled_log_probs,
            weights,
        )
        if is_first_pass and sampled is not None:
            token_metrics["sampler_difference"] = (log_probs - sampled_log_probs).abs().detach()

        total = losses.sum() + 0.0 * scores.sum()  # keeps the graph connected for a batch without labels
        if self.balance is not None:
            num_terms = num_tokens  # as :meth:`num_terms` counts them; a filler has none
            if self.normalize != "tokens":
                num_terms = (batch.per_document["label_counts"] > 0).sum()
            total = self.balance.add_to(total, num_terms)
        metrics = {}
        for name, values in token_metrics.items():
            metrics[f"policy/{name}"] = (values.float().sum(), num_tokens)
        return total, metrics


class DAPOLoss(GRPOLoss):
    """Loss of DAPO (arXiv:2503.14476): a higher upper clip, and a mean over all tokens of the step.

    Example:
        >>> torchtune.rlhf.loss.DAPOLoss().epsilon_high
        0.28
    """

    def __init__(self, epsilon: float = 0.2, epsilon_high: float = 0.28) -> None:
        super().__init__(epsilon, epsilon_high)


class DrGRPOLoss(GRPOLoss):
    """Loss of Dr. GRPO (arXiv:2503.20783): no division by the length of the answer, which would prefer some lengths.

    Args:
        constant: divisor of the sum over an answer, usually the sampler's ``max_new_tokens``.
        epsilon: clip on both sides: the ratio is within ``1 ± epsilon``.

    Example:
        >>> torchtune.rlhf.loss.DrGRPOLoss(constant=512).normalize
        'constant'
    """

    def __init__(self, constant: float, epsilon: float = 0.2) -> None:
        super().__init__(epsilon, epsilon, normalize="constant", constant=constant)


class GSPOLoss(GRPOLoss):
    """Loss of GSPO (arXiv:2507.18071): one ratio per answer, which is more stable for mixtures of experts.

    Example:
        >>> torchtune.rlhf.loss.GSPOLoss().ratio
        'sequence'
    """

    def __init__(self, epsilon: float = 3e-4, epsilon_high: float = 4e-4) -> None:
        super().__init__(epsilon, epsilon_high, ratio="sequence", normalize="sequences")


class CISPOLoss(GRPOLoss):
    """Loss of CISPO (arXiv:2506.13585): capped importance weights, so that every token has a gradient.

    Args:
        epsilon_high: maximum importance weight minus 1.

    Example:
        >>> torchtune.rlhf.loss.CISPOLoss(epsilon_high=4.0).kind
        'cispo'
    """

    def __init__(self, epsilon_high: float = 4.0) -> None:
        super().__init__(epsilon_high=epsilon_high, kind="cispo")


class RLOOLoss(GRPOLoss):
    """Policy gradient of whole answers (RLOO, arXiv:2402.14740); use with ``GroupAdvantages(leave_one_out=True)``.

    Example:
        >>> torchtune.rlhf.loss.RLOOLoss().epsilon_high
        0.2
    """

    def __init__(self, epsilon: float = 0.2, epsilon_high: float = 0.2) -> None:
        super().__init__(epsilon, epsilon_high, normalize="constant", constant=1.0)


class OnPolicyDistillationLoss(GRPOLoss):
    """On-policy distillation: a token's advantage is the negative log-ratio of student and teacher.

    The loss minimizes KL(student ‖ teacher) per token on the student's samples. The teacher is the model of
    ``ref_checkpointer`` in the recipe. Rewards are recorded, but not used.

    Args:
        coeff: weight of the log-ratio.

    Example:
        >>> torchtune.rlhf.loss.OnPolicyDistillationLoss(coeff=1.0).needs_reference
        True
    """

    needs_rewards = False

    def __init__(self, coeff: float = 1.0) -> None:
        super().__init__(kl_coeff=coeff, kl="k1")
