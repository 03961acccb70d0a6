"""LLaVA-Instruct dataset."""

from typing import Any

from torchtune.data import Transform
from torchtune.datasets._file_formats import suffix_of
from torchtune.datasets._packed import PackedDataset
from torchtune.datasets._row_source import LOADERS, Source
from torchtune.datasets._sft import SFTDataset
from torchtune.datasets.multimodal._multimodal import multimodal_chat_dataset


def llava_instruct_dataset(
    model_transform: Transform,
    *,
    source: Source = "liuhaotian/LLaVA-Instruct-150K",
    image_dir: str = "coco/train2017/",
    data_files: Any = "llava_instruct_150k.json",
    **settings: Any,
) -> SFTDataset | PackedDataset:
    """Build the LLaVA-Instruct dataset: ShareGPT conversations with ``<image>`` in the text, about COCO images.

    The images are not included: download and unpack http://images.cocodataset.org/zips/train2017.zip. Other arguments:
    see :func:`multimodal_chat_dataset`.

    Raises:
        DataError: ``image_dir`` does not exist, or no row has an image; see :class:`SFTDataset`.
    """
    if not isinstance(source, str) or suffix_of(source) in LOADERS:  # source is the file or the rows
        data_files = None
    return multimodal_chat_dataset(
        model_transform, source=source, image_tag="<image>", image_dir=image_dir, data_files=data_files, **settings
    )
