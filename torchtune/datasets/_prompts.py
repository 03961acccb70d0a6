"""Prompt datasets for online RL, with the columns that rewards read."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torchtune.data import (
    Conversation,
    DataError,
    Message,
    check_tokenizer,
    images_of_columns,
    read_conversation,
    reference_answer,
    unfold_prompt,
    with_images,
)
from torchtune.datasets._row_images import row_error, tokenize_text
from torchtune.datasets._row_source import RowSource, Source
from torchtune.datasets._tokenized import Tokenize, TokenizedDataset
from torchtune.tokenizers import ModelTokenizer
from torchtune.utils import require


class PromptDataset(TokenizedDataset):
    """Dataset of prompts, tokenized at construction up to the generation prompt, with their rows.

    A prompt is a text or a list of messages. If the last message is the assistant's, it is the reference answer: it is
    removed from the prompt and becomes the row's column ``answer``; a tool call becomes the text
    ``{"arguments": {…}, "name": …}``. The row's tools and its column ``system`` are part of the prompt.

    Args:
        source: Hub dataset, folder, file, loader name, or rows in memory.
        tokenizer: tokenizer of the model.
        column: column of the prompt.
        new_system_prompt: system prompt that replaces the prompts' own.
        filter_fn: function of a row; rows for which it returns False are dropped.
        **load_dataset_kwargs: passed to ``datasets.load_dataset``.

    Raises:
        DataError: the data cannot be loaded, has no rows, or has rows without a prompt, or with a prompt of at least
            ``max_seq_len`` tokens (listed by number).

    Example:
        >>> data = torchtune.datasets.PromptDataset(source=[{"prompt": "What is 2 + 3?"}], tokenizer=tokenizer)
        >>> len(data)
        1
    """

    _has_prompts: ClassVar[bool] = True

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
        check_tokenizer(tokenizer, "__call__", reader="a dataset of conversations")
        self._column, self._system, self._tokenizer = column, new_system_prompt, tokenizer
        found = RowSource(source, filter_fn=filter_fn, **load_dataset_kwargs)
        if found.skips:
            raise DataError("on_bad_row=skip is not possible for prompts: leave rows out with filter_fn.")
        depends_on = {"column": column, "new_system_prompt": new_system_prompt, "tokenizer": tokenizer}
        work = Tokenize(self._prompt, self._names, tokenizer)
        rows = self._prepare(found, depends_on, work, limit=None, way_out="filter_fn")
        self.num_images = sum(note["images"][0] for note in rows.notes)
        self._rows = found.rows()

    def _prompt(self, row: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        prompt, _ = self._split(row)
        messages = [*prompt.messages, Message(role="assistant", content="")]
        tokens, _, note = tokenize_text(self._tokenizer, messages, inference=True, tools=prompt.tools)
        tokens = list(tokens)
        limit = getattr(self._tokenizer, "max_seq_len", None)
        if limit is not None and len(tokens) >= limit:
            raise DataError(f"the prompt is as long as max_seq_len={limit}, or longer")
        return {"rows": {"tokens": tokens, "labels": tokens, **({"note": note} if note else {})}}

    def _split(self, row: Mapping[str, Any]) -> tuple[Conversation, Message | None]:
        """Return the prompt, and the reference answer if the last message is the assistant's."""
        if not isinstance(row, Mapping) or self._column not in row:
            found = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
            raise DataError(f"there is no column '{self._column}' among {found or 'none'}")
        row = unfold_prompt(row, self._column)
        turns = with_images(row[self._column], images_of_columns(row))
        prompt = read_conversation(row, turns, new_system_prompt=self._system, columns=(self._column,))
        answer = None
        if prompt.messages and prompt.messages[-1].role == "assistant":
            answer = prompt.messages.pop()
        if not any(message.text_content.strip() for message in prompt.messages if message.role != "system"):
            raise DataError("the prompt is empty")
        return prompt, answer

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return ``tokens``, ``labels``, ``row`` (its columns), ``number`` (of the row), ``messages`` (of the prompt)
        and, if there are images, ``encoder_input``.

        ``labels`` equal ``tokens``; the recipes do not answer a prompt if all its labels are ignored.
        """
        tokens = self.store.lists(index)["tokens"]
        row = dict(self._rows[index])
        prompt, answer = self._split(row)
        messages = prompt.messages
        if answer is not None:
            row.setdefault("answer", reference_answer(answer))
        images = {}
        if self.num_images:
            try:
                images = self._tokenizer.encode_images(messages, tokens)
            except DataError as error:
                raise row_error(error, self.source, index, self._rows, skips=True) from error
        return {"tokens": tokens, "labels": tokens, "row": row, "number": index, "messages": messages, **images}


def prompt_dataset(
    tokenizer: ModelTokenizer, *, source: Source, split: str = "train", **settings: Any
) -> PromptDataset:
    """Build a dataset of prompts (texts or lists of ``{"role", "content"}``), with all columns for rewards.

    Args:
        tokenizer: tokenizer of the model.
        source: Hub dataset, folder, file, loader name (``json``, ``parquet`` …), or rows in memory.
        split: split of the dataset.
        **settings: see :class:`PromptDataset`.

    Raises:
        DataError: see :class:`PromptDataset`.

    Example:
        >>> data = torchtune.datasets.prompt_dataset(tokenizer, source=[{"prompt": "What is 2 + 3?", "answer": "5"}])
        >>> len(data)
        1
    """
    return PromptDataset(source=source, tokenizer=tokenizer, split=split, **settings)


def reasoning_gym_dataset(
    tokenizer: ModelTokenizer,
    *,
    environment: str,
    size: int = 1000,
    seed: int = 0,
    new_system_prompt: str | None = None,
    **settings: Any,
) -> PromptDataset:
    """Build a dataset of problems that a ``reasoning-gym`` environment generates from a seed.

    Requires the extra ``reasoning-gym``. Rows have the columns ``question``, ``answer`` and ``metadata``. Score
    environments with one right answer by :class:`~torchtune.rlhf.reward_functions.ExactMatch`, others by
    :class:`~torchtune.rlhf.reward_functions.ReasoningGymReward`.

    Args:
        tokenizer: tokenizer of the model.
        environment: name of the environment, for example ``chain_sum`` or ``spell_backward``.
        size: number of problems.
        seed: seed of the problems; use another seed for validation.
        new_system_prompt: system prompt to add, with the answer format.
        **settings: settings of the environment, for example ``max_terms``.

    Raises:
        DataError: the environment is unknown or rejects the settings.

    Example:
        >>> dataset = torchtune.datasets.reasoning_gym_dataset(  # doctest: +SKIP
        ...     tokenizer, environment="chain_sum", size=2, max_terms=2
        ... )
        >>> sorted(dataset[0]["row"])  # doctest: +SKIP
        ['answer', 'metadata', 'question']
    """
    gym = require("reasoning_gym", extra="reasoning-gym", purpose="reasoning_gym_dataset")
    try:
        rows = list(gym.create_dataset(environment, size=size, seed=seed, **settings))
    except (ValueError, TypeError, AssertionError) as error:
        raise DataError(
            f"reasoning_gym_dataset: {environment!r} with size={size} and {settings or 'no settings'} cannot be made "
            f"({error}): correct the name of the environment or its settings."
        ) from error
    return PromptDataset(source=rows, tokenizer=tokenizer, column="question", new_system_prompt=new_system_prompt)
