"""LoRA: linear layers and experts with low-rank adapters, their projection as one autograd node, and merging.

:class:`DoRALinear` trains magnitudes too, and :class:`QATLoRALinear` simulates the quantization of the merged weight.
:class:`LoRAGroupedExperts` has an adapter for each expert and matrix.
"""

import math
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache, partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torchtune._lazy import former_names
from torchtune.modules.conversion import ConversionError, change_class
from torchtune.modules.kernels.onednn import linear, mm
from torchtune.modules.low_precision.formats import Stored
from torchtune.modules.low_precision.layers import (
    FakeQuantized,
    FakeQuantSwitch,
    FrozenNF4Linear,
    StoredLinear,
    frozen_linear,
)
from torchtune.modules.low_precision.torchao_interface import fake_quantizer
from torchtune.modules.moe.experts import GroupedExperts
from torchtune.modules.moe.frozen_experts import Adapter
from torchtune.utils import computes_on_cpu, fill_from_cpu, in_dispatch_mode


def lora_scaling(rank: int, alpha: float, *, use_rslora: bool = False) -> float:
    """Return the factor of the update ``B A``: ``alpha / rank``, or ``alpha / sqrt(rank)`` with rsLoRA."""
    if use_rslora:
        return alpha / rank**0.5
    return alpha / rank


class LoRAProjection(torch.autograd.Function):
    """y = x Wᵀ + bias + scale · (x ∘ mask) Aᵀ Bᵀ (Hu et al., "LoRA", 2021, equation 3).

    For the backward pass it saves ``x`` (for the gradient of A), ``x Aᵀ`` of width ``rank``, and with dropout a mask of
    one byte per element. Low-rank products write into a given tensor, so that selective checkpointing, which saves
    some products, does not see them; where it may save the base's product, that is not changed in place.
    W is ``decode(*stored)`` and is decoded again in the backward pass, so only the stored tensors are saved.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        lora_a: Tensor,
        lora_b: Tensor,
        mask: Tensor | None,
        scale: float,
        decode: Callable[..., Tensor],
        *stored: Tensor,
    ) -> Tensor:
        """x and mask [..., in], W [out, in], lora_a [r, in], lora_b [out, r] -> [..., out].

        The mask is True where dropout keeps an element, None without dropout; ``scale`` includes dropout's factor
        1 / (1 - p).
        """
        rows = x.reshape(-1, x.shape[-1])  # [n, in]
        adapter_rows = rows if mask is None else torch.where(mask.view_as(rows), rows, 0.0)
        low = adapter_rows.new_empty(adapter_rows.shape[0], lora_a.shape[0])  # [n, r]
        torch.mm(adapter_rows, lora_a.t(), out=low)  # `out=`: selective checkpointing does not see the product
        base = linear(rows, decode(*stored), bias).to(rows.dtype)  # [n, out]; autocast may change the dtype
        y = base
        if torch.compiler.is_compiling() or in_dispatch_mode():  # which may save the base's product
            y = torch.empty_like(base)
        torch.addmm(base, low, lora_b.t(), alpha=scale, out=y)
        _, _, needs_a, needs_b, _, _, _, needs_weight, *_ = ctx.needs_input_grad
        # Only what a required gradient reads: `rows` for those of A and W, `low` for that of B.
        saved_rows = rows if needs_weight or needs_a else None
        saved_low = low if needs_b else None
        ctx.save_for_backward(saved_rows, lora_a, lora_b, saved_low, mask, *stored)
        ctx.scale = scale
        ctx.decode = decode
        ctx.shape = x.shape
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the required gradients of x, bias, A, B and W."""
        rows, lora_a, lora_b, low, mask, *stored = ctx.saved_tensors
        needs_x, needs_bias, needs_a, needs_b, _, _, _, needs_weight, *_ = ctx.needs_input_grad
        grad = grad.reshape(-1, grad.shape[-1])  # [n, out]
        if mask is not None:
            mask = mask.view(grad.shape[0], -1)  # [n, in]
        if needs_x or needs_a:  # of x Aᵀ, which both gradients come from
            grad_low = _scaled_mm(grad, lora_b, ctx.scale)  # [n, r]
        grad_a = None
        if needs_a:
            adapter_rows = rows if mask is None else torch.where(mask, rows, 0.0)
            grad_a = mm(grad_low.t(), adapter_rows)  # [r, in]
            del adapter_rows  # [n, in], not needed for the products below
        grad_b = None
        if needs_b and computes_on_cpu(grad.device):
            grad_b = _scaled_mm(low.t(), grad, ctx.scale).t()  # faster than a narrow result
        elif needs_b:
            grad_b = _scaled_mm(grad.t(), low, ctx.scale)  # autograd would copy a transposed gradient
        grad_x = None
        if needs_x:
            grad_x = mm(grad, ctx.decode(*stored))  # [n, in]
            if mask is None:
                grad_x.addmm_(grad_low, lora_a)
            else:
                grad_x.addcmul_(grad_low @ lora_a, mask)
            grad_x = grad_x.view(ctx.shape)
        grad_weight = None
        if needs_weight:
            grad_weight = mm(grad.t(), rows)  # [out, in]
        grad_bias = None
        if needs_bias:
            grad_bias = grad.sum(0)
        # Only the first stored tensor, a weight that is not in a storage format, can have a gradient.
        other_stored = [None] * (len(stored) - 1)
        return grad_x, grad_bias, grad_a, grad_b, None, None, None, grad_weight, *other_stored


