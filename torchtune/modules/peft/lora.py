"""Linear layers with a low-rank adapter."""

import math
from enum import Enum
from functools import cache, partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from torchtune._lazy import former_names
from torchtune.modules._change_class import change_class
from torchtune.modules.conversion import ConversionError
from torchtune.modules.peft._functional import lora_projection, lora_scaling, merged_weight
from torchtune.modules.stored_linear import Stored, StoredLinear, frozen_linear
from torchtune.utils import fill_from_cpu


class TrainableParams(Enum):
    """Trainable parameters of a part of a model: all, only adapters, or none.

    Example:
        >>> torchtune.modules.peft.TrainableParams("lora") is torchtune.modules.peft.TrainableParams.LORA
        True
    """

    FULL = "full"
    LORA = "lora"
    FROZEN = "frozen"


def _check_quantization(quantize_base: bool, **quantization_kwargs: Any) -> None:
    if quantization_kwargs and not quantize_base:
        raise ConversionError(
            f"{', '.join(sorted(quantization_kwargs))}: options of the quantized base need quantize_base=True, "
            "remove them."
        )


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
            ConversionError: ``rank`` is below 1, ``dropout`` is outside [0, 1], or a quantization option is invalid.

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
        _check_quantization(quantize_base, **quantization_kwargs)
        check_adapter_numbers(rank, alpha, dropout)
        self.weight = nn.Parameter(torch.empty(out_dim, in_dim), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_dim), requires_grad=False) if use_bias else None
        self._set_up(in_dim, out_dim, rank, alpha, dropout)
        self._initialize_base()
        if quantize_base:
            self._quantize_base(quantization_kwargs)
        self._make_adapter(self.weight.device, self.stored_weight().dtype)
        self.initialize_parameters()

    def _quantize_base(self, options: dict[str, Any]) -> None:
        from torchtune.modules.low_precision._layers import FrozenNF4Linear  # imported only if needed

        self.in_features = self.in_dim
        self.out_features = self.out_dim
        base = FrozenNF4Linear.from_linear(self, **options)
        self.__dict__.update(vars(base))
        self.__class__ = _adapt_stored_class(type(self), FrozenNF4Linear)

    def _set_up(self, in_dim: int, out_dim: int, rank: int, alpha: float, dropout: float) -> None:
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
        # Created on meta, because nn.Linear would initialize them; initialize_parameters() does.
        self.lora_a = nn.Linear(self.in_dim, self.rank, bias=False, device="meta", dtype=dtype).to_empty(device=device)
        self.lora_b = nn.Linear(self.rank, self.out_dim, bias=False, device="meta", dtype=dtype).to_empty(device=device)

    def _initialize_base(self) -> None:
        """Initialize the base weight as ``nn.Linear`` does. No-op on meta."""
        if self.weight.is_meta:
            return
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_dim)
            nn.init.uniform_(self.bias, -bound, bound)

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, rank: int, alpha: float, dropout: float = 0.0) -> "LoRALinear":
        """Wrap ``linear``: the new layer shares its base parameters, frozen, with device and dtype unchanged.

        Args:
            linear: a plain layer, or a :class:`~torchtune.modules.stored_linear.StoredLinear`; the new layer is then
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
        """Return the weight for matrix products; see :class:`~torchtune.modules.stored_linear.StoredLinear`."""
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


__getattr__ = former_names(__name__)
