"""Qwen 3 from its numbers."""

from torchtune.models._builders import lora_builder
from torchtune.models.qwen2._component_builders import qwen_builder
from torchtune.models.qwen3._model_builders import SPEC

qwen3 = qwen_builder("qwen3", __name__, "Qwen 3", SPEC, "before_rope")
lora_qwen3 = lora_builder(qwen3, "lora_qwen3", __name__, "a Qwen 3 decoder with LoRA adapters from its numbers")
