"""Transform of vision-language models: converts text and images of a conversation to tokens and patches."""

from array import array
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from torchtune.data import (
    DataError,
    Grid,
    ImageCache,
    Images,
    Message,
    MessageLike,
    Video,
    as_messages,
    check_placeholders,
    each_image,
    grid_positions,
    image_size,
    join_pixels,
    open_image,
    read_tool_calls,
    truncate_row,
)
from torchtune.models._description import ImageTextDescription, ModelError
from torchtune.models._hf_fields import architecture_of
from torchtune.models._image_processors import ImageProcessor, Plan
from torchtune.models._spec import spec_for_architecture
from torchtune.tokenizers import HuggingFaceModelTokenizer, hf_tokenizer
from torchtune.utils import read_json

_UNLIMITED = 2**62  # tokens; fits in an int64
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


class ImageEncoder:
    """Base class of tokenizers that also convert images to patches.

    Attributes:
        image_tokens: ids of image tokens.
        processor: image processor of the family.
        image_cache: cache of image features; images with cached features are not decoded.
    """

    takes_images = True
    gives_patches = True  # collate_documents batches its rows
    image_tokens: tuple[int, ...]
    processor: ImageProcessor
    image_cache: ImageCache | None = None
    _has_grid_positions = False

    def encode_images(self, messages: Sequence[MessageLike], tokens: Sequence[int]) -> dict[str, Any]:
        """Return ``{"encoder_input": ...}`` with the images of a tokenized conversation; empty without images.

        Raises:
            DataError: an image cannot be read.
        """
        media = _media_of(as_messages(messages))
        if not media:
            return {}
        plans = each_image(self.plan, media)
        grids: tuple[Grid, ...] = ()  # of all images: one for each part of an image
        steps: list[float] = []  # for each grid, the time between its frames
        for plan in plans:
            grids += plan.grids
            steps += [plan.step] * len(plan.grids)
        cached: list[Any] = []
        media_to_read = list(media)
        if self.image_cache is not None:
            for index, plan in enumerate(plans):
                # Without features, the entry is where the vision tower writes them.
                cached.append(self.image_cache.find(media[index], plan.grids))
                if cached[index].features is not None:
                    media_to_read[index] = None  # an image with cached features is not decoded
        pixels = join_pixels(each_image(self._pixels, media_to_read), self.processor.colors)
        merge = self.processor.merge
        check_placeholders(tokens, self.image_tokens, grids, merge)
        # Where the row has image tokens: the model replaces their embeddings by the images' features.
        indices = torch.from_numpy(np.flatnonzero(np.isin(tokens, self.image_tokens)))
        positions = None
        if self._has_grid_positions:  # M-RoPE: int64 [3, 1, s]
            positions = torch.from_numpy(grid_positions(tokens, self.image_tokens, grids, merge, steps))[:, None]
        images = Images(pixels, grids, indices, positions, colors=self.processor.colors, cached=tuple(cached))
        return {"encoder_input": {"images": images}}

    def _pixels(self, image: Any) -> torch.Tensor:
        """Return the pixels of an image's patches; no pixels for None."""
        if image is None:
            return torch.empty(0, 0, dtype=torch.uint8)
        return torch.from_numpy(self.processor.pixels(open_image(image)))

    def plan(self, image: Any) -> Plan:
        """Return sizes and number of tokens of an image or a video, from the header of its files."""
        if isinstance(image, Video) and not self.processor.video_placeholder:
            raise DataError("the model takes images, but no videos: give frames as images")
        return self.processor.plan(image_size(image))


