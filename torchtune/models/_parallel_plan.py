"""Tensor-parallel plan of decoders."""

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:  # DTensor is slow to import
    from torch.distributed.tensor.parallel import ParallelStyle


def decoder_plan(model: nn.Module) -> dict[str, "ParallelStyle"]:
    """Make the tensor-parallel plan of a decoder, which shards heads, MLP channels and the vocabulary.

    Recurrent mixers have all weights on every rank, which computes with its positions and with a share of the heads.
    Layers with experts compute with a rank's positions; their experts are sharded over all ranks.

    Args:
        model: a :class:`torchtune.modules.TransformerDecoder`.

    Returns:
        Module name pattern -> style, for ``torch.distributed.tensor.parallel.parallelize_module``.

    Raises:
        ParallelError: the model has balanced experts, per-layer embeddings, or shared keys and values.
    """
    from torchtune.modules.conversion import get_conversions
    from torchtune.modules.moe import BalancingLoss, LossFreeBalancing
    from torchtune.modules.parallel import HeadParallel, ParallelError, ReplicatedNorm, VocabParallel

    for conversion in get_conversions(model):
        if isinstance(conversion, BalancingLoss | LossFreeBalancing):
            raise ParallelError(
                f"tensor_parallel_dim: {type(conversion).__name__} counts the tokens of whole sequences, of which each "
                "rank has a part: set it to 1, or leave out the balancing."
            )
    if model.layer_embeddings is not None or model.kv_sources:
        raise ParallelError(
            "tensor_parallel_dim: a model whose layers embed tokens or share keys and values cannot be split by tensor "
            "parallelism: set it to 1, and data_parallel_shard_dim to -1 to shard the weights instead."
        )
    plan: dict[str, ParallelStyle] = {}
    for index, layer in enumerate(model.layers):
        for name, style in _layer_plan(layer).items():
            plan[f"layers.{index}.{name}"] = style
    plan["tok_embeddings"] = VocabParallel()
    # The residual stream is [b, s / ranks, d] up to this norm, whose result is all-gathered: every rank multiplies all
    # positions with its rows of the output projection.
    plan["norm"] = ReplicatedNorm(gather=True)
    description = model.description
    if description is not None and description.is_classifier:  # too few rows to shard: it is sharded by columns
        plan["output"] = HeadParallel()
    elif isinstance(model.output, nn.Module):  # a tied projection is not one: it reads the weight of tok_embeddings
        plan["output"] = VocabParallel()
    return plan


def _layer_plan(layer: nn.Module) -> dict[str, "ParallelStyle"]:
    """Return the styles of a layer's modules by name."""
    from torchtune.modules.mixers import RecurrentMixer
    from torchtune.modules.moe import MoE
    from torchtune.modules.parallel import (
        ColwiseParallel,
        GatherInput,
        ReplicatedNorm,
        RowwiseParallel,
        SequenceParallel,
    )

    plan: dict[str, ParallelStyle] = {}
    for name in ("sa_norm", "mlp_norm", "sa_scale", "mlp_scale", "layer_scale"):
        module = getattr(layer, name)
        has_parameters = module is not None and next(module.parameters(), None) is not None
        if has_parameters:  # a constant factor in the place of a norm has none
            plan[name] = ReplicatedNorm()
    for name in ("attn", "mixer"):
        module = getattr(layer, name)
        if isinstance(module, RecurrentMixer):
            # Its weights are replicated: heads are exchanged for positions inside of it.
            plan[name] = SequenceParallel()
        elif module is not None:
            for child, style in _attention_plan(module).items():
                plan[f"{name}.{child}"] = style
            # Between layers, a rank has some of the positions; attention and feed-forward need all of them.
            plan[name] = GatherInput()
    if isinstance(layer.mlp, MoE):
        plan["mlp"] = SequenceParallel("experts")
    elif layer.mlp is not None:
        plan["mlp"] = GatherInput()
        plan["mlp.w1"] = ColwiseParallel()
        plan["mlp.w2"] = RowwiseParallel()
        if layer.mlp.w3 is not None:
            plan["mlp.w3"] = ColwiseParallel()
    return plan


def _attention_plan(attention: nn.Module) -> dict[str, "ParallelStyle"]:
    """Return the styles of the modules of attention by name: each rank has some of the heads."""
    from torchtune.modules import LatentAttention
    from torchtune.modules.parallel import (
        ColwiseParallel,
        ReplicatedNorm,
        RowwiseParallel,
        SequenceParallel,
        ShardedNorm,
    )

    if isinstance(attention, LatentAttention):
        # Every rank computes the latents of all positions, and from them its heads.
        plan: dict[str, ParallelStyle] = {
            "q_proj": ColwiseParallel(),
            "kv_down_proj": SequenceParallel(),
            "kv_down_norm": ReplicatedNorm(),
            "kv_proj": ColwiseParallel(),
            "output_proj": RowwiseParallel(),
        }
        if attention.q_down_proj is not None:
            plan["q_down_proj"] = SequenceParallel()
            plan["q_down_norm"] = ReplicatedNorm()
        return plan
    plan = {
        "q_proj": ColwiseParallel(),
        "k_proj": ColwiseParallel(),
        "v_proj": ColwiseParallel(),
        "output_proj": RowwiseParallel(),
    }
    if attention.q_norm is not None:
        # A norm over all heads is sharded like the heads, a norm of each head is the same on all ranks.
        norm_style = ShardedNorm if attention.qk_norm_whole else ReplicatedNorm
        plan["q_norm"] = norm_style()
        plan["k_norm"] = norm_style()
    return plan
