"""Short convolutions: depthwise causal convolution within packed documents, and the mixer of LFM2."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torchtune.data import Documents
from torchtune.modules._outside_graphs import outside_graphs
from torchtune.modules.kernels import CAUSAL_CONV, KernelUser
from torchtune.modules.kernels.documents import Boundaries, SeparatedRow
from torchtune.modules.mixers._mixer import Blocks, MixerShare, RecurrentMixer, StateCache


class _CausalConv(torch.autograd.Function):
    """Convolution that saves only its arguments for the backward pass, instead of a shifted copy per tap.

    From the earliest tap on, the sum so far is kept where the next position is of the same document, and the product of
    the next tap is added: all taps share the mask of the first positions.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, reach: Tensor) -> Tensor:
        # 1 where the position before is of the same document, else 0: [b, s, 1].
        continues = torch.empty(*reach.shape, dtype=x.dtype, device=x.device)
        continues = torch.ge(reach, 1, out=continues)[..., None]
        ctx.save_for_backward(x, weight, continues)
        num_positions = x.shape[1]
        *earlier, last = weight.unbind(1)
        if not earlier and bias is None:
            return x * last
        if not earlier:
            return torch.addcmul(bias, x, last)

        out = torch.zeros_like(x, memory_format=torch.contiguous_format)
        for index, tap in enumerate(earlier):
            distance = len(earlier) - index  # of this tap's inputs, in positions
            length = max(0, num_positions - distance)
            if index > 0:  # the sum so far is of still earlier inputs: 0 where this tap's input begins a document
                out[:, distance:].mul_(continues[:, :length])
            out[:, distance:].addcmul_(x[:, :length], tap)  # rounds once
        if bias is None:
            out.mul_(continues)
        else:
            out = torch.addcmul(bias, out, continues)
        return out.addcmul_(x, last)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, continues = ctx.saved_tensors
        _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        d_bias = None
        if needs_bias:
            d_bias = grad.sum((0, 1))
        *earlier, last = weight.unbind(1)
        d_x = grad * last
        if needs_weight:
            d_taps = x.new_empty(weight.shape[::-1], dtype=torch.float32)  # [K, c]
            torch.sum(grad * x, (0, 1), dtype=torch.float32, out=d_taps[-1])
        # A tap of distance D gives input t the gradient of output t + D, if no document begins between them. That is
        # the gradient of distance D - 1 at t + 1, if t + 1 continues the document of t.
        d_tap_products = grad
        for index in reversed(range(len(earlier))):
            length = max(0, d_tap_products.shape[1] - 1)  # inputs that are read from this distance
            d_tap_products = d_tap_products[:, 1:] * continues[:, 1 : length + 1]
            d_x[:, :length].addcmul_(d_tap_products, earlier[index])
            if needs_weight:
                torch.sum(d_tap_products * x[:, :length], (0, 1), dtype=torch.float32, out=d_taps[index])
        d_weight = None
        if needs_weight:
            d_weight = torch.empty_like(weight).copy_(d_taps.mT)
        return d_x, d_weight, d_bias, None


