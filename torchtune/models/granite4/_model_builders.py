"""The sizes of Granite 4's dense models, the attention-only ones of GraniteMoeHybrid."""

from typing import Any

from torchtune.models._builders import model_builders
from torchtune.models._description import Description
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields
from torchtune.models._spec import ModelSpec
from torchtune.models._weight_names import hf_names, renamed
from torchtune.models._weight_ops import Identity
from torchtune.models.granite._model_builders import read_multipliers, write_multipliers

_MAMBA = ("n_heads", "n_groups", "d_state", "d_head", "d_conv", "expand", "chunk_size", "conv_bias", "proj_bias")


def _read(fields: Fields) -> dict[str, Any]:
    layers = fields.take("num_hidden_layers")
    fields.take("layer_types")  # absent, all layers are Mamba's
    if number := fields.take("num_local_experts", 8):
        raise fields.refusal("num_local_experts", number)
    rotated = fields.choice("position_embedding_type", {"rope": True, "nope": False, "none": False}, "none")
    for name in ("num_experts_per_tok", "router_aux_loss_coef", "time_step_limit", *(f"mamba_{n}" for n in _MAMBA)):
        fields.take(name, None)  # of layers and experts that the model does not have
    return {
        **read_multipliers(fields),
        "intermediate_dim": fields.take("shared_intermediate_size", 1024),
        "unrotated_layers": () if rotated else tuple(range(layers)),
    }


def _write(d: Description) -> dict[str, Any]:
    return {
        **write_multipliers(d),
        "shared_intermediate_size": d.intermediate_dim,
        "position_embedding_type": None if d.unrotated_layers else "rope",
        "layer_types": ["full_attention"] * d.num_layers,
        "num_local_experts": 0,
        "mamba_n_heads": 1,
    }


FORMAT = HFFormat(
    "GraniteMoeHybridForCausalLM",
    "granitemoehybrid",
    "half",
    biases="attention_bias",
    own=(("embedding_multiplier", "embed_scale", 1.0), ("residual_multiplier", "residual_scale", 1.0)),
    read_more=_read,
    write_more=_write,
    defaults=(("max_position_embeddings", 2048),),
)
_NAMES = {"mlp.gate_up_proj": "shared_mlp.input_linear", "mlp.down_proj": "shared_mlp.output_linear"}
SPEC = ModelSpec(
    name="granite4",
    architectures=("GraniteMoeHybridForCausalLM",),
    from_hf_config=FORMAT.read,
    to_hf_config=FORMAT.write,
    weight_maps={"hf": renamed(hf_names(Identity(), fused=("gate_up",)), _NAMES)},
)

SIZES = {
    "granite4_micro": Description(
        vocab_size=100_352,
        num_layers=40,
        embed_dim=2560,
        intermediate_dim=8192,
        max_seq_len=131_072,
        num_heads=40,
        num_kv_heads=8,
        rope_base=10_000_000.0,
        rope_layout="half",
        embed_scale=12.0,
        residual_scale=0.22,
        hidden_scale=1 / 10,
        attn_scale=0.015625,
        tie_word_embeddings=True,
    ),
}
BUILDERS = model_builders(__name__, "Granite 4", SPEC, SIZES)
globals().update(BUILDERS)
