"""How the next token is chosen from logits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from torchtune.utils import UserError


class GenerationError(UserError, ValueError):
    """Invalid prompts or settings of generation."""


# (tokens [b, s], logits [b, v]) -> logits [b, v]
LogitsProcessor = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling, applied in this order: processors, temperature, top-k, top-p, min-p.

    The order, and which tokens are left, are those of ``transformers``.

    Args:
        temperature: divides the logits; 0 takes the most likely token (greedy).
        top_k: sample from the k most likely tokens; ``None`` or 0 samples from all.
        top_p: sample from the most likely tokens whose probabilities sum to p; ``None`` or 1 samples from all.
        min_p: sample from the tokens that are at least p times as likely as the most likely one; ``None`` or 0 samples
            from all.
        logits_processors: callables ``(tokens [b, s], logits [b, v]) -> logits [b, v]``, applied in order.

    Raises:
        GenerationError: a number is out of range, or a processor is not callable.

    Example:
        >>> torchtune.generation.Sampling(temperature=0.7, top_k=50).top_k
        50
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    logits_processors: Sequence[LogitsProcessor] = ()

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and (self.top_k or 0) >= 0):
            raise GenerationError(f"temperature is {self.temperature} and top_k {self.top_k}: both must be at least 0.")
        if self.top_k is not None and not isinstance(self.top_k, Integral):
            raise GenerationError(f"top_k is {self.top_k}: it is a number of tokens, such as 50.")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise GenerationError(f"{name} is {value}: it must be between 0 and 1.")
        for processor in self.logits_processors:
            if not callable(processor):
                raise GenerationError(
                    f"logits_processors: {processor!r:.80} cannot be called: give functions that take tokens [b, s] "
                    "and logits [b, v], and return logits."
                )


def keep_likely(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return logits ``[..., v]``, already divided by the temperature, with -inf for tokens that are not sampled."""
    if sampling.top_k:
        k = min(sampling.top_k, logits.shape[-1])
        lowest = logits.topk(k).values[..., -1:]  # [..., 1]
        logits = logits.masked_fill(logits < lowest, float("-inf"))
    if sampling.top_p is not None and sampling.top_p < 1.0:
        # From the least likely token on, tokens are removed as long as they sum to at most 1 - p.
        ascending, order = logits.sort(dim=-1)
        is_removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - sampling.top_p
        is_removed[..., -1] = False  # the most likely token stays
        logits = logits.masked_fill(is_removed.scatter(-1, order, is_removed), float("-inf"))
    if sampling.min_p:
        probabilities = logits.softmax(dim=-1)
        highest = probabilities.amax(dim=-1, keepdim=True)
        logits = logits.masked_fill(probabilities < sampling.min_p * highest, float("-inf"))
    return logits


def process_logits(tokens: Tensor, logits: Tensor, processors: Sequence[LogitsProcessor]) -> Tensor:
    """Apply logits processors to logits ``[b, v]`` of the token after ``tokens [b, s]``.

    Raises:
        GenerationError: a processor returns another shape, or no token that may be sampled.
    """
    for processor in processors:
        name = getattr(processor, "__name__", type(processor).__name__)
        processed = processor(tokens, logits)
        if not isinstance(processed, Tensor) or processed.shape != logits.shape:
            result = type(processed).__name__
            if isinstance(processed, Tensor):
                result = list(processed.shape)
            raise GenerationError(
                f"logits_processors: {name} returned {result}: it must return logits of the shape {list(logits.shape)}."
            )
        logits = processed
        if logits.isneginf().all(dim=-1).any():
            raise GenerationError(f"logits_processors: {name} left no token to sample: one logit must be above -inf.")
    return logits


def draw_tokens(logits: Tensor, sampling: Sampling, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Sample with one uniform number ``[m]`` per row.

    Args:
        logits: logits ``[m, v]``, after logits processors.
        sampling: temperature, top-k, top-p and min-p.
        uniform: random numbers in [0, 1), ``[m]``.

    Returns:
        Tokens ``[m, 1]``, and the probabilities ``[m, v]`` of all tokens before top-k, top-p and min-p.
    """
    scaled = logits
    if sampling.temperature not in (0.0, 1.0):
        # A temperature below 1e-30 changes nothing, and the quotient could be infinite.
        scaled = logits / max(sampling.temperature, 1e-30)
    probabilities = scaled.softmax(-1)
    if sampling.temperature == 0.0:
        return logits.argmax(-1, keepdim=True), probabilities
    likely = keep_likely(scaled, sampling)
    weights = probabilities
    if likely is not scaled:
        weights = probabilities.masked_fill(likely.isneginf(), 0.0)
    # Inverse transform sampling: the token at which the cumulative weights pass the uniform number.
    cumulative = weights.cumsum(-1)  # [m, v]
    total = cumulative[:, -1:]  # [m, 1]
    threshold = (uniform[:, None] * total).to(cumulative.dtype)
    # Rounded up to the total, a threshold would give the last token, even if its probability is 0.
    threshold = torch.minimum(threshold, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, threshold, right=True)  # [m, 1]
    # Logits with NaN give the index v, which would fail later without a message; check_finite reports them.
    tokens = tokens.clamp(max=weights.shape[-1] - 1)
    return tokens, probabilities


def sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    q: Tensor | None = None,
) -> Tensor:
    """Sample a token from logits.

    Sampling takes the argmax of ``p / q`` with q ~ Exp(1), which needs no host synchronization.

    Args:
        logits: ``[..., v]``.
        temperature: divides the logits; 0 takes the most likely token (greedy).
        top_k: sample from the k most likely tokens; ``None`` or 0 samples from all.
        top_p: sample from the most likely tokens whose probabilities sum to p; ``None`` or 1 samples from all.
        min_p: sample from the tokens that are at least p times as likely as the most likely one; ``None`` or 0 samples
            from all.
        q: exponential noise ``[..., v]``; by default sampled here.

    Returns:
        int64 ``[..., 1]``.

    Raises:
        GenerationError: ``top_k`` or ``temperature`` below 0, ``top_p`` or ``min_p`` not between 0 and 1.

    Example:
        >>> torchtune.generation.sample(torch.tensor([[0.0, 5.0, 1.0]]), top_k=1)
        tensor([[1]])
    """
    sampling = Sampling(temperature, top_k, top_p, min_p)
    if temperature == 0.0:
        return logits.argmax(dim=-1, keepdim=True)
    probabilities = keep_likely(logits / max(temperature, 1e-5), sampling).softmax(dim=-1)
    if q is None:
        q = torch.empty_like(probabilities).exponential_(1)
    return (probabilities / q).argmax(dim=-1, keepdim=True)


def seeded_draws(
    keys: Sequence[tuple[int, int]], count: int, device: torch.device, dtype: type[np.floating] = np.float64
) -> Tensor:
    """Return uniform random numbers ``[keys, count]`` that depend only on the two numbers of each key."""
    rows = []
    for key in keys:
        # Philox is counter-based: its stream is a function of the key, whatever other keys are there.
        generator = np.random.Generator(np.random.Philox(key=np.array(key, np.uint64)))
        rows.append(generator.random(count, dtype))
    draws = torch.from_numpy(np.stack(rows))
    if device.type == "mps":  # which has no float64
        draws = draws.float()
    return draws.to(device)