def _scaled_mm(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Compute ``scale · a b``, in one launch on an accelerator."""
    if computes_on_cpu(a.device):
        return mm(a, b).mul_(scale)
    unread = a.new_empty(())  # its factor is 0
    return torch.addmm(unread, a, b, beta=0, alpha=scale)


def _identity(weight: Tensor) -> Tensor:
    """Decode a weight that is in no storage format."""
    return weight


def lora_projection(
    x: Tensor,
    weight: Tensor | Stored,
    bias: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    *,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Compute a frozen projection plus its low-rank update.

    Args:
        x: [..., in].
        weight: [out, in]; a quantized weight gets no gradient.
        bias: [out] or ``None``.
        lora_a: [r, in].
        lora_b: [out, r].
        scale: alpha / rank.
        dropout: dropout probability of the adapter's input (0 outside of training).

    Returns:
        [..., out].
    """
    mask = None
    if dropout >= 1.0:
        scale = 0.0  # nothing of the input remains
    elif dropout > 0.0:
        mask = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1.0 - dropout)
        scale = scale / (1.0 - dropout)
    if isinstance(weight, Stored):
        decode = weight.decode
        stored = weight.tensors
    else:
        decode = _identity
        stored = (weight,)
    return LoRAProjection.apply(x, bias, lora_a, lora_b, mask, scale, decode, *stored)


