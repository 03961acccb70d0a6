"""Collation of examples with images."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchtune.data._check_shifted import check_shifted
from torchtune.data._collate import documents_of
from torchtune.data._common import CROSS_ENTROPY_IGNORE_IDX, DataError


def padded_collate_tiled_images_and_mask(
    batch: Sequence[Mapping[str, Any]],
    padding_idx: int = 0,
    ignore_idx: int = CROSS_ENTROPY_IGNORE_IDX,
    pad_direction: str = "right",
    pad_max_tiles: int | None = None,
    pad_max_images: int | None = None,
    pad_to_multiple_of: int = 1,
) -> dict[str, Any]:
    """Pad text, images and cross-attention masks to their maximum sizes in the batch.

    A batch can mix rows with and without images. Padding images and tiles are masked out.

    Args:
        batch: examples with ``tokens``, ``labels`` (optional with left padding), ``encoder_input`` with the lists
            ``images``, of ``[tiles, c, h, w]``, and ``aspect_ratio``, of ``[2]``, and ``encoder_mask``, a list of
            ``[s, tiles * (patches + 1)]``.
        padding_idx: padding value of the tokens.
        ignore_idx: padding value of the labels.
        pad_direction: ``"right"``, or ``"left"`` for inference; applies to the text.
        pad_max_tiles: number of tiles per image after padding; by default the maximum of the batch.
        pad_max_images: number of images per row after padding; by default the maximum of the batch.
        pad_to_multiple_of: pad the length of the text to a multiple of this value.

    Returns:
        ``tokens`` and ``labels``, int64 ``[b, s]``. If there is an image, ``encoder_input`` with ``images``
        ``[b, images, tiles, c, h, w]`` and ``aspect_ratio`` ``[b, images, 2]`` (1 x 1 for padding), and
        ``encoder_mask``, bool ``[b, s, images * tiles * (patches + 1)]``.

    Raises:
        DataError: an example lacks a key, its images, masks and aspect ratios differ in number or size, it has more
            images or tiles than the maximum, its labels are not shifted, or ``pad_direction`` is unknown.

    Example:
        >>> image = {"images": [torch.ones(2, 3, 4, 4)], "aspect_ratio": [torch.tensor([1, 2])]}
        >>> mask = [torch.ones(2, 2 * 5, dtype=torch.bool)]
        >>> seen = {"tokens": [9, 1], "labels": [1, 2], "encoder_input": image, "encoder_mask": mask}
        >>> nothing = {"encoder_input": {"images": [], "aspect_ratio": []}, "encoder_mask": []}
        >>> text = {"tokens": [4], "labels": [5], **nothing}
        >>> out = torchtune.data.padded_collate_tiled_images_and_mask([seen, text])
        >>> out["encoder_input"]["images"].shape, out["encoder_mask"].sum(dim=(1, 2))
        (torch.Size([2, 1, 2, 3, 4, 4]), tensor([20,  0]))
    """
    if pad_direction not in ("left", "right"):
        raise DataError(f"pad_direction must be 'left' or 'right', not '{pad_direction}'.")
    with_labels = pad_direction == "right" or "labels" in batch[0]
    for example in batch:
        _check(example, with_labels)
    length = max(len(example["tokens"]) for example in batch)
    length += -length % pad_to_multiple_of
    # Positions of each row's text.
    places = [
        slice(length - len(row["tokens"]), length) if pad_direction == "left" else slice(len(row["tokens"]))
        for row in batch
    ]
    out: dict[str, Any] = {}
    for name, fill in [("tokens", padding_idx), *([("labels", ignore_idx)] if with_labels else [])]:
        out[name] = torch.full((len(batch), length), fill)
        for row, place, example in zip(out[name], places, batch, strict=True):
            row[place] = torch.as_tensor(example[name], dtype=torch.int64)
    if with_labels:
        spans = [(place.start or 0, place.stop) for place in places]
        check_shifted(
            out["tokens"], out["labels"], [n for start, end in spans for n in (start, end - start, length - end)]
        )
    images = [image for example in batch for image in example["encoder_input"]["images"]]
    if not images:
        return out
    num_images = max(len(example["encoder_input"]["images"]) for example in batch)
    num_images = _pad_limit("pad_max_images", pad_max_images, num_images, "images of a row")
    num_tiles = _pad_limit("pad_max_tiles", pad_max_tiles, max(map(len, images)), "tiles of an image")
    mask = next(mask for example in batch for mask in example["encoder_mask"])
    positions = mask.shape[1] // len(images[0])
    # Fill the tensors in place, to avoid a second copy of images and masks.
    pixels = images[0].new_zeros(len(batch), num_images, num_tiles, *images[0].shape[1:])
    ratios = torch.ones(len(batch), num_images, 2, dtype=torch.int64)
    masks = torch.zeros(len(batch), length, num_images, num_tiles, positions, dtype=torch.bool)
    for i, (example, place) in enumerate(zip(batch, places, strict=True)):
        inputs = example["encoder_input"]
        entries = zip(inputs["images"], inputs["aspect_ratio"], example["encoder_mask"], strict=True)
        for j, (image, ratio, mask) in enumerate(entries):
            count = len(image)
            if image.shape[1:] != pixels.shape[3:] or mask.shape != (len(example["tokens"]), count * positions):
                raise DataError(
                    f"An image {tuple(image.shape)} with the mask {tuple(mask.shape)} does not fit the others of the "
                    f"batch, {tuple(images[0].shape)} with {positions} positions a tile."
                )
            pixels[i, j, :count] = image
            ratios[i, j] = torch.as_tensor(ratio)
            masks[i, place, j, :count] = mask.view(len(mask), count, positions)
    out["encoder_input"] = {"images": pixels, "aspect_ratio": ratios}
    out["encoder_mask"] = masks.view(len(batch), length, -1)
    return out


def _check(example: Mapping[str, Any], with_labels: bool) -> None:
    if with_labels:
        documents_of(example)
    inputs = example.get("encoder_input")
    if (
        not isinstance(inputs, Mapping)
        or not {"images", "aspect_ratio"} <= inputs.keys()
        or "encoder_mask" not in example
    ):
        raise DataError(
            f"An example has {', '.join(map(str, example))}, but images need 'encoder_input' with 'images' and "
            "'aspect_ratio', and 'encoder_mask': use the transform of a vision model as the tokenizer."
        )
    counts = [len(inputs["images"]), len(inputs["aspect_ratio"]), len(example["encoder_mask"])]
    if len(set(counts)) > 1:
        raise DataError("An example has {} images, {} aspect ratios and {} masks.".format(*counts))


def _pad_limit(name: str, most: int | None, found: int, what: str) -> int:
    """Return ``most``, by default ``found``. Raises :class:`DataError` if ``found`` is larger."""
    if most is not None and found > most:
        raise DataError(f"{name}={most} is less than the {found} {what} in the batch: raise it.")
    return found if most is None else most
