"""Transform of Llama 3.2 Vision, which makes tokens, tiles and masks from text and images."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchtune.data import DataError, PromptTemplateInterface, TemplateType, as_messages, get_prompt_template
from torchtune.models.clip import CLIP_MEAN, CLIP_STD, CLIPImageTransform
from torchtune.models.llama3 import Llama3Tokenizer
from torchtune.modules.transforms import VisionCrossAttentionMask
from torchtune.tokenizers import parse_hf_tokenizer_json


class Llama3VisionTransform(Llama3Tokenizer):
    """Llama 3's tokenizer that also processes the images of a conversation.

    ``<|image|>`` is the token of an image. Rows raise an error if ``max_seq_len`` would cut off images; text is cut at
    its end, as in :class:`~torchtune.models.llama3.Llama3Tokenizer`.

    Args:
        path: path of Meta's ``tokenizer.model``.
        tile_size: width and height of a tile, in pixels.
        patch_size: width and height of a patch, in pixels.
        max_num_tiles: maximum number of tiles per image.
        special_tokens_path: path of a ``tokenizer.json`` with special tokens that replace Llama 3's.
        max_seq_len: maximum number of tokens; ``None``: no truncation.
        image_mean: mean of red, green and blue; ``None``: no normalization.
        image_std: standard deviation of red, green and blue.
        prompt_template: adds texts to the messages before they are formatted.
        dtype: dtype of the tiles.

    Attributes:
        image_seq_len: sequence length of an image of ``max_num_tiles`` tiles in the encoder.
        transform_image: the :class:`~torchtune.models.clip.CLIPImageTransform`.

    Raises:
        DataError: a file is missing or broken or lacks ``<|image|>``; also as in
            :class:`~torchtune.models.clip.CLIPImageTransform`.
    """

    # tokenize_messages needs no pixels: datasets check and measure rows before they read images.
    takes_images = True

    def __init__(
        self,
        path: str,
        *,
        tile_size: int,
        patch_size: int,
        max_num_tiles: int = 4,
        special_tokens_path: str | None = None,
        max_seq_len: int | None = None,
        image_mean: Sequence[float] | None = None,
        image_std: Sequence[float] | None = None,
        prompt_template: PromptTemplateInterface | TemplateType | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(
            path,
            None if special_tokens_path is None else parse_hf_tokenizer_json(special_tokens_path),
            max_seq_len,
            get_prompt_template(prompt_template),
        )
        if self.image_id is None:
            raise DataError(f"{special_tokens_path} lacks <|image|>, which stands for an image.")
        self.max_num_tiles = max_num_tiles
        self.patch_size = patch_size
        self.tile_size = tile_size
        self.transform_image = CLIPImageTransform(
            image_mean=image_mean,
            image_std=image_std,
            tile_size=tile_size,
            max_num_tiles=max_num_tiles,
            dtype=dtype,
        )
        self.xattn_mask = VisionCrossAttentionMask(tile_size, patch_size, self.image_id)
        self.image_seq_len = max_num_tiles * (self.xattn_mask.patches_per_tile + 1)  # 1: the class token of a tile

    @property
    def tokenizer(self) -> "Llama3VisionTransform":
        """This object; evaluation recipes of earlier releases read the property."""
        return self

    @property
    def vocab_size(self) -> int:
        """Largest token id plus 1, including ``<|image|>``."""
        return max(super().vocab_size, self.image_id + 1)

    def fingerprint_parts(self) -> dict[str, Any]:
        """Return the attributes that affect the tokens of a row, without the image transforms."""
        return {name: value for name, value in vars(self).items() if name not in ("transform_image", "xattn_mask")}

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        """Replace ``messages`` by tokens and images.

        Args:
            sample: sample with ``messages``; an image is a Pillow image, a path, a URL, or a tensor
                ``[c, height, width]``.
            inference: leave the last turn open, for a model to continue.

        Returns:
            The sample with ``tokens``, ``mask`` (True: masked), ``encoder_input`` and ``encoder_mask``. The lists in
            ``encoder_input`` are ``images``, of ``[tiles, 3, tile_size, tile_size]``, and ``aspect_ratio``, of int64
            ``[2]``. ``encoder_mask`` is a list of bool ``[s, tiles * (patches + 1)]``. Text has empty lists.

        Raises:
            DataError: the messages do not fit the chat format, an image cannot be read, or ``max_seq_len`` would cut
                off an image.
        """
        messages = as_messages(sample["messages"]) if "messages" in sample else []
        if messages:
            sample = {**sample, "messages": messages}
        row = super().__call__(sample, inference)
        images = []
        aspect_ratios = []
        for message in messages:
            for image in message.get_media():
                tiles = self.transform_image({"image": image})
                images.append(tiles["image"])
                aspect_ratios.append(tiles["aspect_ratio"])
        encoder_input = {"images": images, "aspect_ratio": aspect_ratios}
        return self.xattn_mask({**row, "encoder_input": encoder_input})

    def tokenize_messages(self, messages: Any, **kwargs: Any) -> tuple[list[int], list[bool]]:
        """Tokenize as :class:`~torchtune.models.llama3.Llama3Tokenizer`; raises ``DataError`` if it cuts off images."""
        messages = as_messages(messages)
        tokens, mask = super().tokenize_messages(messages, **kwargs)
        num_images = sum(len(message.get_media()) for message in messages)
        num_cut_off = num_images - tokens.count(self.image_id)
        if num_cut_off:
            raise DataError(
                f"max_seq_len={self.max_seq_len} cuts off {num_cut_off} of the row's {num_images} images: raise it"
            )
        # Image tokens are masked in all turns, because the output projection has no row for them.
        return tokens, [masked or token == self.image_id for token, masked in zip(tokens, mask, strict=True)]


def llama3_2_vision_transform(
    path: str,
    max_seq_len: int | None = 8192,
    image_size: int = 560,
    special_tokens_path: str | None = None,
    prompt_template: TemplateType | None = None,
) -> Llama3VisionTransform:
    """Build the transform of Llama 3.2 Vision: patches of 14 pixels, up to 4 tiles per image.

    Args:
        path: path of Meta's ``tokenizer.model``.
        max_seq_len: maximum number of tokens; ``None``: no truncation.
        image_size: width and height of a tile, in pixels; must be the model's.
        special_tokens_path: path of a ``tokenizer.json`` with special tokens that replace Llama 3's.
        prompt_template: dotted path of a template, or a mapping role -> [text before, text after].

    Raises:
        DataError: a file is missing or broken.
    """
    return Llama3VisionTransform(
        path,
        tile_size=image_size,
        patch_size=14,
        max_num_tiles=4,
        special_tokens_path=special_tokens_path,
        max_seq_len=max_seq_len,
        image_mean=CLIP_MEAN,
        image_std=CLIP_STD,
        prompt_template=prompt_template,
    )
