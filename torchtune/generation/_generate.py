"""The functions that generate: batches with log-probabilities, streams, and padded batches of earlier releases."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchtune.generation._continuous_batch import Batch, Request, Row, decode
from torchtune.generation._prompts import check_images
from torchtune.generation._sampling import GenerationError, LogitsProcessor, Sampling, draw_tokens, sample
from torchtune.modules.transformer import TransformerDecoder, text_decoder
from torchtune.utils import computes_on_cpu, to_device

Prompts = Sequence[Tensor | Sequence[int]]
# A row that ends gets half as many tokens too many, on average.
_TOKENS_PER_CHECK = 8


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
        >>> generated = torchtune.generation.generate_tokens(model, [[5, 40, 7]], max_new_tokens=4, temperature=0.0)
        >>> generated.tokens[0].shape, generated.log_probs[0].shape
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
    tokens_per_check: int | None = None,
) -> GeneratedTokens:
    """Generate ``num_samples`` continuations of every prompt. Arguments and errors: see :func:`stream_tokens`.

    Returns:
        Tokens and their log-probabilities, on the device of the prompts.

    Example:
        >>> prompts = [[5, 40, 7], [9]]
        >>> generated = torchtune.generation.generate_tokens(model, prompts, max_new_tokens=4, temperature=0.0)
        >>> [len(tokens) for tokens in generated.tokens]
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
            tokens_per_check=tokens_per_check,
        )
    )
    # Steps hold one token of each sequence; a stable sort by sequence keeps the tokens of each in their order.
    rows = torch.cat([step.rows for step in steps])
    order = rows.argsort(stable=True)
    lengths = rows.bincount(minlength=len(prompts) * num_samples).tolist()
    tokens = torch.cat([step.tokens for step in steps])[order].split(lengths)
    log_probs = torch.cat([step.log_probs for step in steps])[order].split(lengths)
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
    tokens_per_check: int | None = None,
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
        more: called with the batch after every check; returns further prompts, with new indices, which join it ahead of
            waiting prompts. Generation ends when it returns none and the batch is finished.
        images: images of each prompt, as returned by :func:`images_of_row`.
        tokens_per_check: maximum number of tokens after which the host reads them, to see which sequences have ended.
            Tokens are yielded after each check, and the device computes, and drops, those after the end of a sequence.
            By default 8 on an accelerator, which would else be idle while the host waits for it, and 1 on CPU or with
            ``logits_processors``.

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
    sampling = Sampling(temperature, top_k, top_p, min_p, tuple(logits_processors))
    requests = _make_requests(model, prompts, max_new_tokens, num_samples)
    num_sequences = len(prompts) * num_samples
    if draws is not None:
        longest = max(request.limit for request in requests)
        # With `more`, the number of sequences is not known in advance.
        has_wrong_rows = more is None and len(draws) != num_sequences
        if has_wrong_rows or draws.shape[1] < longest:
            raise GenerationError(
                f"draws has the shape {list(draws.shape)}: give [{num_sequences}, {longest}] numbers."
            )
    device = model.tok_embeddings.weight.device
    if isinstance(prompts[0], Tensor):
        device = prompts[0].device  # new tokens are yielded on the device of the prompts
    if images is not None:
        check_images(model, images, num_samples)
        for request, prompt_images in zip(requests, images, strict=True):
            request.images = prompt_images
    stop = frozenset(int(token) for token in stop_tokens or ())
    if tokens_per_check is None:
        reads_each = computes_on_cpu(device) or bool(sampling.logits_processors)
        tokens_per_check = 1 if reads_each else _TOKENS_PER_CHECK
    batch_rows = num_sequences
    if max_sequences is not None:
        batch_rows = max(num_samples, min(num_sequences, max_sequences))  # samples of a prompt start together

    def draw(logits: Tensor, rows: list[Row]) -> tuple[Tensor, Tensor]:
        if draws is None:
            uniform = torch.rand(len(rows), generator=rng, device=device)  # [m]
        else:
            host_indices = [row.index for row in rows]
            host_counts = [row.count for row in rows]
            # [m] each, in one copy to the device
            indices, counts = to_device([host_indices, host_counts], draws.device)
            uniform = draws[indices, counts]  # [m]
        tokens, probabilities = draw_tokens(logits, sampling, uniform)
        return tokens, probabilities.gather(-1, tokens)[:, 0].log()

    def ends(index: int, token: int) -> bool:
        # is_over sees every token, a stop token too.
        is_ended = is_over is not None and is_over(index, token)
        return is_ended or token in stop

    steps = decode(
        model,
        requests,
        size=batch_rows,
        device=device,
        use_cache=use_cache,
        draw=draw,
        ends=ends,
        processors=lambda index: sampling.logits_processors,  # the same for every sequence
        more=more,
        tokens_per_check=tokens_per_check,
    )
    with closing(steps):
        for drawn in steps:
            check_finite(torch.cat([log_probs for _, _, log_probs in drawn]), model)
            for indices, tokens, log_probs in drawn:
                yield TokenStep(to_device(indices, device), tokens[:, 0], log_probs)


