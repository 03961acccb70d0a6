"""OLMoE.

64 experts per layer, 8 per token, and norms of queries and keys over all heads together
(https://arxiv.org/abs/2409.02060).
"""

from typing import Any

from torchtune.models._builders import model_builders
from torchtune.models._description import Description
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields
from torchtune.models._spec import family
from torchtune.models._weight_names import HF_HALF, experts


def _read(fields: Fields) -> dict[str, Any]:
    number = fields.take("num_local_experts", 64)  # the name in transformers 5
    return {"num_experts": fields.take("num_experts", number)}


def _write(d: Description) -> dict[str, Any]:
    return {"num_experts": d.num_experts}


_FORMAT = HFFormat(
    "OlmoeForCausalLM",
    "olmoe",
    "half",
    biases="attention_bias",
    qk_norm="before_rope",
    fixed={"qk_norm_whole": True},
    extra_fields=(
        ("num_experts_per_tok", "experts_per_token", 8),
        ("intermediate_size", "expert_dim", 2048),
        ("norm_topk_prob", "router_normalize", False),
        ("router_aux_loss_coef", "router_balance", 0.01),
    ),
    read_more=_read,
    write_more=_write,
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
)
SPEC = family("olmoe", _FORMAT, experts(HF_HALF, "mlp", "gate_proj", "up_proj", "down_proj"))

SIZES = {
    "olmoe_1b_7b": _FORMAT.describe(
        vocab_size=50_304,
        num_layers=16,
        embed_dim=2048,
        intermediate_dim=1024,
        max_seq_len=4096,
        num_heads=16,
        num_kv_heads=16,
        num_experts=64,
        experts_per_token=8,
        expert_dim=1024,
        router_balance=0.01,
    ),
}
BUILDERS = model_builders(__name__, "OLMoE", SPEC, SIZES)
olmoe_1b_7b = BUILDERS["olmoe_1b_7b"]
lora_olmoe_1b_7b = BUILDERS["lora_olmoe_1b_7b"]
qlora_olmoe_1b_7b = BUILDERS["qlora_olmoe_1b_7b"]

__all__ = ["SPEC", *BUILDERS]
