"""LoRA on weights that will be quantised with the adapter merged in."""

from typing import Any

from torch import Tensor

from torchtune.modules import _torchao
from torchtune.modules._fake_quantized import FakeQuantized, FakeQuantSwitch
from torchtune.modules._recast import recast
from torchtune.modules.conversion import ConversionError
from torchtune.modules.peft._functional import merged_weight
from torchtune.modules.peft.lora import LoRALinear


class QATLoRALinear(FakeQuantized, LoRALinear):
    """LoRA on a weight that will be quantised with the adapter merged into it: y = Q(x) Q(W + (alpha / rank) B A)ᵀ.

    The merged weight is rounded to the dtype of ``W``, as an export does, before it is quantised: what is exported is
    what was trained. Parameters and names are those of :class:`LoRALinear`.

    Args:
        in_dim: width of the input.
        out_dim: width of the output.
        rank: width of the bottleneck.
        alpha: the update is scaled by alpha / rank.
        dropout: must be 0: a merged adapter has no input of its own.
        activation_qat_config: torchao's ``FakeQuantizeConfigBase`` of the input, or None.
        weight_qat_config: of the weight, or None.

    Raises:
        ConversionError: ``rank`` below 1 or ``dropout`` above 0.

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
        check_dropout(dropout)
        self._set_configs(activation_qat_config, weight_qat_config)

    @classmethod
    def from_lora_linear(
        cls,
        lora_linear: LoRALinear,
        activation_qat_config: Any | None = None,
        weight_qat_config: Any | None = None,
    ) -> "QATLoRALinear":
        """The same layer with fake quantizers: it has the very same parameters. See the class for the arguments."""
        check_dropout(lora_linear.dropout.p)
        new = recast(lora_linear, cls)
        new._set_configs(activation_qat_config, weight_qat_config)
        return new

    def _set_configs(self, activation: Any | None, weight: Any | None) -> None:
        self.activation_fake_quantizer = None if activation is None else _torchao.fake_quantizer(activation)
        self.weight_fake_quantizer = None if weight is None else _torchao.fake_quantizer(weight)
        self.fake_quant = FakeQuantSwitch()

    def quantized_weight(self) -> Tensor:
        """The weight ``[out, in]`` with the adapter merged in, in the dtype of the base; gradients reach A and B."""
        if self.disabled:
            return self.weight
        return merged_weight(self.weight, self.lora_a.weight, self.lora_b.weight, self.scaling)


def check_dropout(dropout: float) -> None:
    """Raise ``ConversionError`` unless it is 0."""
    if dropout:
        raise ConversionError(
            f"lora_dropout is {dropout:g}: with fake quantisation the adapter is merged into the weight and has no "
            "input of its own to drop, set it to 0."
        )
