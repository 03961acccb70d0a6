"""Sizes of Qwen 3's dense models: head dimension 128, norms of queries and keys, no biases."""

from dataclasses import replace

from torchtune._lazy import former_names
from torchtune.models._family import GGUF, HF_HALF, QWEN3, family, model_builders
from torchtune.models.qwen2._model_builders import qwen_components

SPEC = family("qwen3", QWEN3, HF_HALF, formats={"gguf": GGUF}, model_types=("QWEN3",))

_0_6B = QWEN3.describe(
    vocab_size=151_936,
    num_layers=28,
    embed_dim=1024,
    intermediate_dim=3072,
    max_seq_len=32_768,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    rope_base=1_000_000.0,
    norm_eps=1e-6,
    tie_word_embeddings=True,
)
_1_7B = replace(_0_6B, embed_dim=2048, intermediate_dim=6144)
_4B = replace(_0_6B, num_layers=36, embed_dim=2560, intermediate_dim=9728, num_heads=32)
_8B = replace(_4B, embed_dim=4096, intermediate_dim=12_288, tie_word_embeddings=False)
_14B = replace(_8B, num_layers=40, embed_dim=5120, intermediate_dim=17_408, num_heads=40)
_32B = replace(_8B, num_layers=64, embed_dim=5120, intermediate_dim=25_600, num_heads=64)
_LONG = 40_960  # context of the instruct models

SIZES = {
    "qwen3_0_6b_base": _0_6B,
    "qwen3_0_6b_instruct": replace(_0_6B, max_seq_len=_LONG),
    "qwen3_1_7b_base": _1_7B,
    "qwen3_1_7b_instruct": replace(_1_7B, max_seq_len=_LONG),
    "qwen3_4b_base": _4B,
    "qwen3_4b_instruct": replace(_4B, max_seq_len=_LONG),
    "qwen3_8b_base": _8B,
    "qwen3_8b_instruct": replace(_8B, max_seq_len=_LONG),
    "qwen3_14b_base": _14B,
    "qwen3_14b_instruct": replace(_14B, max_seq_len=_LONG),
    "qwen3_32b": replace(_32B, max_seq_len=_LONG),
}
BUILDERS = model_builders(__name__, "Qwen3", SPEC, SIZES)
COMPONENTS = qwen_components(__name__, "qwen3", "Qwen 3", SPEC, "before_rope")

__getattr__ = former_names(__name__)
