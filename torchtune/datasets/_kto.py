"""KTO datasets: single answers labeled good or bad."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from torchtune.data import (
    DataError,
    MaskingName,
    Transform,
    check_column_map,
    column,
    read_conversation,
    read_label,
    resolve_masking,
    turns_with_answer,
    unfold_prompt,
)
from torchtune.datasets._preference import PreferenceDataset, tokenize_answer
from torchtune.datasets._row_source import Source
from torchtune.datasets._token_store import PreparedRows
from torchtune.tokenizers import ModelTokenizer


class LabelledAnswerToMessages(Transform):
    """Converts a row with a prompt, an answer and a label to messages.

    Args:
        column_map: columns of ``prompt``, ``completion`` and ``label``; by default the same names. If the completion is
            a whole conversation, the prompt is ignored. Turns of a prompt are trained on with ``train_on_all`` only.
        masking_strategy: see :func:`torchtune.data.mask_messages`.

    Raises:
        DataError: ``column_map`` lacks a key; when called, a column is missing or has another type.

    Example:
        >>> row = {"prompt": "Who?", "completion": "one cat", "label": 1}
        >>> torchtune.datasets.LabelledAnswerToMessages()(row)["is_chosen"]
        True
    """

    formats: ClassVar[tuple[str, ...]] = ("labeled answers (KTO)",)

    def __init__(
        self, column_map: Mapping[str, str] | None = None, masking_strategy: MaskingName | None = "train_on_assistant"
    ) -> None:
        names = {name: name for name in ("prompt", "completion", "label")}
        self.column_map = check_column_map(column_map, names, ("completion", "label"))
        self.masking_strategy = resolve_masking(None, masking_strategy)

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``messages`` and ``is_chosen``, True for a good answer, with ``tools`` if the row has them."""
        label = column(sample, self.column_map["label"])
        is_chosen = read_label(label)
        if is_chosen is None:
            raise DataError(f"column '{self.column_map['label']}' is {label!r}: it must be true or false")
        prompt = self.column_map.get("prompt", "prompt")
        sample = unfold_prompt(sample, prompt)
        conversation = read_conversation(
            sample,
            turns_with_answer(sample, self.column_map["completion"], prompt, self.masking_strategy),
            masking_strategy=self.masking_strategy,
            columns=(*self.column_map.values(), prompt),
        )
        return {**conversation.as_sample(), "is_chosen": is_chosen}


class KTODataset(PreferenceDataset):
    """Dataset of answers labeled good or bad, tokenized at construction; see :class:`PreferenceDataset`.

    Example:
        >>> rows = [{"prompt": "Who?", "completion": text, "label": text == "one cat"} for text in ("one cat", "no")]
        >>> transform = torchtune.datasets.LabelledAnswerToMessages()
        >>> data = torchtune.datasets.KTODataset(source=rows, message_transform=transform, tokenizer=tokenizer)
        >>> [row["is_chosen"] for row in data]
        [True, False]
    """

    _names: ClassVar[tuple[str, ...]] = ("answers",)

    def _read(self, rows: PreparedRows) -> None:
        super()._read(rows)
        self._is_good = np.array([note["is_chosen"] for note in rows.notes], bool)
        for kind, there in (("good", self._is_good.any()), ("bad", not self._is_good.all())):
            if len(self._is_good) and not there:
                raise DataError(f"{self.source} has no answer that is labeled {kind}: both kinds are needed.")

    @staticmethod
    def _tokenize(
        row: Mapping[str, Any], tokenizer: Any, limit: int | None, allow_empty_answers: bool
    ) -> dict[str, dict[str, Any]]:
        if missing := {"messages", "is_chosen"} - row.keys():
            raise DataError(
                f"message_transform gives no '{min(missing)}' among {', '.join(map(repr, row)) or 'nothing'}"
            )
        sample = tokenize_answer(
            row["messages"],
            tokenizer,
            limit,
            "the answer",
            tools=row.get("tools"),
            allow_empty_answers=allow_empty_answers,
        )
        return {"answers": {**sample, "note": {**sample.get("note", {}), "is_chosen": bool(row["is_chosen"])}}}

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return ``tokens``, pre-shifted ``labels``, ``is_chosen`` and, if there are images, ``encoder_input``."""
        row = self.stores["answers"].lists(index)
        return {**row, "is_chosen": bool(self._is_good[index]), **self._images(index, "messages", row["tokens"])}


def kto_dataset(
    tokenizer: ModelTokenizer,
    *,
    source: Source,
    column_map: Mapping[str, str] | None = None,
    masking_strategy: MaskingName | None = "train_on_assistant",
    filter_fn: Callable[..., bool] | None = None,
    split: str = "train",
    **load_dataset_kwargs: Any,
) -> KTODataset:
    """Build a dataset of rows with a prompt, an answer and a label, True for a good answer.

    Args:
        tokenizer: tokenizer of the model.
        source: Hub dataset, folder, file, loader name (``json``, ``parquet`` …), or rows in memory.
        column_map: columns of ``prompt``, ``completion`` and ``label``; by default the same names.
        masking_strategy: ``train_on_assistant``, ``train_on_all`` or ``train_on_last``.
        filter_fn: function of a row; rows for which it returns False are dropped.
        split: split of the dataset.
        **load_dataset_kwargs: passed to ``datasets.load_dataset``, for example ``data_files``.

    Raises:
        DataError: see :class:`PreferenceDataset`; all answers are good or all are bad.

    Example:
        >>> rows = [{"prompt": "Who?", "completion": text, "label": text == "one cat"} for text in ("one cat", "no")]
        >>> len(torchtune.datasets.kto_dataset(tokenizer, source=rows))
        2
    """
    return KTODataset(
        source=source,
        message_transform=LabelledAnswerToMessages(column_map, masking_strategy),
        tokenizer=tokenizer,
        filter_fn=filter_fn,
        split=split,
        **load_dataset_kwargs,
    )
