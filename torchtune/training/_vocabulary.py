"""Fit a model's embedding to a tokenizer."""

import math
from typing import Any

import torch

from torchtune.modules.transformer import text_decoder
from torchtune.tokenizers import check_tokenizer
from torchtune.utils import UserError, get_logger


def fit_vocabulary(model: torch.nn.Module, tokenizer: Any, *, resize: bool = False) -> None:
    """Check that the model's embedding has a row for every token of ``tokenizer``, and enlarge it on request.

    Args:
        model: a materialized decoder with ``tok_embeddings``; nothing is known of another module.
        tokenizer: has ``vocab_size``, one more than its largest id.
        resize: enlarge embedding and output in place if they are too small; they never shrink. If the embedding is
            frozen (training with adapters), only the new rows are trained.

    Raises:
        DataError: the tokenizer has no ``vocab_size``.
        ConversionError: new rows of a frozen embedding cannot be trained in this model.
        UserError: the tokenizer has more tokens than the embedding and ``resize`` is False, or it produces images that
            the model cannot read.

    Example:
        >>> torchtune.training.fit_vocabulary(model, tokenizer)  # raises if a token has no row
    """
    if getattr(tokenizer, "takes_images", False):
        _check_images(model, tokenizer)
    decoder = text_decoder(model)
    embedding = getattr(decoder, "tok_embeddings", None)
    if embedding is None:  # a module of the user's own, whose layers have other names
        return
    check_tokenizer(tokenizer, "vocab_size", reader="the embedding of the model")
    num_tokens = tokenizer.vocab_size
    # An embedding with special tokens in a second weight counts the rows of both.
    has_special_rows = hasattr(embedding, "num_tokens")
    rows = embedding.num_tokens if has_special_rows else embedding.weight.shape[0]
    if num_tokens <= rows:
        return
    if has_special_rows:
        raise UserError(
            f"tokenizer: it has {num_tokens} tokens but the model's embeddings have {rows} rows, of which the last "
            "ones are those of its special tokens and cannot be moved: use the tokenizer of this checkpoint."
        )
    if not resize:
        raise UserError(
            f"tokenizer: it has {num_tokens} tokens but the checkpoint's embedding has {rows} rows: use the tokenizer "
            "of this checkpoint, or set resize_token_embeddings=True (single-device recipes) to train new rows."
        )
    from torchtune.modules.embedding_utils import resize_token_embeddings
    from torchtune.modules.peft import NewTokens

    if embedding.weight.requires_grad:
        resize_token_embeddings(decoder, num_tokens)
    else:  # adapters: the rows of the checkpoint stay frozen, the new ones are trained
        NewTokens.grow(decoder, num_tokens, num_tokens - rows)
    get_logger().info(f"The embedding grew from {rows} to {num_tokens} rows.")


def _check_images(model: torch.nn.Module, tokenizer: Any) -> None:
    """Raise :class:`UserError` unless the model reads images of the tokenizer's tile size."""
    if text_decoder(model) is model:
        raise UserError(
            f"tokenizer: a {type(tokenizer).__name__} gives images, but the model reads text only: take a text "
            "tokenizer, or a vision model."
        )
    if not hasattr(tokenizer, "tile_size"):
        return
    clip = getattr(model.encoder, "clip", None)
    vision = getattr(model.description, "vision", None)
    max_num_tiles = None
    if clip is not None:
        patch_size = clip.conv.kernel_size[0]
        patches_per_side = math.isqrt(clip.patches_per_tile)
        max_num_tiles = clip.max_num_tiles
    elif vision is not None:
        patch_size = vision.patch_size
        patches_per_side = vision.positions_side
    else:
        return
    tile_size = patch_size * patches_per_side
    if tokenizer.tile_size != tile_size or tokenizer.patch_size != patch_size:
        raise UserError(
            f"tokenizer: its images have tiles of {tokenizer.tile_size} pixels in patches of {tokenizer.patch_size}, "
            f"but those of the model have {tile_size} in patches of {patch_size}: set image_size of both to the "
            "checkpoint's."
        )
    if max_num_tiles is not None and tokenizer.max_num_tiles > max_num_tiles:
        raise UserError(
            f"tokenizer: max_num_tiles is {tokenizer.max_num_tiles}, but the model reads {max_num_tiles} at most."
        )
