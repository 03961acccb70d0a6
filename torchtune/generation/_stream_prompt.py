"""Streaming generation from one prompt."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from torch import Tensor

from torchtune.generation._generate import stream_tokens
from torchtune.generation._sampling import LogitsProcessor
from torchtune.modules.transformer import TransformerDecoder


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
    images = {"encoder_input": encoder_input, "encoder_mask": encoder_mask}
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
        images=[{name: value for name, value in images.items() if value is not None}],
    )
    with closing(steps):
        for step in steps:
            if (token := step.tokens.item()) in (stop_tokens or ()):
                return
            yield token
