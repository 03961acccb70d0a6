"""Builders of datasets of conversations and instructions, and the public datasets in these formats."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from torchtune.data import (
    AlpacaToMessages,
    DataError,
    InputOutputToMessages,
    MaskingName,
    MaskingStrategy,
    Transform,
    check_column_map,
    column,
    resolve_masking,
)
from torchtune.datasets._packed import PackedDataset, pack_length
from torchtune.datasets._row_formats import KINDS, STYLES, conversations_of
from torchtune.datasets._row_source import Source
from torchtune.datasets._sft import SFTDataset, SFTTransform
from torchtune.datasets._streamed import StreamedDataset
from torchtune.tokenizers import ModelTokenizer


def sft_dataset(
    tokenizer: Any, source: Source, message_transform: Transform, *, packed: bool, **settings: Any
) -> SFTDataset | PackedDataset | StreamedDataset:
    """Build an :class:`SFTDataset` (packed if ``packed``) or, with ``streaming=True``, a :class:`StreamedDataset`.

    Raises:
        DataError: ``packed`` is True but the tokenizer has no ``max_seq_len``; further cases in :class:`SFTDataset`.
    """
    length = pack_length(tokenizer) if packed else None
    if settings.get("streaming"):
        if getattr(tokenizer, "reasoning", None) == "split":
            raise DataError("reasoning=split makes several samples of a row: leave streaming out.")
        checks = {name: settings.pop(name) for name in ("allow_any_order", "allow_empty_answers") if name in settings}
        return StreamedDataset(
            SFTTransform(message_transform, tokenizer, **checks).as_arrays,
            source,
            limit=getattr(tokenizer, "max_seq_len", None),
            side=getattr(tokenizer, "truncation_type", "right"),
            tokenizer=tokenizer,
            pack_length=length,
            **settings,
        )
    dataset = SFTDataset(source=source, message_transform=message_transform, model_transform=tokenizer, **settings)
    return dataset if length is None else PackedDataset(dataset, max_seq_len=length)


class ConversationToMessages(Transform):
    """Transform of a conversation in OpenAI or ShareGPT format, which finds column and format in each row.

    Args:
        conversation_column: column of the conversation; None: the only one that holds a conversation.
        conversation_style: ``"openai"`` or ``"sharegpt"``; None: that of the first turn.
        new_system_prompt: system prompt that replaces the conversation's system turn.
        masking_strategy: see :func:`torchtune.data.mask_messages`.

    Raises:
        DataError: the style is unknown; when called, a row has no conversation, or several.
    """

    takes_encoded_images = True  # encoded files need not be decoded first

    def __init__(
        self,
        conversation_column: str | None,
        conversation_style: str | None,
        new_system_prompt: str | None,
        masking_strategy: MaskingStrategy,
    ) -> None:
        if conversation_style is not None and conversation_style not in STYLES:
            raise DataError(f"conversation_style must be {' or '.join(STYLES)}, not '{conversation_style}'.")
        self.conversation_column = conversation_column
        self.conversation_style = conversation_style
        self.new_system_prompt = new_system_prompt
        self.masking_strategy = masking_strategy

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats of rows that are read, see :func:`formats_of`."""
        return tuple(KINDS.values()) if self.conversation_style is None else (KINDS[self.conversation_style],)

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``{"messages": [...]}``, and what else the transform of the format returns."""
        name, style = self._reading(sample)
        _, transform, key = STYLES[style]
        convert = transform(
            column_map={key: name}, new_system_prompt=self.new_system_prompt, masking_strategy=self.masking_strategy
        )
        return convert(sample)

    def _reading(self, sample: Mapping[str, Any]) -> tuple[str, str]:
        """Return the column and the format of the row's conversation."""
        if self.conversation_column is not None and self.conversation_style is not None:
            return self.conversation_column, self.conversation_style
        if self.conversation_column is not None:
            name = self.conversation_column
            readings = conversations_of({name: column(sample, name)})
        else:
            readings = conversations_of(sample)
        if self.conversation_style is not None:
            readings = [reading for reading in readings if reading[1] == self.conversation_style]
        if len(readings) > 1:
            settings = [f"conversation_column={name} conversation_style={style}" for name, style in readings[:2]]
            raise DataError(f"the row can be read in two ways: set {' or '.join(settings)}")
        if not readings:
            if self.conversation_column is not None:
                return self.conversation_column, "openai"  # whose transform says what is wrong with the column
            raise DataError(f"no column holds a conversation among {', '.join(map(repr, sample)) or 'none'}")
        return readings[0]


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
    if isinstance(source, str) and source in _PUBLISHED_ALPACA and load_dataset_kwargs.get("data_files") is None:
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
