"""Hunyuan, the dense models.

Norms of queries and keys come after RoPE. In published files, a constant ``alpha`` enlarges the RoPE base (NTK-aware
scaling).
"""

from torchtune.models._builders import model_builders
from torchtune.models._description import Description
from torchtune.models._hf_config import HFFormat
from torchtune.models._spec import family
from torchtune.models._weight_map import Identity
from torchtune.models._weight_names import hf_names

FORMAT = HFFormat(
    "HunYuanDenseV1ForCausalLM",
    "hunyuan_v1_dense",
    "half",
    biases="attention_bias",
    qk_norm="after_rope",
    ropes=("alpha",),
    required_values={"use_qk_norm": True, "num_experts": 1},
    # Fields of published files that transformers also ignores.
    unused=tuple(
        "attention_head_dim cla_share_factor dense_list eod_token_id moe_topk norm_type org_vocab_size pad_id".split()
    ),
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
)
SPEC = family(
    "hunyuan",
    FORMAT,
    hf_names(
        Identity(),
        qk_norms={"attn.q_norm": "self_attn.query_layernorm", "attn.k_norm": "self_attn.key_layernorm"},
    ),
)

SIZES: dict[str, Description] = {}  # read from config.json
BUILDERS = model_builders(__name__, "Hunyuan", SPEC, SIZES)

__all__ = ["SPEC", *BUILDERS]
