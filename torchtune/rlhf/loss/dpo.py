"""Preference losses for pairs of answers."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchtune.data import Batch, DataError
from torchtune.modules.loss import LossError
from torchtune.rlhf.loss._base import AnswerLoss, Metrics, label_counts, total_and_metrics
from torchtune.utils import deprecated

# Losses of the pairs, rewards of the chosen answers, rewards of the rejected answers; ``[p]`` each.
LossesAndRewards = tuple[Tensor, Tensor, Tensor]


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

    chosen_logps: Tensor
    rejected_logps: Tensor
    chosen_logits: Tensor | None = None
    rejected_logits: Tensor | None = None
    chosen_lengths: Tensor | None = None
    rejected_lengths: Tensor | None = None

    @property
    def chosen_mean(self) -> Tensor:
        """Per-token mean log-probs of the chosen answers ``[p]``; ``chosen_logps`` if there are no lengths."""
        return _per_token_mean(self.chosen_logps, self.chosen_lengths)

    @property
    def rejected_mean(self) -> Tensor:
        """Per-token mean log-probs of the rejected answers ``[p]``; ``rejected_logps`` if there are no lengths."""
        return _per_token_mean(self.rejected_logps, self.rejected_lengths)


def _per_token_mean(sums: Tensor, lengths: Tensor | None) -> Tensor:
    """Divide sums over answers ``[p]`` by the answers' lengths, if these are known."""
    if lengths is None:
        return sums
    return sums / lengths.clamp(min=1)


