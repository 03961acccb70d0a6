"""The Cauldron: fifty vision-language datasets."""

from collections.abc import Mapping
from typing import Any

from torchtune.data import DataError, Message, Transform, check_column_map, column, image_column, read_conversation
from torchtune.datasets._file_formats import suffix_of
from torchtune.datasets._packed import PackedDataset
from torchtune.datasets._row_source import LOADERS, Source
from torchtune.datasets._sft import SFTDataset, SFTTransform
from torchtune.datasets.multimodal._image_builder import image_dataset

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
            content = []
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
    on_hub = isinstance(source, str) and "data_files" not in settings and suffix_of(source) not in LOADERS
    return image_dataset(
        model_transform,
        source,
        TheCauldronToMessages(column_map, new_system_prompt),
        split=split,
        name=subset if on_hub else None,
        **settings,
    )
