"""Parallelize a model over the processes of a run, on the meta device."""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from torchtune.modules.conversion import get_conversions
from torchtune.modules.transformer import text_decoder
from torchtune.training.parallel._parallel_dims import ParallelDims, ParallelDimsError
from torchtune.training.parallel._ranks import is_distributed
from torchtune.utils import FrozenIntegers, UserError, flatten_mesh, get_logger, log_rank_zero

ShardCondition = Callable[[str, nn.Module], bool]


def parallelize(
    model: nn.Module,
    dims: ParallelDims,
    *,
    device: torch.device,
    cpu_offload: bool = False,
    reshard_after_forward: bool = True,
    custom_sharded_layers: Sequence[str] | None = None,
    tensor_parallel_plan: Callable[[nn.Module], Any] | None = None,
) -> None:
    """Parallelize ``model`` in place: tensor, context and expert parallelism, then FSDP.

    Call it on the converted model on the meta device; the checkpointer then loads every shard. Gradients are *summed*
    over ranks, so divide a loss by the global count (``dims.sum``). A single process changes nothing.

    Args:
        model: model built by :mod:`torchtune.models`.
        dims: from ``ParallelDims.start``.
        device: device of the computation.
        cpu_offload: keep shards, gradients and optimizer states in host memory.
        reshard_after_forward: free a layer's full parameters after its forward pass and all-gather them again for the
            backward pass; False keeps them, which saves communication but costs memory.
        custom_sharded_layers: names of modules to shard separately, besides the layers.
        tensor_parallel_plan: replaces the plan of the model's family.

    Raises:
        ParallelDimsError, ParallelError: the model does not support these dimensions.
    """
    _check_composite(model, dims)
    if dims.mesh is None:
        if cpu_offload:
            raise ParallelDimsError("fsdp_cpu_offload: it needs torchrun: start with tune run --nproc-per-node 1.")
        return
    if dims.cp > 1:
        from torchtune.modules.parallel import shard_sequences

        # Before tensor parallelism changes the numbers of heads, which the check divides by `dims.tp` itself.
        _check_context_parallel(model, dims)
        shard_sequences(text_decoder(model), dims.mesh["cp"].get_group())
    if dims.tp > 1:
        _apply_tensor_parallel(model, dims, tensor_parallel_plan)
    meshes: dict[str, Any] = {}  # of experts, by their paths
    if dims.ep > 1 or dims.tp > 1:  # tensor-parallel ranks have different tokens in layers with experts
        meshes = apply_expert_parallel(model, dims)
    if dims.data_size * dims.cp == 1 and not meshes and not cpu_offload:
        return  # no two ranks have the same weights, which FSDP would shard
    if cpu_offload and device.type == "cpu":
        log_rank_zero(get_logger(), "fsdp_cpu_offload changes nothing: everything is in host memory already.")
    names = list(custom_sharded_layers or [])
    _check_names(model, names)
    shard_model(
        model,
        [lambda name, module: get_shard_conditions(name, module, names)],
        cpu_offload=cpu_offload and device.type != "cpu",
        reshard_after_forward=reshard_after_forward,
        dp_mesh=dims.fsdp_mesh,
        meshes=meshes,
    )
    unshard_output(model)


def shard_for_inference(model: nn.Module, device: torch.device, *, split_layers: bool = True) -> ParallelDims:
    """Shard ``model`` over all processes of torchrun, to generate and to be measured; no rank has all of its weights.

    Every layer is split over the ranks (tensor parallel) if the model allows it. Otherwise each parameter is sharded
    and all-gathered layer by layer (FSDP), which takes longer; the reason is logged. All ranks then run the model on
    the same batches.

    Args:
        model: model on the meta device; the checkpointer then loads every shard.
        device: device of this process.
        split_layers: False shards parameters in any case, for readers of hidden states of any length.

    Returns:
        The parallel dims; one process without torchrun, which changes nothing.

    Raises:
        ParallelDimsError, ParallelError: parameters of the model cannot be sharded.
    """
    ranks = 1
    if is_distributed():
        ranks = int(os.environ["WORLD_SIZE"])
    sizes = {"dp_shard": ranks}
    if split_layers and ranks > 1:
        try:
            _check_split_for_inference(model, ranks)
            sizes = {"tp": ranks}
        except UserError as error:
            log_rank_zero(get_logger(), f"Layers are not split over the {ranks} ranks, but parameters: {error}")
    dims = ParallelDims.start(device, **sizes)
    parallelize(model, dims, device=device)
    return dims