def init_from_weight(weight: Tensor, how: str, rank: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Initialize an adapter from its base weight, as ``peft`` does.

    ``"pissa"`` takes the first singular vectors (Meng et al., "PiSSA", 2024), ``"olora"`` the first vectors of the QR
    decomposition (Büyükakyüz, "OLoRA", 2024).

    Args:
        weight: float32 [out, in].
        how: ``"pissa"`` or ``"olora"``.
        rank: r.
        scale: scale of the update.

    Returns:
        W - scale · B A, A [r, in] and B [out, r], in float32.
    """
    if how == "pissa":
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
        # B and A share a singular value evenly; scale · B A is the best approximation of rank r.
        root = (values[:rank] / scale).sqrt()  # [r]
        b = left[:, :rank] * root  # [out, r]
        a = root.unsqueeze(1) * right[:rank]  # [r, in]
    else:
        left, right = torch.linalg.qr(weight)  # orthonormal columns, and an upper triangle
        b = left[:, :rank].contiguous()
        a = right[:rank].contiguous()
    base = torch.addmm(weight, b, a, alpha=-scale)
    return base, a, b


def updated_weight(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    """Compute ``weight`` [out, in] + scale · B A in at least float32, on the device of ``weight``."""
    compute = torch.promote_types(weight.dtype, torch.float32)
    a = lora_a.to(weight.device, compute)
    b = lora_b.to(weight.device, compute)
    return torch.addmm(weight.to(compute), b, a, alpha=scale)


def merged_weight(
    weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float, magnitude: Tensor | None = None
) -> Tensor:
    """Merge an adapter into ``weight``, keeping its dtype; with ``magnitude`` [out], scale the rows to it (DoRA)."""
    merged = updated_weight(weight, lora_a, lora_b, scale)
    if magnitude is not None:
        factors = magnitude.to(merged.device, merged.dtype) / merged.norm(dim=1)  # [out]
        merged = merged.mul_(factors.unsqueeze(1))
    return merged.to(weight.dtype)


class TrainableParams(Enum):
    """Trainable parameters of a part of a model: all, only adapters, or none.

    Example:
        >>> torchtune.modules.peft.TrainableParams("lora") is torchtune.modules.peft.TrainableParams.LORA
        True
    """

    FULL = "full"
    LORA = "lora"
    FROZEN = "frozen"


def check_adapter_numbers(rank: int, alpha: float, dropout: float) -> None:
    """Check that an adapter can change the model.

    Raises:
        ConversionError: ``rank`` is below 1, ``alpha`` is 0, or ``dropout`` is outside [0, 1).
    """
    if rank < 1:
        raise ConversionError(f"rank is {rank}: the rank of an adapter must be at least 1.")
    if alpha == 0:
        raise ConversionError("alpha is 0: the adapter would change nothing, give another number, such as 2 * rank.")
    if not 0.0 <= dropout < 1.0:
        raise ConversionError(f"dropout is {dropout}: give a probability from 0 to below 1.")


AdapterStart = Literal["pissa", "olora"]


class LoRALinear(nn.Module):
    """Frozen linear layer with a LoRA adapter: y = x Wᵀ + (alpha / rank) · x Aᵀ Bᵀ.

    Parameters are ``weight`` [out, in] and ``bias`` [out] as in ``nn.Linear``, ``lora_a.weight`` [rank, in] and
    ``lora_b.weight`` [out, rank], all in the default dtype at construction. Formula: Hu et al., "LoRA: Low-Rank
    Adaptation of Large Language Models", 2021.

    Args:
        in_dim: width of the input.
        out_dim: width of the output.
        rank: rank of the adapter.
        alpha: the update is scaled by alpha / rank.
        dropout: dropout on the adapter's input, in training.
        use_bias: whether the base has a bias.
        quantize_base: store the base in NF4; the layer is then also a
            :class:`~torchtune.modules.low_precision.FrozenNF4Linear`.
        **quantization_kwargs: options of that class.

    Raises:
        ConversionError: ``rank`` is below 1, ``alpha`` is 0, ``dropout`` is outside [0, 1), or a quantization option
            is invalid.

    Example:
        >>> from torchtune.modules.peft import LoRALinear
        >>> layer = LoRALinear(in_dim=8, out_dim=4, rank=2, alpha=4)
        >>> layer(torch.ones(3, 8)).shape
        torch.Size([3, 4])
        >>> layer.adapter_params()
        ['lora_a.weight', 'lora_b.weight']
    """

    # Whether initialize_parameters() reads the base weight, which must then not be sharded.
    initialize_reads_base: ClassVar[bool] = False
    # As in StoredLinear.
    parallel_dims: ClassVar[dict[str, tuple[int | None, int | None]]] = {"weight": (0, 1), "bias": (0, None)}
    adapter_parallel_dims: ClassVar[dict[str, tuple[int | None, int | None]]] = {
        "lora_a.weight": (None, 1),
        "lora_b.weight": (0, None),
    }

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        rank: int,
        alpha: float,
        dropout: float = 0.0,
        use_bias: bool = False,
        quantize_base: bool = False,
        **quantization_kwargs: Any,
    ) -> None:
        super().__init__()
        if quantization_kwargs and not quantize_base:
            raise ConversionError(
                f"{', '.join(sorted(quantization_kwargs))}: options of the quantized base need quantize_base=True, "
                "remove them."
            )
        check_adapter_numbers(rank, alpha, dropout)
        self.weight = nn.Parameter(torch.empty(out_dim, in_dim), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_dim), requires_grad=False) if use_bias else None
        self._set_up(in_dim, out_dim, rank, alpha, dropout)
        if not self.weight.is_meta:  # as nn.Linear initializes them
            nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
            if use_bias:
                bound = 1 / math.sqrt(in_dim)
                nn.init.uniform_(self.bias, -bound, bound)
        if quantize_base:
            # The layer becomes an instance of its own class and of FrozenNF4Linear, with the base that this makes.
            self.in_features = in_dim  # from_linear reads both
            self.out_features = out_dim
            base = FrozenNF4Linear.from_linear(self, **quantization_kwargs)
            self.__dict__.update(vars(base))
            self.__class__ = _adapt_stored_class(type(self), FrozenNF4Linear)
        self._make_adapter(self.weight.device, self.stored_weight().dtype)
        self.initialize_parameters()

    def _set_up(self, in_dim: int, out_dim: int, rank: int, alpha: float, dropout: float) -> None:
        """Set the attributes that are neither the base's nor the adapter's parameters."""
        self.in_dim = in_dim
        self.out_dim = out_dim
        self.rank = rank
        self.alpha = alpha
        self.scaling = lora_scaling(rank, alpha)
        self.use_bias = self.bias is not None
        self.disabled = False
        self.start: AdapterStart | None = None  # initialization of A and B when the base is loaded
        self.dropout = nn.Dropout(p=dropout)

    def _make_adapter(self, device: torch.device, dtype: torch.dtype) -> None:
        """Create the adapter's parameters, not initialized."""
        # Created on meta, because nn.Linear would initialize them; initialize_parameters() does.
        lora_a = nn.Linear(self.in_dim, self.rank, bias=False, device="meta", dtype=dtype)
        lora_b = nn.Linear(self.rank, self.out_dim, bias=False, device="meta", dtype=dtype)
        self.lora_a = lora_a.to_empty(device=device)
        self.lora_b = lora_b.to_empty(device=device)

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, rank: int, alpha: float, dropout: float = 0.0) -> "LoRALinear":
        """Wrap ``linear``: the new layer shares its base parameters, frozen, with device and dtype unchanged.

        Args:
            linear: a plain layer, or a :class:`~torchtune.modules.StoredLinear`; the new layer is then
                also an instance of that class.
            rank: rank of the adapter.
            alpha: the update is scaled by alpha / rank.
            dropout: dropout on the adapter's input, in training.
        """
        kind = _adapt_stored_class(cls, type(linear)) if isinstance(linear, StoredLinear) else cls
        new = change_class(linear, kind).requires_grad_(False)
        new._set_up(linear.in_features, linear.out_features, rank, alpha, dropout)
        new._make_adapter(linear.weight.device, new.stored_weight().dtype)
        new.initialize_parameters()
        return new.train(linear.training)

    def without_adapter(self) -> nn.Linear:
        """Return the layer without its adapter; it shares the frozen base parameters."""
        linear = change_class(self, getattr(self, "stored_kind", nn.Linear))
        # "lora_a.weight" -> "lora_a", each once.
        attributes = dict.fromkeys(name.partition(".")[0] for name in self.adapter_params())
        for attribute in attributes:
            delattr(linear, attribute)
        del linear.dropout
        linear.in_features = self.in_dim
        linear.out_features = self.out_dim
        return linear

    def full_weight(self) -> Tensor:
        """Return the base weight ``[out, in]`` in the compute dtype."""
        return self.weight

    def stored_weight(self) -> Tensor | Stored:
        """Return the weight for matrix products; see :class:`~torchtune.modules.StoredLinear`."""
        return self.full_weight()

    def initialize_parameters(self) -> None:
        """Initialize the adapter: A Kaiming uniform, B zero. No-op on meta."""
        if self.lora_a.weight.is_meta or self.start is not None:
            return
        fill_from_cpu(self.lora_a.weight, partial(nn.init.kaiming_uniform_, a=math.sqrt(5)))
        nn.init.zeros_(self.lora_b.weight)

    def adapter_params(self) -> list[str]:
        """Return the names of the adapter's parameters, relative to this module."""
        return ["lora_a.weight", "lora_b.weight"]

    @torch.no_grad()
    def merged_weight(self, weight: Tensor) -> Tensor:
        """Merge the adapter into ``weight`` [out, in] in at least float32, and return it in the weight's dtype."""
        return merged_weight(weight, self.lora_a.weight, self.lora_b.weight, self.scaling)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: [..., in_dim] -> [..., out_dim]."""
        weight = self.stored_weight()
        if self.disabled:
            return frozen_linear(x, weight, self.bias)
        dropout = self.dropout.p if self.training else 0.0
        return lora_projection(
            x, weight, self.bias, self.lora_a.weight, self.lora_b.weight, scale=self.scaling, dropout=dropout
        )

    def extra_repr(self) -> str:
        """Return sizes, rank and alpha for ``repr``."""
        return (
            f"in_dim={self.in_dim}, out_dim={self.out_dim}, rank={self.rank}, alpha={self.alpha}, bias={self.use_bias}"
        )


@cache
def _adapt_stored_class(adapted: type[LoRALinear], stored: type[StoredLinear]) -> type[LoRALinear]:
    """Class of an adapted layer with a :class:`StoredLinear` base."""
    # The adapted class comes first in the order of bases; these members must be those of the stored class all the same.
    members = {name: getattr(stored, name) for name in ("full_weight", "stored_weight", "parallel_dims")}
    members["stored_kind"] = stored
    return type(f"{adapted.__name__}{stored.__name__}", (adapted, stored), members)


class DoRALinear(LoRALinear):
    """LoRA layer with a trained magnitude per row: W' = magnitude · (W + s B A) / ‖W + s B A‖, row by row.

    ``magnitude`` [out] is an additional adapter parameter. The norm is a constant in the backward pass (Liu et al.,
    "DoRA: Weight-Decomposed Low-Rank Adaptation", 2024, section 4.3).

    The adapter is at least float32 for any dtype of the weight: a bfloat16 magnitude would differ from the norm by up
    to 2⁻⁹ of its value, and the model would change before its first step. A and B are float32 too, as in ``peft``,
    because FSDP requires one dtype for all trainable parameters.

    Args:
        in_dim: width of the input.
        out_dim: width of the output.
        rank: rank of the adapter.
        alpha: the update is scaled by alpha / rank.
        dropout: dropout on the adapter's input, in training.
        use_bias: whether the base has a bias.
        quantize_base: store the base in NF4.
        **quantization_kwargs: options of the quantized base.

    Raises:
        ConversionError: ``rank`` is below 1, ``alpha`` is 0, ``dropout`` is outside [0, 1), or a quantization option
            is invalid.

    Example:
        >>> from torchtune.modules.peft import DoRALinear
        >>> layer = DoRALinear(in_dim=8, out_dim=4, rank=2, alpha=4)
        >>> layer.adapter_params()
        ['lora_a.weight', 'lora_b.weight', 'magnitude']
    """

    initialize_reads_base: ClassVar[bool] = True
    adapter_parallel_dims: ClassVar[dict[str, tuple[int | None, int | None]]] = {
        **LoRALinear.adapter_parallel_dims,
        "magnitude": (0, None),
    }

    def _make_adapter(self, device: torch.device, dtype: torch.dtype) -> None:
        dtype = torch.promote_types(dtype, torch.float32)  # see the class
        super()._make_adapter(device, dtype)
        self.magnitude = nn.Parameter(torch.empty(self.out_dim, device=device, dtype=dtype))

    def initialize_parameters(self) -> None:
        """Initialize the adapter so that it changes nothing; requires the loaded base weight. No-op on meta."""
        super().initialize_parameters()
        self.initialize_dora_magnitude()

    @torch.no_grad()
    def initialize_dora_magnitude(self) -> None:
        """Set ``magnitude`` to the row norms of the weight. No-op on meta."""
        if not self.magnitude.is_meta:
            self.magnitude.copy_(self._norms(self.full_weight()))

    def adapter_params(self) -> list[str]:
        """Return the names of the adapter's parameters, relative to this module."""
        return [*super().adapter_params(), "magnitude"]

    @torch.no_grad()
    def _norms(self, weight: Tensor) -> Tensor:
        """Row norms [out] of W + s B A, in at least float32."""
        return updated_weight(weight, self.lora_a.weight, self.lora_b.weight, self.scaling).norm(dim=1)

    @torch.no_grad()
    def merged_weight(self, weight: Tensor) -> Tensor:
        """Merge the adapter into ``weight`` [out, in] in at least float32, and return it in the weight's dtype."""
        return merged_weight(weight, self.lora_a.weight, self.lora_b.weight, self.scaling, self.magnitude)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: [..., in_dim] -> [..., out_dim], in the dtype of ``x``."""
        weight = self.stored_weight()
        if self.disabled:
            return frozen_linear(x, weight, self.bias)
        a = self.lora_a.weight.to(x.dtype)
        b = self.lora_b.weight.to(x.dtype)
        # The norms have no gradient (Liu et al., "DoRA", 2024, section 4.3).
        length = self.magnitude / self._norms(self.full_weight())  # [out], at least float32
        if not self.training or self.dropout.p == 0.0:
            y = lora_projection(x, weight, self.bias, a, b, scale=self.scaling)
            return scale_rows(y, length, self.bias).to(x.dtype)
        # Dropout is before the magnitudes, so both parts of their product need the dropped input.
        dropped = self.dropout(x)
        adapted = lora_projection(dropped, weight, None, a, b, scale=self.scaling)
        scaled = (adapted * length).to(x.dtype)
        # The base gets the input without dropout, only the change of its output is of the dropped input. The difference
        # is computed first: it is exactly 0 for a new adapter.
        return frozen_linear(x, weight, self.bias) + (scaled - frozen_linear(dropped, weight))


def scale_rows(y: Tensor, length: Tensor, bias: Tensor | None) -> Tensor:
    """Scale outputs ``[..., out]``, except the ``bias`` they include, by ``length`` [out]."""
    if bias is None:
        return y * length
    # In this form the result is exactly y if the length is 1.
    return y + (length - 1) * (y - bias)


class QATLoRALinear(FakeQuantized, LoRALinear):
    """LoRA layer that fake-quantizes the merged weight: y = Q(x) Q(W + (alpha / rank) B A)ᵀ.

    The merged weight is rounded to the dtype of ``W`` before it is quantized, as in an export, so that training matches
    the exported model. Parameters have the names of :class:`LoRALinear`.

    Args:
        in_dim: width of the input.
        out_dim: width of the output.
        rank: rank of the adapter.
        alpha: the update is scaled by alpha / rank.
        dropout: must be 0, because a merged adapter has no separate input.
        activation_qat_config: torchao's ``FakeQuantizeConfigBase`` of the input, or None.
        weight_qat_config: torchao's ``FakeQuantizeConfigBase`` of the weight, or None.

    Raises:
        ConversionError: ``rank`` is below 1, ``alpha`` is 0, or ``dropout`` is above 0.

    Example:
        >>> layer = torchtune.modules.peft.QATLoRALinear(8, 4, rank=2, alpha=4)
        >>> layer(torch.ones(1, 8)).shape
        torch.Size([1, 4])
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        rank: int,
        alpha: float,
        dropout: float = 0.0,
        activation_qat_config: Any | None = None,
        weight_qat_config: Any | None = None,
    ) -> None:
        super().__init__(in_dim, out_dim, rank, alpha, dropout)
        check_no_dropout(dropout)
        self._set_configs(activation_qat_config, weight_qat_config)

    @classmethod
    def from_lora_linear(
        cls,
        lora_linear: LoRALinear,
        activation_qat_config: Any | None = None,
        weight_qat_config: Any | None = None,
    ) -> "QATLoRALinear":
        """Make the layer from a LoRA layer, with the same parameter objects. See the class for the arguments."""
        check_no_dropout(lora_linear.dropout.p)
        new = change_class(lora_linear, cls)
        new._set_configs(activation_qat_config, weight_qat_config)
        return new

    def _set_configs(self, activation: Any | None, weight: Any | None) -> None:
        """Build the fake quantizers of the input and of the weight from torchao's configs."""
        self.activation_fake_quantizer = None if activation is None else fake_quantizer(activation)
        self.weight_fake_quantizer = None if weight is None else fake_quantizer(weight)
        self.fake_quant = FakeQuantSwitch()

    def weight_to_quantize(self) -> Tensor:
        """Return the merged weight ``[out, in]`` in the dtype of the base; gradients flow to A and B."""
        if self.disabled:
            return self.weight
        return merged_weight(self.weight, self.lora_a.weight, self.lora_b.weight, self.scaling)


