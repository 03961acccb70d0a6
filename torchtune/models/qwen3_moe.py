"""Qwen 3, the mixtures of experts.

Qwen 3's layers with 128 experts, 8 per token, and no shared expert (https://arxiv.org/abs/2505.09388).
"""

from dataclasses import replace
from functools import partial

from torchtune.models._builders import model_builders
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_layers import read_qwen_experts, write_qwen_experts
from torchtune.models._spec import family
from torchtune.models._weight_names import HF_HALF, experts

_FORMAT = HFFormat(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    "half",
    biases="attention_bias",
    qk_norm="before_rope",
    windows="use_sliding_window",
    extra_fields=(
        ("num_experts_per_tok", "experts_per_token", 8),
        ("moe_intermediate_size", "expert_dim", 768),
        ("norm_topk_prob", "router_normalize", False),
        ("router_aux_loss_coef", "router_balance", 0.001),
    ),
    read_more=partial(read_qwen_experts, num_experts=128),
    write_more=write_qwen_experts,
    defaults={"num_key_value_heads": 4, "max_position_embeddings": 32_768, "sliding_window": 4096},
)
SPEC = family("qwen3_moe", _FORMAT, experts(HF_HALF, "mlp", "gate_proj", "up_proj", "down_proj"))

_30B = _FORMAT.describe(
    vocab_size=151_936,
    num_layers=48,
    embed_dim=2048,
    intermediate_dim=6144,
    max_seq_len=32_768,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    rope_base=1_000_000.0,
    num_experts=128,
    experts_per_token=8,
    expert_dim=768,
    router_normalize=True,
    router_balance=0.001,
    norm_eps=1e-6,
)
_235B = replace(_30B, num_layers=94, embed_dim=4096, intermediate_dim=12_288, num_heads=64, expert_dim=1536)
_LONG = 40_960  # context of the instruct models

SIZES = {
    "qwen3_30b_a3b_base": _30B,
    "qwen3_30b_a3b_instruct": replace(_30B, max_seq_len=_LONG),
    "qwen3_235b_a22b": replace(_235B, max_seq_len=_LONG),
}
BUILDERS = model_builders(__name__, "Qwen3 MoE", SPEC, SIZES)
qwen3_30b_a3b_base = BUILDERS["qwen3_30b_a3b_base"]
lora_qwen3_30b_a3b_base = BUILDERS["lora_qwen3_30b_a3b_base"]
qlora_qwen3_30b_a3b_base = BUILDERS["qlora_qwen3_30b_a3b_base"]
qwen3_30b_a3b_instruct = BUILDERS["qwen3_30b_a3b_instruct"]
lora_qwen3_30b_a3b_instruct = BUILDERS["lora_qwen3_30b_a3b_instruct"]
qlora_qwen3_30b_a3b_instruct = BUILDERS["qlora_qwen3_30b_a3b_instruct"]
qwen3_235b_a22b = BUILDERS["qwen3_235b_a22b"]
lora_qwen3_235b_a22b = BUILDERS["lora_qwen3_235b_a22b"]
qlora_qwen3_235b_a22b = BUILDERS["qlora_qwen3_235b_a22b"]

__all__ = ["SPEC", *BUILDERS]