def _check_split_for_inference(model: nn.Module, ranks: int) -> None:
    """Check that tensor parallelism splits all layers of ``model``, and that it can generate then.

    Raises:
        ParallelDimsError, ParallelError: the model does not allow it.
    """
    from torchtune.modules.mixers import RecurrentMixer
    from torchtune.modules.moe import MoE

    check_parallelizable(model, ParallelDims(tp=ranks, world_size=ranks))
    if any(isinstance(module, RecurrentMixer | MoE) for module in model.modules()):
        # Every rank would have all weights of a mixer, and neither computes with a single position.
        raise ParallelDimsError("the model has recurrent mixers or experts, of which ranks compute parts of sequences.")


def sequence_multiple(model: nn.Module) -> int:
    """Return the number that divides the length of every input of ``model``: the size of its tensor parallelism."""
    from torch.distributed.tensor import DTensor

    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ()):
            return parameter.device_mesh["tp"].size()
    return 1


def _check_composite(model: nn.Module, dims: ParallelDims) -> None:
    """Raise for dimensions that a model of text and images lacks; a decoder of text alone passes.

    Its text decoder may compute with parts of sequences, for which every rank encodes all images of its sequences.
    """
    from torchtune.modules.model_fusion import ImageTextModel

    if text_decoder(model) is model:
        return
    if dims.tp > 1:
        raise ParallelDimsError(
            f"tensor_parallel_dim is {dims.tp}: a model of text and images is split over its data and sequences alone: "
            "set it to 1, and data_parallel_shard_dim to -1."
        )
    if dims.cp > 1 and not isinstance(model, ImageTextModel):
        raise ParallelDimsError(
            f"context_parallel_dim is {dims.cp}: a model of text and images with cross-attention is split over its "
            "data alone: set it to 1, and data_parallel_shard_dim to -1."
        )
    if dims.cp > 1 and model.image_blocks:
        raise ParallelDimsError(
            f"context_parallel_dim is {dims.cp}: the tokens of an image attend to each other in both directions, also "
            "across a cut of the sequence: set it to 1, and data_parallel_shard_dim to -1."
        )


def _attention_layers(model: nn.Module) -> list[nn.Module]:
    """Return the attention modules of a model."""
    from torchtune.modules import MultiHeadAttention

    return [module for module in model.modules() if isinstance(module, MultiHeadAttention)]


def _check_context_parallel(model: nn.Module, dims: ParallelDims) -> None:
    """Raise unless the ranks of a sequence can exchange its shards for shards of the heads of all layers."""
    for attention in _attention_layers(text_decoder(model)):
        # Tensor parallelism divides the heads first; cp divides those that a rank is left with.
        queries = attention.num_heads // dims.tp
        keys = attention.num_kv_heads // dims.tp
        # With fewer key heads than ranks, ranks share one, which needs a whole number of ranks per key head.
        have_equal_keys = keys % dims.cp == 0
        share_keys = dims.cp % max(keys, 1) == 0
        if queries % dims.cp or not (have_equal_keys or share_keys):
            raise ParallelDimsError(
                f"context_parallel_dim is {dims.cp}: it must divide the {queries} query heads of a rank, and divide "
                f"its {keys} key heads or be a multiple of them."
            )
    _check_mixers(model, dims)


def _check_mixers(model: nn.Module, dims: ParallelDims) -> None:
    """Raise unless context- and tensor-parallel ranks can share the positions and heads of recurrent mixers."""
    from torchtune.modules.mixers import RecurrentMixer

    ranks = dims.cp * dims.tp
    if dims.tp == 1:
        setting = f"context_parallel_dim is {dims.cp}"
    elif dims.cp == 1:
        setting = f"tensor_parallel_dim is {dims.tp}"
    else:
        setting = f"context_parallel_dim {dims.cp} x tensor_parallel_dim {dims.tp} is {ranks}"
    for mixer in model.modules():
        if not isinstance(mixer, RecurrentMixer):
            continue
        obstacle = mixer.sharing_obstacle(ranks)
        if obstacle is not None:
            raise ParallelDimsError(
                f"{setting}: {obstacle}: set it to a size that fits, or to 1 with data_parallel_shard_dim=-1 to shard "
                "the weights instead."
            )