def check_finite(log_probs: Tensor, model: TransformerDecoder) -> None:
    """Raise :class:`GenerationError` if log-probabilities of sampled tokens are not finite."""
    if not log_probs.isfinite().all():
        raise GenerationError(
            f"The model's logits are not finite in {model.tok_embeddings.weight.dtype}: load it in fp32, and check "
            "that its training did not diverge."
        )


def _make_requests(
    model: TransformerDecoder, prompts: Prompts, max_new_tokens: int | Sequence[int], num_samples: int
) -> list[Request]:
    """Check the prompts and the limits of their answers, and copy the prompts to the host."""
    if isinstance(max_new_tokens, int):
        limits = [max_new_tokens] * len(prompts)
    else:
        limits = list(max_new_tokens)
    if len(limits) != len(prompts):
        raise GenerationError(
            f"max_new_tokens has {len(limits)} numbers for {len(prompts)} prompts: give one for each."
        )
    if num_samples < 1 or min(limits, default=1) < 1:
        raise GenerationError(
            f"max_new_tokens is {max_new_tokens} and num_samples {num_samples}: both must be at least 1."
        )
    has_tokens = [hasattr(prompt, "__len__") and len(prompt) > 0 for prompt in prompts]
    if not has_tokens or not all(has_tokens):
        raise GenerationError("prompts: give at least one, and at least one token in each.")
    for prompt, limit in zip(prompts, limits, strict=True):
        if len(prompt) + limit - 1 > model.max_seq_len:  # the last new token is not run
            raise GenerationError(
                f"A prompt of {len(prompt)} tokens with {limit} new tokens exceeds the model's max_seq_len "
                f"{model.max_seq_len}: reduce max_new_tokens."
            )
    embedding = model.tok_embeddings
    vocab_size = getattr(embedding, "num_tokens", embedding.weight.shape[0])
    requests = []
    for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        tokens = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)  # on the host
        # An unknown token id is refused here: on a GPU, the lookup would fail without a clear message.
        if not isinstance(tokens[0], Integral):  # one stands for all: a prompt is a tensor, or ids of a tokenizer
            raise GenerationError(f"prompts: {str(tokens[0])[:20]!r} is not a token id: give int64 ids [s] for each.")
        for token in (min(tokens), max(tokens)):
            if not 0 <= token < vocab_size:
                raise GenerationError(f"prompts: the model has no token {token}: give ids of its tokenizer.")
        requests.append(Request(index * num_samples, tokens, limit, num_samples))
    return requests


