"""Kernels of attention and matrix products, and the kernels of other packages that layers may use."""

from torchtune.modules.kernels.optional import (
    CAUSAL_CONV,
    DELTA_RULE,
    FLASH_ATTENTION_3,
    FLASH_ATTENTION_4,
    GROUPED_PRODUCTS,
    KERNELS,
    STATE_SPACE,
    SWIGLU,
    Card,
    KernelUser,
    OptionalKernel,
    allow_kernels,
    card_of,
    describe_kernels,
)

__all__ = [
    "CAUSAL_CONV",
    "DELTA_RULE",
    "FLASH_ATTENTION_3",
    "FLASH_ATTENTION_4",
    "GROUPED_PRODUCTS",
    "KERNELS",
    "STATE_SPACE",
    "SWIGLU",
    "Card",
    "KernelUser",
    "OptionalKernel",
    "allow_kernels",
    "card_of",
    "describe_kernels",
]
