"""What a recipe may ask of a loss."""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from torchtune.modules.moe.balance import balance_of


class SFTLoss(ABC):
    """Loss of supervised fine-tuning: outputs of a model against target tokens."""

    @abstractmethod
    def apply_compile_strategy(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Compile the parts that gain from it (arguments of ``torch.compile``); return the loss itself."""

    @abstractmethod
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Outputs of the model [b, s, ...] and targets [b, s] -> scalar."""

    def set_model_output(self, model: nn.Module) -> None:
        """Adapt what ``model`` returns to what this loss needs, once, before training.

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
    """Loss of reinforcement learning on the outputs of several policies."""

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
