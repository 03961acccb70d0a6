"""Kernels of other packages: what each computes, what it needs, and how to install it.

None of the packages is a dependency. A layer uses a kernel where it is installed and fits the card, the dtype and the
layer's sizes; elsewhere it computes the same in plain PyTorch. The first lines of a run say which it was, and
``tune doctor`` prints the table.
"""

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch
from torch.nn import functional as F

from torchtune.utils import first_line, get_logger, is_simulated, log_once

# A function, or None and why there is none.
_Choice = tuple[Callable[..., Any] | None, str | None]

_HALF = (torch.bfloat16, torch.float16)
_FLOATING = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class OptionalKernel:
    """A row of the table: a function of another package.

    Attributes:
        package: name of the package, as pip and the user call it.
        version: the lowest version whose signature the library calls.
        install: command or page that installs it.
        module: module of the function.
        function: name of the function; empty for a kernel that torch itself calls.
        computes: what it computes, and for which models.
        without: disadvantage of a run without it.
        capability: the lowest compute capability.
        majors: the major versions of it that the kernel is written for; empty: all from the lowest on.
        dtypes: dtypes of the inputs.
        limits: largest sizes by name, for example of a head.
        is_asked_for: whether only a conversion turns it on, because it changes the whole process.
    """

    package: str
    version: str
    install: str
    module: str
    function: str
    computes: str
    without: str
    capability: tuple[int, int] = (8, 0)
    majors: tuple[int, ...] = ()
    dtypes: tuple[torch.dtype, ...] = _HALF
    limits: Mapping[str, int] = field(default_factory=dict)
    is_asked_for: bool = False

    def obstacle(self, device: torch.device, dtype: torch.dtype | None = None, **sizes: int) -> str | None:
        """Return why the kernel cannot run, or None if it can.

        Args:
            device: device of the inputs.
            dtype: dtype of the inputs; by default the dtype is not checked.
            sizes: sizes of the layer that :attr:`limits` names.
        """
        if device.type != "cuda" or not torch.cuda.is_available():
            return "it runs on CUDA"
        if _allowed is not None and self.package not in _allowed:  # None: every package is allowed
            return f"OptionalKernels does not name {self.package}"
        version = self.installed_version()
        if version is None:
            return f"{self.package} is not installed ({self.install})"
        from packaging.version import Version  # a training machine may lack it; whoever has a kernel has it

        # An unknown version is a text without a number, and is not compared.
        if version[0].isdigit() and Version(version) < Version(self.version):
            return f"{self.package} {version} is older than {self.version} ({self.install})"
        capability = torch.cuda.get_device_capability(device)
        major, _ = capability
        if capability < self.capability:
            return f"it needs compute capability {_dotted(self.capability)}, and this card has {_dotted(capability)}"
        if self.majors and major not in self.majors:
            names = " and ".join(f"{supported}.x" for supported in self.majors)
            return f"it is written for compute capability {names}, and this card has {_dotted(capability)}"
        if dtype is not None and dtype not in self.dtypes:
            names = " and ".join(str(supported).removeprefix("torch.") for supported in self.dtypes)
            return f"it takes {names}, not {str(dtype).removeprefix('torch.')}"
        for name, size in sizes.items():
            if size > self.limits.get(name, size):  # a size without a limit always fits
                return f"its largest {name} is {self.limits[name]}, and this model has {size}"
        return None

    def installed_version(self) -> str | None:
        """Return the version of the installed package, ``"(unknown version)"`` if it has none, or None without it."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            top = self.module.partition(".")[0]
            if importlib.util.find_spec(top) is None:
                return None
            return "(unknown version)"  # a checkout on the path, for example

    def load(self) -> Callable[..., Any]:
        """Import the function; errors of the package's import are raised unchanged."""
        return getattr(importlib.import_module(self.module), self.function)

    def choose(self, layer: str, device: torch.device, dtype: torch.dtype, **sizes: int) -> Callable[..., Any] | None:
        """Return the function if the kernel fits, or else None; on CUDA, log which it is, once.

        Args:
            layer: name of the layers, for the log.
            device: device of the inputs.
            dtype: dtype of the inputs.
            sizes: sizes of the layer that :attr:`limits` names.
        """
        if device.type != "cuda" or is_simulated() or not torch.cuda.is_available():
            return None
        function, problem = self.find(device, dtype, **sizes)
        key = (layer, self.package, dtype)
        if key in _logged:  # SwiGLU asks in every layer
            return function
        _logged.add(key)
        prefix = f"{layer} on cuda in {dtype}: "
        if function is None:
            log_once(get_logger(), f"{prefix}plain PyTorch, because {problem}; {self.without}.")
        else:
            log_once(get_logger(), f"{prefix}{self.function} of {self.package} {self.installed_version()}.")
        return function

    def find(self, device: torch.device, dtype: torch.dtype, **sizes: int) -> _Choice:
        """Return the function, or None and why there is none; both are looked up once.

        Args:
            device: device of the inputs.
            dtype: dtype of the inputs.
            sizes: sizes of the layer that :attr:`limits` names.
        """
        key = (self.package, device, dtype, *sizes.items())
        if key not in _choices:
            problem = self.obstacle(device, dtype, **sizes)
            function = None
            if problem is None:
                try:
                    function = self.load()
                except (ImportError, AttributeError, OSError, RuntimeError) as error:  # built for another torch
                    problem = f"the import of {self.module} fails: {type(error).__name__}: {first_line(error)}"
            _choices[key] = function, problem
        return _choices[key]


