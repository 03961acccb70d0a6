"""How a decoder is split over a tensor-parallel group."""

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:  # DTensor takes its time to import
    from torch.distributed.tensor.parallel import ParallelStyle


def decoder_plan(model: nn.Module) -> dict[str, "ParallelStyle"]:
    """The plan of every decoder that the builder makes: heads, channels of the MLP and the vocabulary are split.

    Args:
        model: a :class:`torchtune.modules.TransformerDecoder`.

    Returns:
        Style by pattern of module names, for ``torch.distributed.tensor.parallel.parallelize_module``.

    Raises:
        ParallelError: the model has experts.
    """
    from torchtune.modules.moe import MoE
    from torchtune.modules.parallel import ByColumns, ByRows, ByVocabulary, GatherInput, ReplicatedNorm
    from torchtune.modules.parallel._styles import ParallelError

    layer = model.layers[0]
    if any(isinstance(module, MoE) for module in model.modules()):
        raise ParallelError(
            "tensor_parallel_dim: a model with experts is not split like that; set it to 1, and "
            "data_parallel_shard_dim to -1 to shard the experts' weights."
        )
    block: dict[str, ParallelStyle] = {
        "sa_norm": ReplicatedNorm(),
        "attn": GatherInput(),
        "attn.q_proj": ByColumns(),
        "attn.k_proj": ByColumns(),
        "attn.v_proj": ByColumns(),
        "attn.output_proj": ByRows(),
        "mlp_norm": ReplicatedNorm(),
        "mlp": GatherInput(),
        "mlp.w1": ByColumns(),
        "mlp.w2": ByRows(),
    }
    if layer.mlp.w3 is not None:
        block["mlp.w3"] = ByColumns()
    if layer.attn.q_norm is not None:
        block |= {"attn.q_norm": ReplicatedNorm(), "attn.k_norm": ReplicatedNorm()}
    plan = {f"layers.*.{name}": style for name, style in block.items()}
    plan |= {"tok_embeddings": ByVocabulary(), "norm": ReplicatedNorm(gather=True)}
    if isinstance(model.output, nn.Module):
        plan["output"] = ByVocabulary()
    return plan
