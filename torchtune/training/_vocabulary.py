"""Tokenizer against embedding."""

from typing import Any

import torch

from torchtune.modules.transformer import text_decoder
from torchtune.utils import UserError, get_logger


def fit_vocabulary(model: torch.nn.Module, tokenizer: Any, *, resize: bool = False) -> None:
    """Check that every token of ``tokenizer`` has a row in the embedding of ``model``, and enlarge it if asked.

    Args:
        model: a materialised decoder with ``tok_embeddings``.
        tokenizer: has ``vocab_size``, one more than its largest id.
        resize: enlarge embedding and output in place where they are too small; they are never made smaller. Of a
            frozen embedding, beside adapters, the new rows are trained.

    Raises:
        ConversionError: new rows of a frozen embedding cannot be trained here.
        UserError: the tokenizer has more tokens than the embedding and ``resize`` is False.

    Example:
        >>> torchtune.training.fit_vocabulary(model, tokenizer)  # raises if a token had no row
    """
    decoder = text_decoder(model)
    embedding, needed = decoder.tok_embeddings, tokenizer.vocab_size
    rows = getattr(embedding, "num_tokens", embedding.weight.shape[0])
    if needed <= rows:
        return
    if hasattr(embedding, "num_tokens"):
        raise UserError(
            f"tokenizer: it has {needed} tokens but the model's embeddings have {rows} rows, of which the last ones "
            "are those of its special tokens and cannot be moved: use the tokenizer of this checkpoint."
        )
    if not resize:
        raise UserError(
            f"tokenizer: it has {needed} tokens but the checkpoint's embedding has {rows} rows: use the tokenizer of "
            "this checkpoint, or set resize_token_embeddings=True (single-device recipes) to train new rows."
        )
    from torchtune.modules.conversion import apply_conversions
    from torchtune.modules.embedding_utils import resize_token_embeddings
    from torchtune.modules.peft import NewTokens

    frozen = not decoder.tok_embeddings.weight.requires_grad
    if frozen:
        NewTokens.check(decoder)
    resize_token_embeddings(decoder, needed)
    get_logger().info(f"The embedding grew from {rows} to {needed} rows.")
    if frozen:
        apply_conversions(decoder, [NewTokens(needed - rows)])
