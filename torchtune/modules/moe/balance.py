"""Load balancing of experts: the auxiliary loss, loss-free balancing, and load metrics."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtune.modules._outside_graphs import outside_graphs
from torchtune.modules.conversion import Conversion, ConversionError, ConversionReport, Phase
from torchtune.modules.moe.moe import TokenChoiceTopKRouter, in_backward_pass
from torchtune.utils import get_world_size_and_rank


def load_balancing_loss(probabilities: Sequence[Tensor], counts: Sequence[Tensor]) -> Tensor:
    """Compute the load-balancing loss ``e · Σ f p`` over experts with token fractions f and mean probabilities p.

    Formulas (4) to (6) of Fedus et al. 2021 (arXiv:2101.03961); fractions and means are over all layers together. The
    loss is ``experts_per_token`` if all experts are equally likely.

    Args:
        probabilities: for every layer ``[t, e]``.
        counts: for every layer, tokens per expert, int64 ``[e]``.

    Returns:
        Scalar tensor.

    Example:
        >>> from torchtune.modules.moe import load_balancing_loss
        >>> load_balancing_loss([torch.full((4, 2), 0.5)], [torch.tensor([2, 2])]).item()  # even
        1.0
    """
    num_tokens = sum(layer.shape[0] for layer in probabilities)  # over all layers
    fractions = torch.stack(list(counts)).sum(0) / num_tokens  # [layers, e] -> [e]
    probability_sums = torch.stack([layer.sum(0) for layer in probabilities])  # [layers, e]
    means = probability_sums.sum(0) / num_tokens  # [e]
    return len(fractions) * (fractions * means).sum()


class _RouterStatistics:
    """Statistics of a model's routers in one forward pass; an item of each list is of one router."""

    def __init__(self) -> None:
        self.probability_sums: list[Tensor] = []  # [e]
        self.counts: list[Tensor] = []  # tokens per expert [e]
        self.num_tokens: list[int] = []
        self.slope: Tensor | None = None  # gradient of the balancing loss w.r.t. a token's probabilities [e]
        self.weight: Tensor | None = None  # gradient of the total loss w.r.t. the balancing loss


class Balance:
    """Balancing loss of one model; connects the routers to the loss function.

    In the forward pass, routers record their probabilities and token counts, and the loss function adds the balancing
    loss. In the backward pass, the addition records the upstream gradient, and every router adds the gradient of the
    balancing loss to the gradient of its scores. The result is exact for any scale of the loss, and layers may be
    compiled, sharded or recomputed.

    Args:
        coefficient: coefficient of the balancing loss.
    """

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient
        self._statistics = _RouterStatistics()

    @outside_graphs
    def attach(self, selected_scores: Tensor, probabilities: Tensor, counts: Tensor) -> Tensor:
        """Record the probabilities, and return the scores, whose backward pass adds the gradient of the balancing loss.

        Args:
            selected_scores: scores of the selected experts, ``[t, k]``.
            probabilities: of all experts, ``[t, e]``; they get the gradient.
            counts: tokens per expert, int64 ``[e]``.
        """
        if in_backward_pass():
            return selected_scores  # a recomputed forward pass: the first one has recorded them
        self._statistics.probability_sums.append(probabilities.detach().sum(0))
        self._statistics.counts.append(counts)
        self._statistics.num_tokens.append(len(probabilities))
        return _AttachGradient.apply(selected_scores, probabilities, self._statistics)

    def add_to(self, loss: Tensor, count: Tensor | int = 1) -> Tensor:
        """Return ``loss``, a sum over ``count`` labels, plus ``count`` times the balancing loss since the last call."""
        if not torch.is_grad_enabled():
            return loss
        # The routers' backward passes read these statistics, while the next forward pass records others.
        statistics = self._statistics
        self._statistics = _RouterStatistics()
        if not statistics.counts:
            return loss
        num_tokens = sum(statistics.num_tokens)
        fractions = torch.stack(statistics.counts).sum(0) / num_tokens  # [e]
        # The counts have no gradient, so the loss e · Σ f p is linear in every token's probabilities.
        statistics.slope = fractions * (self.coefficient * len(fractions) / num_tokens)  # [e]
        probability_sums = torch.stack(statistics.probability_sums).sum(0)  # [layers, e] -> [e]
        balancing_loss = (statistics.slope * probability_sums).sum()
        return _AddLoss.apply(loss, balancing_loss.to(loss.dtype), count, statistics)


