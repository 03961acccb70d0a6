"""Sizes of Llama 3."""

from functools import partial

from torchtune.models._builders import model_builders
from torchtune.models._description import Description
from torchtune.models._hf_config import LLAMA
from torchtune.models._spec import ModelSpec
from torchtune.models._weight_names import GGUF, HF_INTERLEAVED, META

SPEC = ModelSpec(
    name="llama3",
    architectures=("LlamaForCausalLM",),
    from_hf_config=LLAMA.read,
    to_hf_config=LLAMA.write,
    weight_maps={"hf": HF_INTERLEAVED, "meta": META, "gguf": GGUF},
    model_types=("LLAMA3", "LLAMA2", "LLAMA3_2"),  # also reads any Llama by its config.json,
)

_llama3 = partial(Description, vocab_size=128_256, max_seq_len=8192, num_kv_heads=8, rope_base=500_000.0)

SIZES = {
    "llama3_8b": _llama3(num_layers=32, embed_dim=4096, intermediate_dim=14_336, num_heads=32),
    "llama3_70b": _llama3(num_layers=80, embed_dim=8192, intermediate_dim=28_672, num_heads=64),
}
BUILDERS = model_builders(__name__, "Llama 3", SPEC, SIZES)
globals().update(BUILDERS)
