"""Llama 3.2, the text models.

Llama 3.1 with another factor of RoPE scaling. The output projection shares the weight of the embeddings.
"""

from torchtune._lazy import former_package
from torchtune.models._builders import component_builders, model_builders
from torchtune.models._description import Description, Llama3RopeScaling
from torchtune.models._hf_config import LLAMA
from torchtune.models._spec import family
from torchtune.models._weight_names import GGUF, HF_INTERLEAVED, META
from torchtune.models.llama3_1 import describe_with_rope_scaling

SPEC = family("llama3_2", LLAMA, HF_INTERLEAVED, formats={"meta": META, "gguf": GGUF}, model_types=("LLAMA3_2",))

_COMMON = {
    "vocab_size": 128_256,
    "max_seq_len": 131_072,
    "num_kv_heads": 8,
    "intermediate_dim": 8192,
    "rope_base": 500_000.0,
    "rope_scaling": Llama3RopeScaling(factor=32.0),
    "tie_word_embeddings": True,
}

SIZES = {
    "llama3_2_1b": Description(**_COMMON, num_layers=16, embed_dim=2048, num_heads=32),
    "llama3_2_3b": Description(**_COMMON, num_layers=28, embed_dim=3072, num_heads=24),
}
BUILDERS = model_builders(__name__, "Llama 3.2", SPEC, SIZES, tie_option=True)
llama3_2_1b = BUILDERS["llama3_2_1b"]
lora_llama3_2_1b = BUILDERS["lora_llama3_2_1b"]
qlora_llama3_2_1b = BUILDERS["qlora_llama3_2_1b"]
llama3_2_3b = BUILDERS["llama3_2_3b"]
lora_llama3_2_3b = BUILDERS["lora_llama3_2_3b"]
qlora_llama3_2_3b = BUILDERS["qlora_llama3_2_3b"]

COMPONENTS = component_builders(
    __name__,
    "llama3_2",
    "Llama 3.2",
    SPEC,
    describe_with_rope_scaling,
    ("vocab_size", "num_layers", "num_heads", "num_kv_heads", "embed_dim", "max_seq_len"),
    attn_dropout=0.0,
    rope_base=500_000,
    intermediate_dim=None,
    norm_eps=1e-5,
    scale_factor=32,
    tie_word_embeddings=True,
)
llama3_2 = COMPONENTS["llama3_2"]
lora_llama3_2 = COMPONENTS["lora_llama3_2"]

__all__ = ["SPEC", *BUILDERS, *COMPONENTS]
__getattr__, __path__ = former_package(__name__)
