"""Datasets of one instruction and one answer."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torchtune.data import AlpacaToMessages, InputOutputToMessages
from torchtune.data._messages import MaskingName
from torchtune.datasets._build import sft_dataset
from torchtune.datasets._load import Source
from torchtune.datasets._packed import PackedDataset
from torchtune.datasets._sft import SFTDataset
from torchtune.modules.transforms.tokenizers import ModelTokenizer


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
    """Rows with a question and an answer.

    Args:
        tokenizer: tokenizer of the model.
        source: a dataset of the hub, a folder, a file, a loader's name (``json``, ``csv``, ``parquet`` …), or rows in
            memory.
        column_map: the columns of ``input`` and ``output``; by default those names.
        train_on_input: old spelling of ``masking_strategy``.
        masking_strategy: ``train_on_assistant``, ``train_on_all`` or ``train_on_last``.
        new_system_prompt: text of a system turn put first.
        packed: put examples together into packs of the tokenizer's ``max_seq_len``.
        filter_fn: rows for which it is false are left out.
        split: split of the dataset, for example ``"train"`` or ``"train[:10%]"``.
        **load_dataset_kwargs: arguments of ``datasets.load_dataset``, for example ``data_files``.

    Raises:
        DataError: see :class:`SFTDataset`; ``packed`` without the tokenizer's ``max_seq_len``.

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
    """Rows with ``instruction``, ``input`` (may be empty) and ``output``, in Alpaca's layout.

    By default the instruction is trained on too. For the arguments see :func:`instruct_dataset`.

    Raises:
        DataError: see :class:`SFTDataset`; ``packed`` without the tokenizer's ``max_seq_len``.

    Example:
        >>> rows = [{"instruction": "Count.", "input": "", "output": "one two"}]
        >>> len(torchtune.datasets.alpaca_dataset(tokenizer, source=rows))
        1
    """
    transform = AlpacaToMessages(
        train_on_input=train_on_input, column_map=column_map, masking_strategy=masking_strategy
    )
    return sft_dataset(
        tokenizer, source, transform, packed=packed, filter_fn=filter_fn, split=split, **load_dataset_kwargs
    )


alpaca_cleaned_dataset = partial(alpaca_dataset, source="yahma/alpaca-cleaned")
alpaca_cleaned_dataset.__doc__ = ":func:`alpaca_dataset` of the cleaned data."


def grammar_dataset(
    tokenizer: ModelTokenizer,
    *,
    source: Source = "liweili/c4_200m",
    column_map: Mapping[str, str] | None = None,
    train_on_input: bool | None = None,
    masking_strategy: MaskingName | None = "train_on_assistant",
    new_system_prompt: str | None = None,
    packed: bool = False,
    filter_fn: Callable[..., bool] | None = None,
    split: str = "train",
    **load_dataset_kwargs: Any,
) -> SFTDataset | PackedDataset:
    """Sentences with and without mistakes, columns ``input`` and ``output``.

    Goes with ``torchtune.data.GrammarErrorCorrectionTemplate``. For the arguments see :func:`instruct_dataset`.

    Raises:
        DataError: see :class:`SFTDataset`; ``packed`` without the tokenizer's ``max_seq_len``.

    Example:
        >>> rows = [{"input": "the cats sees", "output": "the cat sees"}]
        >>> len(torchtune.datasets.grammar_dataset(tokenizer, source=rows))
        1
    """
    return instruct_dataset(
        tokenizer,
        source=source,
        column_map=column_map,
        train_on_input=train_on_input,
        masking_strategy=masking_strategy,
        new_system_prompt=new_system_prompt,
        packed=packed,
        filter_fn=filter_fn,
        split=split,
        **load_dataset_kwargs,
    )


def samsum_dataset(
    tokenizer: ModelTokenizer,
    *,
    source: Source = "Samsung/samsum",
    column_map: Mapping[str, str] | None = None,
    train_on_input: bool | None = None,
    masking_strategy: MaskingName | None = "train_on_assistant",
    new_system_prompt: str | None = None,
    packed: bool = False,
    filter_fn: Callable[..., bool] | None = None,
    split: str = "train",
    **load_dataset_kwargs: Any,
) -> SFTDataset | PackedDataset:
    """Dialogues and their summaries, columns ``dialogue`` and ``summary``.

    Goes with ``torchtune.data.SummarizeTemplate``. For the arguments see :func:`instruct_dataset`.

    Raises:
        DataError: see :class:`SFTDataset`; ``packed`` without the tokenizer's ``max_seq_len``.

    Example:
        >>> rows = [{"dialogue": "A: Why? B: So.", "summary": "A asks why."}]
        >>> len(torchtune.datasets.samsum_dataset(tokenizer, source=rows))
        1
    """
    return instruct_dataset(
        tokenizer,
        source=source,
        column_map=column_map or {"input": "dialogue", "output": "summary"},
        train_on_input=train_on_input,
        masking_strategy=masking_strategy,
        new_system_prompt=new_system_prompt,
        packed=packed,
        filter_fn=filter_fn,
        split=split,
        **load_dataset_kwargs,
    )
