"""Conversations with images."""

from collections.abc import Callable, Mapping
from typing import Any

from torchtune.data import ShareGPTToMessages, Transform
from torchtune.datasets._load import Source
from torchtune.datasets._sft import SFTDataset
from torchtune.datasets.multimodal._build import folder_of, image_dataset


def multimodal_chat_dataset(
    model_transform: Transform,
    *,
    source: Source,
    column_map: Mapping[str, str] | None = None,
    new_system_prompt: str | None = None,
    packed: bool = False,
    image_tag: str | None = None,
    image_dir: str | None = None,
    filter_fn: Callable[..., bool] | None = None,
    split: str = "train",
    **load_dataset_kwargs: Any,
) -> SFTDataset:
    """Rows with a conversation in ShareGPT's style and its image or images; the assistant's turns are trained on.

    An image is a path, a ``data:`` address, a Pillow image, or the bytes of a file; several are a list. A
    row whose image is null is text.

    Args:
        model_transform: ``messages`` -> ``tokens``, ``mask`` and what a model takes of images: the transform of a
            vision model, or a function of yours, which gets Pillow images in the messages.
        source: a dataset of the hub, a folder, a file, a loader's name (``json``, ``csv``, ``parquet`` …), or rows in
            memory.
        column_map: the columns of ``conversations`` and ``image``; by default those names.
        new_system_prompt: text of a system turn that takes the place of the conversations' own.
        packed: is refused.
        image_tag: placeholder of an image in the text, for example ``<image>``; ``None`` puts the images before the
            text of the first user turn.
        image_dir: folder of the images, if rows have file names.
        filter_fn: rows for which it is false are left out.
        split: split of the dataset, for example ``"train"`` or ``"train[:10%]"``.
        **load_dataset_kwargs: arguments of ``datasets.load_dataset``, for example ``data_files``, and
            ``on_bad_row``.

    Raises:
        DataError: ``packed``; there is no folder ``image_dir``; no row has an image; see :class:`SFTDataset`.

    Example:
        >>> from PIL import Image
        >>> def transform(sample):
        ...     images = [image.size for message in sample["messages"] for image in message.get_media()]
        ...     return {"tokens": [1, 2], "mask": [True, False], "sizes": images}
        >>> turns = [{"from": "human", "value": "<image> What?"}, {"from": "gpt", "value": "a cat"}]
        >>> rows = [{"conversations": turns, "image": Image.new("RGB", (4, 3))}]
        >>> data = torchtune.datasets.multimodal.multimodal_chat_dataset(transform, source=rows, image_tag="<image>")
        >>> data[0]["sizes"]
        [(4, 3)]
    """
    transform = ShareGPTToMessages(
        column_map=column_map,
        new_system_prompt=new_system_prompt,
        image_dir=folder_of(image_dir),
        image_tag=image_tag,
    )
    return image_dataset(
        model_transform, source, transform, packed=packed, filter_fn=filter_fn, split=split, **load_dataset_kwargs
    )