class PreferenceLoss(AnswerLoss):
    """Base class of losses for pairs of a chosen and a rejected answer.

    The arguments of a call are the outputs of the policy and, unless :attr:`is_reference_free`, of the reference: two
    :class:`~torchtune.rlhf.ChosenRejectedOutputs`, or log-probs as four tensors ``[p]`` (policy chosen, policy
    rejected, reference chosen, reference rejected). A call returns the losses of the pairs, the rewards of the chosen
    answers and the rewards of the rejected answers, ``[p]`` each; rewards are detached.

    Subclasses implement :meth:`compare`.

    Example:
        >>> issubclass(torchtune.rlhf.loss.DPOLoss, torchtune.rlhf.loss.PreferenceLoss)
        True
    """

    @property
    def is_reference_free(self) -> bool:
        """Whether the loss needs no reference."""
        return not self.needs_reference

    def check_batch(self, batch: Batch) -> None:
        """Check that the batch has pairs. Raises :class:`DataError`."""
        if "pair" not in batch.per_document:
            raise DataError(
                f"dataset: {type(self).__name__} compares pairs of answers, and the data have none: use "
                "torchtune.datasets.preference_dataset."
            )

    @abstractmethod
    def compare(self, policy: ChosenRejectedOutputs, reference: ChosenRejectedOutputs | None) -> LossesAndRewards:
        """Compute losses and rewards of pairs.

        Args:
            policy: outputs of the trained model.
            reference: outputs of the reference; None for a loss without a reference.

        Returns:
            The losses, the rewards of the chosen answers, and the rewards of the rejected answers, ``[p]`` each.
        """

    def forward(self, *outputs: ChosenRejectedOutputs | Tensor | None) -> LossesAndRewards:
        """Compute losses and rewards, see the class.

        Raises:
            TypeError: the number of arguments is wrong.
        """
        if outputs and isinstance(outputs[0], Tensor):
            if len(outputs) % 2:  # an answer without its counterpart
                raise TypeError(f"{type(self).__name__} takes log-probs of chosen and rejected answers, in pairs.")
            # Chosen and rejected answers of the policy, then of the reference.
            outputs = tuple(map(ChosenRejectedOutputs, outputs[::2], outputs[1::2]))
        policy = outputs[0] if outputs else None
        reference = outputs[1] if len(outputs) > 1 else None
        lacks_reference = self.needs_reference and reference is None
        if policy is None or lacks_reference or len(outputs) > 2:
            models = "the policy and the reference" if self.needs_reference else "the policy"
            raise TypeError(f"{type(self).__name__} takes the outputs of {models}, but got {len(outputs)} argument(s).")
        compared = self.compare(policy, reference)
        expected_shapes = [policy.chosen_logps.shape] * 3
        if not isinstance(compared, tuple) or [tensor.shape for tensor in compared] != expected_shapes:
            raise LossError(
                f"loss: {type(self).__name__}.compare must return three tensors of one number for each pair: the "
                "losses, and the rewards of the chosen and of the rejected answers."
            )
        losses, chosen, rejected = compared
        return losses, chosen.detach(), rejected.detach()

    def sum_and_metrics(
        self, batch: Batch, scores: Tensor, reference: Tensor | None = None, baseline: Tensor | None = None
    ) -> tuple[Tensor, Metrics]:
        """Sum losses and metrics, see :meth:`AnswerLoss.sum_and_metrics`."""
        policy = self._outputs(batch, scores)
        reference_outputs = None
        if reference is not None:
            reference_outputs = self._outputs(batch, reference)
        losses, chosen, rejected = self._compare_batch(batch, policy, reference_outputs)
        # A pair without labels is the filler of a rank without data.
        counts = (policy.chosen_lengths > 0) & (policy.rejected_lengths > 0)
        terms = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": (chosen > rejected).float(),
            **self.more_metrics(policy, chosen, rejected),
        }
        weights = None
        if "weight" in batch.per_document:
            weights, _ = batch.chosen_and_rejected(batch.per_document["weight"])  # the same in both answers
        return total_and_metrics(self, losses, counts, terms, weights)

    def _compare_batch(
        self, batch: Batch, policy: ChosenRejectedOutputs, reference: ChosenRejectedOutputs | None
    ) -> LossesAndRewards:
        """Compare the pairs of a batch; a loss that reads further entries of the batch overrides it."""
        return self(policy, reference)

    def more_metrics(self, policy: ChosenRejectedOutputs, chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
        """Return additional metrics, ``[p]`` each."""
        return {
            "log_probs/chosen": policy.chosen_logps,
            "log_probs/rejected": policy.rejected_logps,
            "log_probs/chosen_per_token": policy.chosen_mean,
            "log_probs/rejected_per_token": policy.rejected_mean,
        }

    @staticmethod
    def _outputs(batch: Batch, scores: Tensor) -> ChosenRejectedOutputs:
        """Split the scores of a batch's documents ``[n]`` into those of the chosen and the rejected answers."""
        chosen, rejected = batch.chosen_and_rejected(scores)
        chosen_lengths, rejected_lengths = batch.chosen_and_rejected(label_counts(batch))
        return ChosenRejectedOutputs(chosen, rejected, chosen_lengths=chosen_lengths, rejected_lengths=rejected_lengths)


class _MarginLoss(PreferenceLoss):
    """Base class of losses of the margin m: the log-ratio log π − log π_ref of the chosen minus the rejected answer.

    Args:
        beta: scale β of the implicit reward β·(log π − log π_ref); a higher value stays closer to the reference.
    """

    by_token: ClassVar[bool] = False

    def __init__(self, beta: float = 0.1) -> None:
        super().__init__()
        self.beta = _check_beta(beta)

    @abstractmethod
    def margin_loss(self, margin: Tensor) -> Tensor:
        """Return the losses of the margins m ``[p]``."""

    def compare(self, policy: ChosenRejectedOutputs, reference: ChosenRejectedOutputs | None) -> LossesAndRewards:
        """Compute losses and rewards of pairs; see :class:`PreferenceLoss`."""
        if self.by_token:
            chosen = policy.chosen_mean - reference.chosen_mean
            rejected = policy.rejected_mean - reference.rejected_mean
        else:
            chosen = policy.chosen_logps - reference.chosen_logps
            rejected = policy.rejected_logps - reference.rejected_logps
        return self.margin_loss(chosen - rejected), self.beta * chosen, self.beta * rejected


def _check_beta(beta: float) -> float:
    """Return β. Raises ``ValueError`` unless it is above 0 and finite."""
    if not 0 < beta < math.inf:
        raise ValueError(f"beta is {beta}: it must be above 0, and finite.")
    return beta


def _check_weight(name: str, weight: float) -> float:
    """Return the weight of a loss, the argument ``name``. Raises ``ValueError`` if it is negative or infinite."""
    if not 0 <= weight < math.inf:
        raise ValueError(f"{name} is {weight}: a weight of a loss must be at least 0, and finite.")
    return weight


def _check_smoothing(label_smoothing: float) -> float:
    """Return ε. Raises ``ValueError`` unless it is from 0 to below 0.5."""
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing is {label_smoothing}: the share of wrong labels must be from 0 to below 0.5."
        )
    return label_smoothing


