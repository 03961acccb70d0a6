"""SmolLM 3.

Llama's architecture without RoPE in every fourth layer, for long contexts (https://arxiv.org/abs/2501.18795).
"""

from typing import Any

from torchtune.models._builders import model_builders
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields
from torchtune.models._hf_layers import read_unrotated_layers, write_unrotated_layers
from torchtune.models._spec import family
from torchtune.models._weight_map import Identity
from torchtune.models._weight_names import hf_names


def _read(fields: Fields) -> dict[str, Any]:
    return {"unrotated_layers": read_unrotated_layers(fields)}


FORMAT = HFFormat(
    "SmolLM3ForCausalLM",
    "smollm3",
    "half",
    biases="attention_bias",
    has_mlp_bias=True,
    windows="use_sliding_window",
    window_layers="unrotated",
    read_more=_read,
    write_more=write_unrotated_layers,
    defaults={
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
    },
)
SPEC = family("smol3", FORMAT, hf_names(Identity()))

SIZES = {
    "smollm3_3b": FORMAT.describe(
        vocab_size=128_256,
        num_layers=36,
        embed_dim=2048,
        intermediate_dim=11_008,
        max_seq_len=65_536,
        num_heads=16,
        num_kv_heads=4,
        norm_eps=1e-6,
        rope_base=5_000_000.0,
        unrotated_layers=tuple(range(3, 36, 4)),
        tie_word_embeddings=True,
    ),
}
BUILDERS = model_builders(__name__, "SmolLM 3", SPEC, SIZES)
smollm3_3b = BUILDERS["smollm3_3b"]
lora_smollm3_3b = BUILDERS["lora_smollm3_3b"]
qlora_smollm3_3b = BUILDERS["qlora_smollm3_3b"]

__all__ = ["SPEC", *BUILDERS]
