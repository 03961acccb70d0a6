"""Images of a batch: their patches in one list without padding, and the cache of their features."""

import hashlib
import logging
import shutil
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from torchtune.data._images import is_url, open_image
from torchtune.data._messages import Video
from torchtune.data._rows import DataError
from torchtune.utils import WriteError, atomic_write, convert_os_errors, get_logger, log_once

Grid = tuple[int, int, int]  # frames, rows and columns of patches


class CachedImage(NamedTuple):
    """Image of a batch, with its cached features or the file to cache them in.

    Attributes:
        path: file with the features.
        grids: frames, rows and columns of patches, for each part of the image.
        features: ``[rows, values]``; None if they are not cached yet. The batch then has the image's pixels.
        least_free: minimum number of bytes to leave free on the disk.
    """

    path: Path
    grids: tuple[tuple[int, int, int], ...]
    features: Tensor | None
    least_free: int

    def write(self, features: Tensor) -> None:
        """Write the features to the file, unless fewer than ``least_free`` bytes are free."""
        from safetensors.torch import save

        problem = "half of the space is used that was free when the run started"
        if shutil.disk_usage(self.path.parent).free >= self.least_free:
            features = features.cpu().contiguous()
            try:
                with atomic_write(self.path) as file:
                    file.write(save({"features": features}, {"crc32": str(_checksum(features))}))
                return
            except WriteError as error:
                problem = error.fact
        log_once(get_logger(), f"image_cache: {problem}, no image is added.", logging.WARNING)


class ImageCache:
    """Folder of image features from one vision tower, by content of the image.

    The cache uses at most half of the disk space that is free when it is opened.

    Args:
        folder: folder of the files; created if missing.
        made_by: everything besides the image that the features depend on, such as the image processor.

    Raises:
        WriteError: the folder cannot be created.
    """

    def __init__(self, folder: Path, made_by: Any) -> None:
        with convert_os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._least_free = shutil.disk_usage(folder).free // 2
        self._made_by = repr(made_by)

    def find(self, image: Any, grids: tuple[tuple[int, int, int], ...]) -> CachedImage:
        """Return the image with its cached features; they are None if the file is missing or damaged.

        Args:
            image: see :func:`open_image`.
            grids: frames, rows and columns of patches, for each part of the image.
        """
        from safetensors import SafetensorError, safe_open

        digest = hashlib.sha256(self._made_by.encode())
        for part in _content(image):
            digest.update(part)
        path = self.folder / f"{digest.hexdigest()}.safetensors"
        features = None
        try:
            with safe_open(path, framework="pt") as file:
                stored = file.get_tensor("features")
                checksum = file.metadata()["crc32"]
            if checksum == str(_checksum(stored)):
                features = stored
        except (OSError, SafetensorError, KeyError, TypeError):
            pass  # missing, damaged or without a checksum: computed and written anew
        return CachedImage(path, grids, features, self._least_free)


def _content(image: Any) -> Iterator[bytes]:
    """Yield the bytes that identify an image: the contents of its file, or else its size and pixels."""
    if isinstance(image, Mapping):  # as the datasets package stores it
        content = image.get("bytes")
        if content is None:
            content = image["path"]
        image = content
    if isinstance(image, Video):
        for frame in image.frames:
            yield from _content(frame)
    elif isinstance(image, bytes | bytearray | memoryview):
        yield image
    elif isinstance(image, str | Path) and not is_url(image):
        yield Path(image).expanduser().read_bytes()
    else:
        pixels = open_image(image)
        yield repr(pixels.size).encode()  # images of other shapes may have the same bytes
        yield pixels.tobytes()


def _checksum(features: Tensor) -> int:
    """Return the CRC-32 of the values of a tensor on the host."""
    return zlib.crc32(features.view(torch.uint8).numpy())


