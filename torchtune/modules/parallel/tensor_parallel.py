"""Tensor-parallel styles of modules.

Parameters become DTensors; modules compute with their local shards, as plain tensors. Between the blocks of a layer
activations are sharded along the sequence (sequence parallelism; Korthikanti et al., "Reducing Activation Recomputation
in Large Transformer Models", arXiv:2205.05198): a block all-gathers the sequence, computes with its heads or channels,
and reduce-scatters its output. Gradients of replicated parameters are all-reduced.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F

from torchtune.modules._outside_graphs import outside_graphs
from torchtune.modules.embeddings import NEW_ROWS, GrownEmbedding, GrownLinear
from torchtune.modules.low_precision.formats import Stored
from torchtune.modules.low_precision.layers import StoredLinear, frozen_linear
from torchtune.modules.output_projection import CappedLinear, ClassifierHead, soft_cap
from torchtune.modules.parallel.collectives import (
    gather_sequence,
    sum_and_split_sequence,
    sum_gradients,
    sum_of_equals,
    sum_over_ranks,
    vocabulary_parallel_linear,
)
from torchtune.modules.peft.lora import DoRALinear, LoRALinear, lora_projection, scale_rows, updated_weight
from torchtune.modules.rms_norm import OutputScale, RMSNorm
from torchtune.utils import UserError

# Parameter -> (dimension of the layer's outputs, dimension of its inputs); None: no such dimension.
Dims = Mapping[str, tuple[int | None, int | None]]
_LINEAR_DIMS: Dims = {"weight": (0, 1), "bias": (0, None)}


class ParallelError(UserError, ValueError):
    """Raised when a model cannot be sharded as requested."""


def place_parameters(
    module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement], *, recurse: bool = True
) -> None:
    """Convert the parameters of ``module`` to DTensors; parameters without a placement are replicated.

    Args:
        module: changed in place.
        mesh: mesh of the DTensors.
        placements: placements by parameter name.
        recurse: include the parameters of children.
    """
    for name, parameter in list(module.named_parameters(recurse=recurse)):
        path, _, leaf = name.rpartition(".")
        placement = placements.get(name, Replicate())
        if isinstance(placement, Shard) and parameter.shape[placement.dim] % mesh.size():
            raise ParallelError(
                f"tensor_parallel_dim: {mesh.size()} does not divide the size {parameter.shape[placement.dim]} of "
                f"{type(module).__name__}.{name}: choose one that does."
            )
        data = distribute_tensor(parameter.detach(), mesh, [placement])
        owner = module.get_submodule(path)
        owner.register_parameter(leaf, nn.Parameter(data, requires_grad=parameter.requires_grad))


def local_shard(parameter: Tensor | None) -> Tensor | None:
    """Return this rank's shard of a parameter; a plain tensor, or none, is returned unchanged."""
    if isinstance(parameter, DTensor):
        return parameter.to_local()
    return parameter


def replicated(parameter: Tensor | None, group: dist.ProcessGroup) -> Tensor | None:
    """Return a replicated parameter as a plain tensor, with an all-reduce of its gradient."""
    if parameter is None:
        return None
    tensor = local_shard(parameter)
    if not tensor.requires_grad:
        return tensor
    return sum_gradients(tensor, group)


