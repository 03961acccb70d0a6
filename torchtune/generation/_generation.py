"""Sampling text from a decoder."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchtune.data._documents import Documents
from torchtune.generation._masks import get_causal_mask_from_padding_mask, get_position_ids_from_padding_mask
from torchtune.modules.transformer import TransformerDecoder, text_decoder


def sample(logits: Tensor, *, temperature: float = 1.0, top_k: int | None = None, q: Tensor | None = None) -> Tensor:
    """Sample a token from logits.

    Sampling takes the argmax of ``p / q`` with q ~ Exp(1), which needs no host synchronization.

    Args:
        logits: ``[..., v]``.
        temperature: divides the logits; 0 takes the most likely token (greedy).
        top_k: sample from the k most likely tokens; ``None`` or 0 samples from all.
        q: exponential noise ``[..., v]``; by default sampled here.

    Returns:
        int64 ``[..., 1]``.

    Raises:
        ValueError: ``top_k`` or ``temperature`` below 0.

    Example:
        >>> torchtune.generation.sample(torch.tensor([[0.0, 5.0, 1.0]]), top_k=1)
        tensor([[1]])
    """
    if temperature < 0.0 or (top_k or 0) < 0:
        raise ValueError(f"temperature is {temperature} and top_k is {top_k}: neither may be below 0.")
    if temperature == 0.0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits / max(temperature, 1e-5)
    if top_k:
        lowest = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
        logits = logits.masked_fill(logits < lowest, float("-inf"))
    probabilities = logits.softmax(dim=-1)
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

    Returns:
        Next tokens ``[b, 1]`` and their logits ``[b, 1, v]``.

    Example:
        >>> x, positions = torch.tensor([[5, 40, 7]]), torch.arange(3)[None]
        >>> tokens, logits = torchtune.generation.generate_next_token(model, positions, x, temperature=0.0)
        >>> tokens.shape
        torch.Size([1, 1])
    """
    logits = _last_logits(model, x, input_pos, mask)
    return sample(logits[:, -1].clone(), temperature=temperature, top_k=top_k, q=q), logits


def _last_logits(model: TransformerDecoder, x: Tensor, input_pos: Tensor, mask: Tensor | None) -> Tensor:
    """float32 ``[b, 1, v]``: the output projection runs on the last position only."""
    return model.output(hidden_states(model, x, input_pos, mask)[:, -1:]).float()


def hidden_states(
    model: TransformerDecoder,
    x: Tensor,
    input_pos: Tensor,
    mask: Tensor | None,
    documents: Documents | None = None,
) -> Tensor:
    """Inputs ``[b, s, d]`` of the output projection, independent of ``skip_output_layer``."""
    hidden = model(x, input_pos=input_pos, mask=mask, documents=documents, output="hidden")
    return hidden[-1] if text_decoder(model).output_hidden_states else hidden


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
) -> tuple[Tensor, Tensor]:
    """Generate token by token, and return the logits of every step.

    :func:`generate_tokens` returns log-probabilities instead of logits and so needs less memory by a factor of the
    vocabulary size. With KV caches (``model.setup_caches``, or :func:`torchtune.modules.local_kv_cache`) a step runs
    the model on one position; the caches must be empty and fit prompt and continuation. Without caches, every step
    runs on the whole sequence. The model runs in evaluation mode.

    Args:
        model: the decoder.
        prompt: tokens ``[b, s]`` or ``[s]``; shorter prompts are padded on their left.
        max_generated_tokens: maximum number of new tokens.
        pad_id: token of left padding, and of positions after a stop token. By default there is no padding, and stop
            tokens are repeated.
        temperature: see :func:`sample`.
        top_k: see :func:`sample`.
        stop_tokens: tokens that end a row; they are kept. Generation ends when all rows have ended.
        rng: random generator, on the model's device.
        compiled_generate_next_token: replaces :func:`generate_next_token` after the first token.
        prompt_lengths: number of tokens of each prompt; by default counted without leading ``pad_id``.

    Returns:
        Tokens ``[b, s + new]``, prompts included, and logits ``[b, new, v]`` of the new tokens (0 after a stop token).

    Raises:
        ValueError: ``max_generated_tokens`` is below 1, the caches are too small, or some prompts begin with token 0
            and neither ``pad_id`` nor ``prompt_lengths`` says whether that is padding.

    Example:
        >>> tokens, logits = torchtune.generation.generate(model, torch.tensor([[5, 40, 7]]), max_generated_tokens=2)
        >>> tokens.shape, logits.shape
        (torch.Size([1, 5]), torch.Size([1, 2, 316]))
    """
    with evaluating(model):
        return _generate(
            model,
            prompt,
            max_generated_tokens,
            pad_id,
            {"temperature": temperature, "top_k": top_k},
            stop_tokens or (),
            rng,
            compiled_generate_next_token,
            prompt_lengths,
        )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context manager for evaluation mode; restores the training mode of every module."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _generate(
    model: TransformerDecoder,
    prompt: Tensor,
    max_generated_tokens: int,
    pad_id: int | None,
    sampling: dict[str, Any],
    stop_tokens: Sequence[int],
    rng: torch.Generator | None,
    compiled_generate_next_token: Callable[..., tuple[Tensor, Tensor]] | None,
    prompt_lengths: Tensor | Sequence[int] | None,
) -> tuple[Tensor, Tensor]:
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
    if prompt_lengths is None:
        prompt_lengths = _lengths(tokens, pad_id)
    state = Progress(tokens, prompt_lengths, model.decoder_max_cache_seq_len if cached else None)
    stop = torch.tensor(list(stop_tokens), dtype=tokens.dtype, device=tokens.device)
    running = torch.ones(b, 1, dtype=torch.bool, device=tokens.device)
    all_logits = []
    for step in range(max_generated_tokens):
        draw = compiled_generate_next_token if step and compiled_generate_next_token else generate_next_token
        x, input_pos, mask = state.inputs()
        if cached and step and model.outgrows_caches(input_pos):
            model.reset_caches()
            draw, (x, input_pos, mask) = generate_next_token, state.inputs(again=True)
        next_tokens, logits = draw(model, input_pos, x, noise(model, b, rng, tokens), mask=mask, **sampling)
        after = state.tokens[:, -1:] if pad_id is None else pad_id
        state.append(torch.where(running, next_tokens.to(tokens.dtype), after))
        all_logits.append(logits * running[:, :, None])
        if len(stop):
            running = running & ~torch.isin(next_tokens, stop)
            if not running.any():
                break
    return state.tokens, torch.cat(all_logits, dim=1)


