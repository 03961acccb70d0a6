"""Shared code of the builders of image datasets."""

from pathlib import Path
from typing import Any

from torchtune.data import DataError, Transform
from torchtune.datasets._packed import PackedDataset
from torchtune.datasets._preview import is_preview
from torchtune.datasets._row_source import Source
from torchtune.datasets._sft import SFTDataset
from torchtune.datasets._sft_builder import pack_length


def image_dataset(
    model_transform: Any, source: Source, message_transform: Transform, *, packed: bool = False, **settings: Any
) -> SFTDataset | PackedDataset:
    """Build a dataset of rows with images, which are transformed when they are read.

    Raises:
        DataError: ``streaming`` is set, or no row has an image; see :class:`SFTDataset` and :class:`PackedDataset`.
    """
    if settings.get("streaming"):
        raise DataError("streaming=True is not possible with images: leave streaming out.")
    length = pack_length(model_transform) if packed else None
    dataset = SFTDataset(
        source=source, message_transform=message_transform, model_transform=model_transform, **settings
    )
    if dataset.num_images == 0 and not is_preview():
        raise DataError(
            f"{dataset.source}: no row has an image: set column_map to the column of the images, or use a dataset of "
            "text."
        )
    return dataset if length is None else PackedDataset(dataset, max_seq_len=length)


def folder_of(image_dir: str | Path | None) -> Path | None:
    """Return the folder of the images; raise :class:`DataError` if it does not exist."""
    if image_dir is None:
        return None
    folder = Path(image_dir).expanduser()
    if not folder.is_dir():
        where = "" if folder.is_absolute() else f" (in {Path.cwd()})"
        raise DataError(f"There is no folder {image_dir}{where}: set image_dir to that of the images.")
    return folder
