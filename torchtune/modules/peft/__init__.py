"""Low-rank adapters."""

from torchtune._lazy import former_names
from torchtune.modules.peft.adapters import (
    LORA_ATTN_MODULES,
    AdapterModule,
    disable_adapter,
    get_adapter_params,
    get_adapter_state_dict,
    get_lora_module_names,
    get_merged_lora_ckpt,
    has_adapters,
    owned_parameters,
    require_adapters,
    set_trainable_params,
    validate_missing_and_unexpected_for_lora,
)
from torchtune.modules.peft.conversion import LoRA
from torchtune.modules.peft.lora import DoRALinear, LoRALinear, QATLoRALinear, TrainableParams
from torchtune.modules.peft.new_tokens import NewTokens

__all__ = [
    "LORA_ATTN_MODULES",
    "AdapterModule",
    "DoRALinear",
    "LoRA",
    "LoRALinear",
    "NewTokens",
    "QATLoRALinear",
    "TrainableParams",
    "disable_adapter",
    "get_adapter_params",
    "get_adapter_state_dict",
    "get_lora_module_names",
    "get_merged_lora_ckpt",
    "has_adapters",
    "owned_parameters",
    "require_adapters",
    "set_trainable_params",
    "validate_missing_and_unexpected_for_lora",
]

from torchtune.modules.peft.adapters import adapter_modules as adapter_modules
from torchtune.modules.peft.lora import init_from_weight as init_from_weight

__getattr__ = former_names(__name__)
