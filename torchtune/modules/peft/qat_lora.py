"""Quantization-aware training with LoRA."""

from typing import Any

from torch import Tensor

from torchtune.modules.conversion import ConversionError, change_class
from torchtune.modules.low_precision.fake_quantization import FakeQuantized, FakeQuantSwitch
from torchtune.modules.low_precision.torchao_interface import fake_quantizer
from torchtune.modules.peft.lora import LoRALinear, merged_weight


class QATLoRALinear(FakeQuantized, LoRALinear):
    """LoRA layer that fake-quantizes the merged weight: y = Q(x) Q(W + (alpha / rank) B A)ᵀ.

    The merged weight is rounded to the dtype of ``W`` before it is quantized, as in an export, so that training matches
    the exported model. Parameters have the names of :class:`LoRALinear`.

    Args:
        in_dim: width of the input.
        out_dim: width of the output.
        rank: rank of the adapter.
        alpha: the update is scaled by alpha / rank.
        dropout: must be 0, because a merged adapter has no separate input.
        activation_qat_config: torchao's ``FakeQuantizeConfigBase`` of the input, or None.
        weight_qat_config: torchao's ``FakeQuantizeConfigBase`` of the weight, or None.

        Raises:
            ConversionError: ``rank`` is below 1 or ``dropout`` is above 0.

    Example:
        >>> layer = torchtune.modules.peft.QATLoRALinear(8, 4, rank=2, alpha=4)
        >>> layer(torch.ones(1, 8)).shape
        torch.Size([1, 4])
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        rank: int,
        alpha: float,
        dropout: float = 0.0,
        activation_qat_config: Any | None = None,
        weight_qat_config: Any | None = None,
    ) -> None:
        super().__init__(in_dim, out_dim, rank, alpha, dropout)
        check_no_dropout(dropout)
        self._set_configs(activation_qat_config, weight_qat_config)

    @classmethod
    def from_lora_linear(
        cls,
        lora_linear: LoRALinear,
        activation_qat_config: Any | None = None,
        weight_qat_config: Any | None = None,
    ) -> "QATLoRALinear":
        """Make the layer from a LoRA layer, with the same parameter objects. See the class for the arguments."""
        check_no_dropout(lora_linear.dropout.p)
        new = change_class(lora_linear, cls)
        new._set_configs(activation_qat_config, weight_qat_config)
        return new

    def _set_configs(self, activation: Any | None, weight: Any | None) -> None:
        self.activation_fake_quantizer = None if activation is None else fake_quantizer(activation)
        self.weight_fake_quantizer = None if weight is None else fake_quantizer(weight)
        self.fake_quant = FakeQuantSwitch()

    def weight_to_quantize(self) -> Tensor:
        """Return the merged weight ``[out, in]`` in the dtype of the base; gradients flow to A and B."""
        if self.disabled:
            return self.weight
        return merged_weight(self.weight, self.lora_a.weight, self.lora_b.weight, self.scaling)


def check_no_dropout(dropout: float) -> None:
    """Raise ``ConversionError`` unless ``dropout`` is 0."""
    if dropout:
        raise ConversionError(
            f"lora_dropout is {dropout:g}: with fake quantization the adapter is merged into the weight and has no "
            "input of its own to drop, set it to 0."
        )
