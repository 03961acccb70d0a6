"""Conversions that choose kernels of other packages: flash attention 3 and 4, and which packages layers may use."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn
from torch.nn import attention

from torchtune.modules.attention import MultiHeadAttention
from torchtune.modules.conversion import Conversion, ConversionError, ConversionReport, Phase
from torchtune.modules.kernels.attention import Kernel, choose_kernel
from torchtune.modules.kernels.optional import FLASH_ATTENTION_3, FLASH_ATTENTION_4, KERNELS, allow_kernels
from torchtune.utils import is_simulated

# Torch's name of a kernel -> its row.
_FLASH = {"FA3": FLASH_ATTENTION_3, "FA4": FLASH_ATTENTION_4}


class FlashAttentionKernel(Conversion):
    """Conversion that runs flash attention with FlashAttention-3 or -4 instead of torch's own kernel.

    It calls ``torch.nn.attention.activate_flash_attention_impl``, which affects the whole process; this is why an
    installed package alone does not turn it on. Layers that flash attention does not support (soft caps, sinks,
    float32, heads wider than 256) keep their kernel. Not tested on a GPU.

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
        if kernel not in _FLASH:
            raise ConversionError(f"FlashAttentionKernel: kernel is {kernel!r}, it must be {' or '.join(_FLASH)}.")
        self.kernel = kernel

    def convert(self, model: nn.Module) -> ConversionReport:
        """Activate the kernel.

        Raises:
            ConversionError: no layer uses flash attention, or this machine cannot run the kernel.
        """
        layers = {path: module for path, module in model.named_modules() if isinstance(module, MultiHeadAttention)}
        converted = [path for path, layer in layers.items() if _uses_flash(layer)]
        if not converted:
            raise ConversionError(
                "FlashAttentionKernel: flash attention runs no layer of this model (it takes dtype bf16 or fp16, heads "
                "of at most 256, no soft cap and no sinks): remove it from model_converters."
            )
        if not is_simulated():
            self._activate(max(layers[path].head_dim for path in converted))
        return ConversionReport(self.kernel, converted)

    def _activate(self, head_dim: int) -> None:
        if not torch.cuda.is_available():
            raise ConversionError(
                f"FlashAttentionKernel: {self.kernel} runs on CUDA, and there is none: remove it from model_converters."
            )
        problem = _FLASH[self.kernel].obstacle(torch.device("cuda"), head_dim=head_dim)
        if problem is not None:
            raise ConversionError(
                f"FlashAttentionKernel: {self.kernel} cannot run: {problem}; or remove it from model_converters."
            )
        try:
            attention.activate_flash_attention_impl(self.kernel)
        except (AttributeError, ImportError, RuntimeError) as error:
            raise ConversionError(
                f"FlashAttentionKernel: torch {torch.__version__} cannot use {self.kernel} ({error}): see "
                f"{_FLASH[self.kernel].install} for its installation, or remove it from model_converters."
            ) from error


def _uses_flash(layer: MultiHeadAttention) -> bool:
    kernel = choose_kernel(
        torch.device("cuda"),
        next(layer.parameters()).dtype,
        head_dim=layer.head_dim,
        window=layer.window or 0,
        softcap=layer.softcap or 0.0,
        sinks=layer.sinks is not None,
    )
    return kernel is Kernel.VARLEN


class OptionalKernels(Conversion):
    """Conversion that says which kernels of other packages layers may use, in the whole process.

    Without it, layers use every kernel that is installed and fits (``tune doctor`` lists them). With it, the named
    packages are required, and the others are not used.

    Args:
        use: names of packages: ``fla-core``, ``causal-conv1d``, ``mamba-ssm``, ``liger-kernel`` and ``grouped-gemm``;
            an empty list computes everything in PyTorch.

    Raises:
        ConversionError: a name is unknown.

    Example:
        >>> torchtune.modules.OptionalKernels(use=["fla-core"]).phase.name
        'KERNEL'
    """

    phase: ClassVar[Phase] = Phase.KERNEL

    def __init__(self, use: Sequence[str]) -> None:
        choices = {kernel.package: kernel for kernel in KERNELS if not kernel.is_asked_for}
        self.kernels = []
        for name in use:
            if name not in choices:
                raise ConversionError(f"OptionalKernels: use has {name!r}, it may have {', '.join(choices)}.")
            self.kernels.append(choices[name])

    def convert(self, model: nn.Module) -> ConversionReport:
        """Allow the kernels.

        Raises:
            ConversionError: a package is not installed, or this machine or the dtype of the model does not fit it.
        """
        if not is_simulated():
            dtype = next(model.parameters()).dtype
            allow_kernels([kernel.package for kernel in self.kernels])
            for kernel in self.kernels:
                problem = kernel.obstacle(torch.device("cuda"), dtype)
                if problem is not None:
                    raise ConversionError(
                        f"OptionalKernels: {kernel.package} cannot run: {problem}; or leave it out of use."
                    )
        names = ", ".join(kernel.package for kernel in self.kernels)
        return ConversionReport("OptionalKernels", note=f"layers may use {names or 'no other package'}")
