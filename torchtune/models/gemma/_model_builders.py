"""Sizes of Gemma."""

from functools import partial
from typing import Any

from torchtune.models._builders import model_builders
from torchtune.models._description import Description
from torchtune.models._hf_config import HFFormat
from torchtune.models._hf_fields import Fields
from torchtune.models._spec import ModelSpec
from torchtune.models._weight_names import HF_INTERLEAVED


def _read(fields: Fields) -> dict[str, Any]:
    """Compute the embedding scale from the width; early files name the exact GELU but mean its tanh approximation."""
    if fields.take("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise fields.refusal("hidden_activation", fields.peek("hidden_activation"))
    found: dict[str, Any] = {"embed_scale": fields.take("hidden_size") ** 0.5}
    return found | ({"activation": "gelu_tanh"} if fields.peek("hidden_act") == "gelu" else {})


FORMAT = HFFormat(
    "GemmaForCausalLM",
    "gemma",
    "interleaved",
    biases="attention_bias",
    activation=("hidden_act", "gelu_pytorch_tanh"),
    fixed=(("norm_unit_offset", True),),
    read_more=_read,
    defaults=(
        ("head_dim", 256),
        ("max_position_embeddings", 8192),
        ("num_key_value_heads", 16),
        ("tie_word_embeddings", True),
    ),
)
SPEC = ModelSpec(
    name="gemma",
    architectures=("GemmaForCausalLM",),
    from_hf_config=FORMAT.read,
    to_hf_config=FORMAT.write,
    weight_maps={"hf": HF_INTERLEAVED},
    model_types=("GEMMA",),
)

gemma_description = partial(
    Description,
    head_dim=256,
    max_seq_len=8192,
    activation="gelu_tanh",
    norm_eps=1e-6,
    norm_unit_offset=True,
    tie_word_embeddings=True,
)
_gemma = partial(gemma_description, vocab_size=256_000)

SIZES = {
    "gemma_2b": _gemma(
        num_layers=18, embed_dim=2048, intermediate_dim=16_384, num_heads=8, num_kv_heads=1, embed_scale=2048**0.5
    ),
    "gemma_7b": _gemma(
        num_layers=28, embed_dim=3072, intermediate_dim=24_576, num_heads=16, num_kv_heads=16, embed_scale=3072**0.5
    ),
}
BUILDERS = model_builders(__name__, "Gemma", SPEC, SIZES)
globals().update(BUILDERS)
