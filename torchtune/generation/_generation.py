"""Sampling text from a decoder."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torchtune.generation._masks import get_causal_mask_from_padding_mask, get_position_ids_from_padding_mask
from torchtune.modules.transformer import TransformerDecoder


def sample(logits: Tensor, *, temperature: float = 1.0, top_k: int | None = None, q: Tensor | None = None) -> Tensor:
    """Draw a token from its distribution.

    Drawing is by exponential noise (the largest ``p / q`` with q ~ Exp(1) is a draw from p), which needs no
    synchronisation with the device.

    Args:
        logits: ``[..., v]``.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draw among the k most likely tokens only.
        q: noise ``[..., v]``; by default drawn here.

    Returns:
        int64 ``[..., 1]``.
    """
    if temperature == 0.0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits / max(temperature, 1e-5)
    if top_k is not None:
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
    """Run the model and draw the token that follows the last position.

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
    """
    logits = _last_logits(model, x, input_pos, mask)
    return sample(logits[:, -1].clone(), temperature=temperature, top_k=top_k, q=q), logits


def _last_logits(model: TransformerDecoder, x: Tensor, input_pos: Tensor, mask: Tensor | None) -> Tensor:
    """float32 ``[b, 1, v]``: only the last position passes through the output projection."""
    if x.shape[1] == 1 or model.skip_output_layer or model.output_hidden_states:
        return model(x, input_pos=input_pos, mask=mask)[:, -1:]
    model.skip_output_layer = True
    try:
        hidden = model(x, input_pos=input_pos, mask=mask)
    finally:
        model.skip_output_layer = False
    return model.output(hidden[:, -1:]).float()


@torch.no_grad()
def generate(
    model: TransformerDecoder,
    prompt: Tensor,
    *,
    max_generated_tokens: int,
    pad_id: int = 0,
    temperature: float = 1.0,
    top_k: int | None = None,
    stop_tokens: Sequence[int] | None = None,
    rng: torch.Generator | None = None,
    compiled_generate_next_token: Callable[..., tuple[Tensor, Tensor]] | None = None,
    prompt_lengths: Tensor | Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Continue prompts, token by token.

    With key-value caches (``model.setup_caches``, or :func:`torchtune.modules.local_kv_cache`) each step costs one
    position; the caches must be empty and hold prompt and continuation. Without, each step reads everything again.

    Args:
        model: the decoder.
        prompt: tokens ``[b, s]`` or ``[s]``; shorter prompts are padded on their left.
        max_generated_tokens: length of the longest continuation.
        pad_id: what pads prompts, and what follows a stop token.
        temperature: see :func:`sample`.
        top_k: see :func:`sample`.
        stop_tokens: tokens that end a row (they are kept). Generation ends when all rows have.
        rng: source of randomness, on the device of the model.
        compiled_generate_next_token: takes the place of :func:`generate_next_token` after the first token.
        prompt_lengths: number of tokens of each prompt; by default, every ``pad_id`` in a prompt counts as padding.

    Returns:
        Tokens ``[b, s + new]``, prompts first, and the logits ``[b, new, v]`` of the new ones; both are filled with
        ``pad_id`` and 0 after a stop token.

    Raises:
        ValueError: fewer than one token asked for, or caches too small.
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
    state = _Progress(tokens, pad_id, prompt_lengths, model.decoder_max_cache_seq_len if cached else None)
    stop = torch.tensor(list(stop_tokens or ()), dtype=tokens.dtype, device=tokens.device)
    running = torch.ones(b, 1, dtype=torch.bool, device=tokens.device)
    all_logits = []
    for step in range(max_generated_tokens):
        draw = compiled_generate_next_token if step and compiled_generate_next_token else generate_next_token
        x, input_pos, mask = state.inputs()
        if cached and step and model.outgrows_caches(input_pos):
            model.reset_caches()
            draw, (x, input_pos, mask) = generate_next_token, state.inputs(again=True)
        next_tokens, logits = draw(
            model, input_pos, x, _noise(model, b, rng, tokens), mask=mask, temperature=temperature, top_k=top_k
        )
        state.append(torch.where(running, next_tokens.to(tokens.dtype), pad_id))
        all_logits.append(logits * running[:, :, None])
        if len(stop):
            running = running & ~torch.isin(next_tokens, stop)
            if not running.any():
                break
    return state.tokens, torch.cat(all_logits, dim=1)


def _noise(model: TransformerDecoder, b: int, rng: torch.Generator | None, like: Tensor) -> Tensor | None:
    if rng is None:
        return None
    shape = (b, model.tok_embeddings.num_embeddings)
    return torch.empty(shape, device=like.device).exponential_(1, generator=rng)


class _Progress:
    """Tokens so far, and what the model needs to see for the next ones.

    Args:
        tokens: prompts ``[b, s]``.
        pad_id: what pads them.
        lengths: their lengths, or ``None`` to find padding by ``pad_id``.
        cache_length: positions of the key-value cache, or ``None`` without one.
    """

    def __init__(
        self, tokens: Tensor, pad_id: int, lengths: Tensor | Sequence[int] | None, cache_length: int | None
    ) -> None:
        self.tokens = tokens
        self._cache_length = cache_length
        self._started = False
        if lengths is None:
            self._real = tokens != pad_id
        else:
            first = tokens.shape[1] - torch.as_tensor(lengths, device=tokens.device)
            self._real = torch.arange(tokens.shape[1], device=tokens.device) >= first[:, None]
        self._padded = not bool(self._real.all())

    def append(self, tokens: Tensor) -> None:
        """Add a column ``[b, 1]``."""
        self.tokens = torch.cat([self.tokens, tokens], dim=1)
        self._real = torch.nn.functional.pad(self._real, (0, 1), value=True)

    def inputs(self, again: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens, positions and mask of the next call of the model, whose caches are empty at first and ``again``."""
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
