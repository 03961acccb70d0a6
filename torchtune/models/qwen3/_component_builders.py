"""Component builders of Qwen 3."""

from torchtune.models.qwen2._component_builders import qwen_builders
from torchtune.models.qwen3._model_builders import SPEC

qwen3, lora_qwen3 = qwen_builders("qwen3", __name__, "Qwen 3", SPEC, "before_rope")
