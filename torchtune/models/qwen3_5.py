"""Qwen 3.5 and 3.6, the dense text decoders.

Three layers of linear attention (Gated DeltaNet, https://arxiv.org/abs/2412.06464) for each layer of gated attention
(https://arxiv.org/abs/2505.06708).
"""

from dataclasses import replace

from torchtune.models._builders import model_builders
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import all_but_every
from torchtune.models._hf_layers import read_delta_net, write_delta_net
from torchtune.models._mixers import DeltaNetMixer
from torchtune.models._spec import family
from torchtune.models._weight_names import HF_HALF, mixers

FORMAT = HFFormat(
    "Qwen3_5ForCausalLM",
    "qwen3_5_text",
    "half",
    biases="attention_bias",
    qk_norm="before_rope",
    mixer_layer_type="linear_attention",
    ropes=("partial", "sections"),
    fixed={"attn_gate": True, "norm_unit_offset": True},
    read_more=read_delta_net,
    write_more=write_delta_net,
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 32_768,
        "partial_rotary_factor": 0.25,
    },
)
SPEC = family("qwen3_5", FORMAT, mixers(HF_HALF, DeltaNetMixer.names), untrained=("mtp.",))

_9B = FORMAT.describe(
    vocab_size=248_320,
    num_layers=32,
    embed_dim=4096,
    intermediate_dim=12_288,
    max_seq_len=262_144,
    num_heads=16,
    num_kv_heads=4,
    head_dim=256,
    mixer=DeltaNetMixer(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128),
    mixer_layers=all_but_every(32, 4),
    rope_base=10_000_000.0,
    rope_dim=64,
    norm_eps=1e-6,
)
SIZES = {
    "qwen3_5_9b": _9B,
    "qwen3_5_27b": replace(
        _9B,
        num_layers=64,
        embed_dim=5120,
        intermediate_dim=17_408,
        num_heads=24,
        mixer=replace(_9B.mixer, num_value_heads=48),
        mixer_layers=all_but_every(64, 4),
    ),
}
BUILDERS = model_builders(__name__, "Qwen3.5", SPEC, SIZES)
qwen3_5_9b = BUILDERS["qwen3_5_9b"]
lora_qwen3_5_9b = BUILDERS["lora_qwen3_5_9b"]
qlora_qwen3_5_9b = BUILDERS["qlora_qwen3_5_9b"]
qwen3_5_27b = BUILDERS["qwen3_5_27b"]
lora_qwen3_5_27b = BUILDERS["lora_qwen3_5_27b"]
qlora_qwen3_5_27b = BUILDERS["qlora_qwen3_5_27b"]

__all__ = ["SPEC", *BUILDERS]
