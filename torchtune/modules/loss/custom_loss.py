"""Interfaces of losses, and adapters that give any loss the interface that recipes call."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypedDict

import torch
from torch import Tensor, nn

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, label_index
from torchtune.modules.moe.balance import Balance, balance_of
from torchtune.modules.transformer import is_causal
from torchtune.utils import UserError, is_simulated

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it from Python 3.11 on

# Hidden states [..., d] -> logits [..., v].
Projection = Callable[[Tensor], Tensor]


class TokenOptions(TypedDict, total=False):
    """Optional arguments of :meth:`SFTLoss.sum_and_count`, which a loss need not have.

    Recipes pass them as keywords. An adapter, which hands them on unread, names them together:
    ``**options: Unpack[TokenOptions]``.
    """

    index: Tensor | None
    weights: Tensor | None
    row_losses: list[Tensor] | None
    metrics: dict[str, tuple[Tensor, Tensor]] | None


class SFTLoss(ABC):
    """Base class of losses for supervised fine-tuning.

    Recipes call :meth:`sum_and_count`. A loss of hidden states overrides it; a loss that only defines :meth:`forward`,
    the mean over labeled tokens, inherits it.

    Attributes:
        predicts_tokens: whether labels are tokens, which the model must not see before it predicts them.

    Example:
        >>> issubclass(torchtune.modules.loss.LinearCrossEntropyLoss, torchtune.modules.loss.SFTLoss)
        True
    """

    predicts_tokens: ClassVar[bool] = True

    @abstractmethod
    def apply_compile_strategy(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Compile the parts that profit from it (arguments of ``torch.compile``); return the loss."""

    @abstractmethod
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss, a scalar, of the model's outputs [b, s, ...] and targets [b, s]."""

    def sum_and_count(
        self,
        hidden: Tensor,
        labels: Tensor,
        projection: Projection,
        *,
        index: Tensor | None = None,
        weights: Tensor | None = None,
        row_losses: list[Tensor] | None = None,
        metrics: dict[str, tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the weighted sum of the losses of labeled tokens, and the sum of their weights.

        Args:
            hidden: result of ``model(..., output="hidden")`` [b, s, d].
            labels: int64 [b, s], already shifted.
            projection: ``model.output``, [..., d] -> logits [..., v].
            index: int64 [n], positions of the labeled tokens in the flattened batch, from :attr:`Batch.label_index
                <torchtune.data.Batch.label_index>`; for losses that select them, which else look for them.
            weights: float32 [b, s], factors of the losses of single tokens, from :attr:`Batch.label_weights
                <torchtune.data.Batch.label_weights>`; None: each is 1.
            row_losses: a loss of single tokens appends the losses of the labeled tokens, or of all positions, to this
                list: detached tensors that together are [n] or [b * s], for values that are logged.
            metrics: dict to which a loss adds other values that are logged, by name: (sum, count), both scalars.

        Returns:
            Sum (scalar) and count of labels (int64 scalar), or sum of their weights (float32 scalar).

        Raises:
            LossError: the labels have weights, and the loss only returns a mean.
        """
        del index, row_losses, metrics  # the loss gets all positions, and returns their mean
        refuse_weights(self, weights)
        ignore_index = getattr(self, "ignore_index", CROSS_ENTROPY_IGNORE_IDX)
        count = (labels != ignore_index).sum()
        if type(self).set_model_output is not SFTLoss.set_model_output:  # an older loss, which knows its projection
            mean = self(hidden, labels)
        else:
            mean = self(projection(hidden).float(), labels)  # of logits [b, s, v]
        return mean * count, count

    def set_model_output(self, model: nn.Module) -> None:
        """Prepare ``model`` and this loss for each other before training; for older recipes.

        If the model has a balancing loss (:class:`torchtune.modules.moe.BalancingLoss`), it is added.
        """
        balance = balance_of(model)
        if balance is not None and isinstance(self, nn.Module):
            self.register_forward_hook(lambda module, inputs, output: balance.add_to(output))

    @property
    def tp_requires_loss_parallel_ctx_manager(self) -> bool:
        """Whether tensor parallelism must run this loss inside ``loss_parallel()``."""
        return False

    def patch_tp_plan(self, tp_plan: dict[str, Any]) -> dict[str, Any]:
        """Return the model's tensor-parallel plan, adapted to this loss."""
        return tp_plan


class RLLoss(ABC):
    """Base class of reinforcement learning losses on the outputs of several policies.

    Example:
        >>> class Mine(torchtune.modules.loss.RLLoss):
        ...     def apply_compile_strategy(self, *args, **kwargs):
        ...         return self
        ...     def forward(self, logprobs, advantages):
        ...         return -(logprobs * advantages).mean()
        ...
        >>> Mine().forward(torch.tensor([-1.0]), torch.tensor([2.0]))
        tensor(2.)
    """

    @abstractmethod
    def apply_compile_strategy(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Compile the parts that profit from it (arguments of ``torch.compile``); return the loss."""

    @abstractmethod
    def forward(
        self,
        pi_old_outputs: Tensor,
        pi_outputs: Tensor,
        ref_outputs: Tensor,
        advantages: Tensor,
        padding_masks: Tensor | None = None,
    ) -> Any:
        """Compute loss and statistics from outputs of the old, current and reference policy [b, s, ...]."""

    def set_model_output(self, model: nn.Module) -> None:  # noqa: B027
        """Prepare ``model`` and this loss for each other before training."""


class TokenLoss(Protocol):
    """Interface of losses in recipes: sum over labeled tokens and their number, which add up over micro-batches."""

    def sum_and_count(
        self, hidden: Tensor, labels: Tensor, projection: Projection, **options: "Unpack[TokenOptions]"
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`torchtune.modules.loss.SFTLoss.sum_and_count`."""


class LossError(UserError, TypeError):
    """Raised for a loss that recipes cannot train with."""


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
    if not isinstance(loss, SFTLoss) or loss.predicts_tokens:  # a plain module of logits predicts tokens
        check_causal(model, type(loss).__name__)
    if not isinstance(loss, SFTLoss):
        projection = getattr(model, "output", None)
        if projection is not None:
            weight = projection.weight
        else:  # a module of the user's own, without a known vocabulary: any size serves the check
            weight = next(model.parameters())
        _check(loss, len(weight), weight.device)
        loss = LogitsLoss(loss)
    elif _overrides_only_forward(type(loss)):
        loss.set_model_output(model)  # an older loss takes its projection from the model
        loss = MeanLoss(loss)
    else:
        parameters = inspect.signature(loss.sum_and_count).parameters
        takes_any_keyword = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        arguments = TokenOptions.__annotations__.keys() & parameters.keys()
        if not takes_any_keyword and arguments != TokenOptions.__annotations__.keys():
            loss = OlderLoss(loss, arguments)  # written before recipes passed all of these arguments
    balance = balance_of(model)
    if balance is not None:  # a forward hook that has added it already leaves nothing to add
        loss = BalancedLoss(loss, balance)
    return loss


def check_causal(model: nn.Module, name: str) -> None:
    """Raise :class:`LossError` if a model sees the tokens that the loss called ``name`` lets it predict."""
    if not is_causal(model):
        raise LossError(
            f"loss: {name} predicts tokens, and the model attends to later tokens, so that it sees them: remove "
            "torchtune.modules.BidirectionalAttention from model_converters, or train embeddings or classes."
        )


def zero_loss(hidden: Tensor, projection: Projection) -> Tensor:
    """Return the loss of a batch without labels: 0, with a graph to the parameters that other batches train.

    With FSDP, the other ranks wait for the gradients of this one.

    Args:
        hidden: hidden states ``[n, d]``.
        projection: ``[n, d]`` -> logits ``[n, v]``.
    """
    logits_of_first = projection(hidden[:1]).float()
    return logits_of_first.sum() * 0.0 + hidden.sum() * 0.0


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
        self,
        hidden: Tensor,
        labels: Tensor,
        projection: Projection,
        *,
        index: Tensor | None = None,
        weights: Tensor | None = None,
        row_losses: list[Tensor] | None = None,
        metrics: dict[str, tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`torchtune.modules.loss.SFTLoss.sum_and_count`."""
        del metrics  # the loss gets the logits, and returns losses alone
        hidden = hidden.flatten(0, -2)  # [b * s, d]
        labels = labels.flatten()  # [b * s]
        if index is None:
            index = label_index(labels)
        count = torch.full((), len(index), device=labels.device)
        if not len(index):  # the loss may not take empty tensors; other ranks wait for this one's gradients
            return zero_loss(hidden, projection), count
        logits = projection(hidden[index]).float()  # [n, v]
        losses = self.loss(logits, labels[index])  # [n], or their mean
        if losses.dim() == 0:  # the mean, whose tokens can neither be weighted nor logged one by one
            refuse_weights(self.loss, weights)
            return losses * count, count
        if row_losses is not None:
            row_losses.append(losses.detach())
        if weights is not None:
            label_weights = weights.flatten()[index]  # [n]
            return (losses * label_weights).sum(), label_weights.sum()
        return losses.sum(), count


class MeanLoss(_Adapter):
    """An :class:`SFTLoss` that only defines ``forward`` (mean over labeled tokens), with its model output set."""

    def sum_and_count(
        self, hidden: Tensor, labels: Tensor, projection: Projection, **options: "Unpack[TokenOptions]"
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`torchtune.modules.loss.SFTLoss.sum_and_count`."""
        return SFTLoss.sum_and_count(self.loss, hidden, labels, projection, **options)


class OlderLoss(_Adapter):
    """An :class:`SFTLoss` whose ``sum_and_count`` was written without some of its optional arguments.

    Args:
        loss: the loss.
        arguments: names of the optional arguments that the loss takes.
    """

    def __init__(self, loss: SFTLoss, arguments: set[str]) -> None:
        super().__init__(loss)
        self.arguments = arguments

    def sum_and_count(
        self, hidden: Tensor, labels: Tensor, projection: Projection, **options: "Unpack[TokenOptions]"
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`torchtune.modules.loss.SFTLoss.sum_and_count`."""
        if "weights" not in self.arguments:  # the other options change no result
            refuse_weights(self.loss, options.get("weights"))
        accepted_options = {name: value for name, value in options.items() if name in self.arguments}
        return self.loss.sum_and_count(hidden, labels, projection, **accepted_options)


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
        self, hidden: Tensor, labels: Tensor, projection: Projection, **options: "Unpack[TokenOptions]"
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`torchtune.modules.loss.SFTLoss.sum_and_count`."""
        total, count = self.loss.sum_and_count(hidden, labels, projection, **options)
        return self.balance.add_to(total, count), count


def innermost_loss(loss: Any) -> Any:
    """Return the loss of the config inside the adapters of :func:`setup_loss`."""
    while isinstance(loss, _Adapter):
        loss = loss.loss
    return loss


def refuse_weights(loss: Any, weights: Tensor | None) -> None:
    """Raise :class:`LossError` if labels have weights, for a loss that cannot apply them."""
    if weights is not None:
        raise LossError(
            f"loss: rows of the data have weights, which {type(loss).__name__} cannot apply: return the losses of "
            "single tokens (reduction='none'), or use torchtune.modules.loss.LinearCrossEntropyLoss."
        )


def _overrides_only_forward(kind: type) -> bool:
    """Whether a class overrides ``forward`` but not ``sum_and_count``."""
    for cls in kind.__mro__:
        if "sum_and_count" in vars(cls):
            return False
        if "forward" in vars(cls):
            return True
    return False


def _check(loss: Any, vocab_size: int, device: torch.device) -> None:
    """Call ``loss`` as in training, with two labeled tokens and with each of them twice; the means must agree.

    The loss is moved to ``device``. Raises :class:`LossError` if it is unsuitable.
    """
    name = type(loss).__name__
    if not isinstance(loss, nn.Module):
        raise LossError(f"loss: {name} is no torch.nn.Module: give a class of torchtune.modules.loss, or one of yours.")
    if any(parameter.requires_grad for parameter in loss.parameters()):
        raise LossError(f"loss: {name} has parameters, which no optimizer would train: make them buffers.")
    loss.to(device)  # its buffers, such as class weights
    labels = torch.arange(2, device=device)
    values = torch.linspace(-1, 1, 2 * max(vocab_size, 2), device=device)  # the two labels need two tokens
    logits = values.view(2, -1).requires_grad_()  # [2, v]
    try:
        once = loss(logits, labels)
        twice = loss(logits.repeat(2, 1), labels.repeat(2))
    except Exception as error:  # of any class: the loss is code of the user
        raise LossError(
            f"loss: {name} cannot be called with logits [n, v] and labels [n], which is how fine-tuning calls it: "
            f"{type(error).__name__}: {error}"
        ) from error
    problem = None
    if not isinstance(once, Tensor):
        problem = f"a {type(once).__name__}"
    elif not once.requires_grad:
        problem = f"a tensor {list(once.shape)} without gradient"
    elif once.shape not in ((), (2,)):
        problem = f"a tensor {list(once.shape)}"
    if problem is not None:
        raise LossError(f"loss: {name} returns {problem}: return the mean loss, or one for each label [n].")
    returns_mean = once.dim() == 0
    # A mean is the same for tokens that are all there twice, a sum is twice as large. Simulated tensors have no values.
    if returns_mean and not is_simulated() and not torch.allclose(once, twice, rtol=1e-3):
        raise LossError(f"loss: {name} returns no mean over the labels (reduction='sum'?): let it return the mean.")
