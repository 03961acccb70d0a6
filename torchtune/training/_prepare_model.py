"""Preparation of a model for a run: its vocabulary, its dropout, and the features of its images."""

import hashlib
import math
from pathlib import Path
from typing import Any

from torch import nn

from torchtune.data import ImageCache
from torchtune.modules.model_fusion import ImageTextModel
from torchtune.modules.transformer import text_decoder
from torchtune.tokenizers import check_tokenizer, missing_new_tokens
from torchtune.training.parallel import ParallelDims, fingerprint_weights
from torchtune.utils import UserError, get_logger, is_simulated, log_once, log_rank_zero


def fit_vocabulary(model: nn.Module, tokenizer: Any, *, resize: bool = False) -> None:
    """Check that the model's embedding has a row for every token of ``tokenizer``, and enlarge it on request.

    Args:
        model: a materialized decoder with ``tok_embeddings``; a module without them is left as it is.
        tokenizer: has ``vocab_size``, one more than its largest id; see :func:`add_token_rows` for ``new_tokens``.
        resize: call :func:`add_token_rows`; the model must not be sharded.

    Raises:
        DataError: the tokenizer has no ``vocab_size``.
        ConversionError: new rows of a frozen embedding cannot be trained in this model.
        UserError: the tokenizer has more tokens than the embedding, or new ones, and the model has no rows for them; or
            it produces images that the model cannot read.

    Example:
        >>> torchtune.training.fit_vocabulary(model, tokenizer)  # raises if a token has no row
    """
    if getattr(tokenizer, "takes_images", False):
        _check_images(model, tokenizer)
    if resize:
        add_token_rows(model, tokenizer)
    decoder = text_decoder(model)
    rows = _rows_of_vocabulary(decoder, tokenizer)
    if rows is None:
        return
    new_tokens = getattr(tokenizer, "new_tokens", ())
    # Only a resize sets vocabulary_growth. Without it, new tokens would take untrained rows that pad the vocabulary.
    if new_tokens and getattr(decoder, "vocabulary_growth", None) is None:
        raise UserError(
            f"tokenizer.add_tokens: {', '.join(new_tokens)} are not tokens of the checkpoint, and their rows must be "
            "trained: set resize_token_embeddings=True, or set tokenizer.path to a checkpoint that was trained with "
            "them."
        )
    if tokenizer.vocab_size > rows:
        raise UserError(
            f"tokenizer: it has {tokenizer.vocab_size} tokens but the checkpoint's embedding has {rows} rows: use the "
            "tokenizer of this checkpoint, or set resize_token_embeddings=True to train new rows."
        )


def add_token_rows(model: nn.Module, tokenizer: Any, checkpoint_dir: str | Path | None = None) -> None:
    """Give the vocabulary of a model a row for every token of ``tokenizer``; it never shrinks.

    New rows begin as the mean of the rows of tokens, or of those of the tokens that describe them. If the embedding is
    frozen (training with adapters), only new rows are trained.

    Args:
        model: decoder with ``tok_embeddings``, not sharded. On the meta device, the rows get their values when the
            weights are loaded.
        tokenizer: has ``vocab_size``, one more than its largest id. ``new_tokens`` of it, if any, are the last ones,
            which the tokenizer of the checkpoint does not have; rows that only pad the vocabulary may wait for them.
            ``described_tokens`` has the ids of the description of some of them.
        checkpoint_dir: folder of the model's checkpoint; new tokens that its tokenizer has already keep their rows.

    Raises:
        DataError: the tokenizer has no ``vocab_size``.
        ConversionError: new rows of a frozen embedding cannot be trained in this model.
        UserError: of embedding and output projection one is frozen, or both are in a model without an adapter.

    Example:
        >>> torchtune.training.add_token_rows(model, tokenizer)  # before the model is parallelized
    """
    decoder = text_decoder(model)
    rows = _rows_of_vocabulary(decoder, tokenizer)
    if rows is None:
        return
    num_tokens = tokenizer.vocab_size
    new_tokens = getattr(tokenizer, "new_tokens", ())
    if checkpoint_dir is not None:
        new_tokens = missing_new_tokens(tokenizer, Path(checkpoint_dir))
    first_new = min(num_tokens - len(new_tokens), rows)  # rows from here on belong to no token of the checkpoint
    if num_tokens <= rows and not new_tokens:
        return
    embedding = decoder.tok_embeddings
    if hasattr(embedding, "num_tokens"):
        raise UserError(
            f"tokenizer: it has {num_tokens} tokens but the model's embeddings have {rows} rows, of which the last "
            "ones are those of its special tokens and cannot be moved: use the tokenizer of this checkpoint."
        )
    from torchtune.modules.embeddings import resize_token_embeddings, vocabulary_weights
    from torchtune.modules.peft import NewTokens, has_adapters

    trained = {decoder.get_parameter(name).requires_grad for name in vocabulary_weights(decoder)}
    if len(trained) > 1:
        raise UserError(
            "resize_token_embeddings: one of embedding and output projection is trained and the other is frozen, so "
            "new tokens would be learned by half: train both (train_modules: [tok_embeddings, output]), or neither."
        )
    if not embedding.weight.requires_grad and not has_adapters(decoder):
        raise UserError(
            "resize_token_embeddings: the embedding is frozen, so new tokens would not be learned: train "
            "tok_embeddings and output, too."
        )
    size = max(num_tokens, rows)
    described_tokens = getattr(tokenizer, "described_tokens", {})
    descriptions: list[list[int]] = []
    # Tokens of tokenizer files that the checkpoint lacks come before those that the config adds.
    for _ in range(first_new, num_tokens - len(new_tokens)):
        descriptions.append([])
    for token in new_tokens:
        descriptions.append(described_tokens.get(token, []))
    if embedding.weight.requires_grad:
        resize_token_embeddings(decoder, size, first_new, descriptions)
    else:  # adapters: the rows of the checkpoint stay frozen, the new ones (and those that pad) are trained
        NewTokens.grow(decoder, size, size - first_new, first_new, descriptions)
    if size > rows:
        log_rank_zero(get_logger(), f"The embedding grew from {rows} to {size} rows.")
    else:
        log_rank_zero(get_logger(), f"The {len(new_tokens)} new tokens take rows of the embedding that had no token.")


