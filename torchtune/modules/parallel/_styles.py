"""How a module is split over a tensor-parallel group.

Parameters become DTensors; what a module computes with is its own shard, in plain tensors. Between the blocks of a
layer each rank holds a part of the sequence (Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", arXiv:2205.05198): a block joins the sequence, works with its share of heads or channels, and
what it yields is summed and split again. A parameter that all ranks hold whole sums its gradients over them.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F

from torchtune.modules.parallel._collectives import (
    gather_sequence,
    gather_vocabulary,
    sum_and_split_sequence,
    sum_gradients,
    sum_over_ranks,
)
from torchtune.modules.peft import DoRALinear, LoRALinear
from torchtune.modules.peft._functional import lora_projection
from torchtune.modules.rms_norm import RMSNorm
from torchtune.modules.tied_linear import CappedLinear, soft_cap
from torchtune.utils import UserError


class ParallelError(UserError, ValueError):
    """A model that cannot be split as it was asked for."""


def _place(module: nn.Module, mesh: DeviceMesh, places: dict[str, Placement]) -> None:
    """Make the named parameters of ``module`` DTensors; all others are held whole by every rank."""
    for name, parameter in list(module.named_parameters()):
        path, _, leaf = name.rpartition(".")
        placement = places.get(name, Replicate())
        if isinstance(placement, Shard) and parameter.shape[placement.dim] % mesh.size():
            raise ParallelError(
                f"tensor_parallel_dim: {mesh.size()} does not divide the size {parameter.shape[placement.dim]} of "
                f"{type(module).__name__}.{name}: choose one that does."
            )
        data = distribute_tensor(parameter.detach(), mesh, [placement])
        owner = module.get_submodule(path)
        owner.register_parameter(leaf, nn.Parameter(data, requires_grad=parameter.requires_grad))


def _own(parameter: Tensor | None) -> Tensor | None:
    """This rank's shard of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _shared(parameter: Tensor | None, group: dist.ProcessGroup) -> Tensor | None:
    """A parameter that every rank holds whole; its gradient is summed over them."""
    if parameter is None:
        return None
    own = _own(parameter)
    return sum_gradients(own, group) if own.requires_grad else own


def _check_linear(module: nn.Module) -> None:
    if isinstance(module, DoRALinear):
        raise ParallelError(
            "tensor_parallel_dim: the row norms of DoRA need whole rows: use LoRA (use_dora=False), or shard with "
            "data_parallel_shard_dim instead."
        )
    if not isinstance(module, nn.Linear | LoRALinear):
        raise ParallelError(
            f"tensor_parallel_dim: it is not known how {type(module).__name__} is split: set it to 1 for this model."
        )
    if isinstance(module, LoRALinear) and module.dropout.p > 0.0:
        raise ParallelError(
            "tensor_parallel_dim: dropout of adapters would differ from that of one device: set lora_dropout to 0."
        )


class ByColumns(ParallelStyle):
    """A projection of which each rank has some outputs: input ``[b, s, in]`` whole, output ``[b, s, out / ranks]``.

    The gradient of the input is this rank's summand. Of an adapter, B is split like the weight and A is held whole.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check_linear(module)
        _place(module, device_mesh, {"weight": Shard(0), "bias": Shard(0), "lora_b.weight": Shard(0)})
        group = device_mesh.get_group()

        def forward(x: Tensor) -> Tensor:
            if not isinstance(module, LoRALinear) or module.disabled:
                return F.linear(x, _own(module.weight), _own(module.bias))
            a, b = _shared(module.lora_a.weight, group), _own(module.lora_b.weight)
            return lora_projection(x, _own(module.weight), _own(module.bias), a, b, scale=module.scaling)

        module.forward = forward
        return module


class ByRows(ParallelStyle):
    """A projection of which each rank has some inputs: input ``[b, s, in / ranks]``, output ``[b, s / ranks, out]``.

    Of an adapter, A is split like the weight and B is held whole.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check_linear(module)
        _place(module, device_mesh, {"weight": Shard(1), "lora_a.weight": Shard(1)})
        group = device_mesh.get_group()

        def forward(x: Tensor) -> Tensor:
            if not isinstance(module, LoRALinear) or module.disabled:
                y = F.linear(x, _own(module.weight))
            else:
                a, b = _own(module.lora_a.weight), _shared(module.lora_b.weight, group)
                y = lora_projection(x, _own(module.weight), None, a, b, scale=module.scaling)
            y = sum_and_split_sequence(y, group)
            return y if module.bias is None else y + _shared(module.bias, group)

        module.forward = forward
        return module


