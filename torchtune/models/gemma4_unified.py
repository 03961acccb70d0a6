"""Gemma 4 without encoders (12B), its text.

Any size: a dense Gemma 4 with another ``config.json``.
"""

from dataclasses import replace
from typing import Any

from torchtune.models._builders import model_builders
from torchtune.models._description import Description
from torchtune.models._spec import family
from torchtune.models.gemma4 import FORMAT as GEMMA4_FORMAT
from torchtune.models.gemma4 import SPEC as GEMMA4
from torchtune.models.gemma4 import write_gemma4

_ABSENT = ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block")


def _write(d: Description) -> dict[str, Any]:
    return {name: value for name, value in write_gemma4(d).items() if name not in _ABSENT}


FORMAT = replace(
    GEMMA4_FORMAT,
    architecture="Gemma4UnifiedForCausalLM",
    model_type="gemma4_unified_text",
    write_more=_write,
    defaults={
        **GEMMA4_FORMAT.defaults,
        "hidden_size_per_layer_input": 0,
        "max_position_embeddings": 262_144,
        "sliding_window": 1024,
    },
)
SPEC = family("gemma4_unified", FORMAT, GEMMA4.weight_map(), untrained_modules=GEMMA4.untrained_modules)

SIZES: dict[str, Description] = {}  # read from config.json
BUILDERS = model_builders(__name__, "Gemma 4", SPEC, SIZES)

__all__ = ["SPEC", *BUILDERS]
