"""Tokenizer against model: rows of the embedding, sizes of images."""

from typing import Any

import torch

from torchtune.modules.transformer import text_decoder
from torchtune.utils import UserError, get_logger


def fit_vocabulary(model: torch.nn.Module, tokenizer: Any, *, resize: bool = False) -> None:
    """Check that every token of ``tokenizer`` has a row in the embedding of ``model``, and enlarge it if asked.

    A tokenizer that reads images must fit the image encoder of the model as well.

    Args:
        model: a materialised decoder with ``tok_embeddings``.
        tokenizer: has ``vocab_size``, one more than its largest id.
        resize: enlarge embedding and output in place where they are too small; they are never made smaller. Of a
            frozen embedding, beside adapters, the new rows are trained.

    Raises:
        ConversionError: new rows of a frozen embedding cannot be trained here.
        UserError: the tokenizer has more tokens than the embedding and ``resize`` is False; it reads images, which the
            model does not, or in tiles or patches of another size.

    Example:
        >>> torchtune.training.fit_vocabulary(model, tokenizer)  # raises if a token had no row
    """
    _check_images(model, tokenizer)
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


def _check_images(model: torch.nn.Module, tokenizer: Any) -> None:
    if not getattr(tokenizer, "takes_images", False):
        return
    if text_decoder(model) is model:
        raise UserError(
            f"tokenizer: a {type(tokenizer).__name__} reads images, but a {type(model).__name__} reads text only: use "
            "the tokenizer of this checkpoint."
        )
    description = getattr(model, "description", None)
    for name in ("tile_size", "patch_size", "max_num_tiles"):
        given, wanted = getattr(tokenizer, name, None), getattr(description, name, None)
        if None in (given, wanted) or given == wanted or (name == "max_num_tiles" and given < wanted):
            continue
        setting = "image_size" if name == "tile_size" else name
        raise UserError(
            f"tokenizer: its {setting} is {given}, but the model was built with {wanted}: give both that of the "
            "checkpoint."
        )
