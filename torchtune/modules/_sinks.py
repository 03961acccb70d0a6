"""Attention sinks on top of kernels that know none.

A sink is one more key, with a score of its own for every head and no value (Xiao et al. 2023, arXiv:2309.17453). It
enlarges the denominator of the softmax: where ``lse`` is the log-sum-exp of the scores, ``log(exp(lse) + exp(sink))``
is the one with the sink, and the output shrinks by the ratio of the two denominators.

The backward pass of a flash kernel computes probabilities from the log-sum-exp and their mean gradient from the output
that it is given. Given those with the sink, it returns the gradients with the sink.
"""

import torch
from torch import Tensor


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp with the sinks.

    Args:
        out: output without sinks ``[…, n, t, h]``.
        lse: its log-sum-exp, float32 ``[…, n, t]``.
        sinks: scores of the sinks ``[n]``.
    """
    with_sinks = torch.logaddexp(lse, sinks.float()[:, None])
    return out * (lse - with_sinks).exp().unsqueeze(-1).to(out.dtype), with_sinks


def sinks_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Gradient of the sinks, float32 ``[n]``.

    Args:
        grad: gradient of the output ``[…, n, t, h]``.
        out: output with the sinks, likewise.
        lse: log-sum-exp with the sinks ``[…, n, t]``.
        sinks: their scores ``[n]``.
    """
    probability = (sinks.float()[:, None] - lse).exp()
    found = -(probability * (grad.float() * out.float()).sum(-1)).sum(-1)
    return found.flatten(0, -2).sum(0) if found.dim() > 1 else found