class _LinearStyle(ParallelStyle):
    """Style that shards a linear layer along its outputs or its inputs."""

    # Sharded dimension: outputs (0) or inputs (1).
    side: ClassVar[int]

    def dims(self, module: nn.Module) -> Dims:
        """Return the output and input dimensions of the module's parameters."""
        if isinstance(module, StoredLinear):
            return module.parallel_dims
        return _LINEAR_DIMS

    def supports(self, module: nn.Module) -> bool:
        """Return whether the style supports the module."""
        # A subclass with a forward of its own computes something else.
        return type(module).forward is nn.Linear.forward or isinstance(module, StoredLinear)

    def check(self, name: str, module: nn.Module, ranks: int) -> None:
        """Check that ``ranks`` ranks can share the module.

        Raises:
            ParallelError: the style does not support the module, or ``ranks`` does not divide its size.
        """
        if not self.supports(module):
            raise ParallelError(
                f"tensor_parallel_dim: a {type(module).__name__} cannot be split over ranks: set it to 1 for this "
                "model."
            )
        for parameter, dims in self.dims(module).items():
            dim = dims[self.side]
            path, _, leaf = parameter.rpartition(".")
            tensor = getattr(module.get_submodule(path), leaf)
            if dim is None or tensor is None:  # replicated, or a layer without this parameter
                continue
            if tensor.shape[dim] % ranks:
                raise ParallelError(
                    f"tensor_parallel_dim: {ranks} does not divide the size {tensor.shape[dim]} of {name}: choose one "
                    "that does."
                )

    def project(self, module: nn.Module, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Compute this rank's output."""
        raise NotImplementedError

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(type(module).__name__, module, device_mesh.size())
        placements = {}
        for name, dims in self.dims(module).items():
            if dims[self.side] is not None:
                placements[name] = Shard(dims[self.side])
        place_parameters(module, device_mesh, placements)
        group = device_mesh.get_group()
        module.forward = lambda x: self.project(module, x, group)
        return module


def local_weight(module: nn.Module) -> Tensor | Stored:
    """Return this rank's shard of the weight of a linear layer."""
    if type(module) is nn.Linear:
        return local_shard(module.weight)
    weight = module.stored_weight()
    if not isinstance(weight, Stored):
        return local_shard(weight)
    shards = tuple(local_shard(tensor) for tensor in weight.tensors)
    return weight._replace(tensors=shards)


class ColwiseParallel(_LinearStyle):
    """Column-wise parallel projection: input ``[b, s, in]`` replicated, output ``[b, s, out / ranks]``.

    The gradient of the input is a partial sum.
    """

    side = 0

    def project(self, module: nn.Module, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Project ``[b, s, in]`` to ``[b, s, out / ranks]``."""
        return frozen_linear(x, local_weight(module), local_shard(module.bias))


class RowwiseParallel(_LinearStyle):
    """Row-wise parallel projection: input ``[b, s, in / ranks]``, output ``[b, s / ranks, out]``."""

    side = 1

    def project(self, module: nn.Module, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Project ``[b, s, in / ranks]`` without bias and reduce-scatter the sequence: ``[b, s / ranks, out]``."""
        summand = frozen_linear(x, local_weight(module))  # [b, s, out]
        return sum_and_split_sequence(summand, group)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        if module.bias is not None:
            group = device_mesh.get_group()
            project = module.forward
            # Once, after the sum over ranks.
            module.forward = lambda x: project(x) + replicated(module.bias, group)
        return module


class VocabParallel(ParallelStyle):
    """Vocabulary-parallel embedding or output projection.

    The embedding maps tokens ``[b, s]`` to ``[b, s / ranks, d]``. An output projection, tied or not, all-gathers
    its logits ``[b, s, v]``; losses of hidden states read its sharded weight instead.
    """

    def supports(self, module: nn.Module) -> bool:
        """Return whether the style supports the module."""
        return type(module) in (nn.Embedding, nn.Linear, CappedLinear)

    def check(self, name: str, module: nn.Module, ranks: int) -> None:
        """Check that ``ranks`` ranks can share the module.

        Raises:
            ParallelError: the module is not a plain embedding or output projection, or ``ranks`` does not divide
                its size.
        """
        if not self.supports(module) or getattr(module, "bias", None) is not None:
            raise ParallelError(
                f"tensor_parallel_dim: a {type(module).__name__} cannot be split over its vocabulary: set it to 1, or "
                "leave the output without adapter (apply_lora_to_output=False)."
            )
        if module.weight.shape[0] % ranks:
            raise ParallelError(
                f"tensor_parallel_dim: {ranks} does not divide the size {module.weight.shape[0]} of {name}: choose one "
                "that does, or add tokens until it does (tokenizer.add_tokens, with resize_token_embeddings=True)."
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(type(module).__name__, module, device_mesh.size())
        place_parameters(module, device_mesh, {"weight": Shard(0)})
        group = device_mesh.get_group()
        softcap = getattr(module, "softcap", None)  # of a CappedLinear

        def embed(tokens: Tensor) -> Tensor:
            weight = local_shard(module.weight)  # [v / ranks, d]
            rows, is_elsewhere = _rows_of_shard(tokens, weight, group)
            embedded = F.embedding(rows, weight)  # [b, s, d]
            return _join_embeddings(embedded, is_elsewhere, group)

        def project(x: Tensor) -> Tensor:
            logits = vocabulary_parallel_linear(x, module.weight)  # [b, s, v], all-gathered
            return soft_cap(logits, softcap)

        if isinstance(module, nn.Embedding):
            module.forward = embed
        else:
            module.forward = project
        return module


def _rows_of_shard(tokens: Tensor, weight: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the row of each token in this rank's shard, 0 for those of other ranks, and which these are ``[b, s]``."""
    rows_per_rank = weight.shape[0]
    rows = tokens - group.rank() * rows_per_rank
    is_elsewhere = (rows < 0) | (rows >= rows_per_rank)
    return rows.masked_fill(is_elsewhere, 0), is_elsewhere


def _join_embeddings(embedded: Tensor, is_elsewhere: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum the ranks' embeddings ``[b, s, d]`` of the tokens in their shards, and return ``[b, s / ranks, d]``."""
    # Every token is embedded by one rank and 0 on the others.
    summand = embedded.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)
    return sum_and_split_sequence(summand, group)


class HeadParallel(ParallelStyle):
    """Head of a classifier: ``[..., d]`` replicated to logits ``[..., c]`` replicated, with d sharded over the ranks.

    The gradient of the input is a partial sum.
    """

    def check(self, name: str, module: nn.Module, ranks: int) -> None:
        """Check that ``ranks`` ranks can share the module.

        Raises:
            ParallelError: the module is not a plain head, or ``ranks`` does not divide its width.
        """
        if type(module) is not ClassifierHead:
            raise ParallelError(
                f"tensor_parallel_dim: a head of the class {type(module).__name__} cannot be split over ranks: set it "
                "to 1, or leave the output without adapter (apply_lora_to_output=False)."
            )
        if module.in_features % ranks:
            raise ParallelError(
                f"tensor_parallel_dim: {ranks} does not divide the width {module.in_features} of {name}: choose one "
                "that does."
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(type(module).__name__, module, device_mesh.size())
        place_parameters(module, device_mesh, {"weight": Shard(1)})
        group = device_mesh.get_group()

        def forward(x: Tensor) -> Tensor:
            weight = local_shard(module.weight)  # [c, d / ranks]
            width = weight.shape[1]
            part = x.narrow(-1, group.rank() * width, width)  # [..., d / ranks]
            summand = F.linear(part, weight)  # [..., c]
            return sum_of_equals(summand, group)  # whose gradient is that of the logits, equal on all ranks

        module.forward = forward
        return module


class GrownVocabParallel(VocabParallel):
    """Vocabulary-parallel embedding or output projection with trained last rows, which every rank has.

    A token belongs to the rank that has its row in the frozen weight, also if it is new.
    """

    def supports(self, module: nn.Module) -> bool:
        """Return whether the style supports the module."""
        return isinstance(module, GrownEmbedding | GrownLinear)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(type(module).__name__, module, device_mesh.size())
        place_parameters(module, device_mesh, {"weight": Shard(0), NEW_ROWS: Replicate()})
        if not isinstance(module, GrownEmbedding):
            return module  # GrownLinear.forward computes with its shard by itself
        group = device_mesh.get_group()

        def embed(tokens: Tensor) -> Tensor:
            weight = local_shard(module.weight)  # [v / ranks, d]
            new_rows = replicated(module.new_rows, group)  # [n, d]
            first_new = module.num_embeddings - len(new_rows)
            rows, is_elsewhere = _rows_of_shard(tokens, weight, group)
            old = F.embedding(rows, weight)  # [b, s, d]
            # All tokens by both, because the host does not know which of them are new; an old token's row is not used.
            new = F.embedding((tokens - first_new).clamp(min=0), new_rows)  # [b, s, d]
            is_new = tokens >= first_new  # [b, s]
            embedded = torch.where(is_new.unsqueeze(-1), new, old)
            return _join_embeddings(embedded, is_elsewhere, group)

        module.forward = embed
        return module


def _check_norm(module: nn.Module, *kinds: type[nn.Module]) -> None:
    """Raise :class:`ParallelError` unless the module is of one of these kinds."""
    if not isinstance(module, kinds):
        raise ParallelError(f"tensor_parallel_dim: a {type(module).__name__} cannot be split over ranks: set it to 1.")


class ReplicatedNorm(ParallelStyle):
    """Norm or scale with replicated parameters, applied by every rank to its positions or heads.

    Args:
        gather: all-gather the sequence afterward; the gradient of the result is a partial sum.
    """

    def __init__(self, gather: bool = False) -> None:
        super().__init__()
        self.gather = gather

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check_norm(module, RMSNorm, OutputScale)
        place_parameters(module, device_mesh, {})
        group = device_mesh.get_group()

        def forward(x: Tensor) -> Tensor:
            scale = replicated(module.scale, group)
            normed = module.scaled_by(scale, x)
            if self.gather:
                return gather_sequence(normed, group)
            return normed

        module.forward = forward
        return module


class ShardedNorm(ParallelStyle):
    """Norm over all heads of queries or keys together, sharded along the heads: ``[b, s, n * h / ranks]``.

    It all-reduces one number per position.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check_norm(module, RMSNorm)
        place_parameters(module, device_mesh, {"scale": Shard(0)})
        group = device_mesh.get_group()
        width = module.normalized_shape[0]  # over all ranks

        def forward(x: Tensor) -> Tensor:
            scale = local_shard(module.scale)
            x_float = x.float()
            local_squares = x_float.square().sum(-1, keepdim=True)  # [b, s, 1]
            squares = sum_over_ranks(local_squares, group)
            normed = x_float * torch.rsqrt(squares / width + module.eps)
            # Families differ in whether the normed values are rounded before or after they are scaled.
            if module.rounds_last:
                scaled = normed * (scale.float() + module.unit_offset)
                return scaled.to(x.dtype)
            return normed.to(x.dtype) * scale

        module.forward = forward
        return module


class GatherInput(ParallelStyle):
    """Block of column-wise projections with one all-gather of its input ``[b, s / ranks, d]``.

    Attention sinks, a parameter of the block itself, are sharded by head.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        place_parameters(module, device_mesh, {"sinks": Shard(0)}, recurse=False)
        group = device_mesh.get_group()

        def gather(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return gather_sequence(args[0], group), *args[1:]

        module.register_forward_pre_hook(gather)
        return module


class _Block(nn.Module):
    """Holder of a block whose parameters :func:`torch.func.functional_call` replaces: it calls ``function``."""

    def __init__(self, block: nn.Module, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.block = block
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.function(*args, **kwargs)


class SequenceParallel(ParallelStyle):
    """Block of which every rank has all weights, whose gradients are all-reduced.

    There is neither an all-gather nor a reduce-scatter: as a block between sequence shards, every rank applies it to
    its positions ``[b, s / ranks, d]``.

    Args:
        sharded_children: names of children that have another style, which places their parameters.
    """

    def __init__(self, *sharded_children: str) -> None:
        super().__init__()
        self.sharded_children = sharded_children

    def check(self, name: str, module: nn.Module, ranks: int) -> None:
        """Check that ``ranks`` ranks can share the positions.

        Raises:
            ParallelError: an adapter has dropout.
        """
        for child in module.modules():
            if isinstance(child, LoRALinear):
                check_no_dropout(child)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Replicate the parameters, and let forward compute with copies of them whose gradients are all-reduced."""
        for child in dict(module.named_children()):
            if child not in self.sharded_children:
                place_parameters(module.get_submodule(child), device_mesh, {})
        place_parameters(module, device_mesh, {}, recurse=False)
        group = device_mesh.get_group()
        block = _Block(module, module.forward)

        @outside_graphs
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            parameters = {}
            for name, parameter in module.named_parameters():
                if name.split(".")[0] not in self.sharded_children:
                    parameters[f"block.{name}"] = replicated(parameter, group)
            return torch.func.functional_call(block, parameters, args, kwargs)

        module.forward = forward
        return module


def adapted_style(style: ParallelStyle) -> ParallelStyle:
    """Return the style of an adapted layer for the ``style`` of its base layer; other styles are unchanged."""
    # By exact type: a subclass computes something else.
    if type(style) is ColwiseParallel:
        return AdapterColwise()
    if type(style) is RowwiseParallel:
        return AdapterRowwise()
    return style


def check_no_dropout(module: LoRALinear) -> None:
    """Raise :class:`ParallelError` if the adapter has dropout, whose masks would differ from rank to rank."""
    if module.dropout.p > 0.0:
        raise ParallelError(
            "tensor_parallel_dim: dropout of adapters would differ from that of one device: set lora_dropout to 0."
        )


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
        check_no_dropout(module)


@torch.no_grad()
def _norms(
    module: DoRALinear, weight: Tensor | Stored, a: Tensor, b: Tensor, group: dist.ProcessGroup | None
) -> Tensor:
    """Row norms of W + s B A: [out]. With a group, columns are sharded and the squares are all-reduced."""
    if isinstance(weight, Stored):
        weight = weight.full()
    updated = updated_weight(weight, a, b, module.scaling)  # [out, in], or [out, in / ranks]
    if group is None:
        return updated.norm(dim=1)
    local_squares = updated.square().sum(1)  # [out]
    return sum_over_ranks(local_squares, group).sqrt()


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
        magnitude = local_shard(module.magnitude)  # [out / ranks]
        length = magnitude / _norms(module, weight, a, b, None)
        return scale_rows(y, length, bias).to(x.dtype)


class AdapterRowwise(_Adapted, RowwiseParallel):
    """Row-wise parallel style with an adapter: A is sharded like the weight, B and magnitudes are replicated."""

    def project(self, module: LoRALinear, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """See the base class."""
        if module.disabled:
            return super().project(module, x, group)
        a = local_shard(module.lora_a.weight)
        b = replicated(module.lora_b.weight, group)
        # The weight has no name here, because of the graph break of the collective that follows: see AdapterColwise.
        y = lora_projection(x, local_weight(module), None, a.to(x.dtype), b.to(x.dtype), scale=module.scaling)
        y = sum_and_split_sequence(y, group)  # [b, s, out] -> [b, s / ranks, out]
        if not isinstance(module, DoRALinear):
            return y
        magnitude = replicated(module.magnitude, group)  # [out]
        length = magnitude / _norms(module, local_weight(module), a, b, group)
        return scale_rows(y, length, None).to(x.dtype)