def _smoothed_loss(logits: Tensor, label_smoothing: float) -> Tensor:
    """Return −(1−ε) log σ(x) − ε log σ(−x), the cross-entropy if a fraction ε of the pairs has swapped labels."""
    return -(1.0 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)


class DPOLoss(_MarginLoss):
    """−(1−ε) log σ(βm) − ε log σ(−βm): direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290).

    With ε > 0, the loss is conservative DPO (Mitchell 2023), which has its minimum at a finite margin. With a weight α
    of the chosen answer's likelihood, − α log π_c per token is added (RPO, Pang et al. 2024, arXiv:2404.19733), which
    keeps good answers likely where DPO would lower both.

    Args:
        beta: scale β; a higher value stays closer to the reference.
        label_smoothing: ε, the fraction of pairs with swapped labels.
        rpo_alpha: α, weight of the chosen answer's negative log-likelihood, which is a mean over its tokens.

    Example:
        >>> row = {"chosen_input_ids": [1, 2, 3], "chosen_labels": [2, 3, -100]}
        >>> row |= {"rejected_input_ids": [1, 2, 4], "rejected_labels": [2, 4, -100]}
        >>> batch = torchtune.data.collate_preference([row])
        >>> zeros = torch.zeros(2)
        >>> total, metrics = torchtune.rlhf.loss.DPOLoss(beta=0.1).sum_and_metrics(batch, zeros, reference=zeros)
        >>> total.item()  # log(2): the model does not yet prefer one
        0.6931...
    """

    def __init__(self, beta: float = 0.1, label_smoothing: float = 0.0, rpo_alpha: float = 0.0) -> None:
        super().__init__(beta)
        self.label_smoothing = _check_smoothing(label_smoothing)
        self.rpo_alpha = _check_weight("rpo_alpha", rpo_alpha)

    def margin_loss(self, margin: Tensor) -> Tensor:
        """Return the losses of the margins ``[p]``."""
        return _smoothed_loss(self.beta * margin, self.label_smoothing)

    def compare(self, policy: ChosenRejectedOutputs, reference: ChosenRejectedOutputs | None) -> LossesAndRewards:
        """Compute losses and rewards of pairs; see :class:`PreferenceLoss`."""
        losses, chosen, rejected = super().compare(policy, reference)
        if self.rpo_alpha:
            losses = losses + self.rpo_alpha * _mean_nll(policy, "DPOLoss with rpo_alpha")
        return losses, chosen, rejected


def _mean_nll(policy: ChosenRejectedOutputs, loss: str) -> Tensor:
    """Return the chosen answers' negative log-likelihoods per token ``[p]``, for the loss of this name."""
    if policy.chosen_lengths is None:
        raise ValueError(f"{loss} averages the chosen answer's log-prob: give chosen_lengths and rejected_lengths.")
    return -policy.chosen_mean


class RobustDPOLoss(_MarginLoss):
    """[−(1−ε) log σ(βm) + ε log σ(−βm)] / (1−2ε): unbiased under flipped labels (arXiv:2403.00409).

    Args:
        beta: scale β; a higher value stays closer to the reference.
        label_smoothing: ε, the fraction of pairs with swapped labels.

    Example:
        >>> torchtune.rlhf.loss.RobustDPOLoss(beta=0.1, label_smoothing=0.1).needs_reference
        True
    """

    def __init__(self, beta: float = 0.1, label_smoothing: float = 0.1) -> None:
        super().__init__(beta)
        self.label_smoothing = _check_smoothing(label_smoothing)

    def margin_loss(self, margin: Tensor) -> Tensor:
        """Return the losses of the margins ``[p]``."""
        logits = self.beta * margin
        epsilon = self.label_smoothing
        expected_loss = epsilon * logsigmoid(-logits) - (1.0 - epsilon) * logsigmoid(logits)
        return expected_loss / (1.0 - 2.0 * epsilon)