class _SeparatedConv(torch.autograd.Function):
    """Convolution of one row in which zeros separate the documents, by torch's operator for all positions at once.

    It takes 4 launches in the forward pass and 6 in the backward pass, where :class:`_CausalConv` with four taps takes
    9 and 16. On a CPU, copying to the row and back takes longer in float32 than the taps do.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, row: SeparatedRow) -> Tensor:
        ctx.save_for_backward(x, weight, row.index)
        ctx.row_length = row.length
        inputs = _separated(x, row.index, row.length, weight.shape[1] - 1)
        out = F.conv1d(inputs, weight[:, None], bias, groups=len(weight))  # [1, c, row length]
        return out[0].mT.index_select(0, row.index).view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, index = ctx.saved_tensors
        channels, taps = weight.shape
        inputs = _separated(x, index, ctx.row_length, taps - 1)
        d_out = _separated(grad, index, ctx.row_length, 0)  # the gap between documents has no gradient
        needed = list(ctx.needs_input_grad[:3])
        d_inputs, d_weight, d_bias = torch.ops.aten.convolution_backward(
            d_out,
            inputs,
            weight[:, None],
            bias_sizes=[channels],
            stride=[1],
            padding=[0],
            dilation=[1],
            transposed=False,
            output_padding=[0],
            groups=channels,
            output_mask=needed,
        )
        d_x = None
        if d_inputs is not None:
            d_row = d_inputs[0, :, taps - 1 :].mT  # [row length, c], without the zeros before the row
            d_x = d_row.index_select(0, index).view_as(x)
        if d_weight is not None:
            d_weight = d_weight[:, 0]  # [c, 1, K] -> [c, K]
        return d_x, d_weight, d_bias, None


def _separated(x: Tensor, index: Tensor, row_length: int, num_before: int) -> Tensor:
    """Copy ``[b, s, c]`` to a row of zeros ``[1, c, num_before + row_length]``; ``num_before`` zeros come first."""
    row = x.new_zeros(x.shape[-1], num_before + row_length)
    row[:, num_before:].index_copy_(1, index, x.flatten(0, 1).mT)
    return row[None]


def causal_conv(x: Tensor, weight: Tensor, reach: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``bias[c] + sum_j weight[c, K - 1 - j] * x[t - j, c]`` for j from 0 to ``min(K - 1, reach[t])``.

    Args:
        x: ``[b, s, c]``.
        weight: ``[c, K]``; the last column applies to the position itself.
        reach: ``[b, s]`` or ``[1, s]``, number of earlier positions in the document of each position.
        bias: ``[c]``, or None for zero.

    Returns:
        Tensor ``[b, s, c]``.
    """
    return _CausalConv.apply(x, weight, bias, reach.expand(x.shape[0], -1))


def cached_conv(x: Tensor, weight: Tensor, reach: Tensor, cache: StateCache | None, bias: Tensor | None) -> Tensor:
    """Compute :func:`causal_conv`; the inputs of earlier calls come from the cache."""
    if cache is None:
        return causal_conv(x, weight, reach, bias)
    num_cached = cache.tail.shape[1]  # K - 1
    # Cached positions before the document have negative numbers.
    distances = torch.arange(num_cached, 0, -1, device=reach.device)
    reach_with_cached = torch.cat([reach[:, :1] - distances, reach], dim=1)
    return causal_conv(cache.extend(x), weight, reach_with_cached, bias)[:, num_cached:]


def index_documents(reach: Tensor, rows: int) -> Tensor:
    """Number the documents of each row, int32 ``[rows, s]``, as kernels of other packages expect them."""
    is_first = reach == 0  # position of a document
    numbers = is_first.cumsum(-1, dtype=torch.int32)
    return numbers.expand(rows, -1).contiguous()


@outside_graphs
def kernel_conv(
    kernel: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, reach: Tensor, silu: bool
) -> Tensor:
    """Compute :func:`causal_conv`, the bias and an optional SiLU by ``causal_conv1d_fn`` of causal-conv1d."""
    # The kernel reads documents only from inputs whose channels lie side by side: [b, c, s] with stride 1 in c.
    channels_last = x.contiguous().transpose(1, 2)
    activation = "silu" if silu else None
    out = kernel(channels_last, weight, bias, seq_idx=index_documents(reach, len(x)), activation=activation)
    return out.transpose(1, 2)


