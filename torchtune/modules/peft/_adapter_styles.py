"""Tensor parallelism of adapters, which are sharded like their base weight."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from torchtune.modules.low_precision.formats import Stored
from torchtune.modules.parallel._collectives import sum_and_split_sequence, sum_over_ranks
from torchtune.modules.parallel._styles import (
    ColwiseParallel,
    Dims,
    ParallelError,
    RowwiseParallel,
    local_shard,
    local_weight,
    replicated,
)
from torchtune.modules.peft._functional import lora_projection, updated_weight
from torchtune.modules.peft.dora import DoRALinear, scale_rows
from torchtune.modules.peft.lora import LoRALinear


def adapted_style(style: ParallelStyle) -> ParallelStyle:
    """Return the style of an adapted layer for the ``style`` of its base layer; other styles are unchanged."""
    # By exact type: a subclass computes something else.
    if type(style) is ColwiseParallel:
        return AdapterColwise()
    if type(style) is RowwiseParallel:
        return AdapterRowwise()
    return style


class _Adapted:
    """Mixin of both styles of adapted layers."""

    def supports(self, module: nn.Module) -> bool:
        """Return whether the style supports the module."""
        return isinstance(module, LoRALinear)

    def dims(self, module: LoRALinear) -> Dims:
        """Return the dimensions of the parameters of base and adapter."""
        return {**module.parallel_dims, **module.adapter_parallel_dims}

    def check(self, name: str, module: LoRALinear, ranks: int) -> None:
        """Check that ``ranks`` ranks can share the module.

        Raises:
            ParallelError: the adapter has dropout, or ``ranks`` does not divide a size.
        """
        super().check(name, module, ranks)
        if module.dropout.p > 0.0:
            raise ParallelError(
                "tensor_parallel_dim: dropout of adapters would differ from that of one device: set lora_dropout to 0."
            )


@torch.no_grad()
def _norms(
    module: DoRALinear, weight: Tensor | Stored, a: Tensor, b: Tensor, group: dist.ProcessGroup | None
) -> Tensor:
    """Row norms of W + s B A: [out]. With a group, columns are sharded and the squares are all-reduced."""
    if isinstance(weight, Stored):
        weight = weight.full()
    updated = updated_weight(weight, a, b, module.scaling)
    if group is None:
        return updated.norm(dim=1)
    return sum_over_ranks(updated.square().sum(1), group).sqrt()


class AdapterColwise(_Adapted, ColwiseParallel):
    """Column-wise parallel style with an adapter: B and magnitudes are sharded like the weight, A is replicated."""

    def project(self, module: LoRALinear, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """See the base class."""
        if module.disabled:
            return super().project(module, x, group)
        a = replicated(module.lora_a.weight, group)
        b = local_shard(module.lora_b.weight)
        # After the graph break of replicated(): PyTorch 2.11 does not support a Stored in scope there.
        weight = local_weight(module)
        bias = local_shard(module.bias)
        if not isinstance(module, DoRALinear):
            return lora_projection(x, weight, bias, a, b, scale=module.scaling)
        y = lora_projection(x, weight, bias, a.to(x.dtype), b.to(x.dtype), scale=module.scaling)
        length = local_shard(module.magnitude) / _norms(module, weight, a, b, None)
        return scale_rows(y, length, bias).to(x.dtype)


class AdapterRowwise(_Adapted, RowwiseParallel):
    """Row-wise parallel style with an adapter: A is sharded like the weight, B and magnitudes are replicated."""

    def project(self, module: LoRALinear, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """See the base class."""
        if module.disabled:
            return super().project(module, x, group)
        a = local_shard(module.lora_a.weight)
        b = replicated(module.lora_b.weight, group)
        y = lora_projection(x, local_weight(module), None, a.to(x.dtype), b.to(x.dtype), scale=module.scaling)
        y = sum_and_split_sequence(y, group)
        if not isinstance(module, DoRALinear):
            return y
        length = replicated(module.magnitude, group) / _norms(module, local_weight(module), a, b, group)
        return scale_rows(y, length, None).to(x.dtype)
