"""Training with products in float8."""

from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn

from torchtune.modules import _torchao
from torchtune.modules.conversion import Conversion, ConversionError, ConversionReport, Phase, nearest_module_names
from torchtune.modules.transformer import text_decoder
from torchtune.utils import is_simulated

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

Float8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]

_MULTIPLE = 16  # of widths that the kernels of H100 and later multiply


class Float8Training(Conversion):
    """Conversion that computes the products of the layers' linear layers in float8, forward and backward.

    Weights, gradients and optimizer stay in their dtype, and so do names and checkpoints. Inputs, weights and gradients
    are scaled and rounded for each product; torchao does it. The layers outside of ``layers`` and those whose widths
    are no multiples of 16 compute as before; the report says which.

    Args:
        recipe: one scale for a tensor (``"tensorwise"``, the fastest), or for each row (``"rowwise"``), or for each
            row with weight gradients in high precision (``"rowwise_with_gw_hp"``, the most accurate).
        emulate: compute in high precision with operands rounded to float8, on any device; None does so where there is
            no GPU with float8 products (compute capability 8.9); a simulated device has them.
        enable_fsdp_float8_all_gather: let FSDP round its shards and send a byte for each element of a weight, instead
            of its dtype; the results are the same. The scales of all weights take an all-reduce for each forward pass.
            Without FSDP it changes nothing.

    Raises:
        ConversionError: an unknown recipe, or one that has no scale for a tensor with
            ``enable_fsdp_float8_all_gather``.
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
        """Replace the linear layers.

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

    def post_shard_hook(self, model: nn.Module, *, cpu_offload: bool) -> None:
        """Let FSDP send float8.

        Raises:
            ConversionError: the shards are kept in host memory.
        """
        if not self.gathers_float8:
            return
        if cpu_offload:
            raise ConversionError(
                "Float8Training: enable_fsdp_float8_all_gather rounds shards on the device, and fsdp_cpu_offload=True "
                "keeps them in host memory: set one of the two to False."
            )
        layers = [module for module in model.modules() if _torchao.is_float8_linear(module)]
        # Before FSDP's own hook, which looks at the first call for shards that say how they are gathered
        model.register_forward_pre_hook(lambda *_: _set_scales(layers), prepend=True)


@torch.no_grad()
def _set_scales(layers: list[nn.Module]) -> None:
    """Let FSDP round the shards of these layers by scales that are those of the whole weights."""
    from torch.distributed.tensor import DTensor  # slow to import

    by_group: dict[Any, list[tuple[nn.Module, torch.Tensor]]] = {}
    for layer in layers:
        if isinstance(layer.weight, DTensor):  # else it is gathered already, and has not changed since
            if not _torchao.ShardInFloat8.is_set_on(layer):
                layer.load_state_dict({}, strict=False)  # lets FSDP replace a shard that it pads, which it does once
            (dim,) = (dim for dim, kind in enumerate(layer.weight.placements) if kind.is_shard())
            by_group.setdefault(layer.weight.device_mesh.get_group(dim), []).append((layer, layer.weight.to_local()))
    for group, found in by_group.items():
        largest = torch.stack([shard.abs().amax() if len(shard) else shard.new_zeros(()) for _, shard in found])
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        for (layer, _), scale in zip(found, _torchao.ShardInFloat8.scales(largest, found[0][0]), strict=True):
            _torchao.ShardInFloat8.set_on(layer, scale)
