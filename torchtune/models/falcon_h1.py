"""Falcon-H1.

Every layer has attention and Mamba 2 in parallel, and constant factors from maximal update parametrization
(https://arxiv.org/abs/2507.22448).
"""

from typing import Any

from torchtune.models._builders import model_builders
from torchtune.models._description import Description
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields, is_number
from torchtune.models._hf_layers import read_mamba, write_mamba
from torchtune.models._mixers import Mamba2Mixer
from torchtune.models._spec import family
from torchtune.models._weight_names import HF_HALF, mixers, renamed


def _read(fields: Fields) -> dict[str, Any]:
    has_norm = bool(fields.take("mamba_rms_norm", False))
    norm_before_gate = fields.take("mamba_norm_before_gate", True)
    if has_norm and norm_before_gate:  # Mamba2 normalizes after the gate
        raise fields.refusal("mamba_norm_before_gate", True)
    expand = fields.take("mamba_expand", 2)
    default_inner_dim = 1024
    if fields.has("mamba_d_ssm"):  # transformers takes an absent field as 1024, but null as a multiple of the width
        default_inner_dim = expand * fields.take("hidden_size")
    attn_in_scale = float(fields.take("attention_in_multiplier", 1.0))
    if attn_in_scale != 1.0 and fields.take("attention_bias", False):
        # A bias is not scaled by a factor of the input, so that other factors could not express it.
        raise fields.refusal("attention_in_multiplier", attn_in_scale)
    mlp_gate_scale, mlp_out_scale = _factors(fields, "mlp_multipliers", 2)
    ssm_in_scale = float(fields.take("ssm_in_multiplier", 1.0))
    mixer = read_mamba(
        fields,
        fields.take("mamba_d_ssm", default_inner_dim),
        has_norm=has_norm,
        scales=tuple(ssm_in_scale * factor for factor in _factors(fields, "ssm_multipliers", 5)),
        out_scale=float(fields.take("ssm_out_multiplier", 1.0)),
    )
    return {
        "mixer": mixer,
        "mixer_layers": tuple(range(fields.take("num_hidden_layers"))),
        # A factor of attention's input scales queries, keys and values: scores by its square, the output once.
        "key_scale": float(fields.take("key_multiplier", 1.0)) * attn_in_scale**2,
        "attn_out_scale": float(fields.take("attention_out_multiplier", 1.0)) * attn_in_scale,
        "mlp_gate_scale": mlp_gate_scale,
        "mlp_out_scale": mlp_out_scale,
    }


def _factors(fields: Fields, name: str, count: int) -> list[float]:
    """Read a list of ``count`` factors; without the field, all are 1."""
    values = fields.take(name, [1.0] * count)
    if not isinstance(values, list | tuple) or len(values) != count or not all(map(is_number, values)):
        raise fields.refusal(name, values)
    return [float(value) for value in values]


def _write(d: Description) -> dict[str, Any]:
    return {
        **write_mamba(d.mixer),
        "mamba_d_ssm": d.mixer.num_heads * d.mixer.head_dim,
        "mamba_rms_norm": d.mixer.has_norm,
        "mamba_norm_before_gate": False,
        # The factors of inputs are 1 in a written file: they are part of the other factors.
        "ssm_multipliers": list(d.mixer.scales),
        "ssm_out_multiplier": d.mixer.out_scale,
        "key_multiplier": d.key_scale,
        "attention_out_multiplier": d.attn_out_scale,
        "mlp_multipliers": [d.mlp_gate_scale, d.mlp_out_scale],
    }


FORMAT = HFFormat(
    "FalconH1ForCausalLM",
    "falcon_h1",
    "half",
    biases="attention_bias",
    has_mlp_bias=True,
    fixed={"mixer_beside_attn": True},
    extra_fields=(("embedding_multiplier", "embed_scale", 1.0), ("lm_head_multiplier", "hidden_scale", 1.0)),
    required_values={"projectors_bias": False, "mamba_use_mlp": True},
    # Used in generation only, implied by the architecture, or given by intermediate_size.
    unused=("num_logits_to_keep", "layer_types", "layers_block_type", "mlp_expansion_factor"),
    read_more=_read,
    write_more=_write,
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
    },
)
_NAMES = {
    "model.norm.": "model.final_layernorm.",
    "post_attention_layernorm": "pre_ff_layernorm",
    ".mlp.": ".feed_forward.",
}
SPEC = family(
    "falcon_h1", FORMAT, mixers(renamed(HF_HALF, _NAMES), Mamba2Mixer.names, "mixer"), not_in_peft=("mamba.out_proj",)
)

SIZES: dict[str, Description] = {}  # read from config.json, with their factors
BUILDERS = model_builders(__name__, "Falcon-H1", SPEC, SIZES)

__all__ = ["SPEC", *BUILDERS]
