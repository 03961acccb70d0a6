"""Size of MiniMax-M2: sigmoid routers with selection bias, 256 experts, norms over all heads, partial RoPE."""

from typing import Any

from torchtune.models._builders import model_builders
from torchtune.models._description import Description
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields
from torchtune.models._spec import ModelSpec
from torchtune.models._weight_names import HF_HALF, experts

# Fields with a single supported value, and fields that transformers does not read.
_FIXED = {"qk_norm_type": "per_layer", "scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True}
_UNUSED = ("mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "shared_moe_mode", "use_mtp")


def _read(fields: Fields) -> dict[str, Any]:
    betas = {f"layernorm_{part}_beta": 1.0 for part in ("full_attention", "linear_attention", "mlp")}
    for name, value in {**_FIXED, **betas}.items():
        if fields.take(name, value) != value:
            raise fields.refusal(name, fields.peek(name))
    if any(kind != 1 for kind in fields.list_of("attn_type_list", fields.take("num_hidden_layers"), int) or ()):
        raise fields.refusal("attn_type_list", fields.peek("attn_type_list"))
    for name in _UNUSED:
        fields.take(name, None)
    return {}


_FORMAT = HFFormat(
    "MiniMaxM2ForCausalLM",
    "minimax_m2",
    "half",
    qk_norm="before_rope",
    ropes=("partial", "dim"),
    fixed=(
        ("qk_norm_whole", True),
        ("router_scores", "sigmoid"),
        ("router_normalize", True),
        ("router_selection_bias", True),
    ),
    own=(
        ("num_local_experts", "num_experts", 256),
        ("num_experts_per_tok", "experts_per_token", 8),
        ("intermediate_size", "expert_dim", 1536),
        ("router_aux_loss_coef", "router_balance", 0.001),
    ),
    read_more=_read,
    defaults=(
        ("num_key_value_heads", 8),
        ("head_dim", 128),
        ("max_position_embeddings", 196_608),
        ("rope_theta", 5_000_000.0),
    ),
)
SPEC = ModelSpec(
    name="minimax_m2",
    architectures=("MiniMaxM2ForCausalLM",),
    from_hf_config=_FORMAT.read,
    to_hf_config=_FORMAT.write,
    weight_maps={"hf": experts(HF_HALF, "block_sparse_moe", "w1", "w3", "w2", "e_score_correction_bias")},
)

SIZES = {
    "minimax_m2": Description(
        vocab_size=200_064,
        num_layers=62,
        embed_dim=3072,
        intermediate_dim=1536,
        max_seq_len=196_608,
        num_heads=48,
        num_kv_heads=8,
        head_dim=128,
        qk_norm="before_rope",
        qk_norm_whole=True,
        rope_base=5_000_000.0,
        rope_layout="half",
        rope_dim=64,
        num_experts=256,
        experts_per_token=8,
        expert_dim=1536,
        router_scores="sigmoid",
        router_normalize=True,
        router_selection_bias=True,
        router_balance=0.001,
        norm_eps=1e-6,
    ),
}
BUILDERS = model_builders(__name__, "MiniMax-M2", SPEC, SIZES)
globals().update(BUILDERS)
