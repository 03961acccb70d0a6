"""Llama 3.3: the 70B model of Llama 3.1, trained further."""

from torchtune.models.llama3_1 import SPEC
from torchtune.models.llama3_3._model_builders import llama3_3_70b, lora_llama3_3_70b, qlora_llama3_3_70b

__all__ = ["SPEC", "llama3_3_70b", "lora_llama3_3_70b", "qlora_llama3_3_70b"]
