"""Sizes of Llama 2."""

from dataclasses import replace
from functools import partial

from torchtune.models._builders import model_builders
from torchtune.models._description import Description
from torchtune.models._hf_config import LLAMA
from torchtune.models._spec import ModelSpec
from torchtune.models._weight_names import GGUF, HF_INTERLEAVED, META

SPEC = ModelSpec(
    name="llama2",
    architectures=("LlamaForCausalLM",),
    from_hf_config=LLAMA.read,
    to_hf_config=LLAMA.write,
    weight_maps={"hf": HF_INTERLEAVED, "meta": META, "gguf": GGUF},
    model_types=("LLAMA2", "REWARD"),
)

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
globals().update(BUILDERS)
