"""One prompt in, tokens out as they are made."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from torchtune.generation._generation import _Progress, generate_next_token
from torchtune.modules.common_utils import local_kv_cache
from torchtune.modules.transformer import TransformerDecoder


@torch.no_grad()
def stream(
    model: TransformerDecoder,
    prompt: Tensor,
    *,
    max_generated_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    stop_tokens: Sequence[int] | None = None,
    use_cache: bool = True,
) -> Iterator[int]:
    """Continue one prompt and yield every new token at once; a stop token ends it and is not yielded.

    Args:
        model: the decoder.
        prompt: tokens ``[s]``.
        max_generated_tokens: length of the longest continuation.
        temperature: 0 takes the most likely token.
        top_k: draw among the k most likely tokens only.
        stop_tokens: tokens that end the continuation.
        use_cache: keep keys and values of earlier tokens while this runs.
    """
    stop = set(stop_tokens or ())
    length = prompt.shape[0] + max_generated_tokens
    dtype = model.tok_embeddings.weight.dtype
    cache = (
        local_kv_cache(model, batch_size=1, device=prompt.device, dtype=dtype, decoder_max_seq_len=length)
        if use_cache
        else nullcontext()
    )
    with cache:
        state = _Progress(prompt.unsqueeze(0), 0, [prompt.shape[0]], length if use_cache else None)
        for _ in range(max_generated_tokens):
            x, input_pos, mask = state.inputs()
            if use_cache and model.outgrows_caches(input_pos):
                model.reset_caches()
                x, input_pos, mask = state.inputs(again=True)
            token, _ = generate_next_token(model, input_pos, x, mask=mask, temperature=temperature, top_k=top_k)
            if token.item() in stop:
                return
            state.append(token)
            yield token.item()