def stream(
    model: TransformerDecoder,
    prompt: Tensor,
    *,
    max_generated_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    stop_tokens: Sequence[int] | None = None,
    use_cache: bool = True,
    encoder_input: Mapping[str, Any] | None = None,
    encoder_mask: Tensor | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    logits_processors: Sequence[LogitsProcessor] = (),
) -> Iterator[int]:
    """Generate from one prompt and yield every new token; a stop token ends the stream and is not yielded.

    Args:
        model: the decoder.
        prompt: tokens ``[s]``.
        max_generated_tokens: maximum number of new tokens.
        temperature: 0 takes the most likely token.
        top_k: sample from the k most likely tokens; ``None`` or 0 samples from all.
        stop_tokens: tokens that end generation.
        use_cache: use a KV cache.
        encoder_input: images of the prompt, as returned by :func:`images_of_row`.
        encoder_mask: mask of these images, bool ``[1, s, t]``. New tokens use the row of the prompt's last token.
        top_p: see :func:`stream_tokens`.
        min_p: see :func:`stream_tokens`.
        logits_processors: see :func:`stream_tokens`.

    Raises:
        GenerationError: there are images, but the model reads text only; see also :func:`stream_tokens`.

    Example:
        >>> prompt = torch.tensor([5, 40, 7])
        >>> len(list(torchtune.generation.stream(model, prompt, max_generated_tokens=3, temperature=0.0)))
        3
    """
    images: dict[str, Any] = {}
    if encoder_input is not None:
        images["encoder_input"] = encoder_input
    if encoder_mask is not None:
        images["encoder_mask"] = encoder_mask
    steps = stream_tokens(
        model,
        [prompt],
        max_new_tokens=max_generated_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        logits_processors=logits_processors,
        stop_tokens=stop_tokens,
        use_cache=use_cache,
        images=[images],
        tokens_per_check=1,  # the caller reads each token as soon as it is sampled
    )
    with closing(steps):
        for step in steps:
            token = step.tokens.item()
            if token in (stop_tokens or ()):
                return
            yield token