class _AttachGradient(torch.autograd.Function):
    """Identity for scores of selected experts, whose backward pass gives the probabilities their gradient."""

    @staticmethod
    def forward(ctx: Any, selected_scores: Tensor, probabilities: Tensor, statistics: _RouterStatistics) -> Tensor:
        ctx.statistics = statistics
        ctx.shape = probabilities.shape
        return selected_scores.view_as(selected_scores)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        slope = ctx.statistics.slope
        weight = ctx.statistics.weight
        if slope is None or weight is None:
            raise ConversionError(
                "BalancingLoss: the loss function does not add the balancing loss: build it by "
                "torchtune.modules.loss.setup_loss(loss, model), or call its set_model_output(model)."
            )
        grad_probabilities = (slope * weight).to(grad.dtype).expand(ctx.shape)  # [e] -> [t, e]
        return grad, grad_probabilities, None


class _AddLoss(torch.autograd.Function):
    """Sum of the loss and the balancing loss; the backward pass records the gradient of the latter for the routers."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, balancing_loss: Tensor, count: Tensor | int, statistics: _RouterStatistics
    ) -> Tensor:
        ctx.statistics = statistics
        ctx.count = count
        return loss + balancing_loss * count

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # This node is the last of the forward pass, so it runs before the routers' nodes, which read the weight.
        ctx.statistics.weight = grad.detach() * ctx.count
        return grad, None, None, None


def _routers(model: nn.Module, name: str) -> dict[str, TokenChoiceTopKRouter]:
    """Return the routers by path, for the conversion called ``name``; raise if there are none."""
    routers = {path: module for path, module in model.named_modules() if isinstance(module, TokenChoiceTopKRouter)}
    if not routers:
        raise ConversionError(f"{name}: the model has no experts, remove it from model_converters.")
    return routers


class BalancingLoss(Conversion):
    """Conversion that adds :func:`load_balancing_loss` to the loss of supervised fine-tuning.

    Padding tokens count; packed batches have no padding. With gradient accumulation, the balancing loss of each
    micro-batch is weighted by its number of labels. Each rank balances its own tokens.

    Args:
        coefficient: coefficient of the balancing loss; by default the value in the model's ``config.json``.

    Raises:
        ConversionError: ``coefficient`` is negative.

    Example:
        >>> torchtune.modules.moe.BalancingLoss(coefficient=0.01).phase.name
        'OBJECTIVE'
    """

    phase: ClassVar[Phase] = Phase.OBJECTIVE

    def __init__(self, coefficient: float | None = None) -> None:
        if coefficient is not None and coefficient < 0:
            raise ConversionError(f"BalancingLoss: coefficient is {coefficient}, it must not be negative.")
        self.coefficient = coefficient

    def convert(self, model: nn.Module) -> ConversionReport:
        """Connect the routers to the loss.

        Raises:
            ConversionError: the model has no experts, or its config has no coefficient.
        """
        routers = _routers(model, "BalancingLoss")
        coefficient = self.coefficient
        if coefficient is None:
            description = getattr(model, "description", None)  # a model of the user's own has none
            coefficient = getattr(description, "router_balance", 0.0)
            if not coefficient:
                raise ConversionError("BalancingLoss: the model's config has no coefficient: set one.")
        balance = Balance(coefficient)
        for router in routers.values():
            router.balance = balance
        return ConversionReport("BalancingLoss", list(routers), note=f"coefficient {coefficient:g}")


def balance_of(model: nn.Module) -> Balance | None:
    """Return the :class:`Balance` of a model converted by :class:`BalancingLoss`; None for other models."""
    for module in model.modules():
        if isinstance(module, TokenChoiceTopKRouter):
            return module.balance
    return None


class LossFreeBalancing(Conversion):
    """Conversion for loss-free balancing: update the routers' selection biases after every step.

    ``bias += rate · sign(mean tokens - tokens)``, with the step's tokens per expert on all ranks (Wang et al. 2024,
    arXiv:2408.15664). The bias does not affect scores or gradients. A skipped step does not update the bias, and its
    tokens are not counted.

    Args:
        rate: update of a bias per step.

    Example:
        >>> torchtune.modules.moe.LossFreeBalancing(rate=0.01).phase.name
        'OBJECTIVE'
    """

    phase: ClassVar[Phase] = Phase.OBJECTIVE

    def __init__(self, rate: float = 0.001) -> None:
        self.rate = rate
        self._before: dict[str, Tensor] = {}
        self._step: dict[str, Tensor] = {}

    def convert(self, model: nn.Module) -> ConversionReport:
        """Check that the routers have selection biases.

        Raises:
            ConversionError: the model has no experts, or a router has no selection bias.
        """
        routers = _routers(model, "LossFreeBalancing")
        for path, router in routers.items():
            if router.selection_bias is None:
                raise ConversionError(
                    f"LossFreeBalancing: '{path}' has no selection_bias, for which checkpoints of this model have no "
                    "place: use BalancingLoss."
                )
        return ConversionReport("LossFreeBalancing", list(routers), note=f"rate {self.rate:g}")

    def moved_parameters(self, model: nn.Module) -> set[str]:
        """Return the names of the routers' selection biases."""
        return {f"{path}.selection_bias" for path in _routers(model, "LossFreeBalancing")}

    def pre_optimizer_hook(self, model: nn.Module) -> None:
        """Record the token counts of the step; they replace the counts of a skipped step."""
        totals = _local_counts(model)
        self._step = {}
        for path, total in totals.items():
            self._step[path] = total - self._before.get(path, 0)
        self._before = totals

    @torch.no_grad()
    def post_optimizer_hook(self, model: nn.Module) -> None:
        """Update the biases."""
        if not self._step:  # the training loop does not call pre_optimizer_hook
            self.pre_optimizer_hook(model)
        counts_of_routers = _all_reduce_counts(self._step)
        self._step = {}
        for path, counts in counts_of_routers.items():
            counts = counts.float()  # [e]
            missing = counts.mean() - counts  # tokens that an expert lacks for an even load
            update = self.rate * missing.sign()  # [e]
            bias = model.get_submodule(path).selection_bias
            if hasattr(bias, "device_mesh"):  # sharded
                from torch.distributed.tensor import distribute_tensor  # slow to import

                update = distribute_tensor(update, bias.device_mesh, bias.placements)
            bias.add_(update)


