"""OLMo 2.

For stable training, norms come after attention and feed-forward, and queries and keys are normalized over all heads
together (https://arxiv.org/abs/2501.00656).
"""

from torchtune.models._builders import model_builders
from torchtune.models._hf_config import HFFormat
from torchtune.models._spec import family
from torchtune.models._weight_map import Identity
from torchtune.models._weight_names import hf_names

# Norms of a layer, all post-norms: ours -> Hugging Face's.
NORMS = {"sa_scale": "post_attention_layernorm", "mlp_scale": "post_feedforward_layernorm"}

FORMAT = HFFormat(
    "Olmo2ForCausalLM",
    "olmo2",
    "half",
    biases="attention_bias",
    qk_norm="before_rope",
    fixed={"norm_order": "post", "qk_norm_whole": True},
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
)
SPEC = family("olmo2", FORMAT, hf_names(Identity(), NORMS))

_COMMON = {
    "vocab_size": 100_352,
    "max_seq_len": 4096,
    "norm_eps": 1e-6,
    "rope_base": 500_000.0,
}

SIZES = {
    "olmo2_1b": FORMAT.describe(
        **_COMMON, num_layers=16, embed_dim=2048, intermediate_dim=8192, num_heads=16, num_kv_heads=16
    ),
    "olmo2_7b": FORMAT.describe(
        **_COMMON, num_layers=32, embed_dim=4096, intermediate_dim=11_008, num_heads=32, num_kv_heads=32
    ),
    "olmo2_13b": FORMAT.describe(
        **_COMMON, num_layers=40, embed_dim=5120, intermediate_dim=13_824, num_heads=40, num_kv_heads=40
    ),
    "olmo2_32b": FORMAT.describe(
        **_COMMON, num_layers=64, embed_dim=5120, intermediate_dim=27_648, num_heads=40, num_kv_heads=8
    ),
}
BUILDERS = model_builders(__name__, "OLMo 2", SPEC, SIZES)
olmo2_1b = BUILDERS["olmo2_1b"]
lora_olmo2_1b = BUILDERS["lora_olmo2_1b"]
qlora_olmo2_1b = BUILDERS["qlora_olmo2_1b"]
olmo2_7b = BUILDERS["olmo2_7b"]
lora_olmo2_7b = BUILDERS["lora_olmo2_7b"]
qlora_olmo2_7b = BUILDERS["qlora_olmo2_7b"]
olmo2_13b = BUILDERS["olmo2_13b"]
lora_olmo2_13b = BUILDERS["lora_olmo2_13b"]
qlora_olmo2_13b = BUILDERS["qlora_olmo2_13b"]
olmo2_32b = BUILDERS["olmo2_32b"]
lora_olmo2_32b = BUILDERS["lora_olmo2_32b"]
qlora_olmo2_32b = BUILDERS["qlora_olmo2_32b"]

__all__ = ["SPEC", *BUILDERS]
