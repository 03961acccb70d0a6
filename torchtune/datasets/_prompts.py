"""Prompts that a model answers while it is trained, with what its answers are scored by."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from torchtune.data import DataError, Message, as_messages
from torchtune.data._common import check_tokenizer
from torchtune.datasets._bad_rows import BadRows
from torchtune.datasets._fingerprint import Fingerprint
from torchtune.datasets._load import RowSource, Source
from torchtune.datasets._shared import prepare
from torchtune.datasets._store import Writers
from torchtune.datasets._tokenize import Tokenize, tokenize_rows
from torchtune.modules.transforms.tokenizers import ModelTokenizer


class PromptDataset(Dataset):
    """Prompts, tokenized when the dataset is made up to where the answer begins, and the rows that they are from.

    A prompt is a text, or a list of messages. If the last message is the assistant's, it is the right answer: it is
    left out of the prompt, and stands in the row's column ``answer``.

    Args:
        source: a dataset of the hub, a folder, a file, a loader's name, or rows in memory.
        tokenizer: tokenizer of the model.
        column: of the prompt.
        new_system_prompt: text of a system turn that takes the place of the prompts' own.
        filter_fn: rows for which it is false are left out.
        **load_dataset_kwargs: arguments of ``datasets.load_dataset``.

    Raises:
        DataError: the data cannot be loaded, has no rows, or has rows without a prompt, or with one that is as long as
            the tokenizer's ``max_seq_len`` (named by number).

    Example:
        >>> data = torchtune.datasets.PromptDataset(source=[{"prompt": "What is 2 + 3?"}], tokenizer=tokenizer)
        >>> len(data)
        1
    """

    def __init__(
        self,
        *,
        source: Source,
        tokenizer: ModelTokenizer,
        column: str = "prompt",
        new_system_prompt: str | None = None,
        filter_fn: Callable[..., bool] | None = None,
        **load_dataset_kwargs: Any,
    ) -> None:
        check_tokenizer(tokenizer)
        self._column, self._system, self._tokenizer = column, new_system_prompt, tokenizer
        found = RowSource(source, filter_fn=filter_fn, **load_dataset_kwargs)
        if found.skips:
            raise DataError("on_bad_row=skip is not possible for prompts: leave rows out with filter_fn.")
        self.source = found.shown
        fingerprint = Fingerprint()
        fingerprint.add_part("dataset", [type(self), column, new_system_prompt])
        fingerprint.add_part("tokenizer", tokenizer)
        found.add_to(fingerprint)

        def build(writers: Writers) -> dict[str, Any]:
            rows = found.rows()
            return tokenize_rows(
                rows, Tokenize(self._prompt, ["prompts"], None), BadRows(self.source, rows=rows), writers
            )

        stores, _ = prepare(fingerprint, ["prompts"], self.source, build, found.prepared)
        self._store, self._rows = stores["prompts"], found.rows()

    def _prompt(self, index: int, row: Mapping[str, Any]) -> dict[str, dict[str, list[int]]]:
        messages, _ = self._split(row)
        messages.append(Message(role="assistant", content=""))
        tokens = list(self._tokenizer({"messages": messages}, inference=True)["tokens"])
        limit = getattr(self._tokenizer, "max_seq_len", None)
        if limit is not None and len(tokens) >= limit:
            raise DataError(f"the prompt is as long as max_seq_len={limit}, or longer")
        return {"prompts": {"tokens": tokens, "labels": tokens}}

    def _split(self, row: Mapping[str, Any]) -> tuple[list[Message], str | None]:
        """The turns of the prompt, and the right answer, where it is the turn after them."""
        if not isinstance(row, Mapping) or self._column not in row:
            found = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
            raise DataError(f"there is no column '{self._column}' among {found or 'none'}")
        value = row[self._column]
        messages = [Message(role="user", content=value)] if isinstance(value, str) else list(as_messages(value))
        answer = None
        if messages and messages[-1].role == "assistant":
            answer = messages.pop().text_content
        if self._system is not None:
            messages = [message for message in messages if message.role != "system"]
            messages.insert(0, Message(role="system", content=self._system))
        if not any(message.text_content.strip() for message in messages if message.role != "system"):
            raise DataError("the prompt is empty")
        return messages, answer

    @property
    def fingerprint(self) -> int:
        """Changes when any prompt's tokens do."""
        return self._store.fingerprint

    @property
    def lengths(self) -> np.ndarray:
        """int64 [rows]: tokens of every prompt."""
        return self._store.lengths

    def __len__(self) -> int:
        return len(self._store)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """``tokens``; ``labels``, the same (ignored ones mark a prompt that is not to be answered); ``row``, columns
        of the row; ``number`` of the row.
        """  # fmt: skip
        tokens = self._store.arrays(index)[0].tolist()
        row = dict(self._rows[index])
        if (answer := self._split(row)[1]) is not None:
            row.setdefault("answer", answer)
        return {"tokens": tokens, "labels": tokens, "row": row, "number": index}

    def origins(self, index: int) -> list[dict[str, Any]]:
        """``source`` and ``row`` (counted from 0, after ``filter_fn``) of a prompt."""
        return [{"source": self.source, "row": index}]


def prompt_dataset(
    tokenizer: ModelTokenizer,
    *,
    source: Source,
    column: str = "prompt",
    new_system_prompt: str | None = None,
    filter_fn: Callable[..., bool] | None = None,
    split: str = "train",
    **load_dataset_kwargs: Any,
) -> PromptDataset:
    """Prompts of rows (texts, or lists of ``{"role", "content"}``), with all columns for rewards to read.

    Args:
        tokenizer: tokenizer of the model.
        source: a dataset of the hub, a folder, a file, a loader's name (``json``, ``parquet`` …), or rows in memory.
        column: of the prompt. If it is a conversation that ends with the assistant, that turn is the answer.
        new_system_prompt: text of a system turn that takes the place of the prompts' own.
        filter_fn: rows for which it is false are left out.
        split: split of the dataset.
        **load_dataset_kwargs: arguments of ``datasets.load_dataset``, for example ``data_files``.

    Raises:
        DataError: see :class:`PromptDataset`.

    Example:
        >>> data = torchtune.datasets.prompt_dataset(tokenizer, source=[{"prompt": "What is 2 + 3?", "answer": "5"}])
        >>> len(data)
        1
    """
    return PromptDataset(
        source=source,
        tokenizer=tokenizer,
        column=column,
        new_system_prompt=new_system_prompt,
        filter_fn=filter_fn,
        split=split,
        **load_dataset_kwargs,
    )
