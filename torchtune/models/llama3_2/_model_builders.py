"""Sizes of Llama 3.2's text models."""

from functools import partial

from torchtune.models._builders import model_builders
from torchtune.models._description import Description
from torchtune.models._hf_config import LLAMA
from torchtune.models._rope_scaling import Llama3RopeScaling
from torchtune.models._spec import ModelSpec
from torchtune.models._weight_names import GGUF, HF_INTERLEAVED, META

SPEC = ModelSpec(
    name="llama3_2",
    architectures=("LlamaForCausalLM",),
    from_hf_config=LLAMA.read,
    to_hf_config=LLAMA.write,
    weight_maps={"hf": HF_INTERLEAVED, "meta": META, "gguf": GGUF},
    model_types=("LLAMA3_2",),
)

_llama3_2 = partial(
    Description,
    vocab_size=128_256,
    max_seq_len=131_072,
    num_kv_heads=8,
    intermediate_dim=8192,
    rope_base=500_000.0,
    rope_scaling=Llama3RopeScaling(factor=32.0),
    tie_word_embeddings=True,
)

SIZES = {
    "llama3_2_1b": _llama3_2(num_layers=16, embed_dim=2048, num_heads=32),
    "llama3_2_3b": _llama3_2(num_layers=28, embed_dim=3072, num_heads=24),
}
BUILDERS = model_builders(__name__, "Llama 3.2", SPEC, SIZES, tie_option=True)
globals().update(BUILDERS)