class HingeLoss(_MarginLoss):
    """relu(1 − βm): statistical rejection sampling optimization (Liu et al. 2023, arXiv:2309.06657).

    Args:
        beta: scale β; a higher value stays closer to the reference.

    Example:
        >>> torchtune.rlhf.loss.HingeLoss(beta=0.1).needs_reference
        True
    """

    def margin_loss(self, margin: Tensor) -> Tensor:
        """Return the losses of the margins ``[p]``."""
        return torch.relu(1.0 - self.beta * margin)


@deprecated("Use torchtune.rlhf.loss.HingeLoss(beta=gamma) instead.")
class RSOLoss(HingeLoss):
    """Former name of :class:`HingeLoss`.

    Args:
        gamma: ``beta`` of :class:`HingeLoss`.

    Example:
        >>> torchtune.rlhf.loss.RSOLoss(gamma=0.1).needs_reference
        True
    """

    def __init__(self, gamma: float = 0.1) -> None:
        super().__init__(gamma)


class IPOLoss(_MarginLoss):
    """(m − 1/(2β))² with log-ratios averaged by token: identity preference optimization (arXiv:2310.12036).

    Args:
        beta: scale β; a higher value stays closer to the reference.

    Example:
        >>> torchtune.rlhf.loss.IPOLoss(beta=0.1).needs_reference
        True
    """

    by_token: ClassVar[bool] = True

    def margin_loss(self, margin: Tensor) -> Tensor:
        """Return the losses of the margins ``[p]``."""
        return (margin - 1.0 / (2.0 * self.beta)).square()


class SigmoidNormLoss(_MarginLoss):
    """−log σ(βm) with per-token log-ratios, so that long answers do not weigh more than short answers.

    Args:
        beta: scale β; a higher value stays closer to the reference. Use larger values than for DPO, because per-token
            means are smaller than sums.

    Example:
        >>> torchtune.rlhf.loss.SigmoidNormLoss(beta=0.1).needs_reference
        True
    """

    by_token: ClassVar[bool] = True

    def margin_loss(self, margin: Tensor) -> Tensor:
        """Return the losses of the margins ``[p]``."""
        return -logsigmoid(self.beta * margin)


