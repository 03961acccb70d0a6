"""Keeping the experts of a mixture evenly busy: a loss, a bias learnt without one, and what each has had to do."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtune.modules._outside_graphs import outside_graphs
from torchtune.modules.conversion import Conversion, ConversionError, ConversionReport, Phase
from torchtune.modules.moe.moe import TokenChoiceTopKRouter, in_backward_pass


def load_balancing_loss(probabilities: Sequence[Tensor], counts: Sequence[Tensor]) -> Tensor:
    """``e · Σ f p`` over experts, where f is the share of tokens that chose one and p its mean probability.

    Formulas (4) to (6) of Fedus et al. 2021 (arXiv:2101.03961); shares and means are over all layers together. It is
    ``experts_per_token`` if all experts are equally likely.

    Args:
        probabilities: of every layer ``[t, e]``.
        counts: tokens of every expert in that layer, int64 ``[e]``.

    Returns:
        scalar.
    """
    rows = sum(layer.shape[0] for layer in probabilities)
    shares = torch.stack(list(counts)).sum(0) / rows
    means = torch.stack([layer.sum(0) for layer in probabilities]).sum(0) / rows
    return len(shares) * (shares * means).sum()


class _Seen:
    """What the routers of a model see in one forward pass, and what comes of it."""

    def __init__(self) -> None:
        self.routers: list[tuple[Tensor, Tensor, int]] = []  # sums of probabilities, counts, tokens
        self.slope: Tensor | None = None  # gradient of the balancing loss by the probabilities of any token [e]
        self.weight: Tensor | None = None  # gradient of what is trained by the balancing loss


class Balance:
    """Carries the balancing loss of one model from its routers to its loss and back.

    Routers leave what they see; the model's loss adds the balancing loss of it to its own; in the backward pass that
    sum tells how much it weighs, and every router adds its part to the gradient that comes by. So the gradient is
    that of the sum, whatever the loss is multiplied with, and layers may be compiled, sharded or recomputed.

    Args:
        coefficient: weight of the balancing loss.
    """

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient
        self._seen = _Seen()

    @outside_graphs
    def attach(self, chosen: Tensor, probabilities: Tensor, counts: Tensor) -> Tensor:
        """``chosen``, the scores ``[t, k]``, in whose backward pass ``probabilities`` ``[t, e]`` get their gradient."""
        if in_backward_pass():
            return chosen
        self._seen.routers.append((probabilities.detach().sum(0), counts, len(probabilities)))
        return _Attach.apply(chosen, probabilities, self._seen)

    def add_to(self, loss: Tensor, count: Tensor | int = 1) -> Tensor:
        """``loss``, a sum over ``count`` labels, and as often the balancing loss of what the routers have seen since
        this was last called."""
        if not torch.is_grad_enabled():
            return loss
        seen, self._seen = self._seen, _Seen()
        if not seen.routers:
            return loss
        sums, counts, rows = zip(*seen.routers, strict=True)
        shares = torch.stack(counts).sum(0) / sum(rows)
        seen.slope = shares * (self.coefficient * len(shares) / sum(rows))
        return _Add.apply(loss, (seen.slope * torch.stack(sums).sum(0)).sum().to(loss.dtype), count, seen)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chosen: Tensor, probabilities: Tensor, seen: _Seen) -> Tensor:
        ctx.seen, ctx.shape = seen, probabilities.shape
        return chosen.view_as(chosen)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        slope, weight = ctx.seen.slope, ctx.seen.weight
        if slope is None or weight is None:
            raise ConversionError(
                "BalancingLoss: the loss that is used does not add it: take it from "
                "torchtune.modules.loss.setup_loss(loss, model), or call its set_model_output(model)."
            )
        return grad, (slope * weight).to(grad.dtype).expand(ctx.shape), None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, more: Tensor, count: Tensor | int, seen: _Seen) -> Tensor:
        ctx.seen, ctx.count = seen, count
        return loss + more * count

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.seen.weight = grad.detach() * ctx.count
        return grad, None, None, None


def _routers(model: nn.Module, name: str) -> dict[str, TokenChoiceTopKRouter]:
    found = {path: module for path, module in model.named_modules() if isinstance(module, TokenChoiceTopKRouter)}
    if not found:
        raise ConversionError(f"{name}: the model has no experts, remove it from model_converters.")
    return found


class BalancingLoss(Conversion):
    """Conversion that adds :func:`load_balancing_loss` to the loss of supervised fine-tuning.

    Padding counts as tokens do; batches of documents have none. In a step of several batches each one's balancing loss
    weighs as its labels do; processes balance their own tokens.

    Args:
        coefficient: weight of the loss; by default what the model's ``config.json`` says.

    Raises:
        ConversionError: it is negative.
    """

    phase: ClassVar[Phase] = Phase.OBJECTIVE

    def __init__(self, coefficient: float | None = None) -> None:
        if coefficient is not None and coefficient < 0:
            raise ConversionError(f"BalancingLoss: coefficient is {coefficient}, it must not be negative.")
        self.coefficient = coefficient

    def convert(self, model: nn.Module) -> ConversionReport:
        """Let routers tell the loss what they see.

        Raises:
            ConversionError: the model has no experts, or says no coefficient.
        """
        routers, coefficient = _routers(model, "BalancingLoss"), self.coefficient
        if coefficient is None:
            coefficient = getattr(getattr(model, "description", None), "router_balance", 0.0)
            if not coefficient:
                raise ConversionError("BalancingLoss: the model's config says no coefficient, give one.")
        balance = Balance(coefficient)
        for router in routers.values():
            router.balance = balance
        return ConversionReport("BalancingLoss", list(routers), note=f"coefficient {coefficient:g}")


def balance_of(model: nn.Module) -> Balance | None:
    """What :class:`BalancingLoss` has given to the routers of a model, if it has."""
    found = (module.balance for module in model.modules() if isinstance(module, TokenChoiceTopKRouter))
    return next(found, None)


class LossFreeBalancing(Conversion):
    """Conversion that moves routers' selection biases after every step, towards experts that had too little to do.

    ``bias += rate · sign(mean tokens - tokens)`` over the tokens of the step on all processes (Wang et al. 2024,
    arXiv:2408.15664). Scores, and so gradients, know nothing of it. A step that is skipped moves nothing, and its
    tokens do not count for the next one.

    Args:
        rate: see above.
    """

    phase: ClassVar[Phase] = Phase.OBJECTIVE

    def __init__(self, rate: float = 0.001) -> None:
        self.rate = rate
        self._before: dict[str, Tensor] = {}
        self._step: dict[str, Tensor] = {}

    def convert(self, model: nn.Module) -> ConversionReport:
        """Check that there is something to move.

        Raises:
            ConversionError: the model has no experts, or its routers no bias.
        """
        routers = _routers(model, "LossFreeBalancing")
        if lacking := [path for path, router in routers.items() if router.selection_bias is None]:
            raise ConversionError(
                f"LossFreeBalancing: '{lacking[0]}' has no selection_bias, for which checkpoints of this model have no "
                "place: use BalancingLoss."
            )
        return ConversionReport("LossFreeBalancing", list(routers), note=f"rate {self.rate:g}")

    def moved_parameters(self, model: nn.Module) -> set[str]:
        """The selection biases of the routers."""
        return {f"{path}.selection_bias" for path in _routers(model, "LossFreeBalancing")}

    def pre_optimizer_hook(self, model: nn.Module) -> None:
        """Count the tokens of this step, in the place of those of a step before that was skipped."""
        totals = _own_counts(model)
        self._step = {path: total - self._before.get(path, 0) for path, total in totals.items()}
        self._before = totals

    @torch.no_grad()
    def post_optimizer_hook(self, model: nn.Module) -> None:
        """Move the biases."""
        if not self._step:  # a loop that calls this hook alone
            self.pre_optimizer_hook(model)
        counted, self._step = self._step, {}
        for path, counts in _summed_over_processes(counted).items():
            counts = counts.float()
            step, bias = self.rate * (counts.mean() - counts).sign(), model.get_submodule(path).selection_bias
            if hasattr(bias, "device_mesh"):  # sharded
                from torch.distributed.tensor import distribute_tensor  # takes its time to import

                step = distribute_tensor(step, bias.device_mesh, bias.placements)
            bias.add_(step)


def tokens_per_expert(model: nn.Module) -> dict[str, Tensor]:
    """How many tokens chose each expert since training began, on all processes: path of the router -> int64 ``[e]``.

    All processes call it together. What is only evaluated is not counted, and what is recomputed only once.
    """
    return _summed_over_processes(_own_counts(model))


def _own_counts(model: nn.Module) -> dict[str, Tensor]:
    """The same of this process alone."""
    return {
        path: router.tokens_per_expert.clone()
        for path, router in model.named_modules()
        if isinstance(router, TokenChoiceTopKRouter) and router.tokens_per_expert is not None
    }


def _summed_over_processes(counts: dict[str, Tensor]) -> dict[str, Tensor]:
    if not counts or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return counts
    together = torch.stack(list(counts.values()))
    dist.all_reduce(together)
    return dict(zip(counts, together, strict=True))


class ExpertLoad:
    """How unevenly experts are used, for metrics: call it at every step that is logged.

    Args:
        model: with experts; one without has no metrics.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: dict[str, Tensor] = {}

    def metrics(self) -> dict[str, float]:
        """Tokens of the busiest and the idlest expert of a layer as multiples of the mean, the extremes over layers,
        since the last call: ``expert_load_max`` and ``expert_load_min``. All processes call it together."""
        now = tokens_per_expert(self._model)
        counts = [(total - self._before.get(path, 0)).float() for path, total in now.items()]
        self._before = now
        if not counts or not all(layer.sum() for layer in counts):
            return {}
        load = torch.stack([layer / layer.mean() for layer in counts])
        return {"expert_load_max": load.max().item(), "expert_load_min": load.min().item()}
