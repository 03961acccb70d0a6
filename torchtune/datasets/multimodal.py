"""Datasets of text and images: chats, questions about images, LLaVA-Instruct and The Cauldron."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchtune._lazy import former_package
from torchtune.data import (
    DataError,
    InputOutputToMessages,
    Message,
    ShareGPTToMessages,
    Transform,
    check_column_map,
    column,
    image_column,
    read_conversation,
)
from torchtune.datasets._command_modes import is_preview
from torchtune.datasets._file_formats import LOADERS, suffix_of
from torchtune.datasets._packed import PackedDataset, pack_length
from torchtune.datasets._row_source import Source
from torchtune.datasets._sft import SFTDataset, SFTTransform


def image_dataset(
    model_transform: Any, source: Source, message_transform: Transform, *, packed: bool = False, **settings: Any
) -> SFTDataset | PackedDataset:
    """Build a dataset of rows with images, which are transformed when they are read.

    Raises:
        DataError: ``streaming`` is set, or no row has an image; see :class:`SFTDataset` and :class:`PackedDataset`.
    """
    if settings.get("streaming"):
        raise DataError("streaming=True is not possible with images: leave streaming out.")
    length = None
    if packed:  # fails before the rows are read
        length = pack_length(model_transform)
    dataset = SFTDataset(
        source=source, message_transform=message_transform, model_transform=model_transform, **settings
    )
    # A dataset of text alone would be trained without a word; the first rows, of a preview, may have no images.
    if dataset.num_images == 0 and not is_preview():
        raise DataError(
            f"{dataset.source}: no row has an image: set column_map to the column of the images, or use a dataset of "
            "text."
        )
    if length is None:
        return dataset
    return PackedDataset(dataset, max_seq_len=length)


def folder_of(image_dir: str | Path | None) -> Path | None:
    """Return the folder of the images; raise :class:`DataError` if it does not exist."""
    if image_dir is None:
        return None
    folder = Path(image_dir).expanduser()
    if not folder.is_dir():
        fact = f"There is no folder {image_dir}"
        if not folder.is_absolute():
            fact += f" (in {Path.cwd()})"
        raise DataError(f"{fact}: set image_dir to that of the images.")
    return folder


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
    columns = {"input": "input", "output": "output", "image": "image"}
    if column_map:
        columns = {"image": "image", **column_map}
    transform = InputOutputToMessages(
        column_map=columns, new_system_prompt=new_system_prompt, image_dir=folder_of(image_dir)
    )
    return image_dataset(model_transform, source, transform, split=split, **settings)


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


_SIDES = ("user", "assistant")


class TheCauldronToMessages(Transform):
    """Converts a row of The Cauldron to a conversation; the assistant's turns are trained on.

    The images come before the first question.

    Args:
        column_map: columns of ``images``, a list, and of ``texts``, a list of ``{"user", "assistant"}``.
        new_system_prompt: system prompt to add.

    Raises:
        DataError: ``column_map`` lacks a key; when called, a column is missing or has another type.
    """

    takes_encoded_images = True

    def __init__(self, column_map: Mapping[str, str] | None = None, new_system_prompt: str | None = None) -> None:
        self.column_map = check_column_map(column_map, {"images": "images", "texts": "texts"}, ("images", "texts"))
        self.new_system_prompt = new_system_prompt

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``{"messages": [...]}``, with ``tools`` if the row has them."""
        name = self.column_map["texts"]
        pairs = column(sample, name)
        if not isinstance(pairs, list | tuple) or not pairs:
            raise DataError(f"column '{name}' holds {type(pairs).__name__}, not a list of questions with answers")
        messages = []
        images = image_column(sample, self.column_map["images"], None)
        content = [{"type": "image", "content": image} for image in images]
        for pair in pairs:
            if not isinstance(pair, Mapping) or not all(isinstance(pair.get(side), str) for side in _SIDES):
                raise DataError(f"column '{name}' holds something else than questions and answers: both must be texts")
            messages.append(Message("user", [*content, {"type": "text", "content": pair["user"]}]))
            messages.append(Message("assistant", pair["assistant"]))
            content = []  # the images stand before the first question alone
        conversation = read_conversation(
            sample,
            messages,
            new_system_prompt=self.new_system_prompt,
            masking_strategy="train_on_assistant",
            columns=self.column_map.values(),
        )
        return conversation.as_sample()


def the_cauldron_transform(
    model_transform: Transform | None = None,
    texts_col: str = "texts",
    images_col: str = "images",
    new_system_prompt: str | None = None,
) -> SFTTransform:
    """Build the transform of a row of The Cauldron.

    Args:
        model_transform: ``messages`` -> ``tokens``, ``mask`` and the model's image inputs.
        texts_col: column of the questions and answers.
        images_col: column of the images.
        new_system_prompt: system prompt to add.

    Example:
        >>> transform = torchtune.datasets.multimodal.the_cauldron_transform(tokenizer)
        >>> row = {"images": [], "texts": [{"user": "Who?", "assistant": "one cat"}]}
        >>> tokenizer.decode([label for label in transform(row)["labels"] if label != -100])
        'one cat'
    """
    columns = {"texts": texts_col, "images": images_col}
    return SFTTransform(TheCauldronToMessages(columns, new_system_prompt), model_transform)


def the_cauldron_dataset(
    model_transform: Transform,
    *,
    subset: str = "ocrvqa",
    source: Source = "HuggingFaceM4/the_cauldron",
    column_map: Mapping[str, str] | None = None,
    new_system_prompt: str | None = None,
    split: str = "train",
    **settings: Any,
) -> SFTDataset | PackedDataset:
    """Build one of The Cauldron's datasets.

    Images and other arguments: see :func:`multimodal_chat_dataset`.

    Args:
        subset: name of the dataset, for data on the Hub.
        column_map: columns of ``texts`` and ``images``; by default the same names.

    Raises:
        DataError: no row has an image; see :class:`SFTDataset`.
    """
    is_on_hub = isinstance(source, str) and "data_files" not in settings and suffix_of(source) not in LOADERS
    name = None
    if is_on_hub:
        name = subset
    return image_dataset(
        model_transform,
        source,
        TheCauldronToMessages(column_map, new_system_prompt),
        split=split,
        name=name,
        **settings,
    )


__all__ = [
    "llava_instruct_dataset",
    "multimodal_chat_dataset",
    "the_cauldron_dataset",
    "the_cauldron_transform",
    "vqa_dataset",
]
__getattr__, __path__ = former_package(__name__)
