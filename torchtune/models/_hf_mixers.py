"""Reading and writing the linear attention of a Hugging Face ``config.json``."""

from typing import Any

from torchtune.models._description import Description
from torchtune.models._hf_fields import Fields
from torchtune.models._mixers import DeltaNetMixer, Names
from torchtune.models._weight_ops import HeadGroups

_NUMBERS = (  # theirs, ours, what transformers assumes
    ("linear_num_key_heads", "num_key_heads", 16),
    ("linear_num_value_heads", "num_value_heads", 32),
    ("linear_key_head_dim", "key_dim", 128),
    ("linear_value_head_dim", "value_dim", 128),
    ("linear_conv_kernel_dim", "conv_taps", 4),
)

# Names of :class:`DeltaNetMixer` where checkpoints hold fused input projections, key head by key head.
FUSED_DELTA_NET: Names = (
    (
        "linear_attn.in_proj_qkvz.weight",
        "qkvz_proj.weight",
        HeadGroups(("key_dim", "key_dim", "group_dim", "group_dim")),
    ),
    ("linear_attn.in_proj_ba.weight", "ba_proj.weight", HeadGroups(("group_heads", "group_heads"))),
    *DeltaNetMixer.names[4:],
)


def linear_layers(num_layers: int, interval: int = 4) -> tuple[int, ...]:
    """All layers but every ``interval``-th."""
    return tuple(i for i in range(num_layers) if (i + 1) % interval)


def read_delta_net(fields: Fields, *, fused: bool = False) -> dict[str, Any]:
    """The Gated DeltaNet layers of Qwen 3.5 or Qwen3-Next, as values of a description.

    Args:
        fields: the file's fields.
        fused: whether checkpoints of the architecture hold fused input projections.
    """
    num_layers = fields.take("num_hidden_layers")
    kinds = fields.list_of("layer_types", num_layers, str)
    layers = linear_layers(num_layers, fields.take("full_attention_interval", 4))
    if kinds is not None:
        layers = tuple(i for i, kind in enumerate(kinds[:num_layers]) if kind == "linear_attention")
    for name in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype"):
        fields.take(name, None)  # of weights that are not trained, and of caches
    if not fields.take("attn_output_gate", True):
        raise fields.refusal("attn_output_gate", False)
    numbers = {ours: fields.take(theirs, default) for theirs, ours, default in _NUMBERS}
    return {"mixer": DeltaNetMixer(**numbers, fused=fused) if layers else None, "mixer_layers": layers}


def write_delta_net(d: Description) -> dict[str, Any]:
    """The inverse of :func:`read_delta_net`."""
    kinds = ("full_attention", "linear_attention")
    config = {"layer_types": [kinds[layer in d.mixer_layers] for layer in range(d.num_layers)]}
    return config | ({theirs: getattr(d.mixer, ours) for theirs, ours, _ in _NUMBERS} if d.mixer else {})
