"""Conversions for ``model_converters`` that replace no layer: kernels, freezing, noise, tiles, bidirectional attention.

Conversions that replace layers are in the modules of these layers, :mod:`torchtune.modules.peft` and
:mod:`torchtune.modules.low_precision`.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import attention

from torchtune.data import Documents
from torchtune.modules.attention import MultiHeadAttention
from torchtune.modules.conversion import (
    Conversion,
    ConversionError,
    ConversionReport,
    Phase,
    get_conversions,
    nearest_module_names,
)
from torchtune.modules.feed_forward import FeedForward
from torchtune.modules.kernels.attention import Kernel, choose_kernel
from torchtune.modules.kernels.optional import FLASH_ATTENTION_3, FLASH_ATTENTION_4, KERNELS, allow_kernels
from torchtune.modules.output_projection import TiedLinear
from torchtune.modules.transformer import TransformerDecoder, text_decoder
from torchtune.utils import is_simulated

if TYPE_CHECKING:  # DTensor is slow to import
    from torch.distributed.tensor.parallel import ParallelStyle

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
        paths = []
        largest_head_dim = 0
        for path, module in model.named_modules():
            if not isinstance(module, MultiHeadAttention):
                continue
            # The layer's kernel on CUDA, within documents; without a card, that of an H100. VARLEN alone is flash
            # attention.
            kernel = choose_kernel(
                torch.device("cuda"),
                next(module.parameters()).dtype,
                head_dim=module.head_dim,
                window=module.window or 0,
                softcap=module.softcap or 0.0,
                sinks=module.sinks is not None,
            )
            if kernel is Kernel.VARLEN:
                paths.append(path)
                largest_head_dim = max(largest_head_dim, module.head_dim)  # that the kernel must take
        if not paths:
            raise ConversionError(
                "FlashAttentionKernel: flash attention runs no layer of this model (it takes dtype bf16 or fp16, heads "
                "of at most 256, no soft cap and no sinks): remove it from model_converters."
            )
        if not is_simulated():  # a simulated run plans for another machine
            self._activate(largest_head_dim)
        return ConversionReport(self.kernel, paths)

    def _activate(self, head_dim: int) -> None:
        """Let torch run the kernel in this process. Raises :class:`ConversionError` if this machine cannot."""
        if not torch.cuda.is_available():
            raise ConversionError(
                f"FlashAttentionKernel: {self.kernel} runs on CUDA, and there is none: remove it from model_converters."
            )
        package = _FLASH[self.kernel]
        problem = package.obstacle(torch.device("cuda"), head_dim=head_dim)
        if problem is not None:
            raise ConversionError(
                f"FlashAttentionKernel: {self.kernel} cannot run: {problem}; or remove it from model_converters."
            )
        try:
            attention.activate_flash_attention_impl(self.kernel)
        # Torch lacks the function or the name of the kernel, or the package cannot be imported or registered.
        except (AttributeError, ImportError, RuntimeError) as error:
            raise ConversionError(
                f"FlashAttentionKernel: torch {torch.__version__} cannot use {self.kernel} ({error}): see "
                f"{package.install} for its installation, or remove it from model_converters."
            ) from error


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
        packages = [kernel.package for kernel in self.kernels]
        if not is_simulated():
            dtype = next(model.parameters()).dtype
            allow_kernels(packages)
            for kernel in self.kernels:
                problem = kernel.obstacle(torch.device("cuda"), dtype)
                if problem is not None:
                    raise ConversionError(
                        f"OptionalKernels: {kernel.package} cannot run: {problem}; or leave it out of use."
                    )
        names = ", ".join(packages) or "no other package"
        return ConversionReport("OptionalKernels", note=f"layers may use {names}")


class Freeze(Conversion):
    """Conversion that freezes weights by pattern: they get no gradient and no optimizer state, and are saved unchanged.

    A pattern is a regular expression of one or several whole components of the names of weights: ``layers.(2[0-9])``
    means layers 20 to 29, ``norm`` the final norm, ``attn`` the attention of every layer, ``q_proj.bias`` biases.

    Args:
        train: patterns of the weights to train; all others are frozen.
        freeze: patterns of the weights to freeze; all others are trained. Give either ``train`` or ``freeze``.

    Raises:
        ConversionError: both or none are given, or a pattern is no regular expression.

    Example:
        >>> from torchtune.modules import Freeze
        >>> from torchtune.modules.conversion import apply_conversions
        >>> (report,) = apply_conversions(model, [Freeze(train=["layers.1", "norm"])])
        >>> print(report)
        Freeze: 10 modules converted (...); of 28,704 parameters 9,312 are trained...
    """

    phase: ClassVar[Phase] = Phase.OBJECTIVE  # after all others, which may replace layers

    def __init__(self, train: Sequence[str] | None = None, freeze: Sequence[str] | None = None) -> None:
        if (train is None) == (freeze is None):
            raise ConversionError("Freeze: give the patterns of weights either in train or in freeze.")
        if freeze is None:
            self.setting = "train"
            patterns = train
        else:
            self.setting = "freeze"
            patterns = freeze
        if isinstance(patterns, str) or not patterns:
            raise ConversionError(
                f"Freeze: {self.setting} is {patterns!r}: give a list of patterns, for example "
                "['layers.(2[0-9])', norm]."
            )
        self.patterns = list(patterns)
        for pattern in self.patterns:  # before a model is built; convert compiles them as part of an expression
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConversionError(
                    f"Freeze: {self.setting} has '{pattern}', which is no regular expression ({error}): write it like "
                    "'layers.(2[0-9])' or 'attn.*'."
                ) from error

    def convert(self, model: nn.Module) -> ConversionReport:
        """Clear ``requires_grad`` of the weights to freeze.

        Raises:
            ConversionError: the model has adapters, a pattern matches nothing, or nothing is left to train; the model
                is then unchanged.
        """
        for conversion in get_conversions(model):
            if conversion.owned_parameters(model):
                raise ConversionError(
                    "Freeze: the model has adapters, beside which all weights are frozen already: choose layers with "
                    "target_modules and train_modules of torchtune.modules.peft.LoRA."
                )
        # Weights that are frozen already, such as quantized ones, stay so and are not counted.
        trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        matching: set[str] = set()
        for pattern in self.patterns:
            # Whole components of a name, with any components before and after them.
            expression = re.compile(rf"(.*\.)?({pattern})(\..*)?")
            names = [name for name in trainable if expression.fullmatch(name)]
            if not names:
                self._raise_unmatched(model, pattern, list(trainable))
            matching.update(names)
        frozen = matching
        if self.setting == "train":
            frozen = trainable.keys() - matching
        if len(frozen) == len(trainable):
            raise ConversionError(
                f"Freeze: {self.setting} = {self.patterns} freezes all {len(trainable)} weights, so nothing would be "
                "trained: leave some out."
            )
        for name in frozen:
            trainable[name].requires_grad_(False)
        modules = {}  # with a frozen weight, in the order of the model, each one once
        num_parameters = 0
        num_trained = 0
        for name, parameter in trainable.items():
            num_parameters += parameter.numel()
            if name in frozen:
                path, _, _ = name.rpartition(".")
                modules[path] = None
            else:
                num_trained += parameter.numel()
        note = f"of {num_parameters:,} parameters {num_trained:,} are trained"
        has_tied_output = isinstance(getattr(model, "output", None), TiedLinear)
        if has_tied_output and any(name.endswith("tok_embeddings.weight") for name in frozen):
            note += ", the output is tied to the embedding and frozen with it"
        return ConversionReport("Freeze", list(modules), note=note)

    def revert(self, model: nn.Module) -> None:
        """Train all weights again, except those that another conversion keeps in a storage format."""
        stored: set[str] = set()
        for conversion in get_conversions(model):
            for weight in conversion.stored_weights(model).values():
                stored.update(weight.names)
        for name, parameter in model.named_parameters():
            if name not in stored:
                parameter.requires_grad_(True)

    @staticmethod
    def _raise_unmatched(model: nn.Module, pattern: str, names: list[str]) -> None:
        """Raise :class:`ConversionError` for a pattern that matches none of the names of trainable weights."""
        if pattern == "output" and isinstance(getattr(model, "output", None), TiedLinear):
            raise ConversionError(
                "Freeze: 'output' is tied to the token embedding of this model: name tok_embeddings, which stands for "
                "both."
            )
        paths = dict.fromkeys(name.rpartition(".")[0] for name in names)
        candidates = [*paths, *names]
        nearest = ", ".join(nearest_module_names(pattern, candidates))
        raise ConversionError(f"Freeze: no weight of the model matches '{pattern}', the nearest names are {nearest}.")


class NEFTune(Conversion):
    """Conversion that adds noise to the token embeddings in training: U(-1, 1) · alpha / sqrt(L · d).

    L is the number of tokens of the document and d the width of the embedding (Jain et al., "NEFTune: Noisy Embeddings
    Improve Instruction Finetuning", 2023). Without boundaries of documents, L is the length of the rows. In evaluation
    there is no noise. It changes no weight, and works with and without adapters.

    Args:
        alpha: scale of the noise; the paper uses 5, 10 and 15.

    Raises:
        ConversionError: ``alpha`` is not above 0.

    Example:
        >>> from torchtune.modules import NEFTune
        >>> from torchtune.modules.conversion import apply_conversions
        >>> (report,) = apply_conversions(model, [NEFTune(alpha=5)])
        >>> print(report)
        NEFTune: 1 modules converted (tok_embeddings); noise of scale 5 in training
    """

    phase: ClassVar[Phase] = Phase.OBJECTIVE

    def __init__(self, alpha: float = 5.0) -> None:
        if not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
            raise ConversionError(f"NEFTune: alpha is {alpha!r}: give a number above 0, such as 5.")
        self.alpha = alpha

    def convert(self, model: nn.Module) -> ConversionReport:
        """Set ``embedding_noise`` of the decoder.

        Raises:
            ConversionError: the model is no text decoder.
        """
        if not isinstance(model, TransformerDecoder):
            raise ConversionError(
                f"NEFTune: a {type(model).__name__} is no text decoder, whose embeddings get the noise: remove it from "
                "model_converters."
            )
        model.embedding_noise = self.add_noise
        return ConversionReport("NEFTune", ["tok_embeddings"], note=f"noise of scale {self.alpha:g} in training")

    def revert(self, model: nn.Module) -> None:
        """Remove the noise."""
        model.embedding_noise = None

    def parallel_style(self, module: nn.Module, style: "ParallelStyle") -> "ParallelStyle":
        """Refuse tensor parallelism, whose ranks would add different noise to the same embeddings."""
        if isinstance(module, nn.Embedding):
            raise ConversionError("NEFTune: set tensor_parallel_dim to 1: its ranks would add different noise.")
        return style

    def add_noise(self, h: Tensor, documents: Documents | None) -> Tensor:
        """Add noise to embeddings ``[b, s, d]``.

        Raises:
            ConversionError: the documents continue on other ranks.
        """
        batch_size, seq_len, width = h.shape
        noise = torch.empty_like(h).uniform_(-1, 1)
        if documents is None:
            scale = self.alpha / math.sqrt(seq_len * width)
            return h + noise * scale
        if documents.num_tokens != batch_size * seq_len:
            raise ConversionError("NEFTune: set context_parallel_dim to 1: a rank has a part of each document.")
        lengths = documents.cu_seqlens.diff().to(h.device)  # [documents]
        # The length of each position's document. With output_size, the host does not wait for the sum of the lengths.
        length_of_position = lengths.repeat_interleave(lengths, output_size=documents.num_tokens)  # [b * s]
        scales = self.alpha * (length_of_position * width).rsqrt()
        return h + noise * scales.view(batch_size, seq_len, 1).to(h.dtype)


class TiledMLP(Conversion):
    """Conversion that computes the feed-forward layers of a decoder in tiles of the sequence.

    A feed-forward layer is independent for each token, and its hidden activations are several times as wide as its
    input. Each tile saves only its input and recomputes the rest in the backward pass, so that the hidden activations
    of one tile exist at a time (Bekman et al., "Arctic Long Sequence Training", 2025, arXiv:2506.13996). Outputs and
    gradients are those of the layer, except that the gradients of its weights are summed over the tiles in their dtype.
    It changes no weight. Experts of a mixture are not tiled: they are already computed expert by expert.

    Args:
        tile_size: number of tokens of a tile; shorter rows are computed as before.

    Raises:
        ConversionError: ``tile_size`` is below 1.

    Example:
        >>> from torchtune.modules import TiledMLP
        >>> from torchtune.modules.conversion import apply_conversions
        >>> (report,) = apply_conversions(model, [TiledMLP(tile_size=8192)])
        >>> print(report)
        TiledMLP: 2 modules converted (mlp); tiles of 8,192 tokens
    """

    phase: ClassVar[Phase] = Phase.KERNEL

    def __init__(self, tile_size: int = 16_384) -> None:
        if isinstance(tile_size, bool) or not isinstance(tile_size, int) or tile_size < 1:
            raise ConversionError(f"TiledMLP: tile_size is {tile_size}: give a number of tokens, such as 16384.")
        self.tile_size = tile_size

    def convert(self, model: nn.Module) -> ConversionReport:
        """Set ``tile_size`` of the feed-forward layers.

        Raises:
            ConversionError: the decoder has no feed-forward layer.
        """
        paths = []
        for name, module in text_decoder(model).named_modules():
            if isinstance(module, FeedForward):
                module.tile_size = self.tile_size
                paths.append(name)
        if not paths:
            raise ConversionError(
                f"TiledMLP: {type(model).__name__} has no feed-forward layers to tile: remove it from model_converters."
            )
        return ConversionReport("TiledMLP", paths, note=f"tiles of {self.tile_size:,} tokens")

    def revert(self, model: nn.Module) -> None:
        """Compute whole rows again."""
        for module in text_decoder(model).modules():
            if isinstance(module, FeedForward):
                module.tile_size = None

    def parallel_style(self, module: nn.Module, style: "ParallelStyle") -> "ParallelStyle":
        """Refuse tensor parallelism, which divides the hidden activations by itself."""
        raise ConversionError(
            "TiledMLP: remove it, or set tensor_parallel_dim to 1: tensor parallelism divides the hidden activations "
            "already."
        )


class BidirectionalAttention(Conversion):
    """Conversion that lets positions attend to all of their document, for embedding models and classifiers.

    Without documents and masks, a position attends to its whole row: padded rows need either. Checkpoints have
    ``is_causal: false`` in ``config.json``, which ``transformers`` 5 and this library read. An adapter alone cannot say
    it.

    Raises:
        ConversionError: see :meth:`convert`.

    Example:
        >>> from torchtune.modules import BidirectionalAttention
        >>> from torchtune.modules.conversion import apply_conversions
        >>> (report,) = apply_conversions(model, [BidirectionalAttention()])
        >>> print(report)
        BidirectionalAttention: 2 modules converted (...); each position sees its whole document
    """

    phase: ClassVar[Phase] = Phase.OBJECTIVE

    def convert(self, model: nn.Module) -> ConversionReport:
        """Clear ``is_causal`` of all attention layers, and of the model's description.

        Raises:
            ConversionError: the model is no text decoder that this library has built, or has parts that cannot see
                later positions, such as Mamba layers or sliding windows; it is then unchanged.
        """
        description = getattr(model, "description", None)
        if not isinstance(model, TransformerDecoder) or description is None:
            raise ConversionError(
                f"BidirectionalAttention: a {type(model).__name__} is no text decoder of torchtune.models, so that its "
                "checkpoints could not say it: remove it from model_converters."
            )
        causal_part = description.causal_part()
        if causal_part is not None:
            raise ConversionError(
                f"BidirectionalAttention: the model has {causal_part}, which cannot see later positions: remove it "
                "from model_converters, or choose another model."
            )
        names = self._set_causal(model, is_causal=False)
        return ConversionReport("BidirectionalAttention", names, note="each position sees its whole document")

    def revert(self, model: nn.Module) -> None:
        """Make attention causal again."""
        self._set_causal(model, is_causal=True)

    @staticmethod
    def _set_causal(model: nn.Module, *, is_causal: bool) -> list[str]:
        """Set whether attention is causal; return the names of the layers."""
        names = []
        for name, module in model.named_modules():
            if isinstance(module, MultiHeadAttention):
                module.is_causal = is_causal
                names.append(name)
        model.description = replace(model.description, is_causal=is_causal)
        return names
