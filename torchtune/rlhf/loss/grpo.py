"""Losses of answers that the model sampled itself, each with an advantage."""

from typing import Literal

import torch
from torch import Tensor

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, Batch, DataError
from torchtune.modules.loss import token_log_probs
from torchtune.modules.loss._projection import Projection
from torchtune.rlhf.loss._base import AnswerLoss, Metrics


class GRPOLoss(AnswerLoss):
    """Policy gradient on sampled tokens with a clipped ratio (GRPO, arXiv:2402.03300).

    The loss of a token is −min(ρA, clip(ρ, 1 − epsilon, 1 + epsilon_high)A), with its advantage A and the ratio
    ρ = π / π_old of its probability now and when it was sampled. The defaults are those of DAPO (arXiv:2503.14476).

    Args:
        epsilon: the ratio is clipped to ``1 - epsilon`` from below.
        epsilon_high: and to ``1 + epsilon_high`` from above.
        kind: ``ppo`` as above; ``cispo`` (arXiv:2506.13585) takes −min(ρ, 1 + epsilon_high) A log π, with no
            gradient through the weight: every token contributes.
        ratio: per ``token``, or per ``sequence``: the geometric mean over its tokens (GSPO, arXiv:2507.18071).
        normalize: divide by all ``tokens`` of the step; by its ``sequences``, after the mean over each; or by
            sequences times a ``constant`` (Dr. GRPO, arXiv:2503.20783).
        constant: for ``normalize: constant``, usually the largest number of new tokens.
        kl_coeff: weight of the KL divergence to the reference; 0 needs no reference.
        kl: ``k3`` adds ρ (π_ref / π − log(π_ref / π) − 1), with the gradient of the divergence; ``k1`` takes
            log(π_old / π_ref) of a token off its advantage.
        importance_cap: where sampler and trainer differ: weigh each token by min(π_old / π_sampler, cap), with π_old
            of the trainer. ``None`` takes the sampler's own log-probs as π_old.

    Attributes:
        temperature: divides the logits, as it did when the tokens were sampled; the recipe sets it.
        needs_rewards: whether the advantages of answers count.

    Raises:
        ValueError: a number is out of range, or ``constant`` does not fit ``normalize``.

    Example:
        >>> loss = torchtune.rlhf.loss.GRPOLoss(epsilon=0.2, epsilon_high=0.28, kl_coeff=0.04)
        >>> loss.needs_reference
        True
    """

    needs_rewards = True

    trains_on = "prompts"

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
        importance_cap: float | None = None,
    ) -> None:
        super().__init__()
        choices = {
            "kind": (kind, ("ppo", "cispo")),
            "ratio": (ratio, ("token", "sequence")),
            "normalize": (normalize, ("tokens", "sequences", "constant")),
            "kl": (kl, ("k3", "k1")),
        }
        for name, (value, known) in choices.items():
            if value not in known:
                raise ValueError(f"{name} is {value!r}: it must be one of {', '.join(known)}.")
        if min(epsilon, epsilon_high, kl_coeff) < 0 or (importance_cap is not None and importance_cap <= 0):
            raise ValueError("epsilon, epsilon_high and kl_coeff may not be below 0, nor importance_cap 0 or below.")
        if (normalize == "constant") != (constant is not None) or (constant is not None and constant <= 0):
            raise ValueError(f"constant is {constant}: normalize='constant' needs one above 0, others take none.")
        self.epsilon, self.epsilon_high, self.kind, self.ratio = epsilon, epsilon_high, kind, ratio
        self.normalize, self.constant = normalize, constant
        self.kl_coeff, self.kl, self.importance_cap = kl_coeff, kl, importance_cap
        self.temperature = 1.0

    @property
    def needs_reference(self) -> bool:
        """Whether it compares with a reference model."""
        return self.kl_coeff > 0

    def check_batch(self, batch: Batch) -> None:
        """See that the batch has answers with advantages. Raises :class:`DataError`."""
        if "advantages" not in batch.per_token:
            raise DataError(
                f"loss: {type(self).__name__} reads advantages of sampled answers, and a batch has none: run a recipe "
                "of GRPO, or make it with torchtune.rlhf.collate_rollouts."
            )

    def num_terms(self, num_tokens: int, num_sequences: int) -> int:
        """What the loss is a mean over."""
        return num_tokens if self.normalize == "tokens" else num_sequences

    def score(self, hidden: Tensor, batch: Batch, projection: Projection) -> Tensor:
        """Log-probs of the labels ``[b, s]``, float32 or wider; 0 where there is none."""
        return token_log_probs(hidden, batch.labels, projection, self.temperature)

    def forward(
        self,
        log_probs: Tensor,
        old: Tensor,
        advantages: Tensor,
        sequences: Tensor,
        reference: Tensor | None = None,
        sampled: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Per-token losses; divide their sum by :meth:`num_terms`.

        Args:
            log_probs: of the model that is trained ``[t]``.
            old: at the time of sampling ``[t]``.
            advantages: of each token's answer ``[t]``.
            sequences: index of each token's answer, int64 ``[t]``.
            reference: log-probs of the reference ``[t]``.
            sampled: log-probs that the sampler gave ``[t]``, for ``importance_cap``.

        Returns:
            ``[t]``, and figures by name ``[t]``, detached.
        """
        lengths = torch.bincount(sequences)
        advantages = advantages if self.needs_rewards else torch.zeros_like(advantages)

        def mean_of_sequence(values: Tensor) -> Tensor:
            sums = values.new_zeros(len(lengths)).index_add(0, sequences, values)
            return (sums / lengths.clamp(min=1).to(sums.dtype))[sequences]

        log_ratio = log_probs - old.detach()
        log_ratio = log_ratio if self.ratio == "token" else mean_of_sequence(log_ratio)
        rho, low, high = log_ratio.exp(), 1.0 - self.epsilon, 1.0 + self.epsilon_high
        if reference is not None and self.kl == "k1":
            advantages = advantages - self.kl_coeff * (old - reference).detach()
        if self.kind == "cispo":
            clipped = rho > high
            losses = -rho.clamp(max=high).detach() * advantages * log_probs
        else:
            unclipped, limited = -rho * advantages, -rho.clamp(low, high) * advantages
            clipped = limited > unclipped
            losses = torch.maximum(unclipped, limited)
        figures = {"ratio": rho, "clipped": clipped.to(rho.dtype)}
        if reference is not None:
            difference = reference.detach() - log_probs
            k3 = difference.exp() - difference - 1.0
            figures["kl"] = k3
            if self.kl == "k3":
                losses = losses + self.kl_coeff * (log_probs - old.detach()).exp() * k3
        if self.importance_cap is not None and sampled is not None:
            weights = (old - sampled).exp().clamp(max=self.importance_cap).detach()
            figures["importance"] = weights
            losses = weights * losses
        if self.normalize == "sequences":
            losses = losses / lengths[sequences].to(losses.dtype)
        elif self.normalize == "constant":
            losses = losses / self.constant
        return losses, {name: value.detach() for name, value in figures.items()}

    def sum_and_metrics(
        self, batch: Batch, scores: Tensor, reference: Tensor | None = None, baseline: Tensor | None = None
    ) -> tuple[Tensor, Metrics]:
        """See :meth:`AnswerLoss.sum_and_metrics`; ``scores`` and ``reference`` are per token ``[b, s]``.

        Args:
            batch: of :func:`torchtune.rlhf.collate_rollouts`. Its first pass notes in the entry ``old`` what later
                ones compare with.
            scores: see :meth:`score`.
            reference: of the reference model.
            baseline: not used.
        """
        labelled = (batch.labels != CROSS_ENTROPY_IGNORE_IDX).flatten()
        self.check_batch(batch)
        sampled = batch.per_token.get("sampled")
        first = "old" not in batch.per_token
        if first:  # the model has not been updated since it sampled
            own = sampled is None or self.importance_cap is not None
            batch["old"] = scores.detach() if own else sampled

        def tokens(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.flatten()[labelled]

        losses, figures = self(
            tokens(scores),
            tokens(batch["old"]),
            tokens(batch.per_token["advantages"]),
            _sequence_of_token(batch)[labelled],
            tokens(reference),
            tokens(sampled),
        )
        if first and sampled is not None:
            figures["sampler_difference"] = (tokens(scores) - tokens(sampled)).abs().detach()
        total = losses.sum() + 0.0 * scores.sum()  # a batch without labels has a gradient too
        number = labelled.sum()
        if self.balance is not None:
            terms = number if self.normalize == "tokens" else (batch.per_document["label_counts"] > 0).sum()
            total = self.balance.add_to(total, terms)
        return total, {f"policy/{name}": (value.float().sum(), number) for name, value in figures.items()}


def _sequence_of_token(batch: Batch) -> Tensor:
    """Index of the document of every position, int64 ``[b * s]``."""
    boundaries = batch.documents.cu_seqlens.to(batch.tokens.device)
    numbers = torch.arange(len(batch.documents.lengths), device=batch.tokens.device)
    return numbers.repeat_interleave(boundaries.diff(), output_size=batch.documents.num_tokens)


class DAPOLoss(GRPOLoss):
    """The loss of DAPO (arXiv:2503.14476): a wider clip upwards, one mean over all tokens of the step.

    Example:
        >>> torchtune.rlhf.loss.DAPOLoss().epsilon_high
        0.28
    """

    def __init__(self, epsilon: float = 0.2, epsilon_high: float = 0.28) -> None:
        super().__init__(epsilon, epsilon_high)


class DrGRPOLoss(GRPOLoss):
    """The loss of Dr. GRPO (arXiv:2503.20783): no division by the length of an answer, so none is preferred.

    Args:
        constant: every answer's sum is divided by it; usually the sampler's ``max_new_tokens``.
        epsilon: of the clip, both ways.

    Example:
        >>> torchtune.rlhf.loss.DrGRPOLoss(constant=512).normalize
        'constant'
    """

    def __init__(self, constant: float, epsilon: float = 0.2) -> None:
        super().__init__(epsilon, epsilon, normalize="constant", constant=constant)


class GSPOLoss(GRPOLoss):
    """The loss of GSPO (arXiv:2507.18071): one ratio per answer, which suits mixtures of experts.

    Example:
        >>> torchtune.rlhf.loss.GSPOLoss().ratio
        'sequence'
    """

    def __init__(self, epsilon: float = 3e-4, epsilon_high: float = 4e-4) -> None:
        super().__init__(epsilon, epsilon_high, ratio="sequence", normalize="sequences")


class CISPOLoss(GRPOLoss):
    """The loss of CISPO (arXiv:2506.13585): importance weights are capped, no token's gradient is dropped.

    Args:
        epsilon_high: the weight is at most ``1 + epsilon_high``.

    Example:
        >>> torchtune.rlhf.loss.CISPOLoss(epsilon_high=4.0).kind
        'cispo'
    """

    def __init__(self, epsilon_high: float = 4.0) -> None:
        super().__init__(epsilon_high=epsilon_high, kind="cispo")


class RLOOLoss(GRPOLoss):
    """The policy gradient of whole answers (RLOO, arXiv:2402.14740); with ``GroupAdvantages(leave_one_out=True)``.

    Example:
        >>> torchtune.rlhf.loss.RLOOLoss().epsilon_high
        0.2
    """

    def __init__(self, epsilon: float = 0.2, epsilon_high: float = 0.2) -> None:
        super().__init__(epsilon, epsilon_high, normalize="constant", constant=1.0)


class OnPolicyDistillationLoss(GRPOLoss):
    """Learn from a teacher on the student's own answers: a token's advantage is its log-ratio to the teacher.

    Minimises, token by token, KL(student ‖ teacher) on what the student samples. The teacher is the recipe's
    ``ref_checkpointer``. Rewards are recorded, and have no influence.

    Args:
        coeff: weight of the log-ratio.

    Example:
        >>> torchtune.rlhf.loss.OnPolicyDistillationLoss(coeff=1.0).needs_reference
        True
    """

    needs_rewards = False

    def __init__(self, coeff: float = 1.0) -> None:
        super().__init__(kl_coeff=coeff, kl="k1")
