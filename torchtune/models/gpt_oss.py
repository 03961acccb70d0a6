"""gpt-oss.

Clamped experts, attention sinks, a sliding window in every other layer, and YaRN (https://arxiv.org/abs/2508.10925).
"""

from dataclasses import replace
from typing import Any

from torchtune.models._builders import model_builders
from torchtune.models._description import YarnRopeScaling
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields
from torchtune.models._spec import family
from torchtune.models._weight_map import Row
from torchtune.models._weight_names import HF_HALF
from torchtune.models._weight_ops import FusedExperts

_YARN = YarnRopeScaling(factor=32.0, original_max_seq_len=4096, truncate=False)


def _read(fields: Fields) -> dict[str, Any]:
    # Published experts are in MXFP4, which the checkpointer dequantizes.
    quantization = fields.take("quantization_config", None)
    if quantization and quantization.get("quant_method") != "mxfp4":
        raise fields.refusal("quantization_config", quantization)
    values: dict[str, Any] = {"expert_dim": fields.take("intermediate_size")}
    if fields.peek("rope_parameters") is None and not fields.peek("rope_scaling"):
        values["rope_scaling"] = _YARN  # default of transformers
    return values


_FORMAT = HFFormat(
    "GptOssForCausalLM",
    "gpt_oss",
    "half",
    biases="attention_bias",
    windows="sliding_window",
    window_layers=2,
    fixed={"router_normalize": True, "router_bias": True, "attn_sinks": True},
    extra_fields=(
        ("num_local_experts", "num_experts", 128),
        ("num_experts_per_tok", "experts_per_token", 4),
        ("swiglu_limit", "expert_limit", 7.0),
        ("router_aux_loss_coef", "router_balance", 0.001),
    ),
    required_values={"swiglu_alpha": 1.702},
    read_more=_read,
    defaults={
        "attention_bias": True,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
    },
)
_HF_LAYER = "model.layers.{layer}."
_TUNE_LAYER = "layers.{layer}."
_HF_EXPERTS = f"{_HF_LAYER}mlp.experts."
_TUNE_EXPERTS = f"{_TUNE_LAYER}mlp.experts."
_MATRICES = FusedExperts(transpose=False)
_ROWS = (
    Row(f"{_HF_LAYER}self_attn.sinks", f"{_TUNE_LAYER}attn.sinks", when="attn_sinks"),
    Row(f"{_HF_LAYER}mlp.router.weight", f"{_TUNE_LAYER}mlp.router.gate.weight", when="expert_layers"),
    Row(f"{_HF_LAYER}mlp.router.bias", f"{_TUNE_LAYER}mlp.router.gate.bias", when="router_bias"),
    Row(f"{_HF_EXPERTS}gate_up_proj", f"{_TUNE_EXPERTS}gate_up_proj", _MATRICES, "expert_layers"),
    Row(f"{_HF_EXPERTS}gate_up_proj_bias", f"{_TUNE_EXPERTS}gate_up_proj_bias", when="expert_layers"),
    Row(f"{_HF_EXPERTS}down_proj", f"{_TUNE_EXPERTS}down_proj", _MATRICES, "expert_layers"),
    Row(f"{_HF_EXPERTS}down_proj_bias", f"{_TUNE_EXPERTS}down_proj_bias", when="expert_layers"),
)
SPEC = family("gpt_oss", _FORMAT, HF_HALF.extended(_ROWS))

_20B = _FORMAT.describe(
    vocab_size=201_088,
    num_layers=24,
    embed_dim=2880,
    intermediate_dim=2880,  # of no layer: all have experts
    max_seq_len=131_072,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    q_bias=True,
    k_bias=True,
    v_bias=True,
    attn_output_bias=True,
    window=128,
    window_layers=tuple(range(0, 24, 2)),
    rope_base=150_000.0,
    rope_scaling=_YARN,
    num_experts=32,
    experts_per_token=4,
    expert_dim=2880,
    expert_limit=7.0,
    router_balance=0.9,
)

SIZES = {
    "gpt_oss_20b": _20B,
    "gpt_oss_120b": replace(_20B, num_layers=36, window_layers=tuple(range(0, 36, 2)), num_experts=128),
}
BUILDERS = model_builders(__name__, "gpt-oss", SPEC, SIZES)
gpt_oss_20b = BUILDERS["gpt_oss_20b"]
lora_gpt_oss_20b = BUILDERS["lora_gpt_oss_20b"]
qlora_gpt_oss_20b = BUILDERS["qlora_gpt_oss_20b"]
gpt_oss_120b = BUILDERS["gpt_oss_120b"]
lora_gpt_oss_120b = BUILDERS["lora_gpt_oss_120b"]
qlora_gpt_oss_120b = BUILDERS["qlora_gpt_oss_120b"]

__all__ = ["SPEC", *BUILDERS]