class ByVocabulary(ParallelStyle):
    """An embedding or an output projection of which each rank has the rows of some tokens.

    The embedding turns tokens ``[b, s]`` into ``[b, s / ranks, d]``. An output projection, tied or not, all-gathers
    its logits ``[b, s, v]``; losses of hidden states read its weight instead.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) not in (nn.Embedding, nn.Linear, CappedLinear) or getattr(module, "bias", None) is not None:
            raise ParallelError(
                f"tensor_parallel_dim: it is not known how {type(module).__name__} is split over its vocabulary: "
                "set it to 1, or leave the output without adapter (apply_lora_to_output=False)."
            )
        _place(module, device_mesh, {"weight": Shard(0)})
        if isinstance(module, nn.Embedding):
            module.forward = _split_embedding(module, device_mesh.get_group())
        else:
            softcap = getattr(module, "softcap", None)
            module.forward = lambda x: soft_cap(vocabulary_parallel_linear(x, module.weight), softcap)
        return module


def vocabulary_parallel_linear(x: Tensor, weight: DTensor) -> Tensor:
    """``[..., d]``, the same on all ranks, to all logits ``[..., v]``; the gradient of ``x`` is this rank's summand."""
    if weight.device_mesh.mesh_dim_names != ("tp",):
        raise RuntimeError("The output projection is sharded by FSDP: call it after the forward pass of its model.")
    return gather_vocabulary(F.linear(x, weight.to_local()), weight.device_mesh.get_group())


def _split_embedding(module: nn.Embedding, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    def forward(tokens: Tensor) -> Tensor:
        weight = _own(module.weight)
        rows = tokens - group.rank() * weight.shape[0]
        elsewhere = (rows < 0) | (rows >= weight.shape[0])
        found = F.embedding(rows.masked_fill(elsewhere, 0), weight)
        return sum_and_split_sequence(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), group)

    return forward


def _check_norm(module: nn.Module) -> None:
    if not isinstance(module, RMSNorm):
        raise ParallelError(f"tensor_parallel_dim: it is not known how {type(module).__name__} is split: set it to 1.")


class ReplicatedNorm(ParallelStyle):
    """A norm that every rank applies to its own positions or heads.

    Args:
        gather: join the sequence afterwards; the gradient of the result is this rank's summand.
    """

    def __init__(self, gather: bool = False) -> None:
        super().__init__()
        self.gather = gather

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check_norm(module)
        _place(module, device_mesh, {})
        group = device_mesh.get_group()

        def forward(x: Tensor) -> Tensor:
            normed = module.scaled_by(_shared(module.scale, group), x)
            return gather_sequence(normed, group) if self.gather else normed

        module.forward = forward
        return module


class SplitNorm(ParallelStyle):
    """A norm over all heads of queries or keys at once, of which each rank has some: ``[b, s, n * h / ranks]``.

    One number for each position is summed over the ranks.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check_norm(module)
        _place(module, device_mesh, {"scale": Shard(0)})
        group, width = device_mesh.get_group(), module.normalized_shape[0]

        def forward(x: Tensor) -> Tensor:
            wide, scale = x.float(), _own(module.scale)
            squares = sum_over_ranks(wide.square().sum(-1, keepdim=True), group)
            normed = wide * torch.rsqrt(squares / width + module.eps)
            if module.unit_offset:
                return (normed * (1.0 + scale.float())).to(x.dtype)
            return normed.to(x.dtype) * scale

        module.forward = forward
        return module


class GatherInput(ParallelStyle):
    """A block whose projections are split: its input ``[b, s / ranks, d]`` is joined once for all of them."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()

        def join(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return gather_sequence(args[0], group), *args[1:]

        module.register_forward_pre_hook(join)
        return module