class Colors(NamedTuple):
    """Conversion of pixels to the values of patches.

    Attributes:
        mean: mean of red, green and blue, for values from 0 to 1.
        std: standard deviation of red, green and blue.
        patch_values: number of values of a patch; an image repeats its pixels in each frame of a patch.
        last: whether the values of a patch are ordered by row, column and color (channels last), instead of by color,
            frame, row and column.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    patch_values: int
    last: bool = False

    def values(self, pixels: Tensor) -> Tensor:
        """Convert uint8 ``[p, pixels * 3]`` to float32 ``[p, patch values]``."""
        mean = torch.tensor(self.mean, device=pixels.device)
        std = torch.tensor(self.std, device=pixels.device)
        if self.last:
            values = pixels.float().unflatten(1, (-1, 3)) / 255  # [p, pixels, 3]
            return ((values - mean) / std).flatten(1)
        values = pixels.float().unflatten(1, (3, -1)) / 255  # [p, 3, pixels]
        normalized = (values - mean[:, None]) / std[:, None]
        return self.repeat(normalized.flatten(1))

    def repeat(self, pixels: Tensor) -> Tensor:
        """Repeat an image's pixels ``[p, pixels * 3]`` once per frame of a patch; a video's already have all frames."""
        num_frames = self.patch_values // pixels.shape[1]
        by_color = pixels.unflatten(1, (3, 1, -1))  # [p, 3, frame, pixels]
        return by_color.expand(-1, -1, num_frames, -1).flatten(1)


@dataclass(frozen=True)
class Images:
    """Images of a batch, for vision-language models with image tokens in the text sequence.

    Attributes:
        pixels: patches of all images, ``[p, patch values]``, or with ``colors`` their pixels, uint8
            ``[p, pixels * 3]``. The patches of an image are ordered by block: ``merge`` x ``merge`` patches that
            become one token are consecutive.
        grids: frames, rows and columns of patches of every image, on the host.
        places: int64 ``[n]``, indices of the image tokens in the flattened ``b * s`` positions; None finds them by
            token id.
        positions: int64 ``[3, b, s]``, position of each token in time, rows and columns, for models with M-RoPE; None
            computes them.
        features: int64 ``[n]``, index of the vision tower's output for each of the ``places``; by default in order.
        colors: conversion of ``pixels`` to patch values; None if ``pixels`` already holds patch values. For Qwen, uint8
            pixels take an eighth of the memory of patch values.
        cached: the batch's images, if vision features are cached; ``pixels`` then holds only the patches of images
            without cached features.

    Example:
        >>> images = torchtune.data.Images(torch.zeros(4 + 16, 12), ((1, 2, 2), (1, 4, 4)))
        >>> images.frame_lengths
        [4, 16]
    """

    pixels: Tensor
    grids: tuple[Grid, ...]
    places: Tensor | None = None
    positions: Tensor | None = None
    features: Tensor | None = None
    colors: Colors | None = None
    cached: tuple[CachedImage, ...] = ()

    def __post_init__(self) -> None:
        num_patches = sum(self.frame_lengths)
        if num_patches != len(self.pixels):
            raise DataError(f"Images have {len(self.pixels)} patches, but their grids have {num_patches}.")

    @property
    def patches(self) -> Tensor:
        """Values of all patches, ``[p, patch values]``."""
        if self.colors is None:
            return self.pixels
        return self.colors.values(self.pixels)

    @property
    def missing(self) -> list[CachedImage]:
        """Images in ``cached`` without features."""
        return [image for image in self.cached if image.features is None]

    @property
    def pixel_grids(self) -> tuple[Grid, ...]:
        """Grids of the images that have ``pixels``."""
        if not self.cached:
            return self.grids
        return tuple(chain.from_iterable(image.grids for image in self.missing))

    @property
    def frame_lengths(self) -> list[int]:
        """Number of patches of every frame of every image that has ``pixels``."""
        lengths: list[int] = []
        for frames, rows, columns in self.pixel_grids:
            lengths += [rows * columns] * frames
        return lengths

    @property
    def offset(self) -> int:
        """Offset of text after these images, in one row with one document: position = index + offset."""
        if self.positions is None:
            return 0
        next_position = int(self.positions[:, 0, -1].max()) + 1
        return next_position - self.positions.shape[2]

    def pad_positions(self, num_padding: int) -> "Images":
        """Return the images of a row that is followed by ``num_padding`` positions of text."""
        if self.positions is None:
            return self
        return replace(self, positions=F.pad(self.positions, (0, num_padding)))

    def split_positions(self, first: int, end: int) -> "Images":
        """Return the images for the positions ``first`` to ``end`` (exclusive) of a row: all, with their tokens there.

        Images are not divided: the vision tower encodes all of them, and ``features`` says which outputs are used.
        """
        is_in_shard = (self.places >= first) & (self.places < end)
        features = self.features
        if features is None:  # the outputs of the tower, in order
            features = torch.arange(len(self.places))
        positions = None
        if self.positions is not None:
            positions = self.positions[:, :, first:end].contiguous()  # [3, 1, s / size]
        places = self.places[is_in_shard] - first
        return replace(self, places=places, features=features[is_in_shard], positions=positions)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Images":
        """Copy the tensors to a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Images":
        """Copy the tensors to pinned memory."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Images":
        """Apply a function to all tensors, those of cached features included."""
        tensors = {name: function(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        cached = []
        for image in self.cached:
            if image.features is not None:
                image = image._replace(features=function(image.features))
            cached.append(image)
        return replace(self, **tensors, cached=tuple(cached))


def join_pixels(parts: Sequence[Tensor], colors: Colors | None) -> Tensor:
    """Concatenate the pixels of images and videos; if there are videos, images repeat theirs per frame of a patch."""
    parts = [part for part in parts if len(part)]
    if not parts:
        return torch.empty(0, 0, dtype=torch.uint8)
    width = max(part.shape[1] for part in parts)
    same_width = []
    for part in parts:
        if part.shape[1] < width:  # of an image beside a video
            part = colors.repeat(part)
        same_width.append(part)
    return torch.cat(same_width)


def join_images(documents: Sequence[Images | None], lengths: Sequence[int]) -> Images | None:
    """Join the images of concatenated documents; None if there are no images.

    Documents with the same pixels, such as answers to one prompt, share them: the vision tower encodes them once.

    Args:
        documents: images of each document, as returned by :class:`torchtune.models.ImageTextTransform`.
        lengths: length of each document; may exceed the length for which ``positions`` were computed.
    """
    distinct: dict[int, Images] = {}  # by the identity of their pixels
    first_feature: dict[int, int] = {}
    num_features = 0
    image_tokens: list[Tensor] = []
    features: list[Tensor] = []
    starts = accumulate(lengths, initial=0)
    for images, start in zip(documents, starts, strict=False):  # the last of the starts is the end of the batch
        if images is None:
            continue
        key = id(images.pixels)
        if key not in distinct:
            distinct[key] = images
            first_feature[key] = num_features
            num_features += len(images.places)
        image_tokens.append(images.places + start)
        features.append(torch.arange(len(images.places)) + first_feature[key])
    if not distinct:
        return None
    encoded = list(distinct.values())
    colors = encoded[0].colors  # those of the model, as is whether there are positions
    positions = None
    if encoded[0].positions is not None:
        positions = torch.cat(list(map(_positions, documents, lengths)), dim=2)  # [3, 1, s]
    joined_features = None
    if len(features) > len(encoded):  # some documents share their images
        joined_features = torch.cat(features)
    return Images(
        pixels=join_pixels([images.pixels for images in encoded], colors),
        grids=tuple(chain.from_iterable(images.grids for images in encoded)),
        places=torch.cat(image_tokens),
        positions=positions,
        features=joined_features,
        colors=colors,
        cached=tuple(chain.from_iterable(images.cached for images in encoded)),
    )


def _positions(images: Images | None, length: int) -> Tensor:
    """Return positions ``[3, 1, length]`` of a document's tokens."""
    if images is None:
        return torch.arange(length).expand(3, 1, length)
    computed = images.positions[:, :, :length]  # a row may have been cut, or followed by text
    following_text = torch.arange(computed.shape[2], length, device=computed.device) + images.offset
    return torch.cat([computed, following_text.expand(3, 1, -1)], dim=2)


