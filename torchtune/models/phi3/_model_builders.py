"""Sizes of Phi-3."""

from functools import partial

from torchtune._lazy import former_names
from torchtune.models._family import (
    HFFormat,
    Identity,
    component_builders,
    family,
    hf_names,
    model_builders,
)

FORMAT = HFFormat(
    "Phi3ForCausalLM",
    "phi3",
    "half",
    windows="sliding_window",
    ropes=("partial",),
    defaults=(
        ("attention_bias", None),
        ("embd_pdrop", None),
        ("max_position_embeddings", 4096),
        ("original_max_position_embeddings", 4096),
        ("rms_norm_eps", 1e-5),
    ),
)
SPEC = family("phi3", FORMAT, hf_names(Identity(), fused=("qkv", "gate_up")), model_types=("PHI3_MINI", "PHI4"))

phi3_description = partial(FORMAT.describe)

SIZES = {
    "phi3_mini": phi3_description(
        vocab_size=32_064,
        num_layers=32,
        embed_dim=3072,
        intermediate_dim=8192,
        max_seq_len=4096,
        num_heads=32,
        num_kv_heads=32,
        window=2047,
        window_layers=tuple(range(32)),
    ),
}
BUILDERS = model_builders(__name__, "Phi-3", SPEC, SIZES)
COMPONENTS = component_builders(
    __name__,
    "phi3",
    "Phi-3",
    SPEC,
    phi3_description,
    "vocab_size num_layers num_heads num_kv_heads embed_dim intermediate_dim max_seq_len",
    attn_dropout=0.0,
    norm_eps=1e-5,
    rope_base=10_000,
)

__getattr__ = former_names(__name__)