def tokens_per_expert(model: nn.Module) -> dict[str, Tensor]:
    """Return the tokens per expert since training began, summed over all ranks: router path -> int64 ``[e]``.

    All ranks must call this function. Tokens in evaluation are not counted; recomputed tokens are counted once.
    """
    return _all_reduce_counts(_local_counts(model))


def _local_counts(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the routers' tokens per expert, of this rank since training began, by path."""
    counts = {}
    for path, module in model.named_modules():
        # A router that has not been called in training has counted nothing.
        if isinstance(module, TokenChoiceTopKRouter) and module.tokens_per_expert is not None:
            counts[path] = module.tokens_per_expert.clone()
    return counts


def _all_reduce_counts(counts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sum the tokens per expert of all routers over the ranks."""
    if not counts or get_world_size_and_rank()[0] == 1:
        return counts
    stacked = torch.stack(list(counts.values()))  # [layers, e], for one collective
    dist.all_reduce(stacked)
    return dict(zip(counts, stacked, strict=True))


class ExpertLoad:
    """Load metrics of experts; call :meth:`metrics` at every logged step.

    Args:
        model: the model; without experts there are no metrics.

    Example:
        >>> torchtune.modules.moe.ExpertLoad(model).metrics()  # a model without experts
        {}
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: dict[str, Tensor] = {}

    def metrics(self) -> dict[str, float]:
        """Return ``expert_load_max`` and ``expert_load_min``: highest and lowest load of an expert since the last call.

        Loads are relative to the mean of the layer. All ranks must call this method.
        """
        totals = tokens_per_expert(self._model)
        counts = []  # since the last call, [e] of each layer
        for path, total in totals.items():
            new_tokens = total - self._before.get(path, 0)
            counts.append(new_tokens.float())
        self._before = totals
        if not counts:
            return {}
        tokens = torch.stack([layer.sum() for layer in counts])  # [layers]
        load = torch.stack([layer / layer.mean() for layer in counts])  # [layers, e]
        # In one copy, because the host waits for every copy.
        extremes = torch.stack([tokens.min(), load.max(), load.min()])
        least_tokens, highest, lowest = extremes.tolist()
        if not least_tokens:  # a load of 0 / 0
            return {}
        return {"expert_load_max": highest, "expert_load_min": lowest}
