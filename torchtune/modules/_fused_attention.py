"""torch's fused attention with the kernels that the library allows."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# Not cuDNN's, which torch prefers on an H100 for some shapes: it builds a plan for every new shape, and batches of
# documents and steps of generation have a new shape each time; no speed of the library was measured with it.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def fused_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Call ``scaled_dot_product_attention``; on CUDA only with flash, memory-efficient or plain attention."""
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, **options)
    with sdpa_kernel(_KERNELS):
        return F.scaled_dot_product_attention(q, k, v, **options)
