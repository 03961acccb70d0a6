"""A short causal convolution per channel that does not look into the document before."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchtune.modules.mixers._state_cache import StateCache


class _CausalConv(torch.autograd.Function):
    """Keeps its arguments alone for the backward pass, where one shifted copy per tap would be."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, reach: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, reach)
        out = x * weight[:, -1]
        for shift in range(1, min(weight.shape[1], x.shape[1])):
            taken = x[:, :-shift] * weight[:, -1 - shift]
            out[:, shift:] += taken.masked_fill_((reach[:, shift:] < shift)[..., None], 0)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, reach = ctx.saved_tensors
        d_x, d_weight = grad * weight[:, -1], torch.zeros_like(weight, dtype=torch.float32)
        d_weight[:, -1] = (grad * x).sum((0, 1), dtype=torch.float32)
        for shift in range(1, min(weight.shape[1], x.shape[1])):
            taken = grad[:, shift:].masked_fill((reach[:, shift:] < shift)[..., None], 0)
            d_weight[:, -1 - shift] = (taken * x[:, :-shift]).sum((0, 1), dtype=torch.float32)
            d_x[:, :-shift] += taken.mul_(weight[:, -1 - shift])
        return d_x, d_weight.to(weight.dtype), None


def causal_conv(x: Tensor, weight: Tensor, reach: Tensor) -> Tensor:
    """``out[t, c] = sum_j weight[c, K - 1 - j] * x[t - j, c]`` over the j up to ``reach[t]``.

    Args:
        x: ``[b, s, c]``.
        weight: ``[c, K]``; the last column is that of the position itself.
        reach: ``[b, s]`` or ``[1, s]``, how many earlier positions the document of each position has.

    Returns:
        Tensor ``[b, s, c]``.
    """
    return _CausalConv.apply(x, weight, reach.expand(x.shape[0], -1))


def cached_conv(x: Tensor, weight: Tensor, reach: Tensor, cache: StateCache | None) -> Tensor:
    """:func:`causal_conv` that goes on from what the cache holds of earlier positions."""
    if cache is None:
        return causal_conv(x, weight, reach)
    before = cache.tail.shape[1]
    longer = nn.functional.pad(reach, (before, 0))
    return causal_conv(cache.extend(x), weight, longer)[:, before:]


class DepthwiseWeight(nn.Module):
    """The weight of a convolution per channel, ``weight`` ``[c, 1, K]``, as checkpoints hold it.

    Args:
        channels: c.
        taps: K, positions that the convolution sees, itself the last.
        bias: whether it has a bias, ``bias`` ``[c]``.
    """

    def __init__(self, channels: int, taps: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight, as ``nn.Conv1d`` does."""
        bound = self.weight.shape[-1] ** -0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self, x: Tensor, reach: Tensor, cache: StateCache | None, factors: Sequence[tuple[int, float]] | None = None
    ) -> Tensor:
        """``[b, s, c]`` to ``[b, s, c]``; see :func:`causal_conv`.

        Args:
            x: inputs.
            reach: earlier positions of the same document.
            cache: what earlier positions have left.
            factors: how many channels, and by what their inputs are scaled; c channels in all.
        """
        weight = self.weight[:, 0]
        if factors is not None:
            scales = [weight.new_full((channels, 1), factor) for channels, factor in factors]
            weight = weight * torch.cat(scales)
        out = cached_conv(x, weight, reach, cache)
        return out if self.bias is None else out + self.bias
