"""Hunyuan's dense models: norms of queries and keys after RoPE, with a scaled RoPE base (NTK)."""

from typing import Any

from torchtune.models._builders import model_builders
from torchtune.models._description import Description
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields
from torchtune.models._spec import ModelSpec
from torchtune.models._weight_names import hf_names
from torchtune.models._weight_ops import Identity

# Fields of published files that transformers also ignores.
_UNUSED = (
    "attention_head_dim",
    "cla_share_factor",
    "dense_list",
    "eod_token_id",
    "moe_topk",
    "norm_type",
    "org_vocab_size",
    "pad_id",
    "use_qk_norm",
)


def _read(fields: Fields) -> dict[str, Any]:
    if fields.take("use_qk_norm", True) is not True or fields.take("num_experts", 1) != 1:
        name = "use_qk_norm" if fields.peek("use_qk_norm") is False else "num_experts"
        raise fields.refusal(name, fields.peek(name))
    for name in _UNUSED:
        fields.take(name, None)
    return {}


FORMAT = HFFormat(
    "HunYuanDenseV1ForCausalLM",
    "hunyuan_v1_dense",
    "half",
    biases="attention_bias",
    qk_norm="after_rope",
    ropes=("alpha",),
    read_more=_read,
    defaults=(("max_position_embeddings", 2048), ("rms_norm_eps", 1e-5)),
)
SPEC = ModelSpec(
    name="hunyuan",
    architectures=("HunYuanDenseV1ForCausalLM",),
    from_hf_config=FORMAT.read,
    to_hf_config=FORMAT.write,
    weight_maps={
        "hf": hf_names(
            Identity(),
            qk_norms={"attn.q_norm": "self_attn.query_layernorm", "attn.k_norm": "self_attn.key_layernorm"},
        )
    },
)

SIZES: dict[str, Description] = {}  # read from config.json
BUILDERS = model_builders(__name__, "Hunyuan", SPEC, SIZES)
globals().update(BUILDERS)
