"""OLMo 3.

OLMo 2 with a sliding window in three of four layers, and YaRN in the others.
"""

from dataclasses import replace
from typing import Any

from torchtune.models._builders import model_builders
from torchtune.models._description import Description, YarnRopeScaling
from torchtune.models._hf_fields import Fields, all_but_every
from torchtune.models._hf_rope import write_scaling
from torchtune.models._spec import family
from torchtune.models.olmo2 import FORMAT as OLMO2_FORMAT
from torchtune.models.olmo2 import SIZES as OLMO2
from torchtune.models.olmo2 import SPEC as OLMO2_SPEC

_BASE = 500_000.0


def _read(fields: Fields) -> dict[str, Any]:
    """Refuse RoPE bases outside of ``rope_parameters``, which releases of transformers apply to different layers."""
    for name in ("rope_theta", "rope_local_base_freq"):
        if fields.peek(name) not in (None, _BASE):
            raise fields.refusal(name, fields.peek(name))
    return {}


def _write(d: Description) -> dict[str, Any]:
    scaling = write_scaling(d.rope_scaling) or {"rope_type": "default"}
    parameters = {
        "full_attention": {**scaling, "rope_theta": d.rope_base},
        "sliding_attention": {"rope_type": "default", "rope_theta": d.rope_window_base},
    }
    return {"rope_parameters": parameters, "rope_theta": None, "rope_scaling": None, "rope_local_base_freq": None}


FORMAT = replace(
    OLMO2_FORMAT,
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    windows="sliding_window",
    window_layers=4,
    ropes=("window",),
    read_more=_read,
    write_more=_write,
    defaults={**OLMO2_FORMAT.defaults, "rope_theta": _BASE, "rope_local_base_freq": _BASE, "sliding_window": 4096},
)
SPEC = family("olmo3", FORMAT, OLMO2_SPEC.weight_map())


def _olmo3(olmo2_name: str) -> Description:
    """Describe the model that has the sizes of an OLMo 2."""
    description = OLMO2[olmo2_name]
    return replace(
        description,
        vocab_size=100_278,
        max_seq_len=65_536,
        window=4096,
        window_layers=all_but_every(description.num_layers, 4),
        rope_window_base=_BASE,
        # The attention factor is 0.1 * ln(8) + 1, as published files state it.
        rope_scaling=YarnRopeScaling(factor=8.0, original_max_seq_len=8192, attention_factor=1.2079441541679836),
    )


SIZES = {"olmo3_7b": _olmo3("olmo2_7b"), "olmo3_32b": _olmo3("olmo2_32b")}
BUILDERS = model_builders(__name__, "OLMo 3", SPEC, SIZES)
olmo3_7b = BUILDERS["olmo3_7b"]
lora_olmo3_7b = BUILDERS["lora_olmo3_7b"]
qlora_olmo3_7b = BUILDERS["qlora_olmo3_7b"]
olmo3_32b = BUILDERS["olmo3_32b"]
lora_olmo3_32b = BUILDERS["lora_olmo3_32b"]
qlora_olmo3_32b = BUILDERS["qlora_olmo3_32b"]

__all__ = ["SPEC", *BUILDERS]
