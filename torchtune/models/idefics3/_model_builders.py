"""Idefics 3: SmolVLM 2 with another ``config.json``."""

from dataclasses import replace

from torchtune.models.smolvlm._model_builders import FORMAT
from torchtune.models.smolvlm._model_builders import SPEC as SMOLVLM

_ARCHITECTURE = "Idefics3ForConditionalGeneration"
_FORMAT = replace(FORMAT, architecture=_ARCHITECTURE, model_type="idefics3", vision_type="idefics3_vision")
SPEC = replace(
    SMOLVLM,
    name="idefics3",
    architectures=(_ARCHITECTURE,),
    from_hf_config=_FORMAT.read,
    to_hf_config=_FORMAT.write,
)
