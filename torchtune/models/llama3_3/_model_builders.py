"""Size of Llama 3.3, an alias of Llama 3.1 70B."""

from torchtune.models.llama3_1._model_builders import BUILDERS

llama3_3_70b = BUILDERS["llama3_1_70b"]
lora_llama3_3_70b = BUILDERS["lora_llama3_1_70b"]
qlora_llama3_3_70b = BUILDERS["qlora_llama3_1_70b"]
