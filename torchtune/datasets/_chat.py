"""Datasets of conversations."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from torchtune.data import DataError, OpenAIToMessages, ShareGPTToMessages
from torchtune.data._messages import MaskingName
from torchtune.datasets._build import sft_dataset
from torchtune.datasets._load import Source
from torchtune.datasets._packed import PackedDataset
from torchtune.datasets._sft import SFTDataset
from torchtune.modules.transforms.tokenizers import ModelTokenizer


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
    """Rows with a conversation.

    Args:
        tokenizer: tokenizer of the model.
        source: a dataset of the hub, a folder, a file, a loader's name (``json``, ``csv``, ``parquet`` …), or rows in
            memory.
        conversation_column: the column with the list of turns.
        conversation_style: ``"openai"`` (``{"role", "content"}``) or ``"sharegpt"`` (``{"from", "value"}``).
        train_on_input: old spelling of ``masking_strategy``.
        masking_strategy: ``train_on_assistant``, ``train_on_all`` or ``train_on_last``.
        new_system_prompt: text of a system turn that takes the place of the conversations' own.
        packed: put examples together into packs of the tokenizer's ``max_seq_len``.
        filter_fn: rows for which it is false are left out.
        split: split of the dataset, for example ``"train"`` or ``"train[:10%]"``.
        **load_dataset_kwargs: arguments of ``datasets.load_dataset``, for example ``data_files``.

    Raises:
        DataError: unknown style; see :class:`SFTDataset`; ``packed`` without the tokenizer's ``max_seq_len``.

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
    train_on_input: bool | None = None,
    masking_strategy: MaskingName | None = "train_on_assistant",
    new_system_prompt: str | None = None,
    packed: bool = False,
    filter_fn: Callable[..., bool] | None = None,
    split: str = "train",
    **load_dataset_kwargs: Any,
) -> SFTDataset | PackedDataset:
    """Conversations in ShareGPT's style, column ``conversations``. For the arguments see :func:`chat_dataset`.

    Raises:
        DataError: see :class:`SFTDataset`; ``packed`` without the tokenizer's ``max_seq_len``.

    Example:
        >>> turns = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "one cat"}]
        >>> len(torchtune.datasets.slimorca_dataset(tokenizer, source=[{"conversations": turns}]))
        1
    """
    transform = ShareGPTToMessages(
        train_on_input=train_on_input,
        column_map=column_map,
        new_system_prompt=new_system_prompt,
        masking_strategy=masking_strategy,
    )
    return sft_dataset(
        tokenizer, source, transform, packed=packed, filter_fn=filter_fn, split=split, **load_dataset_kwargs
    )
