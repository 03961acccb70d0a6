"""The size of Mistral."""

from dataclasses import replace

from torchtune.models._builders import model_builders
from torchtune.models._description import Description
from torchtune.models._hf_config import MISTRAL
from torchtune.models._spec import ModelSpec
from torchtune.models._weight_names import GGUF, HF_INTERLEAVED, META

SPEC = ModelSpec(
    name="mistral",
    architectures=("MistralForCausalLM",),
    from_hf_config=MISTRAL.read,
    to_hf_config=MISTRAL.write,
    weight_maps={"hf": HF_INTERLEAVED, "meta": META, "gguf": GGUF},
    model_types=("MISTRAL", "REWARD"),
    capabilities=frozenset({"documents", "kv_cache", "lora"}),
)

SIZES = {
    "mistral_7b": Description(
        vocab_size=32_000,
        num_layers=32,
        embed_dim=4096,
        intermediate_dim=14_336,
        max_seq_len=32_768,
        num_heads=32,
        num_kv_heads=8,
    ),
}
REWARD_SIZES = {"mistral_reward_7b": replace(SIZES["mistral_7b"], num_classes=1)}
BUILDERS = {
    **model_builders(__name__, "Mistral", SPEC, SIZES),
    **model_builders(__name__, "the reward model of Mistral", SPEC, REWARD_SIZES),
}
globals().update(BUILDERS)
