"""Distributing experts over the ranks of the mesh's expert dimension."""

from typing import Any

from torch import nn

from torchtune.training.parallel._parallel_dims import ParallelDims, ParallelDimsError


def check_split_experts(model: nn.Module, dims: ParallelDims) -> dict[str, nn.Module]:
    """The layers of ``model`` with experts, by path, each of which ``dims.ep`` divides.

    Raises:
        ParallelDimsError, ParallelError: there are none, or ranks would have different numbers of experts.
    """
    from torchtune.modules.moe import MoE
    from torchtune.modules.parallel import check_experts

    found = {path: module for path, module in model.named_modules() if isinstance(module, MoE)}
    if not found:
        raise ParallelDimsError(f"expert_parallel_dim is {dims.ep}: the model has no experts: set it to 1.")
    for path, layer in found.items():
        check_experts(f"{path}.experts", layer.experts, dims.ep)
    return found


def split_experts(model: nn.Module, dims: ParallelDims) -> dict[str, Any]:
    """Distribute experts in place: whole experts to every rank, and between their calls an all-to-all of tokens.

    Returns:
        Path of the experts of every layer -> the mesh over which FSDP shards the parameters of a rank's experts.

    Raises:
        ParallelDimsError, ParallelError: see :func:`check_split_experts`.
    """
    from torchtune.modules.parallel import ExpertParallel, place_experts

    layers = check_split_experts(model, dims)
    exchange = ExpertParallel(dims.expert_mesh.get_group())
    for layer in layers.values():
        place_experts(layer.experts, dims.expert_mesh)
        layer.exchange = exchange
    return {f"{path}.experts": dims.expert_fsdp_mesh for path in layers}
