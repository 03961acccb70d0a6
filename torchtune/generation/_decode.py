"""The decode loop, shared by all functions that generate."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from torchtune.generation._continuous_batch import Batch, Request, Row, Step
from torchtune.generation._fast_linear import fast_linears
from torchtune.generation._generation_error import GenerationError
from torchtune.generation._model_ranks import ModelRanks
from torchtune.generation._sampling import LogitsProcessor, process_logits
from torchtune.modules.common_utils import attention_modules
from torchtune.modules.transformer import TransformerDecoder, text_decoder

# Minimum number of new tokens for which converting weights to oneDNN's layout and back saves time.
_WORTH_PACKING = 32


def check_generates(model: nn.Module) -> None:
    """Check that a model is one of a language.

    Args:
        model: a decoder, or a model of text and images.

    Raises:
        GenerationError: it is a classifier or a reward model, whose outputs are no tokens.

    Example:
        >>> torchtune.generation.check_generates(model)  # raises for a reward model
    """
    if getattr(getattr(text_decoder(model), "description", None), "is_classifier", False):
        raise GenerationError(
            "model: it is a classifier or a reward model, which gives scores and no text: give a language model."
        )


def decode(
    model: TransformerDecoder,
    requests: Sequence[Request],
    *,
    size: int,
    device: torch.device,
    use_cache: bool,
    draw: Callable[[Tensor, list[Row]], tuple[Tensor, Tensor]],
    ends: Callable[[int, int], bool],
    processors: Callable[[int], Sequence[LogitsProcessor]] | None = None,
    step: Step | None = None,
    more: Callable[[Batch], Sequence[Request]] | None = None,
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Generate in a continuous batch; the model is restored when the iterator ends, is closed or raises.

    Args:
        model: the decoder.
        requests: prompts and limits, in the order of generation.
        size: number of rows of the batch.
        device: device of the tokens.
        use_cache: use KV caches.
        draw: takes logits ``[m, v]`` of the next token and their rows; returns tokens int64 ``[m, 1]`` and a tensor
            to yield with them.
        ends: takes the index of a sequence and its new token; True ends the sequence.
        processors: takes the index of a sequence; returns its logits processors.
        step: see :class:`Batch`.
        more: called with the batch after every step; returns further prompts. Generation ends when it returns none and
            the batch is finished.

    Yields:
        Indices of the unfinished sequences, their next tokens ``[m, 1]`` and the second tensor of ``draw``.
    """
    check_generates(model)
    ranks = ModelRanks(model)
    pack = use_cache and max(request.limit for request in requests) >= _WORTH_PACKING
    with ranks, evaluating(model), fast_linears(model, pack=pack), _without_caches(model):
        batch = Batch(model, requests, size, ranks, device, use_cache, step)
        while True:
            logits, rows = batch.forward()
            if rows:
                if processors is not None:
                    logits = _process(logits, batch, rows, processors)
                tokens, values = draw(logits, rows)
                tokens = ranks.agree(tokens)
                indices = [row.index for row in rows]
                batch.append(rows, tokens, ends)
                yield indices, tokens, values
            if more is not None:
                batch.add(more(batch))
            if not ranks.any(batch.is_unfinished):
                return


def _process(
    logits: Tensor, batch: Batch, rows: list[Row], processors: Callable[[int], Sequence[LogitsProcessor]]
) -> Tensor:
    """Return logits ``[m, v]`` after the logits processors of each sequence."""
    chains = [processors(row.index) for row in rows]
    if not any(chains):
        return logits
    sequences = batch.sequences(rows)
    processed = [
        process_logits(tokens[None], row_logits, chain)
        for tokens, row_logits, chain in zip(sequences, logits.split(1), chains, strict=True)
    ]
    return torch.cat(processed)


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


@contextmanager
def _without_caches(model: TransformerDecoder) -> Iterator[None]:
    """Context manager that removes the model's KV caches and restores them on exit."""
    attentions = attention_modules(model)
    before = [(module, module.kv_cache, module.cache_enabled) for module in attentions]
    decoder = text_decoder(model)
    lengths = decoder.encoder_max_cache_seq_len, decoder.decoder_max_cache_seq_len
    for module in attentions:
        module.kv_cache, module.cache_enabled = None, False
    try:
        yield
    finally:
        for module, cache, enabled in before:
            module.kv_cache, module.cache_enabled = cache, enabled
        decoder.encoder_max_cache_seq_len, decoder.decoder_max_cache_seq_len = lengths