def _check_layer_heads(module: nn.Module, ranks: int) -> None:
    """Raise unless tensor parallelism can give every rank as many heads of an attention layer."""
    if module.num_heads % ranks or module.num_kv_heads % ranks:
        raise ParallelDimsError(
            f"tensor_parallel_dim is {ranks}: it must divide the {module.num_heads} query heads and the "
            f"{module.num_kv_heads} key heads of the model."
        )


def check_expert_parallel(model: nn.Module, dims: ParallelDims) -> dict[str, nn.Module]:
    """Return the layers of ``model`` with experts, by path; ``dims.ep`` must divide their numbers of experts.

    Raises:
        ParallelDimsError, ParallelError: there are no experts, or ``dims.ep`` does not divide their number.
    """
    from torchtune.modules.moe import MoE
    from torchtune.modules.parallel import check_experts

    layers = {path: module for path, module in model.named_modules() if isinstance(module, MoE)}
    if not layers and dims.ep > 1:
        raise ParallelDimsError(f"expert_parallel_dim is {dims.ep}: the model has no experts: set it to 1.")
    for path, layer in layers.items():
        check_experts(f"{path}.experts", layer.experts, dims.ep)
    return layers


def apply_expert_parallel(model: nn.Module, dims: ParallelDims) -> dict[str, Any]:
    """Distribute experts in place: whole experts on every rank, with an all-to-all of tokens if ``dims.ep`` is above 1.

    Returns:
        The path of each layer's experts, mapped to the FSDP mesh of a rank's experts.

    Raises:
        ParallelDimsError, ParallelError: see :func:`check_expert_parallel`.
    """
    from torchtune.modules.parallel import ExpertParallel, place_experts

    layers = check_expert_parallel(model, dims)
    if dims.ep > 1:
        exchange = ExpertParallel(dims.expert_mesh.get_group())
        for layer in layers.values():
            place_experts(layer.experts, dims.expert_mesh)
            layer.exchange = exchange
    return {f"{path}.experts": dims.expert_fsdp_mesh for path in layers}


def check_parallelizable(
    model: nn.Module, dims: ParallelDims, plan: Callable[[nn.Module], Any] | None = None
) -> Mapping[str, Any] | None:
    """Check that :func:`parallelize` supports ``model``, without other processes and without changing it.

    Args:
        model: see :func:`parallelize`.
        dims: only the sizes are used, not the mesh.
        plan: replaces the plan of the model's family.

    Returns:
        The tensor-parallel plan; None without tensor parallelism.

    Raises:
        ParallelDimsError, ParallelError: the model does not support these dimensions.
    """
    _check_composite(model, dims)
    if dims.tp > 1:
        for module in _attention_layers(model):
            _check_layer_heads(module, dims.tp)
        _check_mixers(model, dims)
    if dims.cp > 1:
        _check_context_parallel(model, dims)
    if dims.ep > 1:
        check_expert_parallel(model, dims)
    if dims.tp == 1:
        return None
    styles = _resolve_plan(model, plan)
    modules = dict(model.named_modules())
    for name, style in styles.items():
        if name in modules and hasattr(style, "check"):  # a plan may contain torch's styles
            style.check(name, modules[name], dims.tp)
    return styles


def _matches_pattern(name: str, pattern: str) -> bool:
    """Return whether a pattern of a plan matches a module, as in torch: every part of the name separately."""
    name_parts = name.split(".")
    pattern_parts = pattern.split(".")
    if len(name_parts) != len(pattern_parts):
        return False
    return all(map(fnmatchcase, name_parts, pattern_parts))


