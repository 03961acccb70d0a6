"""Sizes of Qwen 2.5, which has the architecture of Qwen 2."""

from dataclasses import replace

from torchtune._lazy import former_names
from torchtune.models._family import model_builders
from torchtune.models.qwen2._model_builders import SIZES as QWEN2
from torchtune.models.qwen2._model_builders import SPEC as QWEN2_SPEC
from torchtune.models.qwen2._model_builders import qwen2_size

SPEC = replace(QWEN2_SPEC, name="qwen2_5")

_1_5B, _7B = QWEN2["qwen2_1_5b"], QWEN2["qwen2_7b"]
_14B = replace(_7B, num_layers=48, embed_dim=5120, intermediate_dim=13_824, num_heads=40, num_kv_heads=8)
_32B = replace(_14B, num_layers=64, intermediate_dim=27_648)
_72B = replace(_7B, num_layers=80, embed_dim=8192, intermediate_dim=29_568, num_heads=64, num_kv_heads=8)
_LONG = 131_072  # context of the base models

SIZES = {
    "qwen2_5_0_5b": QWEN2["qwen2_0_5b"],
    "qwen2_5_1_5b_base": replace(_1_5B, max_seq_len=_LONG),
    "qwen2_5_1_5b_instruct": _1_5B,
    "qwen2_5_3b": qwen2_size(
        num_layers=36, embed_dim=2048, intermediate_dim=11_008, num_heads=16, num_kv_heads=2, tie_word_embeddings=True
    ),
    "qwen2_5_7b_base": replace(_7B, max_seq_len=_LONG),
    "qwen2_5_7b_instruct": _7B,
    "qwen2_5_14b_base": replace(_14B, max_seq_len=_LONG, norm_eps=1e-5),
    "qwen2_5_14b_instruct": _14B,
    "qwen2_5_32b_base": replace(_32B, max_seq_len=_LONG, norm_eps=1e-5),
    "qwen2_5_32b_instruct": _32B,
    "qwen2_5_72b_base": replace(_72B, max_seq_len=_LONG, norm_eps=1e-5),
    "qwen2_5_72b_instruct": _72B,
}
BUILDERS = model_builders(__name__, "Qwen2.5", SPEC, SIZES)
# Compatibility: a config of earlier releases uses this name.
lora_qwen2_5_7b = BUILDERS["lora_qwen2_5_7b"] = BUILDERS["lora_qwen2_5_7b_instruct"]

__getattr__ = former_names(__name__)
