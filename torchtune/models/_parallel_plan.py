"""Tensor-parallel plan of decoders."""

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:  # DTensor is slow to import
    from torch.distributed.tensor.parallel import ParallelStyle


def decoder_plan(model: nn.Module) -> dict[str, "ParallelStyle"]:
    """Make the tensor-parallel plan of a decoder, which shards heads, MLP channels and the vocabulary.

    Args:
        model: a :class:`torchtune.modules.TransformerDecoder`.

    Returns:
        Module name pattern -> style, for ``torch.distributed.tensor.parallel.parallelize_module``.

    Raises:
        ParallelError: the model has experts, mixers, latent attention, per-layer embeddings, or shared keys and
            values.
    """
    from torchtune.modules.moe import MoE
    from torchtune.modules.parallel import (
        ColwiseParallel,
        GatherInput,
        HeadParallel,
        ParallelError,
        ReplicatedNorm,
        RowwiseParallel,
        ShardedNorm,
        VocabParallel,
    )

    if any(isinstance(module, MoE) for module in model.modules()):
        raise ParallelError(
            "tensor_parallel_dim: a model with experts has no tensor-parallel plan: set it to 1, and "
            "data_parallel_shard_dim to -1 to shard the experts' weights."
        )
    unsplit = _unsplit_layers(model)
    if unsplit is not None:
        raise ParallelError(
            f"tensor_parallel_dim: a model {unsplit} cannot be split by tensor parallelism: set it to 1, and "
            "data_parallel_shard_dim to -1 to shard the weights instead."
        )
    layer = model.layers[0]  # all layers have the same modules
    block: dict[str, ParallelStyle] = {
        "attn": GatherInput(),
        "attn.q_proj": ColwiseParallel(),
        "attn.k_proj": ColwiseParallel(),
        "attn.v_proj": ColwiseParallel(),
        "attn.output_proj": RowwiseParallel(),
        "mlp": GatherInput(),
        "mlp.w1": ColwiseParallel(),
        "mlp.w2": RowwiseParallel(),
    }
    if layer.mlp.w3 is not None:
        block["mlp.w3"] = ColwiseParallel()
    for name in ("sa_norm", "mlp_norm", "sa_scale", "mlp_scale", "layer_scale"):
        module = getattr(layer, name)
        has_parameters = module is not None and next(module.parameters(), None) is not None
        if has_parameters:
            block[name] = ReplicatedNorm()
    if layer.attn.q_norm is not None:
        # A norm over all heads is sharded like the heads, a norm of each head is the same on all ranks.
        norm_style = ShardedNorm if layer.attn.qk_norm_whole else ReplicatedNorm
        block["attn.q_norm"] = norm_style()
        block["attn.k_norm"] = norm_style()
    plan = {f"layers.*.{name}": style for name, style in block.items()}
    plan["tok_embeddings"] = VocabParallel()
    plan["norm"] = ReplicatedNorm(gather=True)
    description = model.description
    if description is not None and description.is_classifier:
        plan["output"] = HeadParallel()
    elif isinstance(model.output, nn.Module):
        plan["output"] = VocabParallel()
    return plan


def _unsplit_layers(model: nn.Module) -> str | None:
    """Return what a model has that tensor parallelism does not split, or None."""
    description = model.description
    if description is not None and description.mixer_layers:
        return "with linear attention, Mamba or convolutions"
    if model.layer_embeddings is not None or model.kv_sources:
        return "whose layers embed tokens or share keys and values"
    if description is not None and description.kv_latent_dim:
        return "with latent attention"
    return None
