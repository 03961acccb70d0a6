"""Datasets of preferences: pairs of a chosen and a rejected answer, or single answers labeled good or bad (KTO)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from torchtune.data import (
    ChosenRejectedToMessages,
    Conversation,
    DataError,
    MaskingName,
    Transform,
    as_messages,
    check_answers,
    check_column_map,
    column,
    copy_sample,
    read_conversation,
    read_row_weight,
    resolve_masking,
    turns_with_answer,
    unfold_prompt,
    warn_of_similar_columns,
)
from torchtune.datasets._row_formats import LABELED_ANSWERS, formats_of, read_label
from torchtune.datasets._row_images import row_error, takes_encoded_images, tokenize_text
from torchtune.datasets._row_source import RowSource, Source
from torchtune.datasets._token_store import PreparedRows
from torchtune.datasets._tokenized import (
    NO_LABEL,
    Tokenize,
    TokenizedDataset,
    has_label,
    prepare_rows,
    shifted_labels,
    why_no_label,
)
from torchtune.tokenizers import ModelTokenizer, check_tokenizer

_SIDES = ("chosen", "rejected")
# Row -> the texts of its answers, by the name of their store.
TokenizeRow = Callable[..., dict[str, dict[str, Any]]]


def prepare_answers(
    dataset: type,
    source: RowSource,
    message_transform: Transform,
    tokenizer: Any,
    tokenize_row: TokenizeRow,
    *,
    names: Sequence[str],
    allow_empty_answers: bool,
    weight_column: str | None,
) -> PreparedRows:
    """Return the token rows of one or two answers to a prompt.

    Args:
        dataset: class of the dataset.
        source: the source of the rows.
        message_transform: row -> the messages of the answers.
        tokenizer: tokenizer of the model.
        tokenize_row: tokenizes a sample of the message transform, see :func:`tokenize_pair`.
        names: names of the answers, one store each.
        allow_empty_answers: train on answers that say nothing.
        weight_column: column with the weight of a row in the loss; None for no such column.

    Raises:
        DataError: some rows cannot be trained on and are not skipped.
    """
    check_tokenizer(tokenizer, "__call__", reader="a dataset of conversations")
    limit = getattr(tokenizer, "max_seq_len", None)

    def tokenize_answers(row: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        warn_of_similar_columns(row, weight_column)
        weight = read_row_weight(row, weight_column)
        sample = copy_sample(message_transform(row), "message_transform")
        answers = tokenize_row(sample, tokenizer, limit, allow_empty_answers=allow_empty_answers)
        if weight != 1:
            for answer in answers.values():
                # The store keeps a weight for each label; here all have that of the row.
                answer["label_weights"] = np.full(len(answer["labels"]), weight, np.float32)
        return answers

    depends_on = {
        "dataset": dataset,
        "masks and columns": message_transform,
        "tokenizer": tokenizer,
        "allow_empty_answers": allow_empty_answers,
        "weight_column": weight_column,
    }
    # The notes are facts about images. An answer without a label is refused where it is tokenized, by its name.
    tokenize = Tokenize(tokenize_answers, tokenizer=tokenizer, has_notes=True, needs_labels=False, answers=names)
    return prepare_rows(source, tokenize, depends_on, formats=formats_of(message_transform))


class AnswersDataset(TokenizedDataset):
    """Base class of datasets of one or two answers to a prompt.

    Args:
        source: the source of the rows.
        rows: the token rows.
        message_transform: row -> the messages of the answers.
        tokenizer: tokenizer of the model.
        names: names of the answers, one store each.

    Attributes:
        num_images: number of images in all rows.
    """

    def __init__(
        self, source: RowSource, rows: PreparedRows, message_transform: Transform, tokenizer: Any, names: Sequence[str]
    ) -> None:
        super().__init__(source, rows, names=names, limit=getattr(tokenizer, "max_seq_len", None))
        self._transform = message_transform
        self._tokenizer = tokenizer
        self.num_images = sum(note["images"][0] for note in rows.notes if "images" in note)
        self._rows = None
        if self.num_images:  # read again with each example, because images are not stored with the tokens
            self._rows = source.rows(encoded_images=takes_encoded_images(message_transform))

    @property
    def fingerprint(self) -> tuple[int, ...]:
        """Digests of all tokens and labels."""
        return tuple(store.fingerprint for store in self.stores.values())

    def _token_row(self, index: int, name: str) -> dict[str, Any]:
        """Return ``tokens`` and ``labels`` of a store and, unless it is 1, the ``weight`` of the row."""
        row: dict[str, Any] = self.stores[name].lists(index)
        label_weights = row.pop("label_weights", None)
        if label_weights is not None:
            row["weight"] = label_weights[0]  # the same for all labels
        return row

    def _encoder_inputs(self, index: int, name: str, tokens: Sequence[int]) -> dict[str, Any]:
        """Return the ``encoder_input`` of the conversation that the message transform returns under ``name``."""
        if self._rows is None:
            return {}
        row = int(self._numbers[index])
        try:
            messages = self._transform(self._rows[row])[name]
            return self._tokenizer.encode_images(messages, tokens)
        except DataError as error:
            raise row_error(error, self.source, row, self._rows, skips=True) from error


class PreferenceDataset(AnswersDataset):
    """Dataset of answer pairs, tokenized at construction.

    A pair cannot be trained on if its answers are equal, or if an answer is empty or has no label within the
    tokenizer's ``max_seq_len``.

    Args:
        source: Hub dataset, folder, file, loader name, or rows in memory.
        message_transform: row -> ``chosen`` and ``rejected`` messages.
        tokenizer: tokenizer of the model.
        filter_fn: function of a row; rows for which it returns False are dropped.
        packed: not supported; True raises.
        allow_empty_answers: train on answers that say nothing; by default they are refused.
        weight_column: column with the weight of a row in the loss; None for no such column. A column that holds no
            numbers is not read.
        **load_dataset_kwargs: passed to ``datasets.load_dataset``.

    Raises:
        DataError: the data cannot be loaded, has no rows, or has rows that cannot be trained on (listed by number).

    Example:
        >>> question = {"role": "user", "content": "Who?"}
        >>> row = {side: [question, {"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
        >>> transform = torchtune.data.ChosenRejectedToMessages()
        >>> len(torchtune.datasets.PreferenceDataset(source=[row], message_transform=transform, tokenizer=tokenizer))
        1
    """

    def __init__(
        self,
        *,
        source: Source,
        message_transform: Transform,
        tokenizer: ModelTokenizer,
        filter_fn: Callable[..., bool] | None = None,
        packed: bool = False,
        allow_empty_answers: bool = False,
        weight_column: str | None = "weight",
        **load_dataset_kwargs: Any,
    ) -> None:
        if packed:
            raise DataError("packed=True is not possible for preference data: set it to False.")
        row_source = RowSource(source, filter_fn=filter_fn, **load_dataset_kwargs)
        rows = prepare_answers(
            type(self),
            row_source,
            message_transform,
            tokenizer,
            tokenize_pair,
            names=_SIDES,
            allow_empty_answers=allow_empty_answers,
            weight_column=weight_column,
        )
        super().__init__(row_source, rows, message_transform, tokenizer, _SIDES)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return ``*_input_ids``, shifted ``*_labels`` and, for images, ``*_encoder_input`` (*: chosen, rejected).

        A pair of another weight than 1 also has its ``weight``.
        """
        item: dict[str, Any] = {}
        for side in self.stores:
            row = self._token_row(index, side)
            if "weight" in row:
                item["weight"] = row["weight"]
            item[f"{side}_input_ids"] = row["tokens"]
            item[f"{side}_labels"] = row["labels"]
            for name, value in self._encoder_inputs(index, side, row["tokens"]).items():
                item[f"{side}_{name}"] = value
        if "chosen_encoder_input" in item and "rejected_encoder_input" in item:
            chosen = item["chosen_encoder_input"]["images"]
            rejected = item["rejected_encoder_input"]["images"]
            if torch.equal(chosen.pixels, rejected.pixels):
                # The same object: a batch has each tensor once, so that the vision tower runs once for both answers.
                item["rejected_encoder_input"]["images"] = replace(rejected, pixels=chosen.pixels)
        return item

    def _conversation_of(self, row: Mapping[str, Any]) -> Conversation:
        pair = self._transform(row)
        return Conversation(as_messages(pair["chosen"]), pair.get("tools"))


def tokenize_pair(
    pair: Mapping[str, Any], tokenizer: Any, limit: int | None, *, allow_empty_answers: bool
) -> dict[str, dict[str, Any]]:
    """Tokenize the ``chosen`` and ``rejected`` messages of a row; arguments as in :func:`tokenize_answer`.

    Raises:
        DataError: an answer is missing, see :func:`tokenize_answer`, or both are the same.
    """
    samples = {}
    for side in _SIDES:
        if side not in pair:
            raise DataError(f"message_transform gives no '{side}' among {', '.join(map(repr, pair)) or 'nothing'}")
        samples[side] = tokenize_answer(
            pair[side],
            tokenizer,
            limit,
            f"the {side} answer",
            tools=pair.get("tools"),
            allow_empty_answers=allow_empty_answers,
        )
    if samples["chosen"]["tokens"] == samples["rejected"]["tokens"]:  # there is nothing to prefer
        problem = "both answers are the same"
        # Truncation may have cut off what differs.
        if limit is not None and len(samples["chosen"]["tokens"]) >= limit:
            problem += f" within max_seq_len={limit}"
        raise DataError(problem)
    return samples


def tokenize_answer(
    messages: Any,
    tokenizer: Any,
    limit: int | None,
    name: str,
    *,
    tools: list[Any] | None,
    allow_empty_answers: bool,
) -> dict[str, Sequence[int]]:
    """Tokenize a conversation that ends with an answer; return tokens, pre-shifted labels, and facts about images.

    Args:
        messages: messages of the conversation.
        tokenizer: tokenizer of the model.
        limit: its ``max_seq_len``, for the error message.
        name: name of the answer, for the error message.
        tools: tool definitions of the row.
        allow_empty_answers: whether the answer may say nothing.

    Raises:
        DataError: the answer is missing or empty, a turn has another weight than 0 and 1, or there is no label after
            truncation.
    """
    messages = as_messages(messages)
    # The loss is of the log-probability of the whole answer, which has one weight: that of the row.
    for i, message in enumerate(messages):
        if message.weight != 1 and not message.masked:
            raise DataError(
                f"turn {i} has weight {message.weight:g}, but preference data takes turns only as a whole: use 0 (not "
                "trained on) or 1"
            )
    if not messages or messages[-1].role != "assistant":
        raise DataError(f"{name} is missing: the last turn must be the assistant's")
    if not allow_empty_answers:
        if messages[-1].is_empty:
            raise DataError(f"{name} is empty (train on such answers with allow_empty_answers=true)")
        check_answers(messages)
    tokens, mask, note = tokenize_text(tokenizer, messages, tools=tools)
    sample = {"tokens": tokens, "labels": shifted_labels(tokens, mask)}
    if note:
        sample["note"] = note
    if not has_label(sample):
        raise DataError(f"{NO_LABEL} in {name}" + why_no_label(sample, limit, "the prompt is too long"))
    return sample


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

    formats: ClassVar[tuple[str, ...]] = (LABELED_ANSWERS,)

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


class KTODataset(AnswersDataset):
    """Dataset of answers labeled good or bad, tokenized at construction.

    Args:
        source: Hub dataset, folder, file, loader name, or rows in memory.
        message_transform: row -> ``messages`` and ``is_chosen``.
        tokenizer: tokenizer of the model.
        filter_fn: function of a row; rows for which it returns False are dropped.
        packed: not supported; True raises.
        allow_empty_answers: train on answers that say nothing; by default they are refused.
        weight_column: column with the weight of a row in the loss; None for no such column. A column that holds no
            numbers is not read.
        **load_dataset_kwargs: passed to ``datasets.load_dataset``.

    Raises:
        DataError: the data cannot be loaded, has no rows, or has rows that cannot be trained on (listed by number); all
            answers are good or all are bad.

    Example:
        >>> rows = [{"prompt": "Who?", "completion": text, "label": text == "one cat"} for text in ("one cat", "no")]
        >>> transform = torchtune.datasets.LabelledAnswerToMessages()
        >>> data = torchtune.datasets.KTODataset(source=rows, message_transform=transform, tokenizer=tokenizer)
        >>> [row["is_chosen"] for row in data]
        [True, False]
    """

    def __init__(
        self,
        *,
        source: Source,
        message_transform: Transform,
        tokenizer: ModelTokenizer,
        filter_fn: Callable[..., bool] | None = None,
        packed: bool = False,
        allow_empty_answers: bool = False,
        weight_column: str | None = "weight",
        **load_dataset_kwargs: Any,
    ) -> None:
        if packed:
            raise DataError("packed=True is not possible for preference data: set it to False.")
        row_source = RowSource(source, filter_fn=filter_fn, **load_dataset_kwargs)
        rows = prepare_answers(
            type(self),
            row_source,
            message_transform,
            tokenizer,
            tokenize_labeled_answer,
            names=["answers"],
            allow_empty_answers=allow_empty_answers,
            weight_column=weight_column,
        )
        super().__init__(row_source, rows, message_transform, tokenizer, ["answers"])
        self._set_is_good(np.array([note["is_chosen"] for note in rows.notes], bool))

    def _set_is_good(self, is_good: np.ndarray) -> None:
        """Keep whether each answer is good, bool ``[rows]``; raise :class:`DataError` if all or none are."""
        self._is_good = is_good
        if not len(is_good):
            return
        for kind, is_missing in (("good", not is_good.any()), ("bad", is_good.all())):
            if is_missing:
                raise DataError(f"{self.source} has no answer that is labeled {kind}: both kinds are needed.")

    def _keep(self, rows: np.ndarray) -> None:
        super()._keep(rows)
        self._set_is_good(self._is_good[rows])  # too long rows may have been all that were bad

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return ``tokens``, pre-shifted ``labels``, ``is_chosen`` and, if there are images, ``encoder_input``.

        An answer of another weight than 1 also has its ``weight``.
        """
        row = self._token_row(index, "answers")
        images = self._encoder_inputs(index, "messages", row["tokens"])
        return {**row, "is_chosen": bool(self._is_good[index]), **images}

    def _conversation_of(self, row: Mapping[str, Any]) -> Conversation:
        sample = self._transform(row)
        return Conversation(as_messages(sample["messages"]), sample.get("tools"))

    @property
    def _right_rows(self) -> np.ndarray:
        return self._numbers[self._is_good]


def tokenize_labeled_answer(
    row: Mapping[str, Any], tokenizer: Any, limit: int | None, *, allow_empty_answers: bool
) -> dict[str, dict[str, Any]]:
    """Tokenize the ``messages`` of a row, and note ``is_chosen``; arguments as in :func:`tokenize_answer`.

    Raises:
        DataError: the messages or the label are missing, see :func:`tokenize_answer`.
    """
    missing = {"messages", "is_chosen"} - row.keys()
    if missing:
        raise DataError(f"message_transform gives no '{min(missing)}' among {', '.join(map(repr, row)) or 'nothing'}")
    sample = tokenize_answer(
        row["messages"],
        tokenizer,
        limit,
        "the answer",
        tools=row.get("tools"),
        allow_empty_answers=allow_empty_answers,
    )
    note = {**sample.get("note", {}), "is_chosen": bool(row["is_chosen"])}
    return {"answers": {**sample, "note": note}}


def preference_dataset(
    tokenizer: ModelTokenizer,
    *,
    source: Source,
    column_map: Mapping[str, str] | None = None,
    train_on_input: bool | None = None,
    masking_strategy: MaskingName | None = "train_on_assistant",
    new_system_prompt: str | None = None,
    filter_fn: Callable[..., bool] | None = None,
    split: str = "train",
    weight_column: str | None = "weight",
    **load_dataset_kwargs: Any,
) -> PreferenceDataset:
    """Build a dataset of rows with a chosen and a rejected answer.

    The answers are conversations (lists of ``{"role", "content"}``), or there is a prompt with two answers.

    Args:
        tokenizer: tokenizer of the model.
        source: Hub dataset, folder, file, loader name (``json``, ``parquet`` …), or rows in memory.
        column_map: columns of ``chosen``, ``rejected`` and ``prompt``; by default the same names. The prompt is used if
            the answers are texts, or messages that begin with an assistant turn.
        train_on_input: deprecated, use ``masking_strategy``.
        masking_strategy: ``train_on_assistant``, ``train_on_all`` or ``train_on_last``.
        new_system_prompt: system prompt that replaces the conversations' own.
        filter_fn: function of a row; rows for which it returns False are dropped.
        split: split of the dataset.
        weight_column: column with the weight of a row in the loss; None for no such column.
        **load_dataset_kwargs: passed to ``datasets.load_dataset``, for example ``data_files``.

    Raises:
        DataError: see :class:`PreferenceDataset`.

    Example:
        >>> question = {"role": "user", "content": "Who?"}
        >>> row = {side: [question, {"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
        >>> len(torchtune.datasets.preference_dataset(tokenizer, source=[row]))
        1
    """
    transform = ChosenRejectedToMessages(
        train_on_input=train_on_input,
        column_map=column_map,
        new_system_prompt=new_system_prompt,
        masking_strategy=masking_strategy,
    )
    return PreferenceDataset(
        source=source,
        message_transform=transform,
        tokenizer=tokenizer,
        filter_fn=filter_fn,
        split=split,
        weight_column=weight_column,
        **load_dataset_kwargs,
    )


def stack_exchange_paired_dataset(
    tokenizer: ModelTokenizer,
    *,
    source: Source = "lvwerra/stack-exchange-paired",
    column_map: Mapping[str, str] | None = None,
    **settings: Any,
) -> PreferenceDataset:
    """Build a dataset of questions with a better and a worse answer, ``question``, ``response_j`` and ``response_k``.

    Other arguments: see :func:`preference_dataset`.

    Raises:
        DataError: see :class:`PreferenceDataset`.

    Example:
        >>> rows = [{"question": "Who?", "response_j": "one cat", "response_k": "no"}]
        >>> len(torchtune.datasets.stack_exchange_paired_dataset(tokenizer, source=rows))
        1
    """
    # The data on the hub have a folder for each use; files of the user's own have none.
    if source == "lvwerra/stack-exchange-paired" and "data_files" not in settings:
        settings.setdefault("data_dir", "data/rl")
    columns = column_map or {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}
    return preference_dataset(tokenizer, source=source, column_map=columns, **settings)


def hh_rlhf_helpful_dataset(
    tokenizer: ModelTokenizer, *, source: Source = "RLHFlow/HH-RLHF-Helpful-standard", **settings: Any
) -> PreferenceDataset:
    """Build a dataset of helpfulness comparisons. For the arguments see :func:`preference_dataset`.

    Raises:
        DataError: see :class:`PreferenceDataset`.

    Example:
        >>> question = {"role": "user", "content": "Who?"}
        >>> row = {side: [question, {"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
        >>> len(torchtune.datasets.hh_rlhf_helpful_dataset(tokenizer, source=[row]))
        1
    """
    return preference_dataset(tokenizer, source=source, **settings)


def kto_dataset(
    tokenizer: ModelTokenizer,
    *,
    source: Source,
    column_map: Mapping[str, str] | None = None,
    masking_strategy: MaskingName | None = "train_on_assistant",
    filter_fn: Callable[..., bool] | None = None,
    split: str = "train",
    weight_column: str | None = "weight",
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
        weight_column: column with the weight of a row in the loss; None for no such column.
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
        weight_column=weight_column,
        **load_dataset_kwargs,
    )
