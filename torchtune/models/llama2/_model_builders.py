"""Sizes of Llama 2."""

from dataclasses import replace
from functools import partial

from torchtune._lazy import former_names
from torchtune.models._classifiers import classifier_builders
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

SPEC = family("llama2", LLAMA, HF_INTERLEAVED, formats={"meta": META, "gguf": GGUF}, model_types=("LLAMA2", "REWARD"))

_llama2 = partial(Description, vocab_size=32_000, max_seq_len=4096)

SIZES = {
    "llama2_7b": _llama2(num_layers=32, embed_dim=4096, intermediate_dim=11_008, num_heads=32, num_kv_heads=32),
    "llama2_13b": _llama2(num_layers=40, embed_dim=5120, intermediate_dim=13_824, num_heads=40, num_kv_heads=40),
    "llama2_70b": _llama2(num_layers=80, embed_dim=8192, intermediate_dim=28_672, num_heads=64, num_kv_heads=8),
}
REWARD_SIZES = {"llama2_reward_7b": replace(SIZES["llama2_7b"], num_classes=1)}
BUILDERS = {
    **model_builders(__name__, "Llama 2", SPEC, SIZES),
    **model_builders(__name__, "the reward model of Llama 2", SPEC, REWARD_SIZES),
}
COMPONENTS = component_builders(
    __name__,
    "llama2",
    "Llama 2",
    SPEC,
    Description,
    "vocab_size num_layers num_heads num_kv_heads embed_dim max_seq_len",
    attn_dropout=0.0,
    intermediate_dim=None,
    norm_eps=1e-5,
    rope_base=10_000.0,
)
COMPONENTS |= classifier_builders(__name__, COMPONENTS)

__getattr__ = former_names(__name__)