def _resolve_plan(model: nn.Module, plan: Callable[[nn.Module], Any] | None) -> Mapping[str, Any]:
    """Return styles by module path, from the plan and the conversions of the model."""
    if plan is None and getattr(model, "spec", None) is None:
        raise ParallelDimsError(
            f"tensor_parallel_dim: {type(model).__name__} has no ModelSpec with a plan of its layers: set "
            "tensor_parallel_plan, or build the model with a builder of torchtune.models."
        )
    from torchtune.modules.parallel import SequenceParallel

    build_plan = plan or model.spec.parallel_plan
    modules = dict(model.named_modules())
    styles = {}
    for pattern, style in build_plan(model).items():
        matching = [name for name in modules if _matches_pattern(name, pattern)]
        if not matching:
            styles[pattern] = style  # kept, so that torch warns of a pattern without a module
        for name in matching:
            styles[name] = style
    # In the order in which the conversions changed the layers: each one gets the style of the one before.
    for conversion in get_conversions(model):
        for name in styles:
            if name in modules:
                styles[name] = conversion.parallel_style(modules[name], styles[name])
            if name in modules and isinstance(styles[name], SequenceParallel):
                # A plan names a sequence-parallel module, but not its children, which a conversion may have changed.
                for child in modules[name].modules():
                    conversion.parallel_style(child, styles[name])  # it may refuse the child
    return styles


