"""Scores of a batch in parts, with the gradients of the whole batch and the memory of one part."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchtune.data import Batch
from torchtune.training import RNGState, undisturbed_random_state

# Scores the documents of a part [n, ...].
Score = Callable[[Batch], Tensor]


def score_in_parts(score: Score, batch: Batch, size: int, num_passes: Callable[[int], int]) -> Tensor:
    """Score a batch in parts, each with two forward passes (GradCache; Gao et al. 2021, arXiv:2101.06983).

    The first pass keeps nothing for the backward pass. There, each part is computed again with the same random numbers,
    and its gradients are added to those of the parameters, before the next part is computed.

    Args:
        score: scores the documents of a part ``[n, ...]``.
        batch: the whole batch.
        size: number of documents of a part.
        num_passes: given the number of parts, returns the number of passes, which is the same on all ranks: passes of
            sharded models are collectives.

    Returns:
        The scores of all documents.
    """
    parts = batch.split_documents(size)
    fillers = [parts[0]] * (num_passes(len(parts)) - len(parts))
    if not torch.is_grad_enabled():
        scores = [score(part) for part in [*parts, *fillers]]
        return torch.cat(scores[: len(parts)])
    # Autograd calls the backward pass only where an input needs gradients, and the parameters are no inputs.
    trigger = torch.zeros((), device=batch.tokens.device, requires_grad=True)
    return _TwoPasses.apply(trigger, score, parts, fillers)


class _TwoPasses(torch.autograd.Function):
    """Scores parts without a graph; the backward pass scores each part again, with one."""

    @staticmethod
    def forward(ctx: Any, trigger: Tensor, score: Score, parts: Sequence[Batch], fillers: Sequence[Batch]) -> Tensor:
        ctx.score = score
        ctx.parts = [*parts, *fillers]
        ctx.random_states = []
        scores = []
        for part in ctx.parts:
            ctx.random_states.append(RNGState().state_dict())  # dropout draws the same numbers again
            scores.append(score(part))
        ctx.num_documents = [len(part_scores) for part_scores in scores[: len(parts)]]
        return torch.cat(scores[: len(parts)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        gradients = list(gradient.split(ctx.num_documents))
        with undisturbed_random_state():
            for index, (part, random_state) in enumerate(zip(ctx.parts, ctx.random_states, strict=True)):
                RNGState().load_state_dict(random_state)
                with torch.enable_grad():
                    scores = ctx.score(part)
                is_filler = index >= len(gradients)
                torch.autograd.backward(scores, torch.zeros_like(scores) if is_filler else gradients[index])
        return None, None, None, None
