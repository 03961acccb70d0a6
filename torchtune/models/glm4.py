"""GLM-4.

Norms before and after attention and feed-forward. RoPE rotates neighboring channels in the first half of a head.
"""

from torchtune.models._builders import model_builders
from torchtune.models._hf_config import HFFormat
from torchtune.models._spec import family
from torchtune.models._weight_map import Identity
from torchtune.models._weight_names import hf_names

# Norms of a layer: ours -> Hugging Face's.
NORMS = {
    "sa_norm": "input_layernorm",
    "sa_scale": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_scale": "post_mlp_layernorm",
}

FORMAT = HFFormat(
    "Glm4ForCausalLM",
    "glm4",
    "interleaved",
    biases="attention_bias",
    ropes=("partial",),
    fixed={"norm_order": "both"},
    output_bias=False,
    defaults={
        "attention_bias": True,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-07,  # published files have 1e-5
    },
)
SPEC = family("glm4", FORMAT, hf_names(Identity(), NORMS, fused=("gate_up",)))

_COMMON = {
    "vocab_size": 151_552,
    "max_seq_len": 32_768,
    "head_dim": 128,
    "rope_dim": 64,
    "norm_eps": 1e-5,
}

SIZES = {
    "glm4_9b_0414": FORMAT.describe(
        **_COMMON,
        num_layers=40,
        embed_dim=4096,
        intermediate_dim=13_696,
        num_heads=32,
        num_kv_heads=2,
        q_bias=True,
        k_bias=True,
        v_bias=True,
    ),
    "glm4_32b_0414": FORMAT.describe(
        **_COMMON, num_layers=61, embed_dim=6144, intermediate_dim=23_040, num_heads=48, num_kv_heads=8
    ),
}
BUILDERS = model_builders(__name__, "GLM-4", SPEC, SIZES)
glm4_9b_0414 = BUILDERS["glm4_9b_0414"]
lora_glm4_9b_0414 = BUILDERS["lora_glm4_9b_0414"]
qlora_glm4_9b_0414 = BUILDERS["qlora_glm4_9b_0414"]
glm4_32b_0414 = BUILDERS["glm4_32b_0414"]
lora_glm4_32b_0414 = BUILDERS["lora_glm4_32b_0414"]
qlora_glm4_32b_0414 = BUILDERS["qlora_glm4_32b_0414"]

__all__ = ["SPEC", *BUILDERS]
