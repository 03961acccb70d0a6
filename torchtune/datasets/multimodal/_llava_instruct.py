"""LLaVA-Instruct dataset."""

from collections.abc import Callable, Mapping
from typing import Any

from torchtune.data import Transform
from torchtune.datasets._packed import PackedDataset
from torchtune.datasets._row_source import LOADERS, Source, _suffix
from torchtune.datasets._sft import SFTDataset
from torchtune.datasets.multimodal._multimodal import multimodal_chat_dataset


def llava_instruct_dataset(
    model_transform: Transform,
    *,
    source: Source = "liuhaotian/LLaVA-Instruct-150K",
    image_dir: str = "coco/train2017/",
    column_map: Mapping[str, str] | None = None,
    new_system_prompt: str | None = None,
    packed: bool = False,
    filter_fn: Callable[..., bool] | None = None,
    split: str = "train",
    data_files: Any = "llava_instruct_150k.json",
    **load_dataset_kwargs: Any,
) -> SFTDataset | PackedDataset:
    """Build the LLaVA-Instruct dataset: ShareGPT conversations with ``<image>`` in the text, about COCO images.

    The images are not included: download and unpack http://images.cocodataset.org/zips/train2017.zip. Arguments: see
    :func:`multimodal_chat_dataset`.

    Raises:
        DataError: ``image_dir`` does not exist, or no row has an image; see :class:`SFTDataset`.
    """
    if not isinstance(source, str) or _suffix(source) in LOADERS:  # source is the file or the rows
        data_files = None
    return multimodal_chat_dataset(
        model_transform,
        source=source,
        column_map=column_map,
        new_system_prompt=new_system_prompt,
        packed=packed,
        image_tag="<image>",
        image_dir=image_dir,
        filter_fn=filter_fn,
        split=split,
        data_files=data_files,
        **load_dataset_kwargs,
    )
