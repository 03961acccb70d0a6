"""Gemma 3, the text models.

Gemma 2 with norms of queries and keys instead of soft caps, and a window in five of six layers. Layers without a window
have a larger RoPE base, which is stretched for the long context (https://arxiv.org/abs/2503.19786).
"""

from functools import partial
from typing import Any

from torchtune.models._builders import model_builders
from torchtune.models._description import Description, LinearRopeScaling
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields
from torchtune.models._spec import family
from torchtune.models._weight_map import Identity
from torchtune.models._weight_names import hf_names
from torchtune.models.gemma2 import NORMS, gemma2_description, read_softcaps, write_softcaps


def _read(fields: Fields) -> dict[str, Any]:
    pattern = fields.take("sliding_window_pattern", 6)
    if pattern != 6 and fields.peek("layer_types") is None:  # layer_types has precedence
        raise fields.refusal("sliding_window_pattern", pattern)
    return read_softcaps(fields, attn=None, final=None)


def _write(d: Description) -> dict[str, Any]:
    config = write_softcaps(d)
    if d.is_classifier:
        config["architectures"] = ["Gemma3TextForSequenceClassification"]
    return config


FORMAT = HFFormat(
    "Gemma3ForCausalLM",
    "gemma3_text",
    "half",
    biases="attention_bias",
    qk_norm="before_rope",
    windows="sliding_window",
    window_layers=6,
    ropes=("window",),
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    fixed={"norm_unit_offset": True, "norm_order": "both"},
    required_values={
        "use_bidirectional_attention": False,
        "attn_logit_softcapping": None,  # transformers ignores it
    },
    read_more=_read,
    write_more=_write,
    defaults={
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rope_local_base_freq": 10_000.0,
        "rope_theta": 1_000_000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "vocab_size": 262_208,
    },
)
SPEC = family(
    "gemma3", FORMAT, hf_names(Identity(), NORMS), architectures=("Gemma3ForCausalLM", "Gemma3TextForCausalLM")
)

_describe = partial(
    gemma2_description,
    full_every=6,
    max_seq_len=131_072,
    vocab_size=262_208,
    qk_norm="before_rope",
    rope_layout="half",
    rope_base=1_000_000.0,
    rope_window_base=10_000.0,
    rope_scaling=LinearRopeScaling(factor=8.0),
    attn_softcap=None,
    logit_softcap=None,
    window=1024,
)

SIZES = {
    "gemma3_1b": _describe(
        26,
        1152,
        intermediate_dim=6912,
        num_heads=4,
        num_kv_heads=1,
        max_seq_len=32_768,
        vocab_size=262_144,
        rope_scaling=None,
        window=512,
    ),
    "gemma3_4b": _describe(34, 2560, intermediate_dim=10_240, num_heads=8, num_kv_heads=4),
    "gemma3_12b": _describe(48, 3840, intermediate_dim=15_360, num_heads=16, num_kv_heads=8),
    "gemma3_27b": _describe(
        62,
        5376,
        intermediate_dim=21_504,
        num_heads=32,
        num_kv_heads=16,
        head_dim=128,
        attn_scale=168**-0.5,  # embed_dim / num_heads, not head_dim
    ),
}
BUILDERS = model_builders(__name__, "Gemma 3", SPEC, SIZES)
gemma3_1b = BUILDERS["gemma3_1b"]
lora_gemma3_1b = BUILDERS["lora_gemma3_1b"]
qlora_gemma3_1b = BUILDERS["qlora_gemma3_1b"]
gemma3_4b = BUILDERS["gemma3_4b"]
lora_gemma3_4b = BUILDERS["lora_gemma3_4b"]
qlora_gemma3_4b = BUILDERS["qlora_gemma3_4b"]
gemma3_12b = BUILDERS["gemma3_12b"]
lora_gemma3_12b = BUILDERS["lora_gemma3_12b"]
qlora_gemma3_12b = BUILDERS["qlora_gemma3_12b"]
gemma3_27b = BUILDERS["gemma3_27b"]
lora_gemma3_27b = BUILDERS["lora_gemma3_27b"]
qlora_gemma3_27b = BUILDERS["qlora_gemma3_27b"]

__all__ = ["SPEC", *BUILDERS]
