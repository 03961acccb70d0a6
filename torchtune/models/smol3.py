"""SmolLM 3.

Llama's architecture without RoPE in every fourth layer, for long contexts (https://arxiv.org/abs/2501.18795).
"""

from typing import Any

from torchtune.models._family import Builder, Description, Fields, HFFormat, Identity, family, hf_names, model_builders


def _read(fields: Fields) -> dict[str, Any]:
    num_layers = fields.take("num_hidden_layers")
    interval = max(fields.take("no_rope_layer_interval", 4), 1)
    has_rope = fields.list_of("no_rope_layers", num_layers, int)  # despite its name, nonzero for layers with RoPE
    if has_rope is None:
        has_rope = [(layer + 1) % interval for layer in range(num_layers)]
    if len(has_rope) < num_layers:
        raise fields.refusal("no_rope_layers", has_rope)
    return {"unrotated_layers": tuple(layer for layer in range(num_layers) if not has_rope[layer])}


def _write(d: Description) -> dict[str, Any]:
    return {"no_rope_layers": [int(layer not in d.unrotated_layers) for layer in range(d.num_layers)]}


FORMAT = HFFormat(
    "SmolLM3ForCausalLM",
    "smollm3",
    "half",
    biases="attention_bias",
    has_mlp_bias=True,
    windows="use_sliding_window",
    window_layers="unrotated",
    read_more=_read,
    write_more=_write,
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
# The builders that these tables make, for editors and type checkers.
smollm3_3b: Builder
lora_smollm3_3b: Builder
qlora_smollm3_3b: Builder

__all__ = ["SPEC", *BUILDERS]
