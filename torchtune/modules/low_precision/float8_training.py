"""Float8 training: linear layers whose matrix products are computed in float8, forward and backward."""

from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import torch
from torch import nn

from torchtune.modules.conversion import (
    Conversion,
    ConversionError,
    ConversionReport,
    Phase,
    apply_conversions,
    nearest_module_names,
)
from torchtune.modules.low_precision import torchao_interface
from torchtune.modules.transformer import text_decoder
from torchtune.utils import is_simulated

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

Float8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]

_WIDTH_MULTIPLE = 16  # float8 kernels of H100 and later GPUs need widths that are multiples of 16


class Float8Training(Conversion):
    """Conversion that runs the matrix products of linear layers in float8, forward and backward, with torchao.

    Weights, gradients and optimizer states keep their dtype, and checkpoints do not change. Inputs, weights and
    gradients are scaled and rounded for each product. Linear layers outside ``layers`` stay in high precision. Layers
    with widths that are not multiples of 16 also do; the conversion report lists them.

    Args:
        recipe: scaling: ``"tensorwise"`` (one scale per tensor, fastest), ``"rowwise"`` (one scale per row), or
            ``"rowwise_with_gw_hp"`` (per row, with weight gradients in high precision; most accurate).
        emulate: round the operands to float8, but multiply them in high precision, on any device. None emulates only
            without a GPU that has float8 kernels (compute capability 8.9); a simulated device has them.

    Raises:
        ConversionError: ``recipe`` is unknown.
        UserError: torchao is not installed.

    Example:
        >>> torchtune.modules.low_precision.Float8Training("rowwise").phase.name
        'FLOAT8_TRAINING'
    """

    phase: ClassVar[Phase] = Phase.FLOAT8_TRAINING

    def __init__(self, recipe: Float8Recipe = "tensorwise", emulate: bool | None = None) -> None:
        if recipe not in get_args(Float8Recipe):
            hint = ""
            if str(recipe).lower().startswith(("mx", "nv")):
                hint = "MXFP8 and NVFP4 are not there; "
            raise ConversionError(
                f"Float8Training: recipe is '{recipe}': {hint}choose out of {', '.join(get_args(Float8Recipe))}."
            )
        if emulate is None:
            # Compute capability 8.9 (Ada) is the first with products in float8.
            has_float8_kernels = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
            emulate = not (has_float8_kernels or is_simulated())
        self.recipe = recipe
        self.emulate = emulate

    def convert(self, model: nn.Module) -> ConversionReport:
        """Replace the plain linear layers inside ``layers`` of the text decoder by float8 layers.

        Raises:
            ConversionError: no layer has widths that are multiples of 16.
        """
        decoder = text_decoder(model)
        prefix = "layers."  # of the paths to convert: the output projection and image encoders stay as they are
        for path, module in model.named_modules():
            if module is decoder and path:  # the decoder of a multimodal model
                prefix = f"{path}.layers."
        supported = set()
        unsupported = []
        for path, module in model.named_modules():
            # A subclass with a forward of its own computes more, which a float8 layer would drop.
            is_plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
            if not is_plain or not path.startswith(prefix):
                continue
            out_dim, in_dim = module.weight.shape
            if out_dim % _WIDTH_MULTIPLE == 0 and in_dim % _WIDTH_MULTIPLE == 0:
                supported.add(path)
            else:
                unsupported.append(path)
        if not supported:
            raise ConversionError(
                f"Float8Training: none of the {len(unsupported)} linear layers has widths that are multiples of "
                f"{_WIDTH_MULTIPLE}: remove the conversion."
            )
        torchao_interface.convert_to_float8(model, supported, self.recipe, emulate=self.emulate)
        note = self.recipe
        if self.emulate:
            note += ", emulated: slower than without"
        if unsupported:
            names = ", ".join(nearest_module_names("", unsupported, count=4))  # the first ones, layer numbers as "*"
            note += (
                f"; {len(unsupported)} stay as they are, their widths are no multiples of {_WIDTH_MULTIPLE}: {names}"
            )
        return ConversionReport("Float8 training", sorted(supported), note=note)

    def parallel_style(self, module: nn.Module, style: "ParallelStyle") -> "ParallelStyle":
        """Raise for float8 layers, because tensor parallelism would scale each shard instead of the whole tensor."""
        if torchao_interface.is_float8_linear(module):
            raise ConversionError("Float8Training: layers in float8 cannot be split: set tensor_parallel_dim=1.")
        return style


def convert_to_float8_training(model: nn.Module, fp8_recipe_name: str | None = None) -> nn.Module:
    """Compute the linear layers of the transformer layers in float8, in place.

    Args:
        model: decoder without adapters, possibly on the meta device.
        fp8_recipe_name: see :class:`~torchtune.modules.low_precision.Float8Training`; None is ``"tensorwise"``.

    Returns:
        ``model``.

    Raises:
        ConversionError: the recipe is unknown, or excluded by another conversion of the model.
    """
    apply_conversions(model, [Float8Training(fp8_recipe_name or "tensorwise")])
    return model
