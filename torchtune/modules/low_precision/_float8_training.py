"""Training with products in float8."""

from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import torch
from torch import nn

from torchtune.modules import _torchao
from torchtune.modules.conversion import Conversion, ConversionError, ConversionReport, Phase, nearest_module_names
from torchtune.modules.transformer import text_decoder

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

Float8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]

_MULTIPLE = 16  # of widths that the kernels of H100 and later multiply


class Float8Training(Conversion):
    """Conversion that computes the products of the layers' linear layers in float8, forward and backward.

    Weights, gradients and optimizer stay in their dtype, and so do names and checkpoints. Inputs, weights and gradients
    are scaled and rounded for each product; torchao does it. The layers outside of ``layers`` and those whose widths
    are no multiples of 16 compute as before; the report says which. FSDP gathers the weights in their own dtype.

    Args:
        recipe: one scale for a tensor (``"tensorwise"``, the fastest), or for each row (``"rowwise"``), or for each
            row with weight gradients in high precision (``"rowwise_with_gw_hp"``, the most accurate).
        emulate: compute in high precision with operands rounded to float8, on any device; None does so where there is
            no GPU with float8 products (compute capability 8.9).

    Raises:
        ConversionError: an unknown recipe.
        UserError: torchao is not installed.
    """

    phase: ClassVar[Phase] = Phase.FLOAT8_TRAINING

    def __init__(self, recipe: Float8Recipe = "tensorwise", emulate: bool | None = None) -> None:
        if recipe not in get_args(Float8Recipe):
            hint = "MXFP8 and NVFP4 are not there; " if str(recipe).lower().startswith(("mx", "nv")) else ""
            raise ConversionError(
                f"Float8Training: recipe is '{recipe}': {hint}choose out of {', '.join(get_args(Float8Recipe))}."
            )
        if emulate is None:
            emulate = not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9)
        self.recipe, self.emulate = recipe, emulate

    def convert(self, model: nn.Module) -> ConversionReport:
        """Replace the linear layers.

        Raises:
            ConversionError: no layer has widths that are multiples of 16.
        """
        prefix = "text.layers." if text_decoder(model) is not model else "layers."
        linears = {
            path: module
            for path, module in model.named_modules()
            if path.startswith(prefix) and isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
        }
        chosen = {path for path, module in linears.items() if not any(size % _MULTIPLE for size in module.weight.shape)}
        if not chosen:
            raise ConversionError(
                f"Float8Training: none of the {len(linears)} linear layers has widths that are multiples of "
                f"{_MULTIPLE}: remove the conversion."
            )
        _torchao.compute_in_float8(model, chosen, self.recipe, emulate=self.emulate)
        note = f"{self.recipe}, emulated: slower than without" if self.emulate else self.recipe
        left = [path for path in linears if path not in chosen]
        if left:
            names = ", ".join(nearest_module_names("", left, count=4))
            note += f"; {len(left)} stay as they are, their widths are no multiples of {_MULTIPLE}: {names}"
        return ConversionReport("Float8 training", sorted(chosen), note=note)

    def parallel_style(self, module: nn.Module, style: "ParallelStyle") -> "ParallelStyle":
        """Refuse tensor parallelism: a scale of a shard is not that of the tensor."""
        if _torchao.is_float8_linear(module):
            raise ConversionError("Float8Training: layers in float8 cannot be split: set tensor_parallel_dim=1.")
        return style