def generate_next_token(
    model: TransformerDecoder,
    input_pos: Tensor,
    x: Tensor,
    q: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the model and sample the next token.

    Args:
        model: the decoder.
        input_pos: positions ``[b, s]`` or ``[s]`` of ``x``.
        x: tokens ``[b, s]``.
        q: noise ``[b, v]`` for :func:`sample`.
        mask: bool ``[b, s, t]``, as the model takes it.
        temperature: see :func:`sample`.
        top_k: see :func:`sample`.
        top_p: see :func:`sample`.
        min_p: see :func:`sample`.

    Returns:
        Next tokens ``[b, 1]`` and their logits ``[b, 1, v]``.

    Example:
        >>> x, positions = torch.tensor([[5, 40, 7]]), torch.arange(3)[None]
        >>> tokens, logits = torchtune.generation.generate_next_token(model, positions, x, temperature=0.0)
        >>> tokens.shape
        torch.Size([1, 1])
    """
    hidden = model(x, input_pos=input_pos, mask=mask, output="hidden")  # [b, s, d]
    if text_decoder(model).output_hidden_states:
        hidden = hidden[-1]
    logits = model.output(hidden[:, -1:]).float()  # [b, 1, v]
    last_logits = logits[:, -1].clone()  # [b, v], which may be changed in place
    tokens = sample(last_logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, q=q)
    return tokens, logits


@torch.no_grad()
def generate(
    model: TransformerDecoder,
    prompt: Tensor,
    *,
    max_generated_tokens: int,
    pad_id: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    stop_tokens: Sequence[int] | None = None,
    rng: torch.Generator | None = None,
    compiled_generate_next_token: Callable[..., tuple[Tensor, Tensor]] | None = None,
    prompt_lengths: Tensor | Sequence[int] | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    logits_processors: Sequence[LogitsProcessor] = (),
) -> tuple[Tensor, Tensor]:
    """Generate token by token, and return the logits of every step.

    :func:`generate_tokens` returns log-probabilities instead of logits, which divides the memory by the vocabulary
    size. With KV caches (``model.setup_caches``, or :func:`torchtune.modules.local_kv_cache`) a step runs the model on
    one position; without them, on the whole sequence. The caches must be long enough for prompt and continuation. Their
    contents do not change, because generation uses its own caches. The model runs in evaluation mode.

    Args:
        model: the decoder.
        prompt: tokens ``[b, s]`` or ``[s]``; shorter prompts are padded on their left.
        max_generated_tokens: maximum number of new tokens.
        pad_id: padding token, left of prompts and after stop tokens. By default there is no padding, and stop tokens
            are repeated.
        temperature: see :func:`sample`.
        top_k: see :func:`sample`.
        top_p: see :func:`sample`.
        min_p: see :func:`sample`.
        stop_tokens: tokens that end a row; they are returned. Generation ends when all rows have ended.
        rng: random generator, on the model's device.
        compiled_generate_next_token: replaces :func:`generate_next_token` after the first token. It runs with KV
            caches and uncompiled: the lengths of mask and caches change from step to step.
        prompt_lengths: number of tokens of each prompt; by default counted without leading ``pad_id``.
        logits_processors: see :func:`stream_tokens`.

    Returns:
        Tokens ``[b, s + new]``, prompts included, and logits ``[b, new, v]`` of the new tokens (0 after a stop token),
        after processors.

    Raises:
        ValueError: ``max_generated_tokens`` is below 1, the caches are too small, or some prompts begin with token 0
            and neither ``pad_id`` nor ``prompt_lengths`` defines the padding.
        GenerationError: there are ``logits_processors`` beside ``compiled_generate_next_token``, which samples alone;
            see also :func:`sample`.

    Example:
        >>> tokens, logits = torchtune.generation.generate(model, torch.tensor([[5, 40, 7]]), max_generated_tokens=2)
        >>> tokens.shape, logits.shape
        (torch.Size([1, 5]), torch.Size([1, 2, 316]))
    """
    tokens = prompt.unsqueeze(0) if prompt.ndim == 1 else prompt
    b, s = tokens.shape
    cached = model.caches_are_enabled()
    if max_generated_tokens < 1:
        raise ValueError(f"max_generated_tokens must be at least 1, got {max_generated_tokens}.")
    if cached and model.decoder_max_cache_seq_len < s + max_generated_tokens - 1:
        raise ValueError(
            f"The key-value caches hold {model.decoder_max_cache_seq_len} positions, too few for a prompt of {s} and "
            f"{max_generated_tokens} new tokens: set them up with decoder_max_seq_len={s + max_generated_tokens}."
        )
    if prompt_lengths is not None:
        lengths = torch.as_tensor(prompt_lengths)
    elif pad_id is not None:
        lengths = (tokens != pad_id).cumsum(1).bool().sum(1)  # padding after the first token belongs to the prompt
    else:
        begins_with_zero = tokens[:, 0] == 0
        if begins_with_zero.any() and not begins_with_zero.all():
            raise ValueError(
                "Some prompts begin with token 0 and others do not: give pad_id=0 if it is padding, or prompt_lengths."
            )
        lengths = torch.full((b,), s, device=tokens.device)
    host_rows = tokens.tolist()  # read at once, because the host waits for the device
    requests = []
    for index, length in enumerate(lengths.tolist()):
        start = s - max(length, 1)  # the first token that is not padding; a prompt of padding alone keeps one token
        requests.append(Request(index, host_rows[index][start:], max_generated_tokens, 1))
    if logits_processors and compiled_generate_next_token is not None:
        raise GenerationError(
            "logits_processors do not reach compiled_generate_next_token, which samples by itself: leave one out."
        )
    processors = Sampling(logits_processors=tuple(logits_processors)).logits_processors
    # A function of the caller's own may take temperature and top_k only.
    sampling = {"temperature": temperature, "top_k": top_k}
    if top_p is not None:
        sampling["top_p"] = top_p
    if min_p is not None:
        sampling["min_p"] = min_p
    rows = _PaddedRows(model, tokens, pad_id, stop_tokens or (), rng, compiled_generate_next_token, sampling)
    steps = decode(
        model,
        requests,
        size=b,
        device=tokens.device,
        use_cache=cached or compiled_generate_next_token is not None,
        draw=rows.draw,
        ends=lambda *_: rows.have_ended,  # no row leaves before the others: the result has columns of all rows
        processors=lambda index: processors,
        step=None if compiled_generate_next_token is None else rows.step,
    )
    logits = []
    for drawn in steps:
        logits += [step_logits for _, _, step_logits in drawn]
    return torch.cat(rows.columns, dim=1), torch.stack(logits, dim=1)


class _PaddedRows:
    """Rows that all run until the last one has ended; see :func:`generate` for the arguments.

    Attributes:
        columns: the prompts ``[b, s]``, then the new tokens ``[b, 1]`` of each step.
        have_ended: whether all rows have ended.
    """

    def __init__(
        self,
        model: TransformerDecoder,
        tokens: Tensor,
        pad_id: int | None,
        stop_tokens: Sequence[int],
        rng: torch.Generator | None,
        next_token: Callable[..., tuple[Tensor, Tensor]] | None,
        sampling: dict[str, Any],
    ) -> None:
        self.columns = [tokens]
        self.have_ended = False
        self._model = model
        self._pad_id = pad_id
        self._rng = rng
        self._sampling = sampling
        self._next_token = next_token
        self._next_tokens: Tensor | None = None  # [b, 1], sampled by the caller's function in `step`
        self._stop = torch.tensor(list(stop_tokens), dtype=tokens.dtype, device=tokens.device)
        self._running = torch.ones(len(tokens), 1, dtype=torch.bool, device=tokens.device)

    def step(self, x: Tensor, input_pos: Tensor, mask: Tensor | None) -> Tensor:
        """Return logits ``[b, v]`` of the next token, computed by the caller's function."""
        with torch.compiler.set_stance("force_eager"):  # lengths change from step to step
            self._next_tokens, logits = self._next_token(
                self._model, input_pos, x, self._noise(), mask=mask, **self._sampling
            )
        return logits[:, -1]

    def draw(self, logits: Tensor, rows: list[Row]) -> tuple[Tensor, Tensor]:
        """Return the next tokens ``[b, 1]`` and the logits, which are 0 in rows that have ended."""
        tokens = self._next_tokens
        self._next_tokens = None
        if tokens is None:
            tokens = sample(logits, q=self._noise(), **self._sampling)
        # Rows that have ended are padded, without a pad token by their last token.
        padding = self._pad_id
        if padding is None:
            padding = self.columns[-1][:, -1:]  # [b, 1]
        logits = logits * self._running  # [b, v] * [b, 1]
        tokens = tokens.to(self._stop.dtype)
        self.columns.append(torch.where(self._running, tokens, padding))
        self._running = self._running & ~torch.isin(tokens, self._stop)
        self.have_ended = not self._running.any()
        return self.columns[-1], logits

    def _noise(self) -> Tensor | None:
        """Return exponential noise ``[b, v]`` for :func:`sample`, or ``None`` without a generator."""
        if self._rng is None:
            return None
        shape = (len(self._running), self._model.tok_embeddings.num_embeddings)
        noise = torch.empty(shape, device=self._running.device)
        return noise.exponential_(1, generator=self._rng)


def get_causal_mask_from_padding_mask(padding_mask: Tensor, target_seq_len: int | None = None) -> Tensor:
    """Make the causal mask of a padded batch.

    Args:
        padding_mask: bool ``[b, s]``, True for real tokens.
        target_seq_len: number of key positions t (the length of the KV cache), at least s; by default s.

    Returns:
        bool ``[b, s, t]``: a token attends to itself and to earlier real tokens. Padding attends to itself, so that
        no row is empty; key positions from s on are never attended.

    Raises:
        AssertionError: ``target_seq_len`` below s.

    Example:
        >>> torchtune.generation.get_causal_mask_from_padding_mask(torch.tensor([[False, True, True]])).int()
        tensor([[[1, 0, 0],
                 [0, 1, 0],
                 [0, 1, 1]]], dtype=torch.int32)
    """
    b, s = padding_mask.shape
    if target_seq_len is None:
        target_seq_len = s
    assert target_seq_len >= s, f"target_seq_len ({target_seq_len}) is shorter than the sequence ({s})."
    mask = padding_mask[:, None, :].expand(b, s, s).tril()  # [b, s] -> [b, s, s]
    mask = mask | torch.eye(s, dtype=torch.bool, device=mask.device)
    return F.pad(mask, (0, target_seq_len - s))


def get_position_ids_from_padding_mask(padding_mask: Tensor) -> Tensor:
    """Return positions int ``[b, s]`` that count real tokens from 0; padding gets 0.

    Args:
        padding_mask: bool ``[b, s]``, True for real tokens.

    Example:
        >>> torchtune.generation.get_position_ids_from_padding_mask(torch.tensor([[False, True, True]]))
        tensor([[0, 0, 1]], dtype=torch.int32)
    """
    return ((padding_mask.cumsum(-1) - 1) * padding_mask).to(torch.int)
