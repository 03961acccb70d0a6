"""DoRA: linear layers with an adapter and separately trained magnitudes."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from torchtune.modules.low_precision.layers import frozen_linear
from torchtune.modules.peft.lora import LoRALinear, lora_projection, merged_weight, updated_weight


class DoRALinear(LoRALinear):
    """LoRA layer with a trained magnitude per row: W' = magnitude · (W + s B A) / ‖W + s B A‖, row by row.

    ``magnitude`` [out] is an additional adapter parameter. The norm is a constant in the backward pass (Liu et al.,
    "DoRA: Weight-Decomposed Low-Rank Adaptation", 2024, section 4.3).

    The adapter is at least float32 for any dtype of the weight: a bfloat16 magnitude would differ from the norm by up
    to 2⁻⁹ of its value, and the model would change before its first step. A and B are float32 too, as in ``peft``,
    because FSDP requires one dtype for all trainable parameters.

    Args:
        in_dim: width of the input.
        out_dim: width of the output.
        rank: rank of the adapter.
        alpha: the update is scaled by alpha / rank.
        dropout: dropout on the adapter's input, in training.
        use_bias: whether the base has a bias.
        quantize_base: store the base in NF4.
        **quantization_kwargs: options of the quantized base.

    Raises:
        ConversionError: ``rank`` is below 1, ``dropout`` is outside [0, 1], or a quantization option is invalid.

    Example:
        >>> from torchtune.modules.peft import DoRALinear
        >>> layer = DoRALinear(in_dim=8, out_dim=4, rank=2, alpha=4)
        >>> layer.adapter_params()
        ['lora_a.weight', 'lora_b.weight', 'magnitude']
    """

    initialize_reads_base: ClassVar[bool] = True
    adapter_parallel_dims: ClassVar[dict[str, tuple[int | None, int | None]]] = {
        **LoRALinear.adapter_parallel_dims,
        "magnitude": (0, None),
    }

    def _make_adapter(self, device: torch.device, dtype: torch.dtype) -> None:
        dtype = torch.promote_types(dtype, torch.float32)
        super()._make_adapter(device, dtype)
        self.magnitude = nn.Parameter(torch.empty(self.out_dim, device=device, dtype=dtype))

    def initialize_parameters(self) -> None:
        """Initialize the adapter so that it changes nothing; requires the loaded base weight. No-op on meta."""
        super().initialize_parameters()
        self.initialize_dora_magnitude()

    @torch.no_grad()
    def initialize_dora_magnitude(self) -> None:
        """Set ``magnitude`` to the row norms of the weight. No-op on meta."""
        if not self.magnitude.is_meta:
            self.magnitude.copy_(self._norms(self.full_weight()))

    def adapter_params(self) -> list[str]:
        """Return the names of the adapter's parameters, relative to this module."""
        return [*super().adapter_params(), "magnitude"]

    @torch.no_grad()
    def _norms(self, weight: Tensor) -> Tensor:
        """Row norms [out] of W + s B A, in at least float32."""
        return updated_weight(weight, self.lora_a.weight, self.lora_b.weight, self.scaling).norm(dim=1)

    @torch.no_grad()
    def merged_weight(self, weight: Tensor) -> Tensor:
        """Merge the adapter into ``weight`` [out, in] in at least float32, and return it in the weight's dtype."""
        return merged_weight(weight, self.lora_a.weight, self.lora_b.weight, self.scaling, self.magnitude)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: [..., in_dim] -> [..., out_dim], in the dtype of ``x``."""
        weight = self.stored_weight()
        if self.disabled:
            return frozen_linear(x, weight, self.bias)
        a = self.lora_a.weight.to(x.dtype)
        b = self.lora_b.weight.to(x.dtype)
        # The norms have no gradient (Liu et al., "DoRA", 2024, section 4.3).
        length = self.magnitude / self._norms(self.full_weight())  # [out]
        if not self.training or self.dropout.p == 0.0:
            y = lora_projection(x, weight, self.bias, a, b, scale=self.scaling)
            return scale_rows(y, length, self.bias).to(x.dtype)
        dropped = self.dropout(x)
        adapted = lora_projection(dropped, weight, None, a, b, scale=self.scaling)
        scaled = (adapted * length).to(x.dtype)
        # The difference is computed first: it is exactly 0 for a new adapter.
        return frozen_linear(x, weight, self.bias) + (scaled - frozen_linear(dropped, weight))


def scale_rows(y: Tensor, length: Tensor, bias: Tensor | None) -> Tensor:
    """Scale outputs ``[..., out]``, except the ``bias`` they include, by ``length`` [out]."""
    if bias is None:
        return y * length
    # In this form the result is exactly y if the length is 1.
    return y + (length - 1) * (y - bias)