def _lengths(tokens: Tensor, pad_id: int | None) -> Tensor:
    """Lengths ``[b]`` of prompts ``[b, s]`` without left padding."""
    b, s = tokens.shape
    if pad_id is None:
        zeros = tokens[:, 0] == 0
        if zeros.any() and not zeros.all():
            raise ValueError(
                "Some prompts begin with token 0 and others do not: give pad_id=0 if it is padding, or prompt_lengths."
            )
        return torch.full((b,), s, device=tokens.device)
    return (tokens != pad_id).cumsum(1).bool().sum(1)


def noise(model: TransformerDecoder, b: int, rng: torch.Generator | None, like: Tensor) -> Tensor | None:
    """Exponential noise ``[b, v]`` for :func:`sample`, or ``None`` without a generator."""
    if rng is None:
        return None
    shape = (b, model.tok_embeddings.num_embeddings)
    return torch.empty(shape, device=like.device).exponential_(1, generator=rng)


class Progress:
    """The tokens generated so far, and the model's inputs for the next step.

    Args:
        tokens: prompts ``[b, s]``, padded on the left.
        lengths: their lengths ``[b]``.
        cache_length: positions of the key-value cache, or ``None`` without one.
    """

    def __init__(self, tokens: Tensor, lengths: Tensor | Sequence[int], cache_length: int | None) -> None:
        self.tokens = tokens
        self._cache_length = cache_length
        self._started = False
        first = tokens.shape[1] - torch.as_tensor(lengths, device=tokens.device)
        self._real = torch.arange(tokens.shape[1], device=tokens.device) >= first[:, None]
        self._padded = not bool(self._real.all())

    def append(self, tokens: Tensor) -> None:
        """Add a column ``[b, 1]``."""
        self.tokens = torch.cat([self.tokens, tokens], dim=1)
        self._real = torch.nn.functional.pad(self._real, (0, 1), value=True)

    def inputs(self, again: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens, positions and mask of the next forward pass; all positions at first and if ``again``."""
        s = self.tokens.shape[1]
        if self._padded:
            input_pos = get_position_ids_from_padding_mask(self._real)
        else:
            input_pos = torch.arange(s, device=self.tokens.device).unsqueeze(0)
        if self._cache_length is None:
            return self.tokens, input_pos, get_causal_mask_from_padding_mask(self._real) if self._padded else None
        if not self._started or again:
            self._started = True
            return self.tokens, input_pos, get_causal_mask_from_padding_mask(self._real, self._cache_length)
        mask = torch.nn.functional.pad(self._real, (0, self._cache_length - s))[:, None]
        return self.tokens[:, -1:], input_pos[:, -1:], mask
