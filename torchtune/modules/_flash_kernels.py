"""Conversion that uses a separately installed FlashAttention-3 or -4 kernel."""

from typing import ClassVar

import torch
from torch import nn
from torch.nn import attention

from torchtune.modules.attention import MultiHeadAttention
from torchtune.modules.attention_utils import Kernel, choose_kernel
from torchtune.modules.conversion import Conversion, ConversionError, ConversionReport, Phase
from torchtune.utils import is_simulated

# Torch's name of a kernel -> its source.
_KERNELS = {
    "FA3": "github.com/Dao-AILab/flash-attention/tree/main/hopper",
    "FA4": "github.com/Dao-AILab/flash-attention/tree/main/flash_attn/cute",
}


class FlashAttentionKernel(Conversion):
    """Conversion that runs flash attention with FlashAttention-3 or -4 instead of torch's own kernel.

    It calls ``torch.nn.attention.activate_flash_attention_impl``, which affects the whole process. Layers that flash
    attention does not support (soft caps, sinks, float32, heads wider than 256) keep their kernel. Not tested on a GPU.

    Args:
        kernel: ``"FA3"`` (compute capability 9.0) or ``"FA4"`` (9.0 or 10.0).

    Raises:
        ConversionError: ``kernel`` is unknown.

    Example:
        >>> torchtune.modules.FlashAttentionKernel("FA3").phase.name
        'KERNEL'
    """

    phase: ClassVar[Phase] = Phase.KERNEL

    def __init__(self, kernel: str) -> None:
        if kernel not in _KERNELS:
            raise ConversionError(f"FlashAttentionKernel: kernel is {kernel!r}, it must be {' or '.join(_KERNELS)}.")
        self.kernel = kernel

    def convert(self, model: nn.Module) -> ConversionReport:
        """Activate the kernel.

        Raises:
            ConversionError: no layer uses flash attention, or this machine cannot run
                the kernel.
        """
        layers = {path: module for path, module in model.named_modules() if isinstance(module, MultiHeadAttention)}
        using = [path for path, layer in layers.items() if _uses_flash(layer)]
        if not using:
            raise ConversionError(
                "FlashAttentionKernel: flash attention runs no layer of this model (it takes dtype bf16 or fp16, heads "
                "of at most 256, no soft cap and no sinks): remove it from model_converters."
            )
        if not is_simulated():
            self._activate()
        return ConversionReport(self.kernel, using)

    def _activate(self) -> None:
        if not torch.cuda.is_available():
            raise ConversionError(
                f"FlashAttentionKernel: {self.kernel} runs on CUDA, and there is none: remove it from model_converters."
            )
        try:
            attention.activate_flash_attention_impl(self.kernel)
        except (AttributeError, ImportError, RuntimeError) as error:
            raise ConversionError(
                f"FlashAttentionKernel: torch {torch.__version__} cannot use {self.kernel} ({error}): see "
                f"{_KERNELS[self.kernel]} for its installation, or remove it from model_converters."
            ) from error


def _uses_flash(layer: MultiHeadAttention) -> bool:
    dtype = next(layer.parameters()).dtype
    kind = {"head_dim": layer.head_dim, "window": layer.window or 0, "softcap": layer.softcap or 0.0}
    kind["sinks"] = layer.sinks is not None
    return choose_kernel(torch.device("cuda"), dtype, **kind) is Kernel.VARLEN
