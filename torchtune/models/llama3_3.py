"""Llama 3.3: the 70B model of Llama 3.1, trained further."""

from torchtune._lazy import former_package
from torchtune.models.llama3_1 import BUILDERS, SPEC

llama3_3_70b = BUILDERS["llama3_1_70b"]
lora_llama3_3_70b = BUILDERS["lora_llama3_1_70b"]
qlora_llama3_3_70b = BUILDERS["qlora_llama3_1_70b"]

__all__ = ["SPEC", "llama3_3_70b", "lora_llama3_3_70b", "qlora_llama3_3_70b"]
__getattr__, __path__ = former_package(__name__)