DELTA_RULE = OptionalKernel(
    package="fla-core",
    version="0.6.0",
    install="pip install 'torchtune[fla]'",
    module="fla.ops.gated_delta_rule",
    function="chunk_gated_delta_rule",
    computes="the gated delta rule of Qwen 3.5 and Qwen3-Next in training",
    without="chunks of 64 positions are computed in dozens of launches",
    limits={"head_dim": 256},
)
CAUSAL_CONV = OptionalKernel(
    package="causal-conv1d",
    version="1.7.0",
    install="pip install --no-build-isolation 'torchtune[causal-conv1d]'",
    module="causal_conv1d",
    function="causal_conv1d_fn",
    computes="the short convolutions of Gated DeltaNet, Mamba 2 and LFM2 in training",
    without="each tap takes several passes over the inputs",
    dtypes=_FLOATING,
    limits={"taps": 4},
    capability=(7, 0),
)
STATE_SPACE = OptionalKernel(
    package="mamba-ssm",
    version="2.3.2",
    install="pip install --no-build-isolation 'torchtune[mamba]'",
    module="mamba_ssm.ops.triton.ssd_combined",
    function="mamba_chunk_scan_combined",
    computes="the state-space model of Granite 4, Falcon-H1 and Nemotron 3 in training",
    without="chunks of 64 positions are computed in dozens of launches",
    limits={"state_dim": 256},
)
SWIGLU = OptionalKernel(
    package="liger-kernel",
    version="0.8.5",
    install="pip install 'torchtune[liger]'",
    module="liger_kernel.ops.swiglu",
    function="LigerSiLUMulFunction",
    computes="SwiGLU in layers that are not compiled",
    without="it takes several passes over its inputs in each direction instead of one",
    dtypes=_FLOATING,
)
GROUPED_PRODUCTS = OptionalKernel(
    package="grouped-gemm",
    version="0.3.0",
    install="pip install --no-build-isolation 'torchtune[grouped-gemm]'",
    module="grouped_gemm.ops",
    function="gmm",
    computes="the products of experts on cards for which torch has no grouped kernel",
    without="experts are multiplied one by one, and the host waits for their numbers of tokens",
    dtypes=(torch.bfloat16,),
)
FLASH_ATTENTION_3 = OptionalKernel(
    package="flash-attn-3",
    version="3.0.0",
    install="github.com/Dao-AILab/flash-attention/tree/main/hopper",
    module="flash_attn_interface",
    function="",
    computes="flash attention within documents",
    without="flash attention is torch's own",
    capability=(9, 0),
    majors=(9,),
    limits={"head_dim": 256},
    is_asked_for=True,
)
FLASH_ATTENTION_4 = OptionalKernel(
    package="flash-attn-4",
    version="4.0.0b36",
    install="pip install 'torchtune[flash-attention-4]'",
    module="flash_attn.cute.interface",
    function="",
    computes="flash attention within documents",
    without="flash attention is torch's own",
    capability=(9, 0),
    majors=(9, 10),
    limits={"head_dim": 128},
    is_asked_for=True,
)
KERNELS = (
    DELTA_RULE,
    CAUSAL_CONV,
    STATE_SPACE,
    SWIGLU,
    GROUPED_PRODUCTS,
    FLASH_ATTENTION_3,
    FLASH_ATTENTION_4,
)

