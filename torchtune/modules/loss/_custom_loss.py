"""Adapters that give any loss the interface that recipes call."""

import inspect
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, label_index
from torchtune.modules.loss._chunked_logits import Projection
from torchtune.modules.loss.loss_types import SFTLoss, record_row_losses
from torchtune.modules.moe.balance import Balance, balance_of
from torchtune.utils import UserError, is_simulated


class TokenLoss(Protocol):
    """Interface of losses in recipes: sum over labeled tokens and their number, which add up over micro-batches."""

    def sum_and_count(
        self, hidden: Tensor, labels: Tensor, projection: Projection, *, index: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`torchtune.modules.loss.SFTLoss.sum_and_count`."""


class LossError(UserError, TypeError):
    """A loss that recipes cannot train with."""


def setup_loss(loss: Any, model: nn.Module) -> TokenLoss:
    """Check a loss before training and adapt it to the interface of recipes.

    An :class:`SFTLoss` is used directly; if a subclass overrides ``forward`` and inherits ``sum_and_count``, the sum is
    computed from its ``forward``. Any other ``nn.Module`` is called as ``loss(logits, labels)`` with only the labeled
    tokens of a micro-batch: logits float32 ``[n, v]``, labels int64 ``[n]``. It must return the mean or per-token
    losses ``[n]``, for example ``torch.nn.CrossEntropyLoss(label_smoothing=0.1)``.

    If the model has a balancing loss (:class:`torchtune.modules.moe.BalancingLoss`), it is added.

    Args:
        loss: the loss.
        model: model with ``output``, the projection of hidden states to logits; or a module of your own, whose logits
            are passed to ``sum_and_count`` with ``torch.nn.Identity()`` as the projection.

    Returns:
        A loss with ``sum_and_count(hidden, labels, projection)``.

    Raises:
        LossError: the loss cannot be called with logits and labels, returns neither their mean nor per-token losses, or
            ignores another label than -100.

    Example:
        >>> from torchtune.modules.loss import setup_loss
        >>> loss = setup_loss(torch.nn.CrossEntropyLoss(), model)  # any loss(logits, labels)
        >>> hidden = model(torch.tensor([[5, 40, 7]]), output="hidden")
        >>> loss.sum_and_count(hidden, torch.tensor([[40, 7, -100]]), model.output)[1].item()
        2
    """
    ignore_index = getattr(loss, "ignore_index", CROSS_ENTROPY_IGNORE_IDX)
    if ignore_index != CROSS_ENTROPY_IGNORE_IDX:
        raise LossError(
            f"loss: it ignores the label {ignore_index}, but {CROSS_ENTROPY_IGNORE_IDX} marks positions without one: "
            "leave out ignore_index."
        )
    if not isinstance(loss, SFTLoss):
        weight = _output_weight(model)
        _check(loss, len(weight), weight.device)
        loss = LogitsLoss(loss)
    elif _overrides_only_forward(type(loss)):
        loss.set_model_output(model)
        loss = MeanLoss(loss)
    elif not _takes_index(loss):
        loss = UnindexedLoss(loss)
    balance = balance_of(model)
    return loss if balance is None else BalancedLoss(loss, balance)


class _Adapter(nn.Module):
    """Base class of the adapters of a loss."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss

    def apply_compile_strategy(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Compile the loss (arguments of ``torch.compile``); return this one."""
        self.loss.apply_compile_strategy(*args, **kwargs)
        return self


class LogitsLoss(_Adapter):
    """Adapter of a loss of logits and labels, (logits [n, v], labels [n]) -> mean, or losses [n].

    It computes logits only for labeled tokens.
    """

    def apply_compile_strategy(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Compile the loss (arguments of ``torch.compile``); return this one."""
        self.loss.forward = torch.compile(self.loss.forward, *args, **kwargs)
        return self

    def sum_and_count(
        self, hidden: Tensor, labels: Tensor, projection: Projection, *, index: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`torchtune.modules.loss.SFTLoss.sum_and_count`."""
        hidden = hidden.flatten(0, -2)  # [b * s, d]
        labels = labels.flatten()  # [b * s]
        if index is None:
            index = label_index(labels)
        count = torch.full((), len(index), device=labels.device)
        if not len(index):
            # Zero, with a graph to the same parameters: other ranks wait for their gradients.
            zero = projection(hidden[:1]).float().sum() * 0.0 + hidden.sum() * 0.0
            return zero, count
        logits = projection(hidden[index]).float()  # [n, v]
        losses = self.loss(logits, labels[index])
        if losses.dim() == 0:  # the mean
            return losses * count, count
        return record_row_losses(losses).sum(), count


class MeanLoss(_Adapter):
    """An :class:`SFTLoss` that only defines ``forward`` (mean over labeled tokens), with its model output set."""

    def sum_and_count(
        self, hidden: Tensor, labels: Tensor, projection: Projection, *, index: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`torchtune.modules.loss.SFTLoss.sum_and_count`."""
        del index  # the loss gets all positions
        return SFTLoss.sum_and_count(self.loss, hidden, labels, projection)


class UnindexedLoss(_Adapter):
    """An :class:`SFTLoss` whose ``sum_and_count`` was written without ``index``."""

    def sum_and_count(
        self, hidden: Tensor, labels: Tensor, projection: Projection, *, index: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`torchtune.modules.loss.SFTLoss.sum_and_count`."""
        del index
        return self.loss.sum_and_count(hidden, labels, projection)


class BalancedLoss(_Adapter):
    """A loss plus, for each label, the balancing loss of the model's experts.

    Args:
        loss: the loss.
        balance: adds the balancing loss.
    """

    def __init__(self, loss: TokenLoss, balance: Balance) -> None:
        super().__init__(loss)
        self.balance = balance

    def sum_and_count(
        self, hidden: Tensor, labels: Tensor, projection: Projection, *, index: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`torchtune.modules.loss.SFTLoss.sum_and_count`."""
        total, count = self.loss.sum_and_count(hidden, labels, projection, index=index)
        return self.balance.add_to(total, count), count


def _takes_index(loss: SFTLoss) -> bool:
    """Whether ``sum_and_count`` has the argument ``index``, or passes on any keyword."""
    parameters = inspect.signature(loss.sum_and_count).parameters.values()
    return any(parameter.name == "index" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _overrides_only_forward(kind: type) -> bool:
    """Whether a class overrides ``forward`` but not ``sum_and_count``."""
    for cls in kind.__mro__:
        if "sum_and_count" in vars(cls):
            return False
        if "forward" in vars(cls):
            return True
    return False


def _output_weight(model: nn.Module) -> Tensor:
    """Return the weight of the output projection, or any parameter of a model that has none by this name."""
    projection = getattr(model, "output", None)
    return next(model.parameters()) if projection is None else projection.weight


def _check(loss: Any, vocab_size: int, device: torch.device) -> None:
    """Call ``loss`` as in training, with two labeled tokens and with each of them twice; the means must agree."""
    name = type(loss).__name__
    if not isinstance(loss, nn.Module):
        raise LossError(f"loss: {name} is no torch.nn.Module: give a class of torchtune.modules.loss, or one of yours.")
    if any(parameter.requires_grad for parameter in loss.parameters()):
        raise LossError(f"loss: {name} has parameters, which no optimizer would train: make them buffers.")
    loss.to(device)
    rows = torch.arange(2, device=device)
    logits = torch.linspace(-1, 1, 2 * max(vocab_size, 2), device=device).view(2, -1).requires_grad_()
    try:
        once = loss(logits, rows)
        twice = loss(logits.repeat(2, 1), rows.repeat(2))
    except Exception as error:
        raise LossError(
            f"loss: {name} cannot be called with logits [n, v] and labels [n], which is how fine-tuning calls it: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(once, Tensor) or once.shape not in ((), (2,)) or not once.requires_grad:
        if isinstance(once, Tensor):
            result = f"a tensor {list(once.shape)}"
            if not once.requires_grad:
                result += " without gradient"
        else:
            result = f"a {type(once).__name__}"
        raise LossError(f"loss: {name} returns {result}: return the mean loss, or one for each label [n].")
    if once.dim() == 0 and not is_simulated() and not torch.allclose(once, twice, rtol=1e-3):
        raise LossError(f"loss: {name} returns no mean over the labels (reduction='sum'?): let it return the mean.")