def _apply_tensor_parallel(model: nn.Module, dims: ParallelDims, plan: Callable[[nn.Module], Any] | None) -> None:
    """Split the layers of ``model`` over the tensor-parallel ranks, in place.

    Raises:
        ParallelDimsError, ParallelError: the model cannot be split, or the plan leaves parameters out.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import parallelize_module

    from torchtune.modules.parallel import SequenceShare, share_mixers

    mesh = dims.mesh["tp"]
    prepare_mha_for_tp(model, mesh)  # attention modules then compute with the heads that their split projections give
    _check_mixers(model, dims)
    # The tensor-parallel ranks of a mixer have parts of the hidden states of the same positions, in order.
    sequence_mesh = mesh
    if dims.cp > 1:
        sequence_mesh = flatten_mesh(dims.mesh["cp", "tp"], "cp_tp")
    share_mixers(model, SequenceShare(sequence_mesh.get_group(), tensor_parallel=mesh.get_group()))
    parallelize_module(model, mesh, _resolve_plan(model, plan))
    # A plain parameter would get gradients of this rank's heads and columns alone, and differ from rank to rank.
    without_style = []
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor) and ".experts." not in name:  # experts are distributed by themselves
            without_style.append(name)
    if without_style:
        raise ParallelDimsError(
            f"tensor_parallel_plan: it has no style for {', '.join(without_style[:3])}: add one for each."
        )


def prepare_mha_for_tp(model: nn.Module, tp_mesh: Any) -> nn.Module:
    """Divide the number of heads of every attention by the ranks of ``tp_mesh``, and return the model.

    Raises:
        ParallelDimsError: the ranks do not divide the heads.
    """
    for module in _attention_layers(model):
        _check_layer_heads(module, tp_mesh.size())
        module.num_heads //= tp_mesh.size()
        module.num_kv_heads //= tp_mesh.size()
    return model


def get_shard_conditions(
    name: str, module: nn.Module, names_to_match: Sequence[str] | None = None, *args: Any, **kwargs: Any
) -> bool:
    """Return whether to shard a module separately: it is listed, a layer (``...layers.3``), or ``layer_embeddings``."""
    if names_to_match and name in names_to_match:
        return True
    path, _, last = name.rpartition(".")
    if last == "layer_embeddings":  # as large as many layers
        return True
    parent = path.rpartition(".")[2]
    return parent == "layers" and last.isdigit()


def _check_names(model: nn.Module, names: Sequence[str]) -> None:
    """Raise for names of ``custom_sharded_layers`` that the model cannot shard separately."""
    modules = dict(model.named_modules())
    for name in names:
        if name == "output" and name not in modules:  # tied to the embedding, which older configs also list
            log_rank_zero(get_logger(), "custom_sharded_layers: 'output' shares the weight of tok_embeddings.")
        elif name not in modules:
            children = ", ".join(child for child, _ in model.named_children())
            raise ParallelDimsError(f"custom_sharded_layers: the model has no module '{name}', only {children}, ….")
        elif name == "output" and type(modules[name]) is not nn.Linear:
            raise ParallelDimsError(
                "custom_sharded_layers: 'output' has an adapter, so the loss calls it once per chunk, and ranks have "
                "different numbers of chunks: leave it out of the list."
            )


def shard_model(
    model: nn.Module,
    shard_conditions: Sequence[ShardCondition],
    *,
    cpu_offload: bool,
    reshard_after_forward: bool = True,
    dp_mesh: Any = None,
    meshes: Mapping[str, Any] | None = None,
) -> None:
    """Shard parameters over the data-parallel ranks with FSDP2: each selected module separately, the rest together.

    Parameters are all-gathered in their dtype; gradients are summed in float32, not averaged.

    Args:
        model: changed in place.
        shard_conditions: a module is sharded separately if any ``condition(name, module)`` is true.
        cpu_offload: keep the shards in host memory.
        reshard_after_forward: see :func:`parallelize`.
        dp_mesh: mesh to shard over; two dimensions mean HSDP. All ranks by default.
        meshes: other meshes, by name of the module that is sharded separately over it; its parameters may be DTensors
            on other mesh dimensions. A mesh of size one shards nothing, except for ``cpu_offload``.

    Raises:
        ValueError: no module is selected.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    if cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    meshes = meshes or {}
    modules = dict(model.named_modules())
    # A mesh of one rank shards nothing; its parameters are ignored, because the layer around them would shard them.
    unsharded: set[str] = set()
    ignored_parameters: set[nn.Parameter] = set()
    for name, mesh in meshes.items():
        if mesh.size() == 1 and not cpu_offload:
            unsharded.add(name)
            ignored_parameters.update(modules[name].parameters())
    options["ignored_params"] = ignored_parameters

    # Children before their parents, as fully_shard asks: a parent takes the parameters that no child has taken.
    sharded: list[tuple[nn.Module, Any]] = []
    for name, module in reversed(modules.items()):
        if name in unsharded:
            continue
        if name in meshes:
            sharded.append((module, meshes[name]))
        elif any(condition(name, module) for condition in shard_conditions):
            sharded.append((module, dp_mesh))
    if not sharded:
        raise ValueError("No module matches the shard conditions: nothing was sharded by itself.")
    with FrozenIntegers():  # quantized weights may be integers
        for module, mesh in sharded:
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward, **options)
        # The root keeps its parameters after its forward pass, by default, because the backward pass begins with them.
        fully_shard(model, mesh=dp_mesh, **options)

    # FSDP averages gradients by default; here the loss is already divided by the global count of tokens. Without the
    # forced sum, torch would give the factor to the collective, as a scaled sum that only NCCL has.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    # By default a layer's all-gather starts with its own forward; here with that of the layer before, to overlap. The
    # modules of other meshes inside a layer are all-gathered with it.
    layers: list[nn.Module] = []  # in the order of the forward pass
    on_other_meshes: set[int] = set()
    for module, mesh in reversed(sharded):
        if mesh is dp_mesh:
            layers.append(module)
        else:
            on_other_meshes.add(id(module))
    for layer, next_layer in itertools.pairwise(layers):
        inner = [module for module in next_layer.modules() if id(module) in on_other_meshes]
        layer.set_modules_to_forward_prefetch([next_layer, *inner])
    for conversion in get_conversions(model):
        conversion.post_shard_hook(model, cpu_offload=cpu_offload)


def unshard_output(model: nn.Module) -> None:
    """All-gather the output projection after the model's forward: the loss reads its weight outside of any forward."""
    from torch.distributed.fsdp import FSDPModule

    projection = getattr(text_decoder(model), "output", None)
    owner = projection
    if not isinstance(projection, nn.Module):  # tied: the weight belongs to the embedding
        owner = getattr(projection, "tied_module", None)
    if not isinstance(owner, FSDPModule):
        return

    def unshard(*_: Any) -> None:  # returns None: a hook's value would replace the model's output
        owner.unshard()

    model.register_forward_hook(unshard)
