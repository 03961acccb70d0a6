"""SmolLM 2.

Llama's architecture without RoPE scaling, in small sizes (https://arxiv.org/abs/2502.02737).
"""

from torchtune._lazy import former_package
from torchtune.models._builders import component_builders, model_builders
from torchtune.models._description import Description
from torchtune.models._hf_config import LLAMA
from torchtune.models._spec import family
from torchtune.models._weight_names import GGUF, HF_INTERLEAVED, META
from torchtune.models.llama3_1 import describe_with_rope_scaling

SPEC = family(
    "smol",
    LLAMA,
    HF_INTERLEAVED,
    formats={"meta": META, "gguf": GGUF},
    model_types=("SMOLLM2", "LLAMA3", "LLAMA3_2", "LLAMA2"),
)

_COMMON = {
    "vocab_size": 49_152,
    "max_seq_len": 8192,
    "head_dim": 64,
    "tie_word_embeddings": True,
}

SIZES = {
    "smollm2_135m": Description(
        **_COMMON, num_layers=30, embed_dim=576, intermediate_dim=1536, num_heads=9, num_kv_heads=3, rope_base=100_000.0
    ),
    "smollm2_360m": Description(
        **_COMMON,
        num_layers=32,
        embed_dim=960,
        intermediate_dim=2560,
        num_heads=15,
        num_kv_heads=5,
        rope_base=100_000.0,
    ),
    "smollm2_1_7b": Description(
        **_COMMON,
        num_layers=24,
        embed_dim=2048,
        intermediate_dim=8192,
        num_heads=32,
        num_kv_heads=32,
        rope_base=130_000.0,
    ),
}
BUILDERS = model_builders(__name__, "SmolLM2", SPEC, SIZES)
smollm2_135m = BUILDERS["smollm2_135m"]
lora_smollm2_135m = BUILDERS["lora_smollm2_135m"]
qlora_smollm2_135m = BUILDERS["qlora_smollm2_135m"]
smollm2_360m = BUILDERS["smollm2_360m"]
lora_smollm2_360m = BUILDERS["lora_smollm2_360m"]
qlora_smollm2_360m = BUILDERS["qlora_smollm2_360m"]
smollm2_1_7b = BUILDERS["smollm2_1_7b"]
lora_smollm2_1_7b = BUILDERS["lora_smollm2_1_7b"]
qlora_smollm2_1_7b = BUILDERS["qlora_smollm2_1_7b"]

COMPONENTS = component_builders(
    __name__,
    "smollm2",
    "SmolLM 2",
    SPEC,
    describe_with_rope_scaling,
    ("num_layers", "num_heads", "num_kv_heads", "embed_dim", "intermediate_dim"),
    max_seq_len=8192,
    vocab_size=49_152,
    attn_dropout=0.0,
    rope_base=100_000,
    norm_eps=1e-5,
    scale_factor=None,
    tie_word_embeddings=True,
)
del COMPONENTS["lora_smollm2"]
smollm2 = COMPONENTS["smollm2"]

__all__ = ["SPEC", *BUILDERS, *COMPONENTS]
__getattr__, __path__ = former_package(__name__)
