"""Batched generation of tokens and their log-probabilities, step by step or all at once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchtune.generation._continuous_batch import Batch, Request, Row
from torchtune.generation._decode import decode
from torchtune.generation._generation_error import GenerationError
from torchtune.generation._prompt_images import check_images
from torchtune.generation._sampling import LogitsProcessor, Sampling, draw_tokens
from torchtune.modules.transformer import TransformerDecoder

Prompts = Sequence[Tensor | Sequence[int]]


@dataclass(frozen=True)
class TokenStep:
    """The next token of every unfinished sequence.

    Args:
        rows: indices of the sequences, int64 ``[m]``: sample j of prompt i is ``i * num_samples + j``.
        tokens: int64 ``[m]``.
        log_probs: float32 ``[m]``.

    Example:
        >>> rows, tokens = torch.tensor([0, 2]), torch.tensor([7, 9])
        >>> step = torchtune.generation.TokenStep(rows, tokens, torch.tensor([-0.1, -0.2]))
        >>> dict(zip(step.rows.tolist(), step.tokens.tolist()))
        {0: 7, 2: 9}
    """

    rows: Tensor
    tokens: Tensor
    log_probs: Tensor


@dataclass(frozen=True)
class GeneratedTokens:
    """Generated sequences without prompts and padding; sample j of prompt i is item ``i * num_samples + j``.

    Args:
        tokens: tokens of each sequence, int64 ``[length]``, including the stop token.
        log_probs: log-probabilities of these tokens, float32 ``[length]``.

    Example:
        >>> found = torchtune.generation.generate_tokens(model, [[5, 40, 7]], max_new_tokens=4, temperature=0.0)
        >>> found.tokens[0].shape, found.log_probs[0].shape
        (torch.Size([4]), torch.Size([4]))
    """

    tokens: list[Tensor]
    log_probs: list[Tensor]


def generate_tokens(
    model: TransformerDecoder,
    prompts: Prompts,
    *,
    max_new_tokens: int | Sequence[int],
    num_samples: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    logits_processors: Sequence[LogitsProcessor] = (),
    stop_tokens: Sequence[int] | None = None,
    rng: torch.Generator | None = None,
    draws: Tensor | None = None,
    use_cache: bool = True,
    max_sequences: int | None = None,
    images: Sequence[Mapping[str, Any]] | None = None,
) -> GeneratedTokens:
    """Generate ``num_samples`` continuations of every prompt. Arguments and errors: see :func:`stream_tokens`.

    Returns:
        Tokens and their log-probabilities, on the device of the prompts.

    Example:
        >>> found = torchtune.generation.generate_tokens(model, [[5, 40, 7], [9]], max_new_tokens=4, temperature=0.0)
        >>> [len(tokens) for tokens in found.tokens]
        [4, 4]
    """
    steps = list(
        stream_tokens(
            model,
            prompts,
            max_new_tokens=max_new_tokens,
            num_samples=num_samples,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            logits_processors=logits_processors,
            stop_tokens=stop_tokens,
            rng=rng,
            draws=draws,
            use_cache=use_cache,
            max_sequences=max_sequences,
            images=images,
        )
    )
    rows = torch.cat([step.rows for step in steps])
    order = rows.argsort(stable=True)
    lengths = rows.bincount(minlength=len(prompts) * num_samples).tolist()
    tokens, log_probs = (
        torch.cat(parts)[order].split(lengths)
        for parts in ([step.tokens for step in steps], [step.log_probs for step in steps])
    )
    return GeneratedTokens(list(tokens), list(log_probs))


@torch.no_grad()
def stream_tokens(
    model: TransformerDecoder,
    prompts: Prompts,
    *,
    max_new_tokens: int | Sequence[int],
    num_samples: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    logits_processors: Sequence[LogitsProcessor] = (),
    stop_tokens: Sequence[int] | None = None,
    rng: torch.Generator | None = None,
    draws: Tensor | None = None,
    use_cache: bool = True,
    max_sequences: int | None = None,
    is_over: Callable[[int, int], bool] | None = None,
    more: Callable[[Batch], Sequence[Request]] | None = None,
    images: Sequence[Mapping[str, Any]] | None = None,
) -> Iterator[TokenStep]:
    """Generate ``num_samples`` continuations of every prompt, and yield the tokens of each step.

    The batch is continuous: each prompt is prefilled once and expanded to ``num_samples`` rows, finished sequences
    leave, and waiting prompts join as soon as a quarter of the ``max_sequences`` rows are free. KV caches grow with the
    longest running sequence. The model runs in evaluation mode with its own KV caches. When the iterator ends, is
    closed or raises, training mode and caches are restored. ``skip_output_layer`` has no effect.

    With FSDP, all ranks must call it together, each with at least one prompt and the same ``use_cache``. With tensor
    parallelism, the ranks of a group pass the same prompts and get the same tokens.

    Args:
        model: the decoder.
        prompts: tokens of each prompt, int64 ``[s]`` or a list, not empty.
        max_new_tokens: maximum number of new tokens per sequence, or one number for each prompt.
        num_samples: number of continuations per prompt.
        temperature: divides the logits; 0 takes the most likely token (greedy).
        top_k: sample from the k most likely tokens; ``None`` or 0 samples from all.
        top_p: sample from the most likely tokens whose probabilities sum to p; ``None`` or 1 samples from all.
        min_p: sample from the tokens that are at least p times as likely as the most likely one; ``None`` or 0 samples
            from all.
        logits_processors: callables ``(tokens [b, s], logits [b, v]) -> logits [b, v]`` that change the logits before
            temperature, top_k, top_p and min_p, in this order. Each is called for one sequence at a time, with its
            prompt and all new tokens, so that there is no padding; those of ``transformers`` fit.
        stop_tokens: tokens that end a sequence; they are returned.
        rng: random generator, on the device of the prompts.
        draws: uniform random numbers in [0, 1), ``[sequences, longest max_new_tokens]``, instead of ``rng``: one
            number per token, so that a sequence does not depend on the others.
        use_cache: use a KV cache; without one, every step runs the model on the whole sequence.
        max_sequences: number of sequences in the batch; by default all. Samples of one prompt are always together.
        is_over: called with the index of a sequence and its new token, before the step is yielded; True ends the
            sequence.
        more: called with the batch after every step; returns further prompts, with new indices, which join it ahead of
            waiting prompts. Generation ends when it returns none and the batch is finished.
        images: images of each prompt, as returned by :func:`images_of_row`.

    Yields:
        The next token of every unfinished sequence and its log-probability under softmax(logits / temperature), or
        under softmax(logits) at temperature 0, of processed logits. ``top_k``, ``top_p`` and ``min_p`` do not change
        log-probabilities.

    Raises:
        GenerationError: prompts are missing, empty or have unknown token ids, a number is out of range, the sequence
            exceeds the model's ``max_seq_len``, ``draws`` have the wrong shape, the model is context parallel, or its
            logits are not finite.

    Example:
        >>> prompts = [[5, 40, 7], [9]]
        >>> for step in torchtune.generation.stream_tokens(model, prompts, max_new_tokens=[1, 2], temperature=0.0):
        ...     print(step.rows)
        tensor([0, 1])
        tensor([1])
    """
    longest = max_new_tokens if isinstance(max_new_tokens, int) else max(max_new_tokens, default=0)
    sampling = Sampling(temperature, top_k, top_p, min_p, tuple(logits_processors))
    expected = len(prompts) * num_samples
    if draws is not None and ((more is None and len(draws) != expected) or draws.shape[1] < longest):
        raise GenerationError(f"draws has the shape {list(draws.shape)}: give [{expected}, {longest}] numbers.")
    requests, device = _requests(model, prompts, max_new_tokens, num_samples), _device(model, prompts)
    if images is not None:
        check_images(model, images, num_samples)
        for request, given in zip(requests, images, strict=True):
            request.images = given
    stop = frozenset(int(token) for token in stop_tokens or ())
    size = sum(request.num_samples for request in requests)
    size = size if max_sequences is None else max(num_samples, min(size, max_sequences))

    def draw(logits: Tensor, rows: list[Row]) -> tuple[Tensor, Tensor]:
        if draws is None:
            uniform = torch.rand(len(rows), generator=rng, device=device)
        else:
            uniform = draws[[row.index for row in rows], [row.count for row in rows]]
        return draw_tokens(logits, sampling, uniform)

    def ends(index: int, token: int) -> bool:
        over = is_over is not None and is_over(index, token)
        return over or token in stop

    steps = decode(
        model,
        requests,
        size=size,
        device=device,
        use_cache=use_cache,
        draw=draw,
        ends=ends,
        processors=lambda index: sampling.logits_processors,
        more=more,
    )
    with closing(steps):
        for indices, tokens, probabilities in steps:
            log_probs = probabilities.gather(-1, tokens)[:, 0].log()
            check_finite(log_probs, model)
            yield TokenStep(torch.tensor(indices, device=device), tokens[:, 0], log_probs)


def check_finite(log_probs: Tensor, model: TransformerDecoder) -> None:
    """Raise :class:`GenerationError` if log-probabilities of sampled tokens are not finite."""
    if not log_probs.isfinite().all():
        raise GenerationError(
            f"The model's logits are not finite in {model.tok_embeddings.weight.dtype}: load it in fp32, and check "
            "that its training did not diverge."
        )


def seeded_draws(
    keys: Sequence[tuple[int, int]], count: int, device: torch.device, dtype: type[np.floating] = np.float64
) -> Tensor:
    """Return uniform random numbers ``[keys, count]`` that depend only on the two numbers of each key."""
    generators = (np.random.Generator(np.random.Philox(key=np.array(key, np.uint64))) for key in keys)
    draws = torch.from_numpy(np.stack([generator.random(count, dtype) for generator in generators]))
    return (draws.float() if device.type == "mps" else draws).to(device)


def _device(model: TransformerDecoder, prompts: Prompts) -> torch.device:
    return prompts[0].device if isinstance(prompts[0], Tensor) else model.tok_embeddings.weight.device


def _requests(
    model: TransformerDecoder, prompts: Prompts, max_new_tokens: int | Sequence[int], num_samples: int
) -> list[Request]:
    """Check the prompts and copy them to the host."""
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    if len(limits) != len(prompts):
        raise GenerationError(
            f"max_new_tokens has {len(limits)} numbers for {len(prompts)} prompts: give one for each."
        )
    if num_samples < 1 or min(limits, default=1) < 1:
        raise GenerationError(
            f"max_new_tokens is {max_new_tokens} and num_samples {num_samples}: both must be at least 1."
        )
    if not len(prompts) or not all(hasattr(prompt, "__len__") and len(prompt) for prompt in prompts):
        raise GenerationError("prompts: give at least one, and at least one token in each.")
    for prompt, limit in zip(prompts, limits, strict=True):
        if len(prompt) + limit - 1 > model.max_seq_len:
            raise GenerationError(
                f"A prompt of {len(prompt)} tokens with {limit} new tokens exceeds the model's max_seq_len "
                f"{model.max_seq_len}: reduce max_new_tokens."
            )
    rows = [prompt.tolist() if isinstance(prompt, Tensor) else list(prompt) for prompt in prompts]
    embedding = model.tok_embeddings
    _check_ids(rows, getattr(embedding, "num_tokens", embedding.weight.shape[0]))
    return [
        Request(index * num_samples, tokens, limit, num_samples)
        for index, (tokens, limit) in enumerate(zip(rows, limits, strict=True))
    ]


def _check_ids(rows: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raise if a prompt is not a list of known token ids, before a device fails without a clear message."""
    for row in rows:
        if not isinstance(row[0], Integral):
            raise GenerationError(f"prompts: {str(row[0])[:20]!r} is not a token id: give int64 ids [s] for each.")
        if wrong := [token for token in (min(row), max(row)) if not 0 <= token < vocab_size]:
            raise GenerationError(f"prompts: the model has no token {wrong[0]}: give ids of its tokenizer.")
