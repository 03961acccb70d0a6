"""DoRA: linear layers with an adapter that trains direction and magnitude separately."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from torchtune.modules.peft._functional import lora_projection, merged_weight, updated_weight
from torchtune.modules.peft.lora import LoRALinear
from torchtune.modules.stored_linear import frozen_linear


class DoRALinear(LoRALinear):
    """LoRA with a trained magnitude per row: W' = magnitude · (W + s B A) / ‖W + s B A‖, row by row.

    ``magnitude`` [out] is one more parameter of the adapter. The norm is treated as a constant in the backward pass
    (Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation", 2024, section 4.3).

    The adapter is float32 or wider for any dtype of the weight: a magnitude in bfloat16 would differ from the norm by
    up to 2⁻⁹ of it, and the model would change before its first step. A and B are float32 too, as in ``peft``, because
    FSDP requires one dtype of all trainable parameters.

    Args:
        in_dim: width of the input.
        out_dim: width of the output.
        rank: width of the bottleneck.
        alpha: the update is scaled by alpha / rank.
        dropout: dropout on the adapter's input, in training.
        use_bias: whether the base has a bias.
        quantize_base: store the base in NF4.
        **quantization_kwargs: options of the quantised base.

    Raises:
        ConversionError: ``rank`` below 1, ``dropout`` outside [0, 1], or an option that does not fit.

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
        """Initialise the adapter to the identity; requires the loaded base weight. No-op on meta."""
        super().initialize_parameters()
        self.initialize_dora_magnitude()

    @torch.no_grad()
    def initialize_dora_magnitude(self) -> None:
        """Set ``magnitude`` to the row norms of the weight. No-op on meta."""
        if not self.magnitude.is_meta:
            self.magnitude.copy_(self._norm(self.full_weight()))

    def adapter_params(self) -> list[str]:
        """Names of the adapter's parameters, relative to this module."""
        return [*super().adapter_params(), "magnitude"]

    @torch.no_grad()
    def _norm(self, weight: Tensor) -> Tensor:
        """Row norms of W + s B A, in float32 at least: [out]."""
        return updated_weight(weight, self.lora_a.weight, self.lora_b.weight, self.scaling).norm(dim=1)

    @torch.no_grad()
    def merged_weight(self, weight: Tensor) -> Tensor:
        """``weight`` [out, in] with the adapter merged in: computed in float32 at least, its dtype kept."""
        return merged_weight(weight, self.lora_a.weight, self.lora_b.weight, self.scaling, self.magnitude)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_dim] -> [..., out_dim], in the dtype of ``x``."""
        weight = self.stored_weight()
        if self.disabled:
            return frozen_linear(x, weight, self.bias)
        a, b = self.lora_a.weight.to(x.dtype), self.lora_b.weight.to(x.dtype)
        length = self.magnitude / self._norm(self.full_weight())
        if not self.training or self.dropout.p == 0.0:
            y = lora_projection(x, weight, self.bias, a, b, scale=self.scaling)
            return scale_rows(y, length, self.bias).to(x.dtype)
        dropped = self.dropout(x)
        scaled = (lora_projection(dropped, weight, None, a, b, scale=self.scaling) * length).to(x.dtype)
        # The difference first: it is exactly 0 for a newly initialised adapter.
        return frozen_linear(x, weight, self.bias) + (scaled - frozen_linear(dropped, weight))


def scale_rows(y: Tensor, length: Tensor, bias: Tensor | None) -> Tensor:
    """Scale outputs ``[..., out]`` by ``length`` [out], except for ``bias``, which they include."""
    # With a bias, this is exactly y if the length is 1.
    return y * length if bias is None else y + (length - 1) * (y - bias)
