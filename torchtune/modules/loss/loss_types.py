"""Interfaces of losses."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX
from torchtune.modules.loss._chunked_logits import Projection
from torchtune.modules.moe.balance import balance_of

_recorded: ContextVar[list[Tensor] | None] = ContextVar("recorded", default=None)


class SFTLoss(ABC):
    """Base class of losses for supervised fine-tuning.

    Recipes call :meth:`sum_and_count`. A loss of hidden states overrides it; a loss that only defines :meth:`forward`,
    the mean over labeled tokens, inherits it.

    Example:
        >>> issubclass(torchtune.modules.loss.LinearCrossEntropyLoss, torchtune.modules.loss.SFTLoss)
        True
    """

    @abstractmethod
    def apply_compile_strategy(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Compile the parts that profit from it (arguments of ``torch.compile``); return the loss."""

    @abstractmethod
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss, a scalar, of the model's outputs [b, s, ...] and targets [b, s]."""

    def sum_and_count(
        self, hidden: Tensor, labels: Tensor, projection: Projection, *, index: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss summed over labeled tokens, and their number.

        Args:
            hidden: result of ``model(..., output="hidden")`` [b, s, d].
            labels: int64 [b, s], already shifted.
            projection: ``model.output``, [..., d] -> logits [..., v].
            index: int64 [n], positions of the labeled tokens in the flattened batch, from :attr:`Batch.label_index
                <torchtune.data.Batch.label_index>`; for losses that select them, which else look for them.

        Returns:
            Sum (scalar) and count (int64 scalar).
        """
        del index  # the loss gets all positions
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


@contextmanager
def keep_row_losses() -> Iterator[list[Tensor]]:
    """Record per-token losses inside the block: losses append them, detached [n], to the yielded list.

    Example:
        >>> loss, labels = torchtune.modules.loss.LinearCrossEntropyLoss(), torch.tensor([[5, -100, 7]])
        >>> with torchtune.modules.loss.keep_row_losses() as kept:
        ...     total, count = loss.sum_and_count(torch.randn(1, 3, 8), labels, torch.nn.Linear(8, 16, bias=False))
        >>> len(torch.cat(kept)) == int(count) == 2
        True
    """
    recorded: list[Tensor] = []
    token = _recorded.set(recorded)
    try:
        yield recorded
    finally:
        _recorded.reset(token)


def record_row_losses(losses: Tensor) -> Tensor:
    """Append ``losses`` [n] to the list of :func:`keep_row_losses`, if any, and return them."""
    recorded = _recorded.get()
    if recorded is not None:
        recorded.append(losses.detach())
    return losses
