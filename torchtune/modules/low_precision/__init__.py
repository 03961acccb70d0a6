"""Quantized base weights in 4 and 8 bits, and float8 training."""

from torchtune._lazy import former_names
from torchtune.modules.low_precision._float8_training import Float8Training
from torchtune.modules.low_precision._layers import FrozenFloat8Linear, FrozenInt8Linear, FrozenNF4Linear
from torchtune.modules.low_precision._quantize_base import QuantizeBase, reparametrize_as_dtype_state_dict_post_hook

__all__ = [
    "Float8Training",
    "FrozenFloat8Linear",
    "FrozenInt8Linear",
    "FrozenNF4Linear",
    "QuantizeBase",
    "reparametrize_as_dtype_state_dict_post_hook",
]

__getattr__ = former_names(__name__)
