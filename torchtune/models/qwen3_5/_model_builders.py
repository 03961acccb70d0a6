"""Qwen 3.5: three layers of linear attention (Gated DeltaNet) for each layer of gated attention."""

from typing import Any

from torchtune.models._builders import model_builders
from torchtune.models._description import Description
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields
from torchtune.models._mixers import DeltaNetMixer
from torchtune.models._spec import ModelSpec
from torchtune.models._weight_names import HF_HALF, mixers

_NUMBERS = (  # theirs, ours, what transformers assumes
    ("linear_num_key_heads", "num_key_heads", 16),
    ("linear_num_value_heads", "num_value_heads", 32),
    ("linear_key_head_dim", "key_dim", 128),
    ("linear_value_head_dim", "value_dim", 128),
    ("linear_conv_kernel_dim", "conv_taps", 4),
)


def linear_layers(num_layers: int, interval: int = 4) -> tuple[int, ...]:
    """All layers but every ``interval``-th."""
    return tuple(i for i in range(num_layers) if (i + 1) % interval)


def read_mixer(fields: Fields) -> dict[str, Any]:
    """The linear attention of a ``config.json`` of Qwen 3.5 or Qwen3-Next."""
    num_layers = fields.take("num_hidden_layers")
    kinds = fields.list_of("layer_types", num_layers, str)
    layers = linear_layers(num_layers, fields.take("full_attention_interval", 4))
    if kinds is not None:
        layers = tuple(i for i, kind in enumerate(kinds[:num_layers]) if kind == "linear_attention")
    numbers = {ours: fields.take(theirs, default) for theirs, ours, default in _NUMBERS}
    return {"mixer": DeltaNetMixer(**numbers) if layers else None, "mixer_layers": layers}


def write_mixer(d: Description) -> dict[str, Any]:
    """The inverse of :func:`read_mixer`."""
    kinds = ("full_attention", "linear_attention")
    config = {"layer_types": [kinds[layer in d.mixer_layers] for layer in range(d.num_layers)]}
    return config | ({theirs: getattr(d.mixer, ours) for theirs, ours, _ in _NUMBERS} if d.mixer else {})


_FORMAT = HFFormat(
    "Qwen3_5ForCausalLM",
    "qwen3_5_text",
    "half",
    biases="attention_bias",
    qk_norm="before_rope",
    mixer_kind="linear_attention",
    ropes=("partial",),
    fixed=(("attn_gate", True), ("norm_unit_offset", True)),
    read_more=read_mixer,
    write_more=write_mixer,
    defaults=(
        ("num_key_value_heads", 4),
        ("head_dim", 256),
        ("max_position_embeddings", 32_768),
        ("partial_rotary_factor", 0.25),
    ),
)
SPEC = ModelSpec(
    name="qwen3_5",
    architectures=("Qwen3_5ForCausalLM",),
    from_hf_config=_FORMAT.read,
    to_hf_config=_FORMAT.write,
    weight_maps={"hf": mixers(HF_HALF, DeltaNetMixer.names)},
)
SIZES: dict[str, Description] = {}
BUILDERS = model_builders(__name__, "Qwen3.5", SPEC, SIZES)
globals().update(BUILDERS)
