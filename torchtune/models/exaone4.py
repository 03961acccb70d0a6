"""EXAONE 4.

Norms come after attention and feed-forward. In models with sliding windows, only the layers with a window have RoPE
(https://arxiv.org/abs/2507.11407).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchtune.models._builders import model_builders
from torchtune.models._description import Llama3RopeScaling
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import all_but_every
from torchtune.models._spec import family
from torchtune.models._weight_map import Identity
from torchtune.models._weight_names import hf_names

_NORMS = {"sa_scale": "post_attention_layernorm", "mlp_scale": "post_feedforward_layernorm"}


def _prepare(config: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out ``sliding_window_pattern`` if ``layer_types`` is present: published files have letters ("LLLG")."""
    config = dict(config)
    if config.get("layer_types") is not None:
        config.pop("sliding_window_pattern", None)
    return config


_FORMAT = HFFormat(
    "Exaone4ForCausalLM",
    "exaone4",
    "half",
    qk_norm="before_rope",
    windows="sliding_window",
    window_layers=4,
    rotates_windows_only=True,
    fixed={"norm_order": "post"},
    required_values={"sliding_window_pattern": 4},
    prepare=_prepare,
    defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
    },
)


SPEC = family("exaone4", _FORMAT, hf_names(Identity(), _NORMS))

_1_2B = _FORMAT.describe(
    vocab_size=102_400,
    num_layers=30,
    embed_dim=2048,
    intermediate_dim=4096,
    max_seq_len=65_536,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    rope_base=1_000_000.0,
    rope_scaling=Llama3RopeScaling(factor=16.0),
    norm_eps=1e-5,
    tie_word_embeddings=True,
)
SIZES = {
    "exaone4_1_2b": _1_2B,
    "exaone4_32b": replace(
        _1_2B,
        num_layers=64,
        embed_dim=5120,
        intermediate_dim=27_392,
        max_seq_len=131_072,
        num_heads=40,
        head_dim=128,
        rope_dim=128,
        window=4096,
        window_layers=all_but_every(64, 4),
        unrotated_layers=tuple(range(3, 64, 4)),
        tie_word_embeddings=False,
    ),
}
BUILDERS = model_builders(__name__, "EXAONE 4", SPEC, SIZES)
exaone4_1_2b = BUILDERS["exaone4_1_2b"]
lora_exaone4_1_2b = BUILDERS["lora_exaone4_1_2b"]
qlora_exaone4_1_2b = BUILDERS["qlora_exaone4_1_2b"]
exaone4_32b = BUILDERS["exaone4_32b"]
lora_exaone4_32b = BUILDERS["lora_exaone4_32b"]
qlora_exaone4_32b = BUILDERS["qlora_exaone4_32b"]

__all__ = ["SPEC", *BUILDERS]
