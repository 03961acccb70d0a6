"""Frozen weights in four and eight bits."""

from torchtune.modules.low_precision._layers import FrozenFloat8Linear, FrozenInt8Linear, FrozenNF4Linear
from torchtune.modules.low_precision._quantize_base import QuantizeBase, reparametrize_as_dtype_state_dict_post_hook

__all__ = [
    "FrozenFloat8Linear",
    "FrozenInt8Linear",
    "FrozenNF4Linear",
    "QuantizeBase",
    "reparametrize_as_dtype_state_dict_post_hook",
]
