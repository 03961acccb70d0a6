"""The images of a prompt."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchtune.data import Batch, padded_collate_tiled_images_and_mask
from torchtune.generation._generation_error import GenerationError
from torchtune.modules.transformer import text_decoder


def images_of_row(row: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """``encoder_input`` and ``encoder_mask`` of one row of a tokenizer, for :func:`images_of_prompt`.

    Args:
        row: of :func:`torchtune.generation.prompt_row`; without images the result is empty.
        device: to put them on.
    """
    if not row.get("encoder_input", {}).get("images"):
        return {}
    batch = padded_collate_tiled_images_and_mask([dict(row)], pad_direction="left")
    return Batch.from_dict(batch).to(device).inputs


@contextmanager
def images_of_prompt(
    model: nn.Module, encoder_input: Mapping[str, Any] | None = None, encoder_mask: Tensor | None = None
) -> Iterator[None]:
    """Context manager in which a model that continues one prompt sees its images.

    Args:
        model: of text and images.
        encoder_input: arguments of its encoder; ``None``: there are no images.
        encoder_mask: bool ``[1, s, t]`` for the tokens of the prompt; new tokens see what the last one sees.

    Raises:
        GenerationError: the model reads text only.
    """
    if encoder_input is None:
        yield
        return
    if text_decoder(model) is model:
        raise GenerationError(f"prompt: it has an image, but a {type(model).__name__} reads text only: take it out.")

    def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        positions = kwargs["input_pos"]
        rows = positions[0].clamp(max=encoder_mask.shape[1] - 1)
        kwargs = {**kwargs, "encoder_mask": encoder_mask[:, rows]}
        # The caches, if there are any, hold the encoder's output for the prompt.
        if not module.caches_are_enabled() or positions[0, 0] == 0:
            kwargs["encoder_input"] = encoder_input
        return args, kwargs

    handle = model.register_forward_pre_hook(add, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
