"""Chat datasets with images."""

from collections.abc import Callable, Mapping
from typing import Any

from torchtune.data import ShareGPTToMessages, Transform
from torchtune.datasets._packed import PackedDataset
from torchtune.datasets._row_source import Source
from torchtune.datasets._sft import SFTDataset
from torchtune.datasets.multimodal._image_builder import folder_of, image_dataset


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
) -> SFTDataset | PackedDataset:
    """Build a dataset of ShareGPT conversations with images; the assistant's turns are trained on.

    The image column holds a path, a ``data:`` URL, a Pillow image, the bytes of a file, or a list of these. A row with
    a null image is text only.

    Args:
        model_transform: ``messages`` -> ``tokens``, ``mask`` and the model's image inputs: the transform of a vision
            model, or your own function, which receives messages with Pillow images.
        source: Hub dataset, folder, file, loader name (``json``, ``csv``, ``parquet`` …), or rows in memory.
        column_map: columns of ``conversations`` and ``image``; by default the same names.
        new_system_prompt: system prompt that replaces the conversations' own.
        packed: pack rows up to the tokenizer's ``max_seq_len``, for models with image tokens.
        image_tag: placeholder of an image in the text, for example ``<image>``; ``None`` puts the images before the
            text of the first user turn.
        image_dir: folder of the images, if rows have relative paths.
        filter_fn: function of a row; rows for which it returns False are dropped.
        split: split of the dataset, for example ``"train"`` or ``"train[:10%]"``.
        **load_dataset_kwargs: passed to ``datasets.load_dataset``, for example ``data_files``, and
            ``on_bad_row``.

    Raises:
        DataError: ``image_dir`` does not exist, or no row has an image; see :class:`SFTDataset`.

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
