"""Read and write linear attention and Mamba layers of a Hugging Face ``config.json``."""

import math
from typing import Any

from torchtune.models._description import Description, ModelError
from torchtune.models._hf_fields import Fields, is_number, is_whole
from torchtune.models._mixers import DeltaNetMixer, Mamba2Mixer, Names
from torchtune.models._weight_ops import HeadGroups

_NUMBERS = (  # name in config.json, name in the mixer, default of transformers
    ("linear_num_key_heads", "num_key_heads", 16),
    ("linear_num_value_heads", "num_value_heads", 32),
    ("linear_key_head_dim", "key_dim", 128),
    ("linear_value_head_dim", "value_dim", 128),
    ("linear_conv_kernel_dim", "conv_taps", 4),
)

_MAMBA = (  # as _NUMBERS
    ("mamba_n_heads", "num_heads", 128),
    ("mamba_n_groups", "num_groups", 1),
    ("mamba_d_state", "state_dim", 256),
    ("mamba_d_conv", "conv_taps", 4),
)

# Weight names of DeltaNetMixer with fused input projections; checkpoints order their rows by key head.
FUSED_DELTA_NET: Names = (
    (
        "linear_attn.in_proj_qkvz.weight",
        "qkvz_proj.weight",
        HeadGroups(("key_dim", "key_dim", "group_dim", "group_dim")),
    ),
    ("linear_attn.in_proj_ba.weight", "ba_proj.weight", HeadGroups(("group_heads", "group_heads"))),
    *DeltaNetMixer.names[4:],
)


def require_silu(fields: Fields, name: str = "hidden_act") -> None:
    """Raise unless the activation is SiLU: ``transformers`` also uses the field in a mixer's convolution."""
    fields.choice(name, {"silu": None, "swish": None}, "silu")


def linear_layers(num_layers: int, interval: int = 4) -> tuple[int, ...]:
    """Return all layers except every ``interval``-th."""
    return tuple(i for i in range(num_layers) if (i + 1) % interval)


def read_delta_net(fields: Fields, *, fused: bool = False) -> dict[str, Any]:
    """Read the Gated DeltaNet layers of Qwen 3.5 or Qwen3-Next as values of a description.

    Args:
        fields: fields of the file.
        fused: whether checkpoints of the architecture hold fused input projections.
    """
    num_layers = fields.take("num_hidden_layers")
    kinds = fields.layer_kinds(num_layers)
    layers = linear_layers(num_layers, fields.take("full_attention_interval", 4))
    if kinds is not None:
        layers = tuple(i for i, kind in enumerate(kinds[:num_layers]) if kind == "linear_attention")
    # Fields of MTP layers, which are not trained, and of caches.
    fields.skip("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")
    fields.require(attn_output_gate=True)
    if layers:
        require_silu(fields)
    numbers = {ours: fields.take(theirs, default) for theirs, ours, default in _NUMBERS}
    return {"mixer": DeltaNetMixer(**numbers, fused=fused) if layers else None, "mixer_layers": layers}


def write_delta_net(d: Description) -> dict[str, Any]:
    """Write the fields of :func:`read_delta_net`."""
    kinds = ("full_attention", "linear_attention")
    config = {"layer_types": [kinds[layer in d.mixer_layers] for layer in range(d.num_layers)]}
    return config | ({theirs: getattr(d.mixer, ours) for theirs, ours, _ in _NUMBERS} if d.mixer else {})


def read_mamba(fields: Fields, inner: int, **more: Any) -> Mamba2Mixer:
    """Read the Mamba layers of Granite 4 or Falcon-H1.

    Args:
        fields: fields of the file.
        inner: total width of all heads.
        **more: further arguments of the mixer.
    """
    numbers = {ours: fields.take(theirs, default) for theirs, ours, default in _MAMBA}
    fields.skip("mamba_chunk_size")  # only affects how transformers computes
    require_silu(fields)
    fields.require(mamba_conv_bias=True, mamba_proj_bias=False)
    size = fields.take("mamba_d_head", "auto")
    if size == "auto":
        size = inner // max(numbers["num_heads"], 1)
    if not is_whole(size, 2**16):
        raise fields.refusal("mamba_d_head", size)
    if size * numbers["num_heads"] != inner:
        raise ModelError(
            f"config.json has mamba_n_heads = {numbers['num_heads']} heads of mamba_d_head = {size}, which together "
            f"are not {inner} wide (mamba_d_ssm, or mamba_expand * hidden_size): download it again, or correct it."
        )
    low, high = _read_limits(fields)
    return Mamba2Mixer(**numbers, head_dim=int(size), dt_min=low, dt_max=high, **more)


def _read_limits(fields: Fields) -> tuple[float, float]:
    limits = fields.take("time_step_limit", (0.0, math.inf))
    values = [math.inf if limit == _INFINITE else limit for limit in limits] if isinstance(limits, list | tuple) else []
    if len(values) != 2 or not all(is_number(value) or value == math.inf for value in values):
        raise fields.refusal("time_step_limit", limits)
    return float(values[0]), float(values[1])


_INFINITE = {"__float__": "Infinity"}  # as written by transformers


def write_mamba(mixer: Mamba2Mixer) -> dict[str, Any]:
    """Write the fields of :func:`read_mamba`."""
    config = {theirs: getattr(mixer, ours) for theirs, ours, _ in _MAMBA} | {"mamba_d_head": mixer.head_dim}
    limits = (mixer.dt_min, mixer.dt_max)
    if limits != (0.0, math.inf):
        config["time_step_limit"] = [_INFINITE if limit == math.inf else limit for limit in limits]
    return config