# Packages whose kernels layers may use; None: all. The conversion OptionalKernels sets it, for the whole process.
_allowed: frozenset[str] | None = None
# Package, device, dtype and sizes -> the function, or None and the reason.
_choices: dict[tuple[Any, ...], _Choice] = {}
# Layers, packages and dtypes whose choice was logged.
_logged: set[tuple[str, str, torch.dtype]] = set()


def allow_kernels(packages: Collection[str] | None) -> None:
    """Let layers use the kernels of these packages only, in this process; None allows all that fit."""
    global _allowed
    _allowed = None if packages is None else frozenset(packages)
    _choices.clear()
    _logged.clear()
    _CARDS.clear()


class KernelUser:
    """Base class of modules that may use a kernel of another package.

    The model calls :meth:`choose_kernels` before its first batch on a device, outside of compiled layers: a lookup
    imports packages, and asks the driver.
    """

    def choose_kernels(self, device: torch.device, dtype: torch.dtype) -> None:
        """Choose the kernels for inputs of this device and dtype."""


@dataclass(frozen=True)
class Card:
    """Properties of a CUDA card that decide between kernels.

    Attributes:
        capability: compute capability.
        shared_memory: bytes of shared memory per block.
        has_grouped_products: whether torch has a kernel for grouped products, which does not wait for their sizes.
        other_grouped_products: the function of another package for a card without it.
    """

    capability: tuple[int, int]
    shared_memory: int
    has_grouped_products: bool = True
    other_grouped_products: Callable[..., Any] | None = None


_CARDS: dict[torch.device, Card] = {}


def card_of(device: torch.device) -> Card | None:
    """Look at a card once, outside of compiled layers; ``None`` if this machine has no such card.

    From then on ``scaled_dot_product_attention`` of this process does not run cuDNN's attention, which torch prefers on
    an H100 for some shapes. It makes a plan for every new shape, and batches of documents and steps of generation have
    a new shape each time; no speed of the library was measured with it. torch's ``varlen_attn`` ignores this switch;
    :func:`attention` calls it such that it runs flash attention.
    """
    if device in _CARDS or torch.compiler.is_compiling() or is_simulated() or not torch.cuda.is_available():
        return _CARDS.get(device)
    torch.backends.cuda.enable_cudnn_sdp(False)
    properties = torch.cuda.get_device_properties(device)
    capability = properties.major, properties.minor
    has_products = _has_grouped_products(device)
    other_products = None
    if not has_products:
        other_products, _ = GROUPED_PRODUCTS.find(device, torch.bfloat16)
    _CARDS[device] = Card(capability, properties.shared_memory_per_block_optin, has_products, other_products)
    return _CARDS[device]


def _has_grouped_products(device: torch.device) -> bool:
    """Return whether torch has a kernel of grouped products for a card, by asking for a product of a few numbers.

    A release without a kernel for this card raises, or copies the sizes of the groups to the host and multiplies group
    by group. Torch's mode that forbids such waits tells the two apart.
    """
    if not hasattr(F, "grouped_mm"):
        return False
    # Rows of a multiple of 16 bytes, as the kernel demands.
    x = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    weight = x.expand(2, 16, 16).contiguous()
    counts = torch.full((2,), 8, dtype=torch.int32, device=device)
    ends = counts.cumsum(0, dtype=torch.int32)
    mode_before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        try:
            torch.cuda.set_sync_debug_mode("error")
            F.grouped_mm(x, weight, offs=ends)
        except RuntimeError:
            return False
        finally:
            torch.cuda.set_sync_debug_mode(mode_before)
    return True


def describe_kernels(device: torch.device) -> list[str]:
    """Return a line about each row of the table on a device, for ``tune doctor``."""
    card = card_of(device) if device.type == "cuda" else None
    lines = []
    for kernel in KERNELS:
        problem = kernel.obstacle(device)
        if kernel is GROUPED_PRODUCTS and card is not None and card.has_grouped_products:
            state = "not needed: torch has a kernel for this card"
        elif problem is not None:
            state = f"not used: {problem}"
        elif kernel.is_asked_for:
            state = f"{kernel.installed_version()}, used where model_converters has FlashAttentionKernel"
        else:
            state = f"{kernel.installed_version()}, used"
        lines.append(f"{kernel.package} ({kernel.computes}): {state}")
    return lines


def _dotted(capability: tuple[int, int]) -> str:
    major, minor = capability
    return f"{major}.{minor}"
