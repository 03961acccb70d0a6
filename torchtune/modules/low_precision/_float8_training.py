"""Float8 training."""

from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn

from torchtune.modules import torchao_formats
from torchtune.modules.conversion import Conversion, ConversionError, ConversionReport, Phase, nearest_module_names
from torchtune.modules.transformer import text_decoder
from torchtune.utils import is_simulated

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

Float8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]

_MULTIPLE = 16  # float8 kernels of H100 and later need widths that are multiples of this


class Float8Training(Conversion):
    """Conversion that runs the matrix products of linear layers in float8, forward and backward, with torchao.

    Weights, gradients and optimizer states keep their dtype, and checkpoints do not change. Inputs, weights and
    gradients are scaled and rounded for each product. Linear layers outside of ``layers``, or with widths that are not
    multiples of 16, stay in high precision; the report lists the latter.

    Args:
        recipe: scaling: ``"tensorwise"`` (one scale per tensor, fastest), ``"rowwise"`` (one scale per row), or
            ``"rowwise_with_gw_hp"`` (per row, with weight gradients in high precision; most accurate).
        emulate: round the operands to float8 and multiply them in high precision, on any device. None: only if there
            is no GPU with float8 kernels (compute capability 8.9); a simulated device has them.
        enable_fsdp_float8_all_gather: make FSDP all-gather weights in float8 instead of their dtype; the results are
            the same. The scales need one all-reduce per forward pass. Without FSDP it has no effect.

    Raises:
        ConversionError: ``recipe`` is unknown, or is not ``"tensorwise"`` with ``enable_fsdp_float8_all_gather``.
        UserError: torchao is not installed.

    Example:
        >>> torchtune.modules.low_precision.Float8Training("rowwise").phase.name
        'FLOAT8_TRAINING'
    """

    phase: ClassVar[Phase] = Phase.FLOAT8_TRAINING

    def __init__(
        self,
        recipe: Float8Recipe = "tensorwise",
        emulate: bool | None = None,
        enable_fsdp_float8_all_gather: bool = False,
    ) -> None:
        if recipe not in get_args(Float8Recipe):
            hint = "MXFP8 and NVFP4 are not there; " if str(recipe).lower().startswith(("mx", "nv")) else ""
            raise ConversionError(
                f"Float8Training: recipe is '{recipe}': {hint}choose out of {', '.join(get_args(Float8Recipe))}."
            )
        if enable_fsdp_float8_all_gather and recipe != "tensorwise":
            raise ConversionError(
                f"Float8Training: enable_fsdp_float8_all_gather needs one scale for a weight, and recipe={recipe} has "
                "one for each row and, in backward passes, each column: set recipe=tensorwise, or leave it out."
            )
        if emulate is None:
            has_products = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
            emulate = not (has_products or is_simulated())
        self.recipe, self.emulate, self.gathers_float8 = recipe, emulate, enable_fsdp_float8_all_gather

    def convert(self, model: nn.Module) -> ConversionReport:
        """Replace linear layers by float8 layers.

        Raises:
            ConversionError: no layer has widths that are multiples of 16.
        """
        decoder = text_decoder(model)
        path = next(name for name, module in model.named_modules() if module is decoder)
        prefix = f"{path}.layers." if path else "layers."
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
        torchao_formats.convert_to_float8(model, chosen, self.recipe, emulate=self.emulate)
        note = f"{self.recipe}, emulated: slower than without" if self.emulate else self.recipe
        left = [path for path in linears if path not in chosen]
        if left:
            names = ", ".join(nearest_module_names("", left, count=4))
            note += f"; {len(left)} stay as they are, their widths are no multiples of {_MULTIPLE}: {names}"
        return ConversionReport("Float8 training", sorted(chosen), note=note)

    def parallel_style(self, module: nn.Module, style: "ParallelStyle") -> "ParallelStyle":
        """Raise for float8 layers: tensor parallelism would scale each shard instead of the tensor."""
        if torchao_formats.is_float8_linear(module):
            raise ConversionError("Float8Training: layers in float8 cannot be split: set tensor_parallel_dim=1.")
        return style

    def post_shard_hook(self, model: nn.Module, *, cpu_offload: bool) -> None:
        """Make FSDP all-gather float8, if enabled.

        Raises:
            ConversionError: the shards are in host memory.
        """
        if not self.gathers_float8:
            return
        if cpu_offload:
            raise ConversionError(
                "Float8Training: enable_fsdp_float8_all_gather rounds shards on the device, and fsdp_cpu_offload=True "
                "keeps them in host memory: set one of the two to False."
            )
        layers = [module for module in model.modules() if torchao_formats.is_float8_linear(module)]
        # Before FSDP's own hook, which checks at the first call whether shards have all-gather hooks
        model.register_forward_pre_hook(lambda *_: _set_scales(layers), prepend=True)


@torch.no_grad()
def _set_scales(layers: list[nn.Module]) -> None:
    """Set the float8 scales of the full weights on the shards of these layers."""
    from torch.distributed.tensor import DTensor  # slow to import

    by_group: dict[Any, list[tuple[nn.Module, torch.Tensor]]] = {}
    for layer in layers:
        if isinstance(layer.weight, DTensor):  # else it is all-gathered already and unchanged
            if not torchao_formats.ShardInFloat8.is_set_on(layer):
                layer.load_state_dict({}, strict=False)  # makes FSDP replace a padded shard now, not later
            (dim,) = (dim for dim, kind in enumerate(layer.weight.placements) if kind.is_shard())
            by_group.setdefault(layer.weight.device_mesh.get_group(dim), []).append((layer, layer.weight.to_local()))
    for group, found in by_group.items():
        largest = torch.stack([shard.abs().amax() if len(shard) else shard.new_zeros(()) for _, shard in found])
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        for (layer, _), scale in zip(found, torchao_formats.ShardInFloat8.scales(largest, found[0][0]), strict=True):
            torchao_formats.ShardInFloat8.set_on(layer, scale)
