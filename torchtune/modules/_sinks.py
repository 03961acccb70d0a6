"""Attention sinks for kernels without support for them.

A sink is a learned logit per head in the softmax's denominator, without a value (Xiao et al. 2023,
arXiv:2309.17453). With ``lse`` the log-sum-exp of the scores, the new one is ``log(exp(lse) + exp(sink))``, and the
output is multiplied by ``sigmoid(lse - sink)``.

The backward pass of a flash attention kernel recomputes probabilities from the log-sum-exp and takes their mean
gradient from the output. Called with both as computed with sinks, it returns the gradients of attention with sinks.
"""

import torch
from torch import Tensor


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add sinks to the output and log-sum-exp of attention.

    Args:
        out: output without sinks ``[…, n, t, h]``.
        lse: its log-sum-exp, float32 ``[…, n, t]``.
        sinks: attention sinks ``[n]``.
    """
    with_sinks = torch.logaddexp(lse, sinks.float()[:, None])
    return out * (lse - with_sinks).exp().unsqueeze(-1).to(out.dtype), with_sinks


def sinks_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks, float32 ``[n]``.

    Args:
        grad: gradient of the output ``[…, n, t, h]``.
        out: output with sinks, of the same shape.
        lse: log-sum-exp with sinks ``[…, n, t]``.
        sinks: attention sinks ``[n]``.
    """
    probability = (sinks.float()[:, None] - lse).exp()
    found = -(probability * (grad.float() * out.float()).sum(-1)).sum(-1)
    return found.flatten(0, -2).sum(0) if found.dim() > 1 else found
