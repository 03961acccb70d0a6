"""Short convolutions: depthwise causal convolution within packed documents, and the mixer of LFM2."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchtune.modules._outside_graphs import outside_graphs
from torchtune.modules.kernels import CAUSAL_CONV, KernelUser
from torchtune.modules.mixers._mixer import Blocks, MixerShare, RecurrentMixer, StateCache


class _CausalConv(torch.autograd.Function):
    """Convolution that saves only its arguments for the backward pass, instead of a shifted copy per tap.

    From the earliest tap on, the sum so far moves one position ahead, unless a document begins there, and the product
    of the next tap is added: all taps share the mask of the first positions.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, reach: Tensor) -> Tensor:
        # 1 where the position before is of the same document, else 0: [b, s - 1, 1].
        continues = torch.empty(*reach[:, 1:].shape, dtype=x.dtype, device=x.device)
        continues = torch.ge(reach[:, 1:], 1, out=continues)[..., None]
        earliest, *later = weight.unbind(1)
        out = x * earliest
        moved = torch.zeros_like(x)  # no position is before the first one
        for tap in later:
            torch.mul(out[:, :-1], continues, out=moved[:, 1:])
            out = torch.addcmul(moved, x, tap)  # rounds once
        ctx.save_for_backward(x, weight, continues)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, continues = ctx.saved_tensors
        *earlier, last = weight.unbind(1)
        d_x = grad * last
        d_taps = []  # [c] each, the last tap first
        if ctx.needs_input_grad[1]:
            d_taps.append((grad * x).sum((0, 1), dtype=torch.float32))
        for tap in reversed(earlier):
            length = max(0, grad.shape[1] - 1)  # positions that a later one reads
            grad = grad[:, 1:] * continues[:, :length]
            d_x[:, :length].addcmul_(grad, tap)
            if ctx.needs_input_grad[1]:
                d_taps.append((grad * x[:, :length]).sum((0, 1), dtype=torch.float32))
        if not d_taps:
            return d_x, None, None
        d_taps.reverse()
        return d_x, torch.stack(d_taps, dim=1).to(weight.dtype), None


def causal_conv(x: Tensor, weight: Tensor, reach: Tensor) -> Tensor:
    """Compute ``out[t, c] = sum_j weight[c, K - 1 - j] * x[t - j, c]`` for j from 0 to ``min(K - 1, reach[t])``.

    Args:
        x: ``[b, s, c]``.
        weight: ``[c, K]``; the last column applies to the position itself.
        reach: ``[b, s]`` or ``[1, s]``, number of earlier positions in the document of each position.

    Returns:
        Tensor ``[b, s, c]``.
    """
    return _CausalConv.apply(x, weight, reach.expand(x.shape[0], -1))


def cached_conv(x: Tensor, weight: Tensor, reach: Tensor, cache: StateCache | None) -> Tensor:
    """Compute :func:`causal_conv`; the inputs of earlier calls come from the cache."""
    if cache is None:
        return causal_conv(x, weight, reach)
    num_cached = cache.tail.shape[1]  # K - 1
    # Cached positions before the document have negative numbers.
    distances = torch.arange(num_cached, 0, -1, device=reach.device)
    reach_with_cached = torch.cat([reach[:, :1] - distances, reach], dim=1)
    return causal_conv(cache.extend(x), weight, reach_with_cached)[:, num_cached:]


def index_documents(reach: Tensor, rows: int) -> Tensor:
    """Number the documents of each row, int32 ``[rows, s]``, as kernels of other packages expect them."""
    return (reach == 0).cumsum(-1, dtype=torch.int32).expand(rows, -1).contiguous()


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
        """
        weight = self.weight[:, 0]
        bias = self.bias
        if factors is not None:
            scales = [weight.new_full((channels, 1), factor) for channels, factor in factors]
            weight = weight * torch.cat(scales)
        if share is not None:
            weight = share.own_channels(weight, blocks)
            bias = None if bias is None else share.own_channels(bias, blocks)
        fits_kernel = len(weight) % 8 == 0  # the kernel reads eight channels at a time
        if self.kernel is not None and fits_kernel and cache is None:
            return kernel_conv(self.kernel, x, weight, bias, reach, silu)
        out = cached_conv(x, weight, reach, cache)
        if bias is not None:
            out = out + bias
        return F.silu(out) if silu else out


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

    def _new_cache(self, batch_size: int, dtype: torch.dtype) -> StateCache:
        channels, _, taps = self.conv.weight.shape
        return StateCache((0,), (batch_size, taps - 1, channels), dtype)

    def _mix(self, x: Tensor, reach: Tensor, cache: StateCache | None) -> Tensor:
        b, c, inner = self.in_proj(x).chunk(3, dim=-1)
        num_earlier = self.conv.weight.shape[-1] - 1
        inputs, reach = self.share.with_earlier_positions(b * inner, reach, num_earlier)
        convolved = self.conv(inputs, reach, cache)[:, -x.shape[1] :]  # without the earlier positions
        return self.output_proj(c * convolved)

    def sharing_obstacle(self, ranks: int) -> str | None:
        """See the base class."""
        return None