class ImageTextTransform(ImageEncoder, HuggingFaceModelTokenizer):
    """Tokenizer and image processor of a vision-language checkpoint.

    The chat template writes a placeholder for each image or video, which is replaced by the image's tokens. Image
    tokens are never trained on. Rows in which ``max_seq_len`` would cut off image tokens raise an error.

    Args:
        tokenizer_json_path: ``tokenizer.json``.
        description: description of the model.
        processor: image processor of the family.
        **options: see :class:`~torchtune.tokenizers.HuggingFaceModelTokenizer`.

    Raises:
        DataError: a file is missing or broken, or the tokenizer lacks the placeholder.

    Example:
        >>> isinstance(tokenizer, torchtune.models.ImageTextTransform)
        False
    """

    def __init__(
        self, tokenizer_json_path: str, description: ImageTextDescription, processor: ImageProcessor, **options: Any
    ) -> None:
        super().__init__(tokenizer_json_path, **options)
        self.image_tokens = description.image_tokens
        self._has_grid_positions = bool(description.rope_axes)
        self.processor = processor
        placeholder_id = self.special_tokens.get(processor.placeholder)
        self._placeholders = self.image_tokens if placeholder_id is None else (placeholder_id,)
        if self._placeholders[0] not in self.special_tokens.values():
            raise DataError(
                f"{tokenizer_json_path} has no special token {self._placeholders[0]}, the image token of config.json: "
                "they are of different models."
            )

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        """Replace ``messages`` by tokens and images.

        Args:
            sample: sample with ``messages``; for the types of images see :func:`torchtune.data.open_image`.
            inference: leave the last turn open, for a model to continue.

        Returns:
            The sample with ``tokens`` and ``mask`` and, if there are images, ``encoder_input`` with ``images``, the
            :class:`torchtune.data.Images` of the row.

        Raises:
            DataError: the chat template rejects the messages, an image cannot be read, or ``max_seq_len`` would cut
                off image tokens.
        """
        sample = dict(sample)
        messages = as_messages(sample.pop("messages"))
        tokens, mask = self.tokenize_messages(messages, not inference, tools=sample.pop("tools", None))
        return {**sample, "tokens": tokens, "mask": mask, **self.encode_images(messages, tokens)}

    def _turn(self, message: Message) -> dict[str, Any]:
        """Convert a message to the template's dict, with a part for each text, image and video.

        Control tokens in the texts are hidden, so that they are encoded as plain text.
        """
        if not message.contains_media:
            return super()._turn(message)
        if message.role == "assistant":
            raise DataError("a turn of the assistant holds an image, which the model cannot write: move it to the user")
        parts = []
        for item in message.content:
            if item["type"] == "image":
                parts.append({"type": "image"})
            elif item["type"] == "video":
                # As a text, the placeholder comes without the tokens that templates write around a video.
                parts.append({"type": "text", "text": self.processor.video_placeholder})
            else:
                parts.append({"type": "text", "text": self._control_tokens.hide(item["content"])})
        role = "tool" if message.role == "ipython" else message.role  # as templates call it
        extra = dict(message.extra)
        if "tool_calls" in extra:  # arguments that are a JSON text become an object
            extra["tool_calls"] = read_tool_calls(extra["tool_calls"] or [])
        return {"role": role, "content": parts, **self._control_tokens.hide(extra)}

    def _tokenized(
        self, messages: Sequence[MessageLike], closed: bool, max_seq_len: int | None, tools: Sequence[Any] | None
    ) -> tuple[Any, Any]:
        """Tokenize a conversation, and replace each placeholder by the tokens of its image or video."""
        prepared = []
        for message in as_messages(messages):
            if message.contains_media:  # never trained on, whatever the row says
                message = copy(message)  # the caller's message is not changed
                message.masked = True
            prepared.append(message)
        # Images are longer than their placeholders: the row is cut below.
        tokens, mask = super()._tokenized(prepared, closed, _UNLIMITED, tools)
        media = _media_of(prepared)
        plans = iter(each_image(self.plan, media))
        num_placeholders = sum(token in self._placeholders for token in tokens)
        if num_placeholders != len(media):
            raise DataError(f"the chat template writes {num_placeholders} placeholders for {len(media)} image(s)")
        row = array("i")  # compact, because rows with images are long
        row_mask = bytearray()  # 1: masked
        for token, masked in zip(tokens, mask, strict=True):
            if token not in self._placeholders:
                row.append(token)
                row_mask.append(masked)
                continue
            image_layout = self.processor.layout(next(plans))
            if isinstance(image_layout, str):
                image_layout = self.encode(image_layout, add_bos=False, add_eos=False)
            row.extend(image_layout)
            row_mask.extend([True] * len(image_layout))
        limit = max_seq_len or self.max_seq_len
        eos_id = self.eos_id if closed else None  # an open row, which a model continues, gets no end
        cut, cut_mask = truncate_row(row, row_mask, limit, self.truncation_type, eos_id, self._turn_end_ids)
        num_cut_off = sum(row.count(token) - cut.count(token) for token in self.image_tokens)
        if num_cut_off:
            raise DataError(
                f"max_seq_len={limit} would cut {num_cut_off} tokens of images off a row of {len(row)}: raise it"
            )
        return cut, cut_mask


