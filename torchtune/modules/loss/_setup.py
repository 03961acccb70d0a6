"""Any loss, as recipes call it."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX
from torchtune.modules.loss._projection import Projection
from torchtune.modules.loss._rows import seen
from torchtune.modules.loss.loss_types import SFTLoss
from torchtune.modules.moe.balance import Balance, balance_of
from torchtune.utils import UserError


class TokenLoss(Protocol):
    """A loss as recipes call it: a sum over labelled positions and their number, so that any split adds up."""

    def sum_and_count(self, hidden: Tensor, labels: Tensor, projection: Projection) -> tuple[Tensor, Tensor]:
        """See :meth:`torchtune.modules.loss.SFTLoss.sum_and_count`."""


class LossError(UserError, TypeError):
    """A loss that recipes cannot train with."""


def setup_loss(loss: Any, model: nn.Module) -> TokenLoss:
    """Make a loss ready for a recipe, and check it before training.

    An :class:`SFTLoss` is taken as it is; where a subclass has a ``forward`` of its own and inherits
    ``sum_and_count``, its ``forward`` counts. Any other ``nn.Module`` is called as ``loss(logits, labels)`` with the
    labelled positions of a micro-batch alone: logits float32 ``[n, v]``, labels int64 ``[n]``, no ignored ones among
    them. It returns their mean, or a loss for each ``[n]``. ``torch.nn.CrossEntropyLoss(label_smoothing=0.1)`` is one.

    If the experts of the model are to be balanced (:class:`torchtune.modules.moe.BalancingLoss`), that loss is added.

    Args:
        loss: the loss.
        model: has ``output``, the projection of hidden states to logits.

    Returns:
        What has ``sum_and_count(hidden, labels, projection)``.

    Raises:
        LossError: it cannot be called like that, or returns something else.

    Example:
        >>> from torchtune.modules.loss import setup_loss
        >>> loss = setup_loss(torch.nn.CrossEntropyLoss(), model)  # any loss(logits, labels)
        >>> hidden = model(torch.tensor([[5, 40, 7]]), output="hidden")
        >>> loss.sum_and_count(hidden, torch.tensor([[40, 7, -100]]), model.output)[1].item()
        2
    """
    if not isinstance(loss, SFTLoss):
        _check(loss, model.output.weight)
        loss = LogitsLoss(loss)
    elif _has_newer_mean(type(loss)):
        loss.set_model_output(model)
        loss = MeanLoss(loss)
    balance = balance_of(model)
    return loss if balance is None else BalancedLoss(loss, balance)


class LogitsLoss(nn.Module):
    """A loss of logits and labels, called for labelled positions alone, whose logits are the only ones made.

    Args:
        loss: (logits [n, v], labels [n]) -> mean, or losses [n].
    """

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def apply_compile_strategy(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Compile the loss (arguments of ``torch.compile``); return this one."""
        self.loss.forward = torch.compile(self.loss.forward, *args, **kwargs)
        return self

    def sum_and_count(self, hidden: Tensor, labels: Tensor, projection: Projection) -> tuple[Tensor, Tensor]:
        """See :meth:`torchtune.modules.loss.SFTLoss.sum_and_count`."""
        hidden, labels = hidden.flatten(0, -2), labels.flatten()
        index = (labels != CROSS_ENTROPY_IGNORE_IDX).nonzero().squeeze(1)
        count = torch.tensor(len(index), device=labels.device)
        if not len(index):  # zero, connected to what a loss is connected to
            return projection(hidden[:1]).float().sum() * 0.0 + hidden.sum() * 0.0, count
        losses = self.loss(projection(hidden[index]).float(), labels[index])
        return seen(losses).sum() if losses.dim() else losses * count, count


class MeanLoss(nn.Module):
    """An :class:`SFTLoss` whose ``forward``, the mean over labels, says what it computes.

    Args:
        loss: knows its projection, if it needs one.
    """

    def __init__(self, loss: SFTLoss) -> None:
        super().__init__()
        self.loss = loss

    def apply_compile_strategy(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Compile the loss (arguments of ``torch.compile``); return this one."""
        self.loss.apply_compile_strategy(*args, **kwargs)
        return self

    def sum_and_count(self, hidden: Tensor, labels: Tensor, projection: Projection) -> tuple[Tensor, Tensor]:
        """See :meth:`torchtune.modules.loss.SFTLoss.sum_and_count`."""
        return SFTLoss.sum_and_count(self.loss, hidden, labels, projection)


class BalancedLoss(nn.Module):
    """A loss and, for each of its labels, the balancing loss of the model's experts.

    Args:
        loss: the loss.
        balance: carries the balancing loss.
    """

    def __init__(self, loss: TokenLoss, balance: Balance) -> None:
        super().__init__()
        self.loss, self.balance = loss, balance

    def apply_compile_strategy(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Compile the loss (arguments of ``torch.compile``); return this one."""
        self.loss.apply_compile_strategy(*args, **kwargs)
        return self

    def sum_and_count(self, hidden: Tensor, labels: Tensor, projection: Projection) -> tuple[Tensor, Tensor]:
        """See :meth:`torchtune.modules.loss.SFTLoss.sum_and_count`."""
        total, count = self.loss.sum_and_count(hidden, labels, projection)
        return self.balance.add_to(total, count), count


def _has_newer_mean(kind: type) -> bool:
    """Whether a class changed ``forward`` and left ``sum_and_count`` to one that it inherits from."""
    changed = (cls for cls in kind.__mro__ if vars(cls).keys() & {"forward", "sum_and_count"})
    return "sum_and_count" not in vars(next(changed))


def _check(loss: Any, weight: Tensor) -> None:
    """Call ``loss`` as training will, with two labelled positions and with each of them twice."""
    name = type(loss).__name__
    if not isinstance(loss, nn.Module):
        raise LossError(f"loss: {name} is no torch.nn.Module: give a class of torchtune.modules.loss, or one of yours.")
    if any(parameter.requires_grad for parameter in loss.parameters()):
        raise LossError(f"loss: {name} has parameters, which no optimizer would train: make them buffers.")
    loss.to(weight.device)
    rows = torch.arange(2, device=weight.device)
    logits = torch.linspace(-1, 1, 2 * weight.shape[0], device=weight.device).view(2, -1).requires_grad_()
    try:
        once, twice = loss(logits, rows), loss(logits.repeat(2, 1), rows.repeat(2))
    except Exception as error:
        raise LossError(
            f"loss: {name} cannot be called with logits [n, v] and labels [n], which is how fine-tuning calls it: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(once, Tensor) or once.shape not in ((), (2,)) or not once.requires_grad:
        found = f"a tensor {list(once.shape)}" if isinstance(once, Tensor) else f"a {type(once).__name__}"
        detached = " without gradient" if isinstance(once, Tensor) and not once.requires_grad else ""
        raise LossError(f"loss: {name} returns {found}{detached}: return the mean loss, or one for each label [n].")
    if once.dim() == 0 and not torch.allclose(once, twice, rtol=1e-3):
        raise LossError(f"loss: {name} returns no mean over the labels (reduction='sum'?): let it return the mean.")
