"""Transform of Llama 4, which makes tokens and patches from text and images."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchtune.data import DataError, PromptTemplateInterface, TemplateType, as_messages, get_prompt_template
from torchtune.models._image_transform import ImageEncoder
from torchtune.models.llama4._processor import LlamaImages
from torchtune.models.llama4._tokenizer import Llama4Tokenizer
from torchtune.tokenizers import parse_hf_tokenizer_json

_LAYOUT = ("patch", "image", "image_start", "image_end", "tile_x_separator", "tile_y_separator")


class Llama4Transform(ImageEncoder, Llama4Tokenizer):
    """Llama 4's tokenizer that also processes the images of a conversation.

    Rows raise an error if ``max_seq_len`` would cut off images; text is cut at its end.

    Args:
        path: path of Meta's ``tokenizer.model``.
        tile_size: width and height of a tile, in pixels.
        patch_size: width and height of a patch, in pixels.
        max_num_tiles: maximum number of tiles per image, without the tile of the whole image.
        pixel_shuffle_scaling_factor: inverse of the rows and columns of patches that become one token.
        special_tokens_path: path of a ``tokenizer.json`` with special tokens that replace Llama 4's.
        max_seq_len: maximum number of tokens; ``None``: no truncation.
        image_mean: mean of red, green and blue; ``None``: no normalization.
        image_std: standard deviation of red, green and blue.
        dtype: accepted for older configs; the model converts patches to its dtype.
        prompt_template: adds texts to the messages before they are formatted.

    Raises:
        DataError: a file is missing or broken, or lacks a token of images.
    """

    required = (*Llama4Tokenizer.required, *_LAYOUT)

    def __init__(
        self,
        path: str,
        *,
        tile_size: int,
        patch_size: int,
        max_num_tiles: int = 4,
        pixel_shuffle_scaling_factor: float = 0.5,
        special_tokens_path: str | None = None,
        max_seq_len: int | None = None,
        image_mean: Sequence[float] | None = None,
        image_std: Sequence[float] | None = None,
        dtype: torch.dtype = torch.bfloat16,
        prompt_template: PromptTemplateInterface | TemplateType | None = None,
    ) -> None:
        special_tokens = None if special_tokens_path is None else parse_hf_tokenizer_json(special_tokens_path)
        super().__init__(path, special_tokens, max_seq_len, get_prompt_template(prompt_template))
        self.tile_size, self.patch_size, self.max_num_tiles = tile_size, patch_size, max_num_tiles
        self.image_tokens = (self.special_tokens["<|patch|>"],)
        self.processor = LlamaImages(
            patch_size=patch_size,
            merge=round(1 / pixel_shuffle_scaling_factor),
            tile=tile_size,
            most=max_num_tiles,
            mean=tuple(map(float, image_mean or (0, 0, 0))),
            std=tuple(map(float, image_std or (1, 1, 1))),
        )

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        """Replace ``messages`` by tokens and images; see :class:`torchtune.models.ImageTextTransform`.

        Raises:
            DataError: the messages do not fit the chat format, an image cannot be read, or ``max_seq_len`` would cut
                off an image.
        """
        messages = as_messages(sample["messages"])
        row = super().__call__({**sample, "messages": messages}, inference)
        return {**row, **self.encode_images(messages, row["tokens"])}

    def tokenize_messages(self, messages: Any, **kwargs: Any) -> tuple[list[int], list[bool]]:
        """Tokenize as :class:`Llama4Tokenizer`; raises ``DataError`` if it cuts off images."""
        messages = as_messages(messages)
        tokens, mask = super().tokenize_messages(messages, **kwargs)
        wanted = sum(self.plan(image).tokens for message in messages for image in message.get_media())
        if lost := wanted - tokens.count(self.image_tokens[0]):
            raise DataError(f"max_seq_len={self.max_seq_len} would cut {lost} tokens of images off a row: raise it")
        drawn = {self.special_tokens[f"<|{name}|>"] for name in _LAYOUT}
        return tokens, [masked or token in drawn for token, masked in zip(tokens, mask, strict=True)]

    def _image_ids(self, image: Any) -> list[int]:
        layout = self.processor.layout(self.plan(image))
        return [self.special_tokens[name] for name in re.findall(r"<\|\w+\|>", layout)]


def llama4_transform(
    path: str,
    max_seq_len: int | None = 8192,
    image_size: int = 336,
    max_num_tiles: int = 16,
    special_tokens_path: str | None = None,
    prompt_template: TemplateType | None = None,
) -> Llama4Transform:
    """Build the transform of Llama 4: patches of 14 pixels, four of which become a token.

    Args:
        path: path of Meta's ``tokenizer.model``.
        max_seq_len: maximum number of tokens; ``None``: no truncation.
        image_size: width and height of a tile, in pixels; must be the model's.
        max_num_tiles: maximum number of tiles per image, without the tile of the whole image.
        special_tokens_path: path of a ``tokenizer.json`` with special tokens that replace Llama 4's.
        prompt_template: dotted path of a template, or a mapping role -> [text before, text after].

    Raises:
        DataError: a file is missing or broken.
    """
    return Llama4Transform(
        path,
        tile_size=image_size,
        patch_size=14,
        max_num_tiles=max_num_tiles,
        special_tokens_path=special_tokens_path,
        max_seq_len=max_seq_len,
        image_mean=(0.5, 0.5, 0.5),
        image_std=(0.5, 0.5, 0.5),
        prompt_template=prompt_template,
    )