def _media_of(messages: Sequence[Message]) -> list[Any]:
    """Return the images and videos of messages, in order."""
    media: list[Any] = []
    for message in messages:
        media += message.get_media()
    return media


def checkpoint_tokenizer(model: nn.Module, path: str | Path) -> HuggingFaceModelTokenizer:
    """Load the tokenizer of a Hugging Face checkpoint; for a vision-language model, also its image processor.

    Args:
        model: the model, from :func:`torchtune.models.from_hf_config`.
        path: folder of the checkpoint.

    Raises:
        DataError: a file is missing or broken.
    """
    spec = getattr(model, "spec", None)
    if spec is None or spec.image_processor is None:
        return hf_tokenizer(str(path))
    return image_text_transform(str(path))


def image_text_transform(path: str, max_seq_len: int | None = None, **options: Any) -> ImageTextTransform:
    """Load the tokenizer, chat template and image processor of a vision-language Hugging Face checkpoint.

    Args:
        path: folder of the checkpoint.
        max_seq_len: maximum row length in tokens; rows in which it would cut off image tokens raise an error.
        **options: see :class:`~torchtune.tokenizers.HuggingFaceModelTokenizer`.

    Raises:
        DataError: a file is missing or broken, or the model is a text model.
    """
    folder = Path(path).expanduser()
    config = read_json(folder / "config.json", DataError)
    try:
        spec = spec_for_architecture(architecture_of(config) or "")
        description = spec.from_hf_config(config)
    except ModelError as error:
        raise DataError(f"{folder}: {error}") from error
    if spec.image_processor is None:
        raise DataError(f"{folder} has a model of text ({spec.name}): use torchtune.tokenizers.hf_tokenizer.")
    files = [folder / name for name in _PROCESSOR_FILES if (folder / name).is_file()]
    if not files:
        raise DataError(f"{folder} has no {_PROCESSOR_FILES[0]}, which says how images are resized: download it again.")
    settings = read_json(files[0], DataError)
    for name in ("image_processor", "video_processor"):
        if not isinstance(settings.get(name, {}), dict):
            raise DataError(f"{files[0]}: {name} is not an object: download it again.")
    # processor_config.json of transformers 5 nests the settings of the image processor.
    settings |= settings.get("image_processor", {})
    video_settings = settings.pop("video_processor", None)
    video_source = f"{files[0]}: video_processor"
    video_file = folder / "video_preprocessor_config.json"
    if video_file.is_file():
        video_settings = read_json(video_file, DataError)
        video_source = str(video_file)
    # First without videos, so that the error names the file of a setting that is not supported.
    source = str(files[0])
    try:
        processor = spec.image_processor(settings, config)
        if video_settings:
            source = video_source
            processor = spec.image_processor({**settings, "video_processor": video_settings}, config)
    except DataError as error:
        raise DataError(f"{source}: {error}") from error
    if processor.merge != description.vision.merge or processor.patch_size != description.vision.patch_size:
        raise DataError(f"{folder}: {files[0].name} and config.json have patches of different sizes.")
    path = str(folder / "tokenizer.json")
    return ImageTextTransform(path, description, processor, max_seq_len=max_seq_len, **options)
