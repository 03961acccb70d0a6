"""Visual question answering datasets."""

from collections.abc import Mapping
from typing import Any

from torchtune.data import InputOutputToMessages, Transform
from torchtune.datasets._packed import PackedDataset
from torchtune.datasets._row_source import Source
from torchtune.datasets._sft import SFTDataset
from torchtune.datasets.multimodal._image_builder import folder_of, image_dataset


def vqa_dataset(
    model_transform: Transform,
    *,
    source: Source,
    image_dir: str | None = None,
    column_map: Mapping[str, str] | None = None,
    new_system_prompt: str | None = None,
    split: str = "train",
    **settings: Any,
) -> SFTDataset | PackedDataset:
    """Build a dataset of questions about images; the image precedes the question, the answer is trained on.

    Images and other arguments: see :func:`multimodal_chat_dataset`.

    Args:
        column_map: columns of ``input``, ``output`` and ``image``; by default the same names.

    Raises:
        DataError: ``image_dir`` does not exist, or no row has an image; see :class:`SFTDataset`.

    Example:
        >>> from PIL import Image
        >>> def transform(sample):
        ...     images = [image.size for message in sample["messages"] for image in message.get_media()]
        ...     return {"tokens": [1, 2], "mask": [True, False], "sizes": images}
        >>> rows = [{"input": "What?", "output": "a cat", "image": Image.new("RGB", (4, 3))}]
        >>> torchtune.datasets.multimodal.vqa_dataset(transform, source=rows)[0]["sizes"]
        [(4, 3)]
    """
    columns = {"image": "image", **column_map} if column_map else {name: name for name in ("input", "output", "image")}
    transform = InputOutputToMessages(
        column_map=columns, new_system_prompt=new_system_prompt, image_dir=folder_of(image_dir)
    )
    return image_dataset(model_transform, source, transform, split=split, **settings)
