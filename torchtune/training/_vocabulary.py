"""Tokenizer against embedding."""

from typing import Any

import torch

from torchtune.utils import UserError, get_logger


def fit_vocabulary(model: torch.nn.Module, tokenizer: Any, *, resize: bool = False) -> None:
    """Check that every token of ``tokenizer`` has a row in the embedding of ``model``, and enlarge it if asked.

    Args:
        model: a materialised decoder with ``tok_embeddings``.
        tokenizer: has ``vocab_size``, one more than its largest id.
        resize: enlarge embedding and output in place where they are too small; they are never made smaller.

    Raises:
        UserError: the tokenizer has more tokens than the embedding and ``resize`` is False.
    """
    decoder = getattr(model, "decoder", model)
    rows, needed = decoder.tok_embeddings.weight.shape[0], tokenizer.vocab_size
    if needed <= rows:
        return
    if not resize:
        raise UserError(
            f"tokenizer: it has {needed} tokens but the checkpoint's embedding has {rows} rows: use the tokenizer of "
            "this checkpoint, or set resize_token_embeddings=True to train new rows."
        )
    from torchtune.modules.embedding_utils import resize_token_embeddings

    resize_token_embeddings(model, needed)
    get_logger().info(f"The embedding grew from {rows} to {needed} rows.")
