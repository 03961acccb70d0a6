"""The images of a prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchtune.data import Batch, Images, join_images, padded_collate_tiled_images_and_mask
from torchtune.generation._generation_error import GenerationError
from torchtune.modules.transformer import text_decoder


def images_of_row(row: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the arguments of a model's forward for the images of a tokenized row.

    Args:
        row: result of :func:`torchtune.generation.prompt_row`; without images, the return value is empty.
        device: device of the tensors.

    Example:
        >>> torchtune.generation.images_of_row({"tokens": [1, 2]}, torch.device("cpu"))
        {}
    """
    images = row.get("encoder_input", {}).get("images")
    if not images:
        return {}
    if isinstance(images, Images):
        return {"encoder_input": {"images": images}}  # images_of_batch copies them
    batch = padded_collate_tiled_images_and_mask([dict(row)], pad_direction="left")
    return Batch.from_dict(batch).to(device).inputs


def check_images(model: nn.Module, images: Sequence[Mapping[str, Any]], num_samples: int) -> None:
    """Check that a model can continue prompts with images. Raises :class:`GenerationError`."""
    if any(images) and text_decoder(model) is model:
        raise GenerationError(f"prompt: it has an image, but a {type(model).__name__} reads text only: remove it.")
    if num_samples > 1 and any("encoder_mask" in each for each in images):
        raise GenerationError(f"num_samples is {num_samples}: a {type(model).__name__} answers an image once, set 1.")


def images_of_batch(images: Sequence[Mapping[str, Any]], lengths: Sequence[int], positions: Tensor) -> dict[str, Any]:
    """Return the arguments of a model's forward for the images of prompts that are run together.

    Args:
        images: results of :func:`images_of_row`; at most one has an ``encoder_mask``.
        lengths: lengths of the prompts, in the order of the tokens.
        positions: positions ``[b, s]`` of the tokens; positions after a prompt use the last row of its
            ``encoder_mask``.
    """
    if masked := [each for each in images if "encoder_mask" in each]:
        mask = masked[0]["encoder_mask"]
        return {**masked[0], "encoder_mask": mask[:, positions[0].clamp(max=mask.shape[1] - 1)]}
    found = join_images([each["encoder_input"]["images"] if each else None for each in images], lengths)
    if found is None:
        return {}
    if found.positions is not None:
        found = replace(found, positions=found.positions.view(3, *positions.shape))
    return {"encoder_input": {"images": found.to(positions.device)}}
