"""Cache of the features of images that a frozen vision tower computes."""

import hashlib
from pathlib import Path
from typing import Any

from torch import nn

from torchtune.data import ImageCache
from torchtune.modules.model_fusion import ImageTextModel
from torchtune.training._checksums import fingerprint_weights
from torchtune.training.parallel import ParallelDims
from torchtune.utils import UserError, get_logger, is_simulated, log_rank_zero


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
    if is_simulated():
        return
    trains_projector = any(parameter.requires_grad for _, parameter in parameters)
    frozen = tower if trains_projector else parameters
    # Kernels of another device round differently, so its features have a folder of their own.
    _, first_parameter = parameters[0]
    origin = (fingerprint_weights(frozen, dims), first_parameter.device.type)
    name = hashlib.sha256(repr(origin).encode()).hexdigest()[:16]
    tokenizer.image_cache = ImageCache(Path(folder) / name, tokenizer.processor)
    log_rank_zero(get_logger(), f"Features of images are cached in {tokenizer.image_cache.folder}.")
