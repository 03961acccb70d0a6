"""Sizes of Llama 3."""

from functools import partial

from torchtune._lazy import former_names
from torchtune.models._family import (
    GGUF,
    HF_INTERLEAVED,
    LLAMA,
    META,
    Description,
    component_builders,
    family,
    model_builders,
)

SPEC = family(
    "llama3",
    LLAMA,
    HF_INTERLEAVED,
    formats={"meta": META, "gguf": GGUF},
    model_types=("LLAMA3", "LLAMA2", "LLAMA3_2"),  # also reads any Llama by its config.json,
)

_llama3 = partial(Description, vocab_size=128_256, max_seq_len=8192, num_kv_heads=8, rope_base=500_000.0)

SIZES = {
    "llama3_8b": _llama3(num_layers=32, embed_dim=4096, intermediate_dim=14_336, num_heads=32),
    "llama3_70b": _llama3(num_layers=80, embed_dim=8192, intermediate_dim=28_672, num_heads=64),
}
BUILDERS = model_builders(__name__, "Llama 3", SPEC, SIZES)
COMPONENTS = component_builders(
    __name__,
    "llama3",
    "Llama 3",
    SPEC,
    Description,
    "vocab_size num_layers num_heads num_kv_heads embed_dim max_seq_len",
    attn_dropout=0.0,
    rope_base=500_000,
    intermediate_dim=None,
    norm_eps=1e-5,
)

__getattr__ = former_names(__name__)