def _rows_of_vocabulary(decoder: nn.Module, tokenizer: Any) -> int | None:
    """Return the number of rows of the embedding; None for a module of the user's own with other names.

    Raises:
        DataError: the tokenizer has no ``vocab_size``.
    """
    embedding = getattr(decoder, "tok_embeddings", None)
    if embedding is None:
        return None
    check_tokenizer(tokenizer, "vocab_size", reader="the embedding of the model")
    if hasattr(embedding, "num_tokens"):  # it has special tokens in a second weight, and counts the rows of both
        return embedding.num_tokens
    return embedding.weight.shape[0]


def _check_images(model: nn.Module, tokenizer: Any) -> None:
    """Raise :class:`UserError` unless the model reads images of the tokenizer's tile size."""
    if text_decoder(model) is model:
        raise UserError(
            f"tokenizer: a {type(tokenizer).__name__} gives images, but the model reads text only: take a text "
            "tokenizer, or a vision model."
        )
    if not hasattr(tokenizer, "tile_size"):  # it does not cut images into tiles of one size
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
    else:  # an encoder that does not state its sizes
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


def validate_no_params_on_meta_device(model: nn.Module) -> None:
    """Raise ``RuntimeError`` with the name of the first parameter or buffer that is on the meta device, if any.

    Example:
        >>> torchtune.training.validate_no_params_on_meta_device(model)
    """
    named_tensors = {"parameter": model.named_parameters(), "buffer": model.named_buffers()}
    for kind, tensors in named_tensors.items():
        for name, tensor in tensors:
            if tensor.is_meta:
                raise RuntimeError(f"The {kind} {name} is still on the meta device: nothing was loaded into it.")


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout of ``model`` to 0 in place and log it, as preference losses compare two forward passes.

    Covers ``torch.nn.Dropout`` and modules with a probability in ``attn_dropout``.

    Example:
        >>> layer = torch.nn.Dropout(0.5)
        >>> torchtune.training.disable_dropout(layer)
        >>> layer(torch.ones(3))
        tensor([1., 1., 1.])
    """
    for name, module in model.named_modules():
        attributes = ["attn_dropout"]
        if isinstance(module, nn.modules.dropout._DropoutNd):  # "p" has another meaning in other modules
            attributes = ["p", "attn_dropout"]
        for attribute in attributes:
            probability = getattr(module, attribute, None)
            if isinstance(probability, float) and probability > 0.0:
                log_once(get_logger(), f"Dropout of {name or type(module).__name__} is set from {probability} to 0.")
                setattr(module, attribute, 0.0)


def cache_images(model: nn.Module, tokenizer: Any, folder: str | None, dims: ParallelDims) -> None:
    """Read features of images from a folder, and add missing features.

    Cached features are the outputs of the projector if it is frozen, too, and otherwise its inputs. Images with cached
    features are not decoded.

    Args:
        model: model with its weights; its vision tower must be frozen.
        tokenizer: transform of the model.
        folder: folder of the features, in a subfolder for each tower; None: no cache.
        dims: parallel dims; all ranks must call this.

    Raises:
        UserError: the model has no image tokens, or its vision tower is trained.

    Example:
        >>> torchtune.training.cache_images(model, tokenizer, "features", torchtune.training.ParallelDims())
        Traceback (most recent call last):
        torchtune.utils._errors.UserError: image_cache: the model has no image tokens, ...
    """
    if folder is None:
        return
    if not isinstance(model, ImageTextModel):
        raise UserError("image_cache: the model has no image tokens, whose features are cached: set it to null.")
    parameters = list(model.encoder.named_parameters())
    tower = [(name, parameter) for name, parameter in parameters if "projector" not in name]
    if any(parameter.requires_grad for _, parameter in tower):
        raise UserError(
            "image_cache: the vision tower is trained, which changes the features: set model.vision_tower=frozen, or "
            "image_cache=null."
        )
    if is_simulated():  # no weights to fingerprint, and no features
        return
    # The features depend on the weights that compute them: those of the tower, or of the frozen projector too.
    trains_projector = any(parameter.requires_grad for _, parameter in parameters)
    frozen = tower if trains_projector else parameters
    # Kernels of another device round differently, so its features have a folder of their own.
    _, first_parameter = parameters[0]
    origin = (fingerprint_weights(frozen, dims), first_parameter.device.type)
    name = hashlib.sha256(repr(origin).encode()).hexdigest()[:16]
    tokenizer.image_cache = ImageCache(Path(folder) / name, tokenizer.processor)
    log_rank_zero(get_logger(), f"Features of images are cached in {tokenizer.image_cache.folder}.")
