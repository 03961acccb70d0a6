"""Distribute experts over the expert-parallel ranks."""

from typing import Any

from torch import nn

from torchtune.training.parallel._parallel_dims import ParallelDims, ParallelDimsError


def check_expert_parallel(model: nn.Module, dims: ParallelDims) -> dict[str, nn.Module]:
    """Return the layers of ``model`` with experts, by path; ``dims.ep`` must divide their numbers of experts.

    Raises:
        ParallelDimsError, ParallelError: there are no experts, or ``dims.ep`` does not divide their number.
    """
    from torchtune.modules.moe import MoE
    from torchtune.modules.parallel import check_experts

    layers = {path: module for path, module in model.named_modules() if isinstance(module, MoE)}
    if not layers:
        raise ParallelDimsError(f"expert_parallel_dim is {dims.ep}: the model has no experts: set it to 1.")
    for path, layer in layers.items():
        check_experts(f"{path}.experts", layer.experts, dims.ep)
    return layers


def apply_expert_parallel(model: nn.Module, dims: ParallelDims) -> dict[str, Any]:
    """Distribute experts in place: whole experts on every rank, with an all-to-all of tokens.

    Returns:
        The path of each layer's experts, mapped to the FSDP mesh of a rank's experts.

    Raises:
        ParallelDimsError, ParallelError: see :func:`check_expert_parallel`.
    """
    from torchtune.modules.parallel import ExpertParallel, place_experts

    layers = check_expert_parallel(model, dims)
    exchange = ExpertParallel(dims.expert_mesh.get_group())
    for layer in layers.values():
        place_experts(layer.experts, dims.expert_mesh)
        layer.exchange = exchange
    return {f"{path}.experts": dims.expert_fsdp_mesh for path in layers}
