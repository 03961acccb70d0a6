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
    if model.description is not None and model.description.mixer_layers:
        raise ParallelError(
            "tensor_parallel_dim: a model with linear attention, Mamba or convolutions cannot be split by tensor "
            "parallelism: set it to 1, and data_parallel_shard_dim to -1 to shard the weights instead."
        )
    if getattr(model, "layer_embeddings", None) is not None or getattr(model, "kv_sources", None):
        raise ParallelError(
            "tensor_parallel_dim: a model whose layers embed tokens or share keys and values cannot be split by tensor "
            "parallelism: set it to 1, and data_parallel_shard_dim to -1 to shard the weights instead."
        )
    if model.description is not None and model.description.kv_latent_dim:
        raise ParallelError(
            "tensor_parallel_dim: a model with latent attention cannot be split by tensor parallelism: set it to 1, "
            "and data_parallel_shard_dim to -1 to shard the weights instead."
        )
    layer = model.layers[0]
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
    for name in ("sa_norm", "mlp_norm", "sa_scale", "mlp_scale", "layer_scale"):  # not in all models
        module = getattr(layer, name, None)
        if module is not None and any(True for _ in module.parameters()):
            block[name] = ReplicatedNorm()
    if layer.attn.q_norm is not None:
        style = ShardedNorm if layer.attn.qk_norm_whole else ReplicatedNorm
        block |= {"attn.q_norm": style(), "attn.k_norm": style()}
    plan = {f"layers.*.{name}": style for name, style in block.items()}
    plan |= {"tok_embeddings": VocabParallel(), "norm": ReplicatedNorm(gather=True)}
    if isinstance(model.output, nn.Module):
        plan["output"] = VocabParallel()
    return plan