def check_no_dropout(dropout: float) -> None:
    """Raise ``ConversionError`` unless ``dropout`` is 0."""
    if dropout:
        raise ConversionError(
            f"lora_dropout is {dropout:g}: with fake quantization the adapter is merged into the weight and has no "
            "input of its own to drop, set it to 0."
        )


class LoRAGroupedExperts(GroupedExperts):
    """Frozen experts with a LoRA adapter per expert and matrix: ``x W + (alpha / rank) · x A B``.

    Besides the weights of :class:`GroupedExperts` it has ``lora_gate_a`` ``[e, dim, rank]``, ``lora_gate_b``
    ``[e, rank, hidden_dim]``, and the same for ``up`` and ``down``. :meth:`from_experts` also wraps experts with other
    matrices, and their adapters are named after these.

    Args:
        dim: d, width of input and output.
        hidden_dim: intermediate width.
        rank: rank of the adapters.
        alpha: updates are scaled by alpha / rank.
        dropout: dropout on the adapters' input, in training.
        num_experts: e.
        activation: elementwise activation of the gate.

    Raises:
        ConversionError: ``rank`` is below 1, ``alpha`` is 0, or ``dropout`` is outside [0, 1).

    Example:
        >>> experts = torchtune.modules.moe.LoRAGroupedExperts(dim=8, hidden_dim=4, rank=2, alpha=4, num_experts=2)
        >>> len(experts.adapter_params())
        6
    """

    # initialize_parameters() does not read the base weights.
    initialize_reads_base: ClassVar[bool] = False

    def __init__(
        self,
        *,
        dim: int,
        hidden_dim: int,
        rank: int,
        alpha: float,
        dropout: float = 0.0,
        num_experts: int = 1,
        activation: Callable[[Tensor], Tensor] = F.silu,
    ) -> None:
        super().__init__(dim=dim, hidden_dim=hidden_dim, num_experts=num_experts, activation=activation)
        self._set_up(rank, alpha, dropout, self.gate_proj.dtype)

    def _set_up(self, rank: int, alpha: float, dropout: float, dtype: torch.dtype) -> None:
        """Freeze the weights, and create an adapter for each matrix."""
        check_adapter_numbers(rank, alpha, dropout)
        self.requires_grad_(False)  # before the adapters, which are trained
        self.rank = rank
        self.alpha = alpha
        self.scaling = lora_scaling(rank, alpha)
        self.disabled = False
        self.dropout = nn.Dropout(p=dropout)
        device = next(self.parameters()).device
        for name, (experts, inputs, outputs) in self.matrix_shapes().items():
            a = torch.empty(experts, inputs, rank, dtype=dtype, device=device)
            b = torch.empty(experts, rank, outputs, dtype=dtype, device=device)
            a_name, b_name = _adapter_names(name)
            setattr(self, a_name, nn.Parameter(a))
            setattr(self, b_name, nn.Parameter(b))
        self.initialize_parameters()

    @classmethod
    def from_experts(
        cls, experts: GroupedExperts, *, rank: int, alpha: float, dropout: float = 0.0
    ) -> "LoRAGroupedExperts":
        """Wrap ``experts``: the new module shares their weights, frozen, with device and dtype unchanged.

        Args:
            experts: plain or quantized experts.
            rank: rank of the adapters.
            alpha: updates are scaled by alpha / rank.
            dropout: dropout on the adapters' input, in training.
        """
        adapted_class = cls
        if type(experts) is not GroupedExperts:
            adapted_class = _adapt_stored_experts(cls, type(experts))
        new = change_class(experts, adapted_class)
        new._set_up(rank, alpha, dropout, experts.stored_weight("down_proj").dtype)
        return new.train(experts.training)

    def without_adapter(self) -> GroupedExperts:
        """Return the experts without their adapters; they share the frozen weights."""
        plain = change_class(self, getattr(self, "stored_kind", GroupedExperts))
        for name in (*self.adapter_params(), "dropout"):
            delattr(plain, name)
        for name in ("rank", "alpha", "scaling", "disabled"):
            plain.__dict__.pop(name)
        return plain

    def reset_parameters(self) -> None:
        """Initialize the base weights; no-op once the adapters exist."""
        if not hasattr(self, "rank"):
            super().reset_parameters()

    def initialize_parameters(self) -> None:
        """Initialize the adapters: A as in LoRA (Kaiming uniform), B zero. No-op on meta."""
        for name in self.adapter_params():
            parameter = getattr(self, name)
            if parameter.is_meta:
                continue
            if name.endswith("_a"):
                bound = parameter.shape[1] ** -0.5  # of [e, i, rank]: Kaiming's bound for i inputs and a = √5
                fill_from_cpu(parameter, partial(nn.init.uniform_, a=-bound, b=bound))
            else:
                nn.init.zeros_(parameter)

    def adapter_params(self) -> list[str]:
        """Return the names of the adapters' parameters, relative to this module."""
        names = []
        for matrix in self.matrix_shapes():
            names += _adapter_names(matrix)
        return names

    @torch.no_grad()
    def merged_weight(self, name: str, weight: Tensor) -> Tensor:
        """Merge the adapters into ``weight`` ``[e, i, o]``, the parameter called ``name``, in at least float32."""
        if name not in self.matrix_shapes():
            return weight
        compute = torch.promote_types(weight.dtype, torch.float32)
        a_name, b_name = _adapter_names(name)
        a = getattr(self, a_name).to(weight.device, compute)  # [e, i, r]
        b = getattr(self, b_name).to(weight.device, compute)  # [e, r, o]
        merged = torch.baddbmm(weight.to(compute), a, b, alpha=self.scaling)  # [e, i, o]
        return merged.to(weight.dtype)

    def adapter(self, name: str, weights: Mapping[str, Tensor | Stored]) -> Adapter | None:
        """Return the adapter of the matrix called ``name``, out of the parameters ``weights``."""
        if self.disabled:
            return None
        a_name, b_name = _adapter_names(name)
        return Adapter(a_name, b_name, weights[a_name], weights[b_name], self.scaling)

    def draw_dropout_mask(self, x: Tensor) -> Tensor | None:
        """Return the factors of an adapter's input ``x``, None without dropout."""
        if not self.draws_random_numbers():
            return None
        return self.dropout(torch.ones_like(x))

    def draws_random_numbers(self) -> bool:
        """Return whether there is dropout."""
        return self.training and self.dropout.p > 0.0 and not self.disabled

    def extra_repr(self) -> str:
        """Return sizes, rank and alpha for ``repr``."""
        return f"{super().extra_repr()}, rank={self.rank}, alpha={self.alpha}"


def _adapter_names(matrix: str) -> tuple[str, str]:
    """Return the names of the parameters A and B of a matrix's adapter."""
    part = matrix.removesuffix("_proj")
    return f"lora_{part}_a", f"lora_{part}_b"


@cache
def _adapt_stored_experts(adapted: type[LoRAGroupedExperts], stored: type[GroupedExperts]) -> type[LoRAGroupedExperts]:
    """Class of adapted experts that store their weights like ``stored``."""
    members = {"stored_weight": stored.stored_weight, "stored_kind": stored}
    return type(f"{adapted.__name__}{stored.__name__}", (adapted, stored), members)


__getattr__ = former_names(__name__)
