"""Datasets for supervised fine-tuning (rows -> messages -> tokens and labels), and the public ones among them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, Literal

import numpy as np

from torchtune.data import (
    CROSS_ENTROPY_IGNORE_IDX,
    AlpacaToMessages,
    Conversation,
    DataError,
    InputOutputToMessages,
    MaskingName,
    Message,
    Transform,
    as_messages,
    check_answers,
    check_column_map,
    copy_sample,
    read_row_weight,
    resolve_masking,
    validate_messages,
    warn_of_similar_columns,
)
from torchtune.datasets._bad_rows import BadRows, report_left_out
from torchtune.datasets._command_modes import is_preparing
from torchtune.datasets._packed import PackedDataset, pack_length
from torchtune.datasets._row_formats import ConversationToMessages, formats_of
from torchtune.datasets._row_images import (
    check_images,
    check_rows,
    images_of,
    row_error,
    takes_encoded_images,
    with_open_images,
)
from torchtune.datasets._row_source import RowSource, Source
from torchtune.datasets._streamed import StreamedDataset
from torchtune.datasets._tokenized import (
    RowTokenizer,
    TokenizedDataset,
    prepare_rows,
    shifted_labels,
)
from torchtune.tokenizers import ModelTokenizer, arrays_of, check_tokenizer, tool_options

# Form of a row's tokens: as the model transform returns them, as arrays, or of a conversation whose images stay closed.
Form = Literal["lists", "arrays", "text"]


class SFTTransform(Transform):
    """Converts a row to tokens and pre-shifted labels.

    Args:
        message_transform: row -> ``messages``; ``None`` if the rows have them.
        model_transform: ``messages`` -> ``tokens`` and ``mask``, usually a tokenizer; None if the rows have both.
        allow_any_order: leave the order of the turns to the chat template, instead of :func:`validate_messages`.
        allow_empty_answers: train on turns of the assistant that say nothing.
        weight_column: column with the weight of a row, a factor of the weights of its turns; None for no such column.
            A column that holds no numbers is not read.

    Example:
        >>> transform = torchtune.datasets.SFTTransform(torchtune.data.OpenAIToMessages(), tokenizer)
        >>> turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "one"}]
        >>> row = transform({"messages": turns})
        >>> len(row["tokens"]) == len(row["labels"])
        True
    """

    def __init__(
        self,
        message_transform: Transform | None = None,
        model_transform: Transform | None = None,
        *,
        allow_any_order: bool = False,
        allow_empty_answers: bool = False,
        weight_column: str | None = "weight",
    ) -> None:
        check_tokenizer(model_transform, "__call__", reader="a dataset of conversations")
        self.message_transform = message_transform
        self.model_transform = model_transform
        self.allow_any_order = allow_any_order
        self.allow_empty_answers = allow_empty_answers
        self.weight_column = weight_column

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``tokens``, ``labels`` and further outputs of the transforms.

        A row with weights other than 0 and 1 also has ``label_weights``, one for each label.

        Raises:
            DataError: a transform rejects the row.
        """
        return self._row(self.messages(sample), "lists")

    def tokenize_row(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``self(sample)``, with arrays instead of lists if the model transform supports them."""
        return self._row(self.messages(sample), "arrays")

    def tokenize_split_row(self, sample: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the result of :meth:`tokenize_row` for each conversation into which the tokenizer splits the row."""
        sample = self.messages(sample)
        conversations = self.model_transform.conversations(sample["messages"])
        return [self._row({**sample, "messages": messages}, "arrays") for messages in conversations]

    def tokenize_row_text(self, sample: Mapping[str, Any], decode: bool = False) -> dict[str, Any]:
        """Return ``tokens``, ``labels`` and, as ``note``, the result of :func:`check_images`, without decoded images.

        Image files are opened, and decoded if ``decode``. Raises :class:`DataError`.
        """
        sample = self.messages(sample)
        images = check_images(sample, decode)  # before the text, so that a broken image is the reason that is given
        if "messages" not in sample:
            raise DataError(f"the message transform gives {', '.join(map(str, sample)) or 'nothing'}, not 'messages'")
        return {**self._row(sample, "text"), "note": images}

    def messages(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return the input of the model transform, with images as in the row; raise :class:`DataError` if invalid."""
        if self.message_transform is None:
            return dict(sample)
        row = sample
        sample = copy_sample(self.message_transform(row), "message_transform")
        if "messages" in sample:
            sample["messages"] = as_messages(sample["messages"])
            warn_of_similar_columns(row, self.weight_column)
            weight = read_row_weight(row, self.weight_column)
            for message in sample["messages"]:
                message.weight *= weight
            if not self.allow_any_order:
                validate_messages(sample["messages"])
            if not self.allow_empty_answers:
                check_answers(sample["messages"])
        return sample

    def _row(self, sample: Mapping[str, Any], form: Form) -> dict[str, Any]:
        """Return the tokens and labels of a sample with messages, and weights of the labels that are not all 1.

        Tokenizers only know whether a turn is trained on. So a conversation with several weights is labeled once more
        for each weight, with the turns of other weights masked.
        """
        row = self._labeled(sample, form)
        if not isinstance(sample.get("messages"), list | tuple):  # the model transform reads something else
            return row
        messages = as_messages(sample["messages"])
        weights = {message.weight for message in messages if not message.masked}
        if weights <= {1.0}:  # also without a turn that is trained on
            return row
        label_weights = np.ones(len(row["labels"]), np.float32)
        for weight in weights:
            labels = row["labels"]
            if len(weights) > 1:
                turns_of_weight = [copy(message) for message in messages]
                for message in turns_of_weight:
                    message.masked = message.masked or message.weight != weight
                labels = self._labeled({**sample, "messages": turns_of_weight}, form)["labels"]
            label_weights[np.asarray(labels) != CROSS_ENTROPY_IGNORE_IDX] = weight
        row["label_weights"] = label_weights
        return row

    def _labeled(self, sample: Mapping[str, Any], form: Form) -> dict[str, Any]:
        """Return the outputs of the model transform for a sample, with labels in the place of its mask."""
        if form == "text":  # a check of the row: images stay closed, and only the text is tokenized
            options = tool_options(self.model_transform, sample.get("tools"))
            tokens, mask = self.model_transform.tokenize_messages(sample["messages"], **options)
            return {"tokens": tokens, "labels": shifted_labels(tokens, mask)}
        if self.model_transform is not None:
            # Transforms to patches open the images themselves; others receive Pillow images.
            gives_patches = getattr(self.model_transform, "gives_patches", False)
            if not gives_patches and images_of(sample):
                sample = with_open_images(sample)
            if form == "arrays":
                sample = arrays_of(self.model_transform, sample)
            else:
                sample = self.model_transform(sample)
        row = copy_sample(sample, "the model transform")
        if "tokens" not in row or "mask" not in row:
            outputs = ", ".join(map(str, row)) or "nothing"
            raise DataError(f"the model transform gives {outputs}, but 'tokens' and 'mask' are needed")
        row["labels"] = shifted_labels(row["tokens"], row.pop("mask"))
        return row


class RowsOnReading:
    """Rows that are transformed each time they are read, because they have more than tokens, such as images.

    Args:
        source: the source of the rows.
        transform: the transform.
    """

    def __init__(self, source: RowSource, transform: SFTTransform) -> None:
        self._source = source
        self._transform = transform
        self._rows = source.rows(encoded_images=takes_encoded_images(transform.message_transform))

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Return ``tokens``, ``labels`` and further outputs; raise :class:`DataError`, with the row's place."""
        try:
            return self._transform(self._rows[row])
        except DataError as error:
            raise row_error(error, self._source.name, row, self._rows, self._source.skips) from error

    def images(self, row: int) -> list[Any]:
        """Return the images of a row as they are stored: paths, URLs, bytes or images."""
        return images_of(self._transform.messages(self._rows[row]))

    def check_images(self) -> tuple[np.ndarray, np.ndarray]:
        """Check the images of all rows, and decode them if rows with broken images are skipped.

        Returns:
            numbers of the rows that can be trained on, and their numbers of images, int64 ``[rows]`` each.

        Raises:
            DataError: some rows cannot be trained on and are not skipped, or none is left.
        """
        skips = self._source.skips
        bad = BadRows(self._source.name, self._rows, skips=skips, skip_setting="on_bad_row=skip")

        def check(row: Mapping[str, Any]) -> list[int]:
            return check_images(self._transform.messages(row), decode=skips)

        notes = check_rows(self._rows, check, bad)
        num_rows = len(self._rows)
        bad_rows = [row for row, _ in bad.reasons]
        numbers = np.delete(np.arange(num_rows), bad_rows)
        report_left_out(bad.reasons, self._source.name, num_rows, len(numbers))
        return numbers, _image_counts(notes)


class SFTDataset(TokenizedDataset):
    """Dataset for supervised fine-tuning, tokenized at construction.

    One process per machine tokenizes and writes token files, which all its processes map into memory. Later runs with
    the same data, tokenizer and settings reuse these files. For reuse, transforms and filters from outside this library
    need an attribute ``fingerprint``, a text that changes whenever their results do.

    Data errors are raised before training starts. Transforms that return more than tokens, such as images, are applied
    each time a row is read. If such a ``model_transform`` can tokenize text alone (it has ``takes_images``), the text
    of all rows is still tokenized before training, and every image file is opened.

    ``on_bad_row=skip`` skips rows that cannot be trained on, and lists them in the run's ``skipped_rows.jsonl``. With
    this setting, every image is decoded once before training.

    Args:
        source: Hub dataset, folder, file, loader name (``json``, ``csv``, ``parquet`` …), or rows in memory: a
            ``datasets.Dataset`` or an iterable of mappings.
        message_transform: row -> ``messages``.
        model_transform: ``messages`` -> ``tokens`` and ``mask``, usually a tokenizer.
        filter_fn: function of a row; rows for which it returns False are dropped.
        filter_kwargs: passed to ``datasets.Dataset.filter``.
        allow_any_order: leave the order of the turns to the chat template; by default a later system turn, or two
            turns of the user or the assistant in a row, are refused.
        allow_empty_answers: train on turns of the assistant that say nothing; by default they are refused, because the
            model learns from them to end at once.
        weight_column: column with the weight of a row in the loss, a factor of the weights of its turns; None for no
            such column. A column that holds no numbers is not read.
        **load_dataset_kwargs: passed to ``datasets.load_dataset``; ``prepared``: an output folder of ``tune data
            prepare``.

    Attributes:
        on_reading: whether rows are transformed when they are read.
        num_images: number of images in all rows; ``None`` for text.

    Raises:
        DataError: the data cannot be loaded, has no rows, or has rows that cannot be trained on (listed by number);
            ``prepared`` was made from other rows.

    Example:
        >>> rows = [{"question": "Who?", "answer": "one cat"}]
        >>> transform = torchtune.data.InputOutputToMessages(column_map={"input": "question", "output": "answer"})
        >>> data = torchtune.datasets.SFTDataset(source=rows, message_transform=transform, model_transform=tokenizer)
        >>> tokenizer.decode([label for label in data[0]["labels"] if label != -100])
        'one cat'
    """

    def __init__(
        self,
        *,
        source: Source,
        message_transform: Transform,
        model_transform: Transform,
        filter_fn: Callable[..., bool] | None = None,
        filter_kwargs: Mapping[str, Any] | None = None,
        allow_any_order: bool = False,
        allow_empty_answers: bool = False,
        weight_column: str | None = "weight",
        **load_dataset_kwargs: Any,
    ) -> None:
        checks = {
            "allow_any_order": allow_any_order,
            "allow_empty_answers": allow_empty_answers,
            "weight_column": weight_column,
        }
        transform = SFTTransform(message_transform, model_transform, **checks)
        row_source = RowSource(source, filter_fn=filter_fn, filter_kwargs=filter_kwargs, **load_dataset_kwargs)
        limit = getattr(model_transform, "max_seq_len", None)
        side = getattr(model_transform, "truncation_type", "right")
        # Such a transform tokenizes text alone, so that all rows are checked and measured before training.
        takes_images = bool(getattr(model_transform, "takes_images", False))
        is_exact = True
        if takes_images:
            tokenize_row = partial(transform.tokenize_row_text, decode=row_source.skips)
            # The fingerprint does not cover which images are broken. `tune data prepare` stores the rows all the same,
            # and takes exact ones only.
            is_exact = not row_source.skips or is_preparing()
        elif getattr(model_transform, "reasoning", None) == "split":
            tokenize_row = transform.tokenize_split_row
        else:
            tokenize_row = transform.tokenize_row
        row_tokenizer = RowTokenizer(
            tokenize_row, tokenizer=model_transform, limit=limit, side=side, has_notes=takes_images
        )
        rows = prepare_rows(
            row_source,
            row_tokenizer,
            {"dataset": type(self), "masks and columns": message_transform, "tokenizer": model_transform, **checks},
            encoded_images=takes_images and takes_encoded_images(message_transform),
            formats=formats_of(message_transform),
            is_exact=is_exact,
        )
        self._on_reading: RowsOnReading | None = None  # `_keep` reads it, which the base class may call
        # Rows with the same text may have different images.
        super().__init__(row_source, rows, limit=limit, are_only_tokens=not takes_images and rows is not None)
        self._transform = transform
        if takes_images or rows is None:
            self._on_reading = RowsOnReading(row_source, transform)
        if rows is None:  # of a transform that returns more than tokens, nothing is known without reading all rows
            self._numbers, self._image_counts = self._on_reading.check_images()
        else:
            self._image_counts = _image_counts(rows.notes)

    def _keep(self, rows: np.ndarray) -> None:
        super()._keep(rows)
        if self.on_reading:
            self._image_counts = self._image_counts[rows]

    @property
    def on_reading(self) -> bool:
        """Whether rows are transformed when they are read."""
        return self._on_reading is not None

    @property
    def num_images(self) -> int | None:
        """Number of images in all rows; ``None`` for text."""
        if not self.on_reading:
            return None
        return int(self._image_counts.sum())

    @property
    def image_tokens(self) -> np.ndarray | None:
        """Number of image tokens in each row, int64 ``[rows]``; ``None`` if the model has no image tokens."""
        ids = getattr(self._transform.model_transform, "image_tokens", None)
        if self.store is None or ids is None:
            return None
        return self.store.count(list(ids))

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return ``tokens`` and pre-shifted ``labels`` as lists, and further outputs of the transform.

        Raises:
            DataError: an image cannot be read, and no earlier check detected it.
        """
        if self._on_reading is None:
            return super().__getitem__(index)
        return self._on_reading[int(self._numbers[index])]

    def _conversation_of(self, row: Mapping[str, Any]) -> Conversation | None:
        sample = self._transform.messages(row)
        if "messages" not in sample:
            return None
        return Conversation(sample["messages"], sample.get("tools"))

    def conversations(self) -> Iterator[list[Message]]:
        """Yield the messages of each row of the source; none for a row that the message transform rejects."""
        for row in self._row_source.rows():
            try:
                yield self._transform.messages(row)["messages"]
            except DataError:
                yield []

    def images(self, index: int) -> list[Any]:
        """Return the images of a row as they are stored: paths, URLs, bytes or images."""
        if self._on_reading is None:
            return []
        return self._on_reading.images(int(self._numbers[index]))


def _image_counts(notes: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the number of images of each row, int64 ``[rows]``, of the notes of :func:`check_images`."""
    return np.array([count for count, _ in notes], np.int64)


def sft_dataset(
    tokenizer: Any, source: Source, message_transform: Transform, *, packed: bool, **settings: Any
) -> SFTDataset | PackedDataset | StreamedDataset:
    """Build an :class:`SFTDataset` (packed if ``packed``) or, with ``streaming=True``, a :class:`StreamedDataset`.

    Raises:
        DataError: ``packed`` is True but the tokenizer has no ``max_seq_len``; further cases in :class:`SFTDataset`.
    """
    length = None
    if packed:  # fails before the rows are read
        length = pack_length(tokenizer)
    if settings.get("streaming"):
        if getattr(tokenizer, "reasoning", None) == "split":
            raise DataError("reasoning=split makes several samples of a row: leave streaming out.")
        # Settings of the transform, not of the source.
        transform_settings = {}
        for name in ("allow_any_order", "allow_empty_answers", "weight_column"):
            if name in settings:
                transform_settings[name] = settings.pop(name)
        return StreamedDataset(
            SFTTransform(message_transform, tokenizer, **transform_settings).tokenize_row,
            source,
            limit=getattr(tokenizer, "max_seq_len", None),
            side=getattr(tokenizer, "truncation_type", "right"),
            tokenizer=tokenizer,
            pack_length=length,
            **settings,
        )
    dataset = SFTDataset(source=source, message_transform=message_transform, model_transform=tokenizer, **settings)
    if length is None:
        return dataset
    return PackedDataset(dataset, max_seq_len=length)


def chat_dataset(
    tokenizer: ModelTokenizer,
    *,
    source: Source,
    conversation_column: str | None = None,
    conversation_style: Literal["openai", "sharegpt"] | None = None,
    train_on_input: bool | None = None,
    masking_strategy: MaskingName | None = "train_on_assistant",
    new_system_prompt: str | None = None,
    packed: bool = False,
    filter_fn: Callable[..., bool] | None = None,
    split: str = "train",
    **load_dataset_kwargs: Any,
) -> SFTDataset | PackedDataset:
    """Build a dataset of conversations.

    Args:
        tokenizer: tokenizer of the model.
        source: Hub dataset, folder, file, loader name (``json``, ``csv``, ``parquet`` …), or rows in memory.
        conversation_column: column with the list of messages; by default the only one with such a list.
        conversation_style: ``"openai"`` (``{"role", "content"}``) or ``"sharegpt"`` (``{"from", "value"}``); by default
            that of a row's first message.
        train_on_input: deprecated, use ``masking_strategy``.
        masking_strategy: ``train_on_assistant``, ``train_on_all`` or ``train_on_last``.
        new_system_prompt: system prompt that replaces the conversations' own.
        packed: pack examples up to the tokenizer's ``max_seq_len``.
        filter_fn: function of a row; rows for which it returns False are dropped.
        split: split of the dataset, for example ``"train"`` or ``"train[:10%]"``.
        **load_dataset_kwargs: passed to ``datasets.load_dataset``, for example ``data_files``.

    Raises:
        DataError: ``conversation_style`` is unknown, or ``packed`` is True but the tokenizer has no ``max_seq_len``;
            further cases in :class:`SFTDataset`.

    Example:
        >>> rows = [{"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "one cat"}]}]
        >>> data = torchtune.datasets.chat_dataset(
        ...     tokenizer, source=rows
        ... )
        >>> tokenizer.decode([label for label in data[0]["labels"] if label != -100])
        'one cat'
    """
    transform = ConversationToMessages(
        conversation_column, conversation_style, new_system_prompt, resolve_masking(train_on_input, masking_strategy)
    )
    return sft_dataset(
        tokenizer, source, transform, packed=packed, filter_fn=filter_fn, split=split, **load_dataset_kwargs
    )


def slimorca_dataset(
    tokenizer: ModelTokenizer,
    *,
    source: Source = "Open-Orca/SlimOrca-Dedup",
    column_map: Mapping[str, str] | None = None,
    **settings: Any,
) -> SFTDataset | PackedDataset:
    """Build a dataset of conversations in ShareGPT format, column ``conversations``.

    Other arguments: see :func:`chat_dataset`.

    Raises:
        DataError: ``packed`` is True but the tokenizer has no ``max_seq_len``; further cases in :class:`SFTDataset`.

    Example:
        >>> turns = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "one cat"}]
        >>> len(torchtune.datasets.slimorca_dataset(tokenizer, source=[{"conversations": turns}]))
        1
    """
    column = check_column_map(column_map, {"conversations": "conversations"}, ("conversations",))["conversations"]
    return chat_dataset(tokenizer, source=source, conversation_column=column, conversation_style="sharegpt", **settings)


_PUBLISHED_ALPACA = ("tatsu-lab/alpaca", "yahma/alpaca-cleaned")


def instruct_dataset(
    tokenizer: ModelTokenizer,
    *,
    source: Source,
    column_map: Mapping[str, str] | None = None,
    train_on_input: bool | None = None,
    masking_strategy: MaskingName | None = "train_on_assistant",
    new_system_prompt: str | None = None,
    packed: bool = False,
    filter_fn: Callable[..., bool] | None = None,
    split: str = "train",
    **load_dataset_kwargs: Any,
) -> SFTDataset | PackedDataset:
    """Build a dataset of rows with an instruction and an answer.

    Both are texts, or lists of turns: the prompts and completions of a conversation. Of these, the turns of the
    completion are trained on.

    Args:
        tokenizer: tokenizer of the model.
        source: Hub dataset, folder, file, loader name (``json``, ``csv``, ``parquet`` …), or rows in memory.
        column_map: columns of ``input`` and ``output``; by default the same names.
        train_on_input: deprecated, use ``masking_strategy``.
        masking_strategy: ``train_on_assistant``, ``train_on_all`` or ``train_on_last``.
        new_system_prompt: system prompt to add.
        packed: pack examples up to the tokenizer's ``max_seq_len``.
        filter_fn: function of a row; rows for which it returns False are dropped.
        split: split of the dataset, for example ``"train"`` or ``"train[:10%]"``.
        **load_dataset_kwargs: passed to ``datasets.load_dataset``, for example ``data_files``.

    Raises:
        DataError: ``packed`` is True but the tokenizer has no ``max_seq_len``; further cases in :class:`SFTDataset`.

    Example:
        >>> rows = [{"input": "What does the cat see?", "output": "a red bird"}]
        >>> data = torchtune.datasets.instruct_dataset(tokenizer, source=rows)
        >>> tokenizer.decode([label for label in data[0]["labels"] if label != -100])
        'a red bird'
    """
    transform = InputOutputToMessages(
        train_on_input=train_on_input,
        column_map=column_map,
        new_system_prompt=new_system_prompt,
        masking_strategy=masking_strategy,
    )
    return sft_dataset(
        tokenizer, source, transform, packed=packed, filter_fn=filter_fn, split=split, **load_dataset_kwargs
    )


def alpaca_dataset(
    tokenizer: ModelTokenizer,
    *,
    source: Source = "tatsu-lab/alpaca",
    column_map: Mapping[str, str] | None = None,
    train_on_input: bool | None = None,
    masking_strategy: MaskingName | None = "train_on_all",
    packed: bool = False,
    filter_fn: Callable[..., bool] | None = None,
    split: str = "train",
    **load_dataset_kwargs: Any,
) -> SFTDataset | PackedDataset:
    """Build a dataset in Alpaca format: columns ``instruction``, ``input`` (may be empty) and ``output``.

    By default the instruction is trained on, too. Columns ``system`` and ``history`` are read as well, see
    :class:`torchtune.data.AlpacaToMessages`. The published data has some empty outputs, which are trained on unless
    ``allow_empty_answers`` is False; in other data they are refused. Arguments: see :func:`instruct_dataset`.

    Raises:
        DataError: ``packed`` is True but the tokenizer has no ``max_seq_len``; further cases in :class:`SFTDataset`.

    Example:
        >>> rows = [{"instruction": "Count.", "input": "", "output": "one two"}]
        >>> len(torchtune.datasets.alpaca_dataset(tokenizer, source=rows))
        1
    """
    transform = AlpacaToMessages(
        train_on_input=train_on_input, column_map=column_map, masking_strategy=masking_strategy
    )
    is_published = isinstance(source, str) and source in _PUBLISHED_ALPACA
    if is_published and load_dataset_kwargs.get("data_files") is None:
        load_dataset_kwargs.setdefault("allow_empty_answers", True)
    return sft_dataset(
        tokenizer, source, transform, packed=packed, filter_fn=filter_fn, split=split, **load_dataset_kwargs
    )


def alpaca_cleaned_dataset(
    tokenizer: ModelTokenizer, *, source: Source = "yahma/alpaca-cleaned", **settings: Any
) -> SFTDataset | PackedDataset:
    """Build a dataset like :func:`alpaca_dataset`, from data with fewer mistakes; the arguments are the same.

    Raises:
        DataError: ``packed`` is True but the tokenizer has no ``max_seq_len``; further cases in :class:`SFTDataset`.

    Example:
        >>> rows = [{"instruction": "Count.", "input": "", "output": "one two"}]
        >>> len(torchtune.datasets.alpaca_cleaned_dataset(tokenizer, source=rows))
        1
    """
    return alpaca_dataset(tokenizer, source=source, **settings)


def grammar_dataset(
    tokenizer: ModelTokenizer, *, source: Source = "liweili/c4_200m", **settings: Any
) -> SFTDataset | PackedDataset:
    """Build a dataset of sentences with and without mistakes, columns ``input`` and ``output``.

    Use it with ``torchtune.data.GrammarErrorCorrectionTemplate``. For the arguments see :func:`instruct_dataset`.

    Raises:
        DataError: ``packed`` is True but the tokenizer has no ``max_seq_len``; further cases in :class:`SFTDataset`.

    Example:
        >>> rows = [{"input": "the cats sees", "output": "the cat sees"}]
        >>> len(torchtune.datasets.grammar_dataset(tokenizer, source=rows))
        1
    """
    return instruct_dataset(tokenizer, source=source, **settings)


def samsum_dataset(
    tokenizer: ModelTokenizer,
    *,
    source: Source = "Samsung/samsum",
    column_map: Mapping[str, str] | None = None,
    **settings: Any,
) -> SFTDataset | PackedDataset:
    """Build a dataset of dialogues and their summaries, columns ``dialogue`` and ``summary``.

    Use it with ``torchtune.data.SummarizeTemplate``. For the arguments see :func:`instruct_dataset`.

    Raises:
        DataError: ``packed`` is True but the tokenizer has no ``max_seq_len``; further cases in :class:`SFTDataset`.

    Example:
        >>> rows = [{"dialogue": "A: Why? B: So.", "summary": "A asks why."}]
        >>> len(torchtune.datasets.samsum_dataset(tokenizer, source=rows))
        1
    """
    columns = column_map or {"input": "dialogue", "output": "summary"}
    return instruct_dataset(tokenizer, source=source, column_map=columns, **settings)
