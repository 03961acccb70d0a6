"""Chat datasets."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from torchtune._lazy import former_names
from torchtune.data import DataError, MaskingName, OpenAIToMessages, ShareGPTToMessages, check_column_map
from torchtune.datasets._packed import PackedDataset
from torchtune.datasets._row_source import Source
from torchtune.datasets._sft import SFTDataset
from torchtune.datasets._sft_builder import sft_dataset
from torchtune.tokenizers import ModelTokenizer


def chat_dataset(
    tokenizer: ModelTokenizer,
    *,
    source: Source,
    conversation_column: str,
    conversation_style: Literal["openai", "sharegpt"],
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
        conversation_column: column with the list of messages.
        conversation_style: ``"openai"`` (``{"role", "content"}``) or ``"sharegpt"`` (``{"from", "value"}``).
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
        ...     tokenizer, source=rows, conversation_column="messages", conversation_style="openai"
        ... )
        >>> tokenizer.decode([label for label in data[0]["labels"] if label != -100])
        'one cat'
    """
    styles = {"sharegpt": (ShareGPTToMessages, "conversations"), "openai": (OpenAIToMessages, "messages")}
    if conversation_style not in styles:
        raise DataError(f"conversation_style must be {' or '.join(styles)}, not '{conversation_style}'.")
    transform, key = styles[conversation_style]
    return sft_dataset(
        tokenizer,
        source,
        transform(
            train_on_input=train_on_input,
            column_map={key: conversation_column},
            new_system_prompt=new_system_prompt,
            masking_strategy=masking_strategy,
        ),
        packed=packed,
        filter_fn=filter_fn,
        split=split,
        **load_dataset_kwargs,
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


__getattr__ = former_names(__name__)
