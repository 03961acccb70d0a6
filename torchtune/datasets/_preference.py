"""Datasets of two answers, one of which is better."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from torch.utils.data import Dataset

from torchtune.data import ChosenRejectedToMessages, DataError, Message, Transform, as_messages
from torchtune.data._common import as_sample, check_tokenizer
from torchtune.data._messages import MaskingName, mask_messages
from torchtune.data._to_messages import check_column_map, resolve_masking, text_column
from torchtune.datasets._bad_rows import BadRows
from torchtune.datasets._fingerprint import Fingerprint
from torchtune.datasets._load import RowSource, Source
from torchtune.datasets._sft import say_what_is_cut
from torchtune.datasets._shared import prepare
from torchtune.datasets._store import Writers, has_label, shifted_labels
from torchtune.datasets._tokenize import NO_LABEL, Tokenize, tokenize_rows
from torchtune.modules.transforms.tokenizers import ModelTokenizer
from torchtune.modules.transforms.tokenizers._protocols import arrays_of
from torchtune.utils import get_logger, log_rank_zero

_SIDES = ("chosen", "rejected")


class PreferenceDataset(Dataset):
    """Pairs of answers, tokenized when the dataset is made.

    A pair cannot be trained on if its answers are the same, one is empty, or no label is left of one within the
    tokenizer's ``max_seq_len``.

    Args:
        source: a dataset of the hub, a folder, a file, a loader's name, or rows in memory.
        message_transform: row -> ``chosen`` and ``rejected`` messages.
        tokenizer: tokenizer of the model.
        filter_fn: rows for which it is false are left out.
        packed: not possible; True is refused.
        drop_bad_rows: leave out rows that cannot be trained on, and say which; by default they are an error.
        **load_dataset_kwargs: arguments of ``datasets.load_dataset``.

    Raises:
        DataError: the data cannot be loaded, has no rows, or has rows that cannot be trained on (named by number).

    Example:
        >>> question = {"role": "user", "content": "Who?"}
        >>> row = {side: [question, {"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
        >>> transform = torchtune.data.ChosenRejectedToMessages()
        >>> len(torchtune.datasets.PreferenceDataset(source=[row], message_transform=transform, tokenizer=tokenizer))
        1
    """

    _sides: ClassVar[tuple[str, ...]] = _SIDES

    def __init__(
        self,
        *,
        source: Source,
        message_transform: Transform,
        tokenizer: ModelTokenizer,
        filter_fn: Callable[..., bool] | None = None,
        packed: bool = False,
        drop_bad_rows: bool = False,
        **load_dataset_kwargs: Any,
    ) -> None:
        if packed:
            raise DataError("packed=True is not possible for preference data: set it to False.")
        check_tokenizer(tokenizer)
        found = RowSource(source, filter_fn=filter_fn, **load_dataset_kwargs)
        self.source = found.shown
        fingerprint = Fingerprint()
        fingerprint.add_part("dataset", [type(self), drop_bad_rows])
        fingerprint.add_part("masks and columns", message_transform)
        fingerprint.add_part("tokenizer", tokenizer)
        limit = getattr(tokenizer, "max_seq_len", None)
        found.add_to(fingerprint)

        def build(writers: Writers) -> dict[str, Any]:
            def samples(index: int, row: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
                return self._tokenize(as_sample(message_transform(row), "message_transform"), tokenizer, limit)

            rows = found.rows()
            bad = BadRows(self.source, rows=rows, drop=drop_bad_rows or found.skips)
            info = tokenize_rows(rows, Tokenize(samples, self._sides, limit), bad, writers)
            return {**info, "dropped": bad.dropped, "reasons": bad.reasons}

        self.stores, info = prepare(fingerprint, self._sides, self.source, build, found.prepared)
        self._read(info)
        self.dropped = dropped = info.get("dropped", [])
        self._rows = np.delete(np.arange(len(self) + len(dropped)), dropped)
        if dropped:
            said = f"{len(dropped)} of {len(self._rows) + len(dropped)} rows of {self.source} were left out"
            log_rank_zero(get_logger(), f"{said}: {info['reasons']}.", logging.WARNING)
        if not len(self):
            raise DataError(f"{self.source}: no row is left that can be trained on.")
        say_what_is_cut(info, len(self), self.source, limit)

    def _read(self, info: Mapping[str, Any]) -> None:
        """Take over the ``notes`` of the rows."""

    @staticmethod
    def _tokenize(pair: Mapping[str, Any], tokenizer: Any, limit: int | None) -> dict[str, dict[str, Sequence[int]]]:
        samples = {}
        for side in _SIDES:
            if side not in pair:
                raise DataError(f"message_transform gives no '{side}' among {', '.join(map(repr, pair)) or 'nothing'}")
            samples[side] = tokenize_answer(pair[side], tokenizer, limit, f"the {side} answer")
        if samples["chosen"]["tokens"] == samples["rejected"]["tokens"]:
            cut = limit is not None and len(samples["chosen"]["tokens"]) >= limit
            raise DataError(f"both answers are the same{f' within max_seq_len={limit}' if cut else ''}")
        return samples

    @property
    def fingerprint(self) -> tuple[int, ...]:
        """Changes when any token or label does."""
        return tuple(store.fingerprint for store in self.stores.values())

    def __len__(self) -> int:
        return len(self.stores["chosen"])

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        """``chosen_input_ids``, ``chosen_labels``, ``rejected_input_ids``, ``rejected_labels`` (pre-shifted)."""
        item = {}
        for side, store in self.stores.items():
            tokens, labels = store.arrays(index)
            item |= {f"{side}_input_ids": tokens.tolist(), f"{side}_labels": labels.tolist()}
        return item

    def origins(self, index: int) -> list[dict[str, Any]]:
        """``source`` and ``row`` (counted from 0, after ``filter_fn``) of a pair."""
        return [{"source": self.source, "row": int(self._rows[index])}]


def tokenize_answer(messages: Any, tokenizer: Any, limit: int | None, name: str) -> dict[str, Sequence[int]]:
    """Tokens and pre-shifted labels of a conversation that ends with an answer.

    Args:
        messages: of the conversation.
        tokenizer: of the model.
        limit: its ``max_seq_len``, for the message.
        name: of the answer, for the message.

    Raises:
        DataError: the answer is missing or empty, or no label is left of it.
    """
    messages = as_messages(messages)
    if not messages or messages[-1].role != "assistant":
        raise DataError(f"{name} is missing: the last turn must be the assistant's")
    if not messages[-1].contains_media and not messages[-1].text_content.strip():
        raise DataError(f"{name} is empty")
    row = arrays_of(tokenizer, {"messages": messages})
    sample = {"tokens": row["tokens"], "labels": shifted_labels(row["tokens"], row["mask"])}
    if not has_label(sample):
        is_full = limit is not None and len(sample["tokens"]) >= limit
        raise DataError(
            f"{NO_LABEL} in {name}" + (f" within max_seq_len={limit}, the prompt is too long" if is_full else "")
        )
    return sample


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
    drop_bad_rows: bool = False,
    **load_dataset_kwargs: Any,
) -> PreferenceDataset:
    """Rows with a chosen and a rejected conversation (lists of ``{"role", "content"}``), or a prompt and two answers.

    Args:
        tokenizer: tokenizer of the model.
        source: a dataset of the hub, a folder, a file, a loader's name (``json``, ``parquet`` …), or rows in memory.
        column_map: the columns of ``chosen``, ``rejected`` and ``prompt``; by default those names. The prompt is read
            where the answers are texts, or turns that begin with the assistant's.
        train_on_input: old spelling of ``masking_strategy``.
        masking_strategy: ``train_on_assistant``, ``train_on_all`` or ``train_on_last``.
        new_system_prompt: text of a system turn that takes the place of the conversations' own.
        filter_fn: rows for which it is false are left out.
        split: split of the dataset.
        drop_bad_rows: leave out rows that cannot be trained on, and say which.
        **load_dataset_kwargs: arguments of ``datasets.load_dataset``, for example ``data_files``.

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
        drop_bad_rows=drop_bad_rows,
        **load_dataset_kwargs,
    )


def hh_rlhf_helpful_dataset(
    tokenizer: ModelTokenizer,
    *,
    source: Source = "RLHFlow/HH-RLHF-Helpful-standard",
    column_map: Mapping[str, str] | None = None,
    train_on_input: bool | None = None,
    masking_strategy: MaskingName | None = "train_on_assistant",
    new_system_prompt: str | None = None,
    filter_fn: Callable[..., bool] | None = None,
    split: str = "train",
    drop_bad_rows: bool = False,
    **load_dataset_kwargs: Any,
) -> PreferenceDataset:
    """Helpfulness comparisons, columns ``chosen`` and ``rejected``. For the arguments see :func:`preference_dataset`.

    Raises:
        DataError: see :class:`PreferenceDataset`.

    Example:
        >>> question = {"role": "user", "content": "Who?"}
        >>> row = {side: [question, {"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
        >>> len(torchtune.datasets.hh_rlhf_helpful_dataset(tokenizer, source=[row]))
        1
    """
    return preference_dataset(
        tokenizer,
        source=source,
        column_map=column_map,
        train_on_input=train_on_input,
        masking_strategy=masking_strategy,
        new_system_prompt=new_system_prompt,
        filter_fn=filter_fn,
        split=split,
        drop_bad_rows=drop_bad_rows,
        **load_dataset_kwargs,
    )


class StackExchangePairedToMessages(Transform):
    """A row with one question and two answers to two conversations.

    Args:
        train_on_input: old spelling of ``masking_strategy``.
        column_map: the columns of ``prompt``, ``chosen`` and ``rejected``.
        masking_strategy: see :func:`torchtune.data.mask_messages`.

    Raises:
        DataError: the map lacks a key; when called, a column is missing or holds no text.
    """

    def __init__(
        self,
        train_on_input: bool | None = None,
        column_map: Mapping[str, str] | None = None,
        masking_strategy: MaskingName | None = "train_on_assistant",
    ) -> None:
        defaults = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
        self.column_map = check_column_map(column_map, defaults, tuple(defaults))
        self.masking_strategy = resolve_masking(train_on_input, masking_strategy)

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """``{"chosen": [...], "rejected": [...]}``."""
        pair = {}
        for side in _SIDES:
            pair[side] = [
                Message(role="user", content=text_column(sample, self.column_map["prompt"])),
                Message(role="assistant", content=text_column(sample, self.column_map[side])),
            ]
            mask_messages(pair[side], self.masking_strategy)
        return pair


def stack_exchange_paired_dataset(
    tokenizer: ModelTokenizer,
    *,
    source: Source = "lvwerra/stack-exchange-paired",
    column_map: Mapping[str, str] | None = None,
    train_on_input: bool | None = None,
    masking_strategy: MaskingName | None = "train_on_assistant",
    filter_fn: Callable[..., bool] | None = None,
    split: str = "train",
    drop_bad_rows: bool = False,
    **load_dataset_kwargs: Any,
) -> PreferenceDataset:
    """Questions with a better and a worse answer, columns ``question``, ``response_j`` and ``response_k``.

    For the arguments see :func:`preference_dataset`; ``column_map`` has the keys ``prompt``, ``chosen``, ``rejected``.

    Raises:
        DataError: see :class:`PreferenceDataset`.

    Example:
        >>> rows = [{"question": "Who?", "response_j": "one cat", "response_k": "no"}]
        >>> len(torchtune.datasets.stack_exchange_paired_dataset(tokenizer, source=rows))
        1
    """
    if source == "lvwerra/stack-exchange-paired" and "data_files" not in load_dataset_kwargs:
        load_dataset_kwargs.setdefault("data_dir", "data/rl")
    transform = StackExchangePairedToMessages(
        train_on_input=train_on_input,
        column_map=column_map or {"prompt": "question", "chosen": "response_j", "rejected": "response_k"},
        masking_strategy=masking_strategy,
    )
    return PreferenceDataset(
        source=source,
        message_transform=transform,
        tokenizer=tokenizer,
        filter_fn=filter_fn,
        split=split,
        drop_bad_rows=drop_bad_rows,
        **load_dataset_kwargs,
    )