def token_counts(grids: Sequence[Grid], merge: int) -> list[int]:
    """Return the number of tokens of every image; ``merge`` x ``merge`` patches become one token."""
    return [frames * rows * columns // merge**2 for frames, rows, columns in grids]


def check_placeholders(tokens: Sequence[int], image_tokens: Collection[int], grids: Sequence[Grid], merge: int) -> None:
    """Check that a document has one placeholder token per image token.

    Raises:
        DataError: the numbers of placeholders and image tokens differ.
    """
    num_placeholders = int(np.isin(np.asarray(tokens), list(image_tokens)).sum())
    num_image_tokens = sum(token_counts(grids, merge))
    if num_image_tokens != num_placeholders:
        raise DataError(
            f"a row has {num_placeholders} image tokens, but its {len(grids)} image(s) become {num_image_tokens}: each "
            "image needs its own placeholder, which must not be cut off"
        )


def grid_positions(
    tokens: Sequence[int],
    image_tokens: Collection[int],
    grids: Sequence[Grid],
    merge: int,
    steps: Sequence[float] | None = None,
) -> np.ndarray:
    """Compute the positions of a document's tokens in time, rows and columns (M-RoPE of Qwen 2.5-VL and Qwen 3-VL).

    A text token advances all three by one. With p the next free position, a token of a frame is at
    (p, p + row, p + column), and the next text token or frame starts at p + max(rows, columns). The frames of a video
    with a step all start at the same p, and frame f is at time p + int(f * step).

    Args:
        tokens: token ids of the document.
        image_tokens: ids of image and video placeholders.
        grids: grids of the document's images and videos, in order.
        merge: rows and columns of patches that become one token.
        steps: for each grid, the time from one frame of a video to the next; the frames then share row and column
            positions. 0, the default, treats each frame as an image.

    Returns:
        int64 ``[3, s]``.

    Raises:
        DataError: the placeholders do not match the grids.
    """
    check_placeholders(tokens, image_tokens, grids, merge)
    is_image = np.isin(np.asarray(tokens), list(image_tokens))
    positions = np.empty((3, len(is_image)), np.int64)
    index = 0  # of the next token
    position = 0  # the next free one
    for (frames, height, width), step in zip(grids, steps or [0.0] * len(grids), strict=True):
        rows = height // merge
        columns = width // merge
        # In float32, as transformers computes the times.
        times = (np.arange(frames, dtype=np.float32) * np.float32(step)).astype(np.int64)
        if step:  # all frames of a video start at the same position
            blocks = [times]
        else:
            blocks = np.split(times, frames)
        for block_times in blocks:
            start = index + int(np.argmax(is_image[index:]))  # the next image token: the check above counts them
            num_text = start - index
            positions[:, index:start] = np.arange(position, position + num_text)
            position += num_text
            index = start + len(block_times) * rows * columns
            if not is_image[start:index].all():
                raise DataError(f"a row has text inside the {index - start} tokens of an image")
            axes = np.meshgrid(block_times, np.arange(rows), np.arange(columns), indexing="ij")
            positions[:, start:index] = position + np.reshape(axes, (3, -1))
            position += max(rows, columns)
    positions[:, index:] = np.arange(position, position + len(is_image) - index)
    return positions
