"""Llama 3.1.

Llama 3 with RoPE scaling for a context of 131,072 tokens, and 405B (https://arxiv.org/abs/2407.21783).
"""

from typing import Any

from torchtune._lazy import former_package
from torchtune.models._builders import component_builders, model_builders
from torchtune.models._description import Description, Llama3RopeScaling
from torchtune.models._hf_config import LLAMA
from torchtune.models._spec import family
from torchtune.models._weight_names import GGUF, HF_INTERLEAVED, META
from torchtune.modules.position_embeddings import ScaledRotaryPositionalEmbeddings as Llama3ScaledRoPE

SPEC = family("llama3_1", LLAMA, HF_INTERLEAVED, formats={"meta": META, "gguf": GGUF}, model_types=("LLAMA3",))

_COMMON = {
    "vocab_size": 128_256,
    "max_seq_len": 131_072,
    "num_kv_heads": 8,
    "rope_base": 500_000.0,
    "rope_scaling": Llama3RopeScaling(),
}

SIZES = {
    "llama3_1_8b": Description(**_COMMON, num_layers=32, embed_dim=4096, intermediate_dim=14_336, num_heads=32),
    "llama3_1_70b": Description(**_COMMON, num_layers=80, embed_dim=8192, intermediate_dim=28_672, num_heads=64),
    "llama3_1_405b": Description(**_COMMON, num_layers=126, embed_dim=16_384, intermediate_dim=53_248, num_heads=128),
}
BUILDERS = model_builders(__name__, "Llama 3.1", SPEC, SIZES)
llama3_1_8b = BUILDERS["llama3_1_8b"]
lora_llama3_1_8b = BUILDERS["lora_llama3_1_8b"]
qlora_llama3_1_8b = BUILDERS["qlora_llama3_1_8b"]
llama3_1_70b = BUILDERS["llama3_1_70b"]
lora_llama3_1_70b = BUILDERS["lora_llama3_1_70b"]
qlora_llama3_1_70b = BUILDERS["qlora_llama3_1_70b"]
llama3_1_405b = BUILDERS["llama3_1_405b"]
lora_llama3_1_405b = BUILDERS["lora_llama3_1_405b"]
qlora_llama3_1_405b = BUILDERS["qlora_llama3_1_405b"]


def describe_with_rope_scaling(scale_factor: float | None, **sizes: Any) -> Description:
    """Make a description with Llama 3.1's RoPE scaling; a ``scale_factor`` of None disables scaling."""
    scaling = None
    if scale_factor is not None:
        scaling = Llama3RopeScaling(factor=scale_factor)
    return Description(rope_scaling=scaling, **sizes)


COMPONENTS = component_builders(
    __name__,
    "llama3_1",
    "Llama 3.1",
    SPEC,
    describe_with_rope_scaling,
    ("vocab_size", "num_layers", "num_heads", "num_kv_heads", "embed_dim", "max_seq_len"),
    attn_dropout=0.0,
    rope_base=500_000,
    intermediate_dim=None,
    norm_eps=1e-5,
    scale_factor=8,
)
llama3_1 = COMPONENTS["llama3_1"]
lora_llama3_1 = COMPONENTS["lora_llama3_1"]

__all__ = ["SPEC", *BUILDERS, *COMPONENTS, "Llama3ScaledRoPE"]
__getattr__, __path__ = former_package(__name__)
