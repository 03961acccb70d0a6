"""What a recipe may ask of a loss."""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX
from torchtune.modules.loss._projection import Projection
from torchtune.modules.moe.balance import balance_of


class SFTLoss(ABC):
    """Loss of supervised fine-tuning: outputs of a model against target tokens.

    Recipes call :meth:`sum_and_count`. A loss that reads hidden states overrides it; one that has only
    :meth:`forward`, the mean over labelled positions of logits, inherits it.

    Example:
        >>> issubclass(torchtune.modules.loss.LinearCrossEntropyLoss, torchtune.modules.loss.SFTLoss)
        True
    """

    @abstractmethod
    def apply_compile_strategy(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Compile the parts that gain from it (arguments of ``torch.compile``); return the loss itself."""

    @abstractmethod
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Outputs of the model [b, s, ...] and targets [b, s] -> scalar."""

    def sum_and_count(self, hidden: Tensor, labels: Tensor, projection: Projection) -> tuple[Tensor, Tensor]:
        """Loss summed over positions with a label, and the number of these positions.

        Args:
            hidden: what ``model(..., output="hidden")`` returns [b, s, d].
            labels: int64 [b, s], already shifted.
            projection: ``model.output``, [..., d] -> logits [..., v].

        Returns:
            sum (scalar) and count (int64 scalar).
        """
        count = (labels != getattr(self, "ignore_index", CROSS_ENTROPY_IGNORE_IDX)).sum()
        if type(self).set_model_output is not SFTLoss.set_model_output:  # an older loss, which has its projection
            return self(hidden, labels) * count, count
        return self(projection(hidden).float(), labels) * count, count

    def set_model_output(self, model: nn.Module) -> None:
        """Adapt what ``model`` returns to what this loss needs, once, before training; for older recipes.

        If the model's experts are to be balanced (:class:`torchtune.modules.moe.BalancingLoss`), that loss is added.
        """
        balance = balance_of(model)
        if balance is not None and isinstance(self, nn.Module):
            self.register_forward_hook(lambda module, inputs, output: balance.add_to(output))

    @property
    def tp_requires_loss_parallel_ctx_manager(self) -> bool:
        """Whether tensor parallelism must run this loss inside ``loss_parallel()``."""
        return False

    def patch_tp_plan(self, tp_plan: dict[str, Any]) -> dict[str, Any]:
        """The tensor-parallel plan of the model, changed to what this loss needs."""
        return tp_plan


class RLLoss(ABC):
    """Loss of reinforcement learning on the outputs of several policies.

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
        """Compile the parts that gain from it (arguments of ``torch.compile``); return the loss itself."""

    @abstractmethod
    def forward(
        self,
        pi_old_outputs: Tensor,
        pi_outputs: Tensor,
        ref_outputs: Tensor,
        advantages: Tensor,
        padding_masks: Tensor | None = None,
    ) -> Any:
        """Outputs of the old, current and reference policy [b, s, ...] and advantages -> loss and statistics."""

    def set_model_output(self, model: nn.Module) -> None:  # noqa: B027
        """Adapt what ``model`` returns to what this loss needs, once, before training."""
