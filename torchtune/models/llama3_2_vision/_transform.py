"""Text and images of Llama 3.2 Vision to tokens, tiles and masks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchtune.data import DataError, PromptTemplateInterface, as_messages
from torchtune.data._prompt_templates import TemplateType, get_prompt_template
from torchtune.models.clip._transform import CLIP_MEAN, CLIP_STD, CLIPImageTransform
from torchtune.models.llama3._tokenizer import Llama3Tokenizer
from torchtune.modules.transforms import VisionCrossAttentionMask
from torchtune.modules.transforms.tokenizers import parse_hf_tokenizer_json


class Llama3VisionTransform(Llama3Tokenizer):
    """Llama 3's tokenizer, with the images of the conversation beside the tokens.

    ``<|image|>`` stands for an image. A row that ``max_seq_len`` would cut images off is refused; text is cut at its
    end, as :class:`~torchtune.models.llama3.Llama3Tokenizer` does.

    Args:
        path: Meta's ``tokenizer.model``.
        tile_size: side of a tile, in pixels.
        patch_size: side of a patch, in pixels.
        max_num_tiles: most tiles of an image.
        special_tokens_path: a ``tokenizer.json`` with special tokens that replace Llama 3's.
        max_seq_len: longest row, in tokens; ``None`` does not cut.
        image_mean: mean of red, green and blue; ``None``: CLIP's, or no normalisation without ``image_std`` either.
        image_std: their standard deviation.
        prompt_template: texts added to the turns before the layout.
        dtype: of the tiles.

    Attributes:
        image_seq_len: positions of the encoder per image of ``max_num_tiles`` tiles.
        transform_image: :class:`~torchtune.models.clip.CLIPImageTransform`.

    Raises:
        DataError: a file is missing or broken, lacks ``<|image|>``, or see
            :class:`~torchtune.models.clip.CLIPImageTransform`.
    """

    # Its tokenize_messages needs no pixels: datasets check and measure rows before images are read.
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
        self.max_num_tiles, self.patch_size, self.tile_size = max_num_tiles, patch_size, tile_size
        self.transform_image = CLIPImageTransform(
            image_mean=image_mean,
            image_std=image_std,
            tile_size=tile_size,
            max_num_tiles=max_num_tiles,
            dtype=dtype,
        )
        self.xattn_mask = VisionCrossAttentionMask(tile_size, patch_size, self.image_id)
        self.image_seq_len = max_num_tiles * (self.xattn_mask.patches_per_tile + 1)

    @property
    def tokenizer(self) -> "Llama3VisionTransform":
        """Itself: evaluation recipes of earlier releases read it."""
        return self

    @property
    def vocab_size(self) -> int:
        """Largest token id plus 1, that of ``<|image|>`` included."""
        return max(super().vocab_size, self.image_id + 1)

    def fingerprint_parts(self) -> dict[str, Any]:
        """What the tokens of a row depend on: not how images are resized."""
        return {name: value for name, value in vars(self).items() if name not in ("transform_image", "xattn_mask")}

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        """Replace ``messages`` by tokens and images.

        Args:
            sample: has ``messages``; the content of an image is a Pillow image, a path, an address, or a tensor
                ``[c, height, width]``.
            inference: leave the last turn open, for a model to continue.

        Returns:
            the sample with ``tokens``, ``mask`` (True = not trained on), ``encoder_input`` and ``encoder_mask``.
            ``encoder_input`` has lists: ``images``, of ``[tiles, 3, tile_size, tile_size]``, and ``aspect_ratio``, of
            int64 ``[2]``. ``encoder_mask`` is a list of bool ``[s, tiles * (patches + 1)]``. Text has empty lists.

        Raises:
            DataError: the messages do not fit the prompt layout, an image cannot be read, or ``max_seq_len`` would cut
                off an image.
        """
        messages = as_messages(sample["messages"]) if "messages" in sample else []
        sample = super().__call__({**sample, **({"messages": messages} if messages else {})}, inference)
        found = [self.transform_image({"image": image}) for message in messages for image in message.get_media()]
        images = {"images": [one["image"] for one in found], "aspect_ratio": [one["aspect_ratio"] for one in found]}
        return self.xattn_mask({**sample, "encoder_input": images})

    def tokenize_messages(self, messages: Any, **kwargs: Any) -> tuple[list[int], list[bool]]:
        """As :class:`~torchtune.models.llama3.Llama3Tokenizer`; a :class:`DataError` if images would be cut off."""
        messages = as_messages(messages)
        tokens, mask = super().tokenize_messages(messages, **kwargs)
        images = sum(len(message.get_media()) for message in messages)
        if lost := images - tokens.count(self.image_id):
            raise DataError(f"max_seq_len={self.max_seq_len} cuts off {lost} of the row's {images} images: raise it")
        # The output layer has no row for the token of an image, whosever turn it is in.
        return tokens, [masked or token == self.image_id for token, masked in zip(tokens, mask, strict=True)]


def llama3_2_vision_transform(
    path: str,
    max_seq_len: int | None = 8192,
    image_size: int = 560,
    special_tokens_path: str | None = None,
    prompt_template: TemplateType | None = None,
) -> Llama3VisionTransform:
    """Transform of Llama 3.2 Vision: patches of 14 pixels, up to 4 tiles per image.

    Args:
        path: Meta's ``tokenizer.model``.
        max_seq_len: longest row, in tokens; ``None`` does not cut.
        image_size: side of a tile, in pixels; that of the model.
        special_tokens_path: a ``tokenizer.json`` with special tokens that replace Llama 3's.
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
