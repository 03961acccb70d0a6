"""Instruction datasets."""

from collections.abc import Callable, Mapping
from typing import Any

from torchtune._lazy import former_names
from torchtune.data import AlpacaToMessages, InputOutputToMessages, MaskingName
from torchtune.datasets._packed import PackedDataset
from torchtune.datasets._row_source import Source
from torchtune.datasets._sft import SFTDataset
from torchtune.datasets._sft_builder import sft_dataset
from torchtune.tokenizers import ModelTokenizer

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


__getattr__ = former_names(__name__)
