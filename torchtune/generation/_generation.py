"""Sampling text from a decoder."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchtune._lazy import former_names
from torchtune.generation._continuous_batch import Request, Row
from torchtune.generation._decode import decode
from torchtune.generation._generation_error import GenerationError
from torchtune.generation._sampling import LogitsProcessor, Sampling, keep_likely
from torchtune.modules.transformer import TransformerDecoder, text_decoder


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
    hidden = model(x, input_pos=input_pos, mask=mask, output="hidden")
    hidden = hidden[-1] if text_decoder(model).output_hidden_states else hidden
    logits = model.output(hidden[:, -1:]).float()
    tokens = sample(logits[:, -1].clone(), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, q=q)
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
        top_p: see :func:`sample`.
        min_p: see :func:`sample`.
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
    lengths = _lengths(tokens, pad_id) if prompt_lengths is None else torch.as_tensor(prompt_lengths)
    requests = [
        Request(index, row[s - max(length, 1) :], max_generated_tokens, 1)
        for index, (row, length) in enumerate(zip(tokens.tolist(), lengths.tolist(), strict=True))
    ]
    if logits_processors and compiled_generate_next_token is not None:
        raise GenerationError(
            "logits_processors do not reach compiled_generate_next_token, which samples by itself: leave one out."
        )
    processors = Sampling(logits_processors=tuple(logits_processors)).logits_processors
    sampling = {"temperature": temperature, "top_k": top_k}
    # A function of the caller's own may take temperature and top_k only.
    sampling |= {name: value for name, value in (("top_p", top_p), ("min_p", min_p)) if value is not None}
    rows = _Rows(model, tokens, pad_id, stop_tokens or (), rng, compiled_generate_next_token, sampling)
    steps = decode(
        model,
        requests,
        size=b,
        device=tokens.device,
        use_cache=cached or compiled_generate_next_token is not None,
        draw=rows.draw,
        ends=lambda *_: rows.have_ended,
        processors=lambda index: processors,
        step=None if compiled_generate_next_token is None else rows.step,
    )
    logits = [logits for _, _, logits in steps]
    return torch.cat(rows.columns, dim=1), torch.stack(logits, dim=1)


class _Rows:
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
        self.columns, self.have_ended = [tokens], False
        self._model, self._pad_id, self._rng, self._sampling = model, pad_id, rng, sampling
        self._next_token, self._chosen = next_token, None
        self._stop = torch.tensor(list(stop_tokens), dtype=tokens.dtype, device=tokens.device)
        self._running = torch.ones(len(tokens), 1, dtype=torch.bool, device=tokens.device)

    def step(self, x: Tensor, input_pos: Tensor, mask: Tensor | None) -> Tensor:
        """Return logits ``[b, v]`` of the next token, computed by the caller's function."""
        with torch.compiler.set_stance("force_eager"):  # lengths change from step to step
            self._chosen, logits = self._next_token(
                self._model, input_pos, x, self._noise(), mask=mask, **self._sampling
            )
        return logits[:, -1]

    def draw(self, logits: Tensor, rows: list[Row]) -> tuple[Tensor, Tensor]:
        """Return the next tokens ``[b, 1]`` and the logits, which are 0 in rows that have ended."""
        chosen, self._chosen = self._chosen, None
        chosen = sample(logits, q=self._noise(), **self._sampling) if chosen is None else chosen
        after = self.columns[-1][:, -1:] if self._pad_id is None else self._pad_id
        logits = logits * self._running
        self.columns.append(torch.where(self._running, chosen.to(self._stop.dtype), after))
        self._running = self._running & ~torch.isin(chosen, self._stop)
        self.have_ended = not self._running.any()
        return self.columns[-1], logits

    def _noise(self) -> Tensor | None:
        """Return exponential noise ``[b, v]`` for :func:`sample`, or ``None`` without a generator."""
        if self._rng is None:
            return None
        shape = (len(self._running), self._model.tok_embeddings.num_embeddings)
        return torch.empty(shape, device=self._running.device).exponential_(1, generator=self._rng)


def _lengths(tokens: Tensor, pad_id: int | None) -> Tensor:
    """Return the lengths ``[b]`` of prompts ``[b, s]`` without left padding."""
    b, s = tokens.shape
    if pad_id is None:
        zeros = tokens[:, 0] == 0
        if zeros.any() and not zeros.all():
            raise ValueError(
                "Some prompts begin with token 0 and others do not: give pad_id=0 if it is padding, or prompt_lengths."
            )
        return torch.full((b,), s, device=tokens.device)
    return (tokens != pad_id).cumsum(1).bool().sum(1)


__getattr__ = former_names(__name__)