class SimPOLoss(PreferenceLoss):
    """−log σ(β(mean log π_c − mean log π_r) − γ), without a reference (Meng et al. 2024, arXiv:2405.14734).

    If called with tensors, it takes two: the per-token mean log-probs of the chosen and the rejected answers.

    Args:
        beta: scale of the rewards; 2 to 2.5 in the paper.
        gamma: target margin between chosen and rejected reward.
        label_smoothing: fraction of pairs with swapped labels.

    Example:
        >>> torchtune.rlhf.loss.SimPOLoss(beta=2.0, gamma=0.5).needs_reference
        False
    """

    needs_reference: ClassVar[bool] = False

    def __init__(self, beta: float = 2.0, gamma: float = 0.5, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.beta = _check_beta(beta)
        self.gamma = gamma
        self.label_smoothing = _check_smoothing(label_smoothing)

    def compare(self, policy: ChosenRejectedOutputs, reference: ChosenRejectedOutputs | None) -> LossesAndRewards:
        """Compute losses and rewards of pairs; see :class:`PreferenceLoss`."""
        chosen = self.beta * policy.chosen_mean
        rejected = self.beta * policy.rejected_mean
        losses = _smoothed_loss(chosen - rejected - self.gamma, self.label_smoothing)
        return losses, chosen, rejected


class ORPOLoss(PreferenceLoss):
    """NLL_c − λ log σ(log-odds ratio), both from mean log-probs, without a reference (arXiv:2403.07691).

    The first term is the loss of supervised fine-tuning, so no prior fine-tuning is needed.

    Args:
        beta: λ, weight of the odds ratio.

    Example:
        >>> torchtune.rlhf.loss.ORPOLoss(beta=0.1).needs_reference
        False
    """

    needs_reference: ClassVar[bool] = False

    def __init__(self, beta: float = 0.1) -> None:
        super().__init__()
        self.beta = _check_beta(beta)

    def compare(self, policy: ChosenRejectedOutputs, reference: ChosenRejectedOutputs | None) -> LossesAndRewards:
        """Compute losses and rewards of pairs; see :class:`PreferenceLoss`."""
        chosen = policy.chosen_mean
        rejected = policy.rejected_mean
        log_odds_ratio = _log_odds(chosen) - _log_odds(rejected)
        losses = -chosen - self.beta * logsigmoid(log_odds_ratio)
        return losses, self.beta * chosen, self.beta * rejected


def _log_odds(log_prob: Tensor) -> Tensor:
    """Return log(p / (1 − p)), with p clamped below 1, where the odds are infinite."""
    log_prob = log_prob.clamp(max=-torch.finfo(log_prob.dtype).eps)
    return log_prob - torch.log(-torch.expm1(log_prob))


class CPOLoss(PreferenceLoss):
    """−log σ(β(log π_c − log π_r)) + α NLL_c, without a reference (Xu et al. 2024, arXiv:2401.08417).

    Args:
        beta: scale of the log-probs.
        alpha: weight of the chosen answer's negative log-likelihood, which is a mean over tokens.
        label_smoothing: fraction of pairs with swapped labels.

    Example:
        >>> torchtune.rlhf.loss.CPOLoss(beta=0.1, alpha=1.0).needs_reference
        False
    """

    needs_reference: ClassVar[bool] = False

    def __init__(self, beta: float = 0.1, alpha: float = 1.0, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.beta = _check_beta(beta)
        self.alpha = alpha
        self.label_smoothing = _check_smoothing(label_smoothing)

    def compare(self, policy: ChosenRejectedOutputs, reference: ChosenRejectedOutputs | None) -> LossesAndRewards:
        """Compute losses and rewards of pairs; see :class:`PreferenceLoss`."""
        nll = _mean_nll(policy, "CPOLoss")
        chosen = self.beta * policy.chosen_logps
        rejected = self.beta * policy.rejected_logps
        losses = _smoothed_loss(chosen - rejected, self.label_smoothing)
        return losses + self.alpha * nll, chosen, rejected


class _RewardsLoss(PreferenceLoss):
    """Base class of losses of the rewards r = β (log π − log π_ref) of both answers.

    Args:
        beta: scale β; a higher value stays closer to the reference.
    """

    def __init__(self, beta: float = 0.1) -> None:
        super().__init__()
        self.beta = _check_beta(beta)

    @abstractmethod
    def rewards_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return the losses of the rewards r_c ``[p]`` and r_r ``[p]``."""

    def compare(self, policy: ChosenRejectedOutputs, reference: ChosenRejectedOutputs | None) -> LossesAndRewards:
        """Compute losses and rewards of pairs; see :class:`PreferenceLoss`."""
        chosen = self.beta * (policy.chosen_logps - reference.chosen_logps)
        rejected = self.beta * (policy.rejected_logps - reference.rejected_logps)
        return self.rewards_loss(chosen, rejected), chosen, rejected


class APOZeroLoss(_RewardsLoss):
    """1 − σ(r_c) + σ(r_r): anchored preference optimization (D'Oosterlinck et al. 2024, arXiv:2408.06266).

    For chosen answers that are better than the model's: it raises their likelihood, and lowers the rejected one's.

    Args:
        beta: scale β; a higher value stays closer to the reference.

    Example:
        >>> torchtune.rlhf.loss.APOZeroLoss(beta=0.1).needs_reference
        True
    """

    def rewards_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return the losses of the rewards ``[p]``."""
        return torch.sigmoid(-chosen) + torch.sigmoid(rejected)


class APODownLoss(_RewardsLoss):
    """σ(r_c) + 1 − σ(r_c − r_r): anchored preference optimization (D'Oosterlinck et al. 2024, arXiv:2408.06266).

    For chosen answers that are worse than the model's: it lowers the likelihood of both, the rejected one's more.

    Args:
        beta: scale β; a higher value stays closer to the reference.

    Example:
        >>> torchtune.rlhf.loss.APODownLoss(beta=0.1).needs_reference
        True
    """

    def rewards_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return the losses of the rewards ``[p]``."""
        return torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen)


class BCOPairLoss(_RewardsLoss):
    """−log σ(r_c) − log σ(−r_r): a binary classifier of answers (Jung et al. 2024, arXiv:2404.04656).

    It has no moving mean of the rewards, as TRL's ``bco_pair`` has none.

    Args:
        beta: scale β; a higher value stays closer to the reference.

    Example:
        >>> torchtune.rlhf.loss.BCOPairLoss(beta=0.1).needs_reference
        True
    """

    def rewards_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return the losses of the rewards ``[p]``."""
        return -logsigmoid(chosen) - logsigmoid(-rejected)


class ChosenNLLLoss(PreferenceLoss):
    """−mean log π_c, the likelihood of the chosen answer as in supervised fine-tuning; part of a mixed loss.

    The rewards are the log-probs per token.

    Example:
        >>> torchtune.rlhf.loss.ChosenNLLLoss().needs_reference
        False
    """

    needs_reference: ClassVar[bool] = False

    def compare(self, policy: ChosenRejectedOutputs, reference: ChosenRejectedOutputs | None) -> LossesAndRewards:
        """Compute losses and rewards of pairs; see :class:`PreferenceLoss`."""
        return _mean_nll(policy, "ChosenNLLLoss"), policy.chosen_mean, policy.rejected_mean


class MixedPreferenceLoss(PreferenceLoss):
    """Weighted sum of losses of the same pairs (MPO, Wang et al. 2024, arXiv:2411.10442).

    The paper's mixture is ``DPOLoss``, ``BCOPairLoss`` and ``ChosenNLLLoss`` with the weights 0.8, 0.2 and 1. The
    rewards that are logged are those of the first loss.

    Args:
        losses: the losses; a reference is needed if one of them needs it.
        loss_weights: weights of the losses; 1 each by default.

    Example:
        >>> losses = [torchtune.rlhf.loss.DPOLoss(), torchtune.rlhf.loss.ChosenNLLLoss()]
        >>> torchtune.rlhf.loss.MixedPreferenceLoss(losses, [1.0, 0.5]).needs_reference
        True
    """

    def __init__(self, losses: list[PreferenceLoss], loss_weights: list[float] | None = None) -> None:
        super().__init__()
        if not losses:
            raise ValueError("losses is empty: give the losses to add, such as DPOLoss and ChosenNLLLoss.")
        if loss_weights is None:
            loss_weights = [1.0] * len(losses)
        if len(loss_weights) != len(losses):
            raise ValueError(
                f"loss_weights has {len(loss_weights)} weights for {len(losses)} losses: give one for each loss."
            )
        for loss in losses:
            # A loss with a score of its own compares no log-probs.
            if not isinstance(loss, PreferenceLoss) or type(loss).score is not PreferenceLoss.score:
                raise ValueError(
                    f"losses has a {type(loss).__name__}: only losses of the log-probs of pairs can be added, such as "
                    "DPOLoss."
                )
        self.losses = torch.nn.ModuleList(losses)
        self.loss_weights = [_check_weight("loss_weights", weight) for weight in loss_weights]
        if not any(self.loss_weights):
            raise ValueError("loss_weights are all 0: there is nothing to train.")
        self.needs_reference = any(loss.needs_reference for loss in losses)

    def check_model(self, model: torch.nn.Module) -> None:
        """Check that the model's output fits all losses. Raises :class:`LossError`."""
        for loss in self.losses:
            loss.check_model(model)

    def compare(self, policy: ChosenRejectedOutputs, reference: ChosenRejectedOutputs | None) -> LossesAndRewards:
        """Compute losses and rewards of pairs; see :class:`PreferenceLoss`."""
        total = torch.zeros_like(policy.chosen_logps)
        rewards: list[tuple[Tensor, Tensor]] = []  # of each loss
        for loss, weight in zip(self.losses, self.loss_weights, strict=True):
            losses, chosen, rejected = loss.compare(policy, reference)
            total = total + weight * losses
            rewards.append((chosen, rejected))
        first_chosen, first_rejected = rewards[0]
        return total, first_chosen, first_rejected
