"""The images of a prompt."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchtune.data import Batch, Images, padded_collate_tiled_images_and_mask
from torchtune.generation._generation_error import GenerationError
from torchtune.modules.transformer import text_decoder


def images_of_row(row: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return ``encoder_input`` and ``encoder_mask`` of a tokenized row, for :func:`images_of_prompt`.

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
    if isinstance(images, Images):  # without caches, the text grows beyond the positions of the row
        return {"encoder_input": {"images": replace(images, positions=None).to(device)}}
    batch = padded_collate_tiled_images_and_mask([dict(row)], pad_direction="left")
    return Batch.from_dict(batch).to(device).inputs


@contextmanager
def images_of_prompt(
    model: nn.Module, encoder_input: Mapping[str, Any] | None = None, encoder_mask: Tensor | None = None
) -> Iterator[None]:
    """Context manager in which a model attends to the images of the prompt that it continues.

    Args:
        model: a model of text and images.
        encoder_input: arguments of its encoder; ``None`` without images.
        encoder_mask: bool ``[1, s, t]`` for the tokens of the prompt; new tokens use the row of the last one. ``None``
            for a model with image tokens.

    Raises:
        GenerationError: the model reads text only.
    """
    if encoder_input is None:
        yield
        return
    if text_decoder(model) is model:
        raise GenerationError(f"prompt: it has an image, but a {type(model).__name__} reads text only: remove it.")

    def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        positions = kwargs["input_pos"]
        if encoder_mask is not None:
            rows = positions[0].clamp(max=encoder_mask.shape[1] - 1)
            kwargs = {**kwargs, "encoder_mask": encoder_mask[:, rows]}
        # With caches, the encoder's output for the prompt is cached after the first step.
        if not module.caches_are_enabled() or positions[0, 0] == 0:
            kwargs["encoder_input"] = encoder_input
        return args, kwargs

    handle = model.register_forward_pre_hook(add, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