class DepthwiseWeight(nn.Module, KernelUser):
    """Depthwise causal convolution with a weight ``[c, 1, K]`` as in ``nn.Conv1d`` and in checkpoints.

    Args:
        channels: number c of channels.
        taps: kernel size K.
        bias: whether there is a bias ``[c]``.
    """

    def __init__(self, channels: int, taps: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.kernel: Callable[..., Any] | None = None
        self.reset_parameters()

    def choose_kernels(self, device: torch.device, dtype: torch.dtype) -> None:
        """See the base class."""
        self.kernel = CAUSAL_CONV.choose("Short convolutions", device, dtype, taps=self.weight.shape[-1])

    @property
    def gap(self) -> int:
        """Number of places between documents that keep them apart in one row; 0 if a kernel reads the documents."""
        if self.kernel is not None:
            return 0
        return self.weight.shape[-1] - 1

    def reset_parameters(self) -> None:
        """Initialize the parameters as ``nn.Conv1d`` does."""
        bound = self.weight.shape[-1] ** -0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self,
        x: Tensor,
        reach: Tensor,
        cache: StateCache | None,
        factors: Sequence[tuple[int, float]] | None = None,
        *,
        silu: bool = False,
        share: MixerShare | None = None,
        blocks: Blocks = (),
        documents: Documents | Boundaries | None = None,
    ) -> Tensor:
        """Compute :func:`causal_conv`: ``[b, s, c]`` to ``[b, s, c]``.

        Args:
            x: inputs ``[b, s, c]``.
            reach: number of earlier positions in the document of each position.
            cache: cache with earlier inputs, or None.
            factors: (number of channels, scale of their inputs) for consecutive groups of the c channels.
            silu: apply SiLU to the result.
            share: the share of the c channels that ``x`` has; by default all of them.
            blocks: blocks of the c channels, for ``share``.
            documents: boundaries of the same documents, of all positions of ``x``; None: only ``reach`` has them.
        """
        weight = self.weight.squeeze(1)
        bias = self.bias
        if factors is not None:  # in the weight, which is much smaller than the inputs
            scales = [weight.new_full((channels, 1), factor) for channels, factor in factors]
            weight = weight * torch.cat(scales)
        if share is not None:
            weight = share.local_channels(weight, blocks)
            bias = None if bias is None else share.local_channels(bias, blocks)
        fits_kernel = len(weight) % 8 == 0  # the kernel reads eight channels at a time
        if self.kernel is not None and fits_kernel and cache is None:
            return kernel_conv(self.kernel, x, weight, bias, reach, silu)
        row = None
        # The compiler fuses the taps. It would compile again for a row of another length.
        if isinstance(documents, Boundaries) and cache is None and not torch.compiler.is_compiling():
            row = documents.separated
        if row is not None:
            out = _SeparatedConv.apply(x, weight, bias, row)
        else:
            out = cached_conv(x, weight, reach, cache, bias)
        if silu:
            return F.silu(out)
        return out


class ShortConv(RecurrentMixer):
    """Gated short convolution ``output_proj(c * conv(b * x))``, where b, c and x are projections of the input.

    Args:
        embed_dim: width d of the hidden states.
        conv_taps: kernel size of the convolution.

    Example:
        >>> mixer = torchtune.modules.mixers.ShortConv(embed_dim=8, conv_taps=3)
        >>> mixer(torch.ones(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    def __init__(self, *, embed_dim: int, conv_taps: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(embed_dim, 3 * embed_dim, bias=False)
        self.conv = DepthwiseWeight(embed_dim, conv_taps)
        self.output_proj = nn.Linear(embed_dim, embed_dim, bias=False)

    @property
    def conv_gap(self) -> int:
        """See the base class."""
        return self.conv.gap

    def _new_cache(self, batch_size: int, dtype: torch.dtype) -> StateCache:
        channels, _, taps = self.conv.weight.shape
        return StateCache((0,), (batch_size, taps - 1, channels), dtype)

    def _mix(
        self, x: Tensor, reach: Tensor, cache: StateCache | None, documents: Documents | Boundaries | None
    ) -> Tensor:
        b, c, inner = self.in_proj(x).chunk(3, dim=-1)
        num_earlier = self.conv.weight.shape[-1] - 1
        inputs, reach = self.share.with_earlier_positions(b * inner, reach, num_earlier)
        if inputs.shape != x.shape:
            documents = None  # of the whole sequence, of which this process has a part
        convolved = self.conv(inputs, reach, cache, documents=documents)
        convolved = convolved[:, -x.shape[1] :]  # without the earlier positions
        return self.output_proj(c * convolved)

    def sharing_obstacle(self, ranks: int) -> str | None:
        """See the base class."""
        return None
