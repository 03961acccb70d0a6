"""ERNIE 4.5, the dense models.

Llama's architecture with one flag for all biases. Its files rotate neighboring channels, as this library does.
"""

from typing import Any

from torchtune.models._builders import model_builders
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields
from torchtune.models._spec import family
from torchtune.models._weight_map import Identity
from torchtune.models._weight_names import hf_names


def _read(fields: Fields) -> dict[str, Any]:
    fields.take("attention_dropout", 0.0)  # transformers ignores it
    return {"attn_dropout": 0.0}


FORMAT = HFFormat(
    "Ernie4_5ForCausalLM",
    "ernie4_5",
    "interleaved",
    biases="attention_bias",
    has_mlp_bias=True,
    bias_fields=("use_bias", "use_bias"),
    read_more=_read,
    defaults={
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    },
)
SPEC = family("ernie4_5", FORMAT, hf_names(Identity()))

SIZES = {
    "ernie4_5_0_3b": FORMAT.describe(
        vocab_size=103_424,
        num_layers=18,
        embed_dim=1024,
        intermediate_dim=3072,
        max_seq_len=131_072,
        num_heads=16,
        num_kv_heads=2,
        head_dim=128,
        rope_base=500_000.0,
        norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
}
BUILDERS = model_builders(__name__, "ERNIE 4.5", SPEC, SIZES)
ernie4_5_0_3b = BUILDERS["ernie4_5_0_3b"]
lora_ernie4_5_0_3b = BUILDERS["lora_ernie4_5_0_3b"]
qlora_ernie4_5_0_3b = BUILDERS["qlora_ernie4_5_0_3b"]

__all__ = ["SPEC", *BUILDERS]
