"""Transforms of question-answer rows and preference rows to messages."""

import difflib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torchtune.data._common import DataError, Transform
from torchtune.data._conversation import check_same_prompt, read_conversation, tools_entry, unfold_prompt
from torchtune.data._images import images_of_columns, is_url, with_images
from torchtune.data._messages import MaskingStrategy, Message, as_messages, parse_masking_strategy, role_of
from torchtune.data._tool_calls import parse_json_text


def column(sample: Mapping[str, Any], name: str) -> Any:
    """Return a column of a row. Raises :class:`DataError` with the columns and the nearest name if it is missing."""
    if name in sample:
        return sample[name]
    near = difflib.get_close_matches(name, list(sample), n=1, cutoff=0.5)
    hint = f"; did you mean '{near[0]}'" if near else ""
    present = ", ".join(f"'{key}'" for key in sample)
    raise DataError(f"there is no column '{name}' among {present}{hint} (column_map says which column holds what)")


def text_column(sample: Mapping[str, Any], name: str) -> str:
    """Return a text column of a row. Raises :class:`DataError` if it is missing or not a text."""
    value = column(sample, name)
    if not isinstance(value, str):
        raise DataError(f"column '{name}' holds {'nothing' if value is None else type(value).__name__}, not a text")
    return value


def check_column_map(
    column_map: Mapping[str, str] | None, defaults: Mapping[str, str], required: Sequence[str]
) -> dict[str, str]:
    """Check and return a mapping from keys to columns; return ``defaults`` if it is None.

    Raises:
        DataError: a required key is missing from ``column_map``, or a key is unknown.
    """
    if column_map is None:
        return dict(defaults)
    for key in required:
        if key not in column_map:
            raise DataError(
                f"column_map needs the key '{key}' (the column that holds it), it has {sorted(column_map)}."
            )
    for key in column_map:
        if key not in defaults:
            raise DataError(f"column_map has the unknown key '{key}': its keys are {', '.join(defaults)}.")
    return dict(column_map)


def resolve_masking(train_on_input: bool | None, masking_strategy: str | MaskingStrategy | None) -> MaskingStrategy:
    """Return the masking strategy; the deprecated ``train_on_input`` takes precedence if it is set.

    Raises:
        DataError: the strategy is unknown.
    """
    if train_on_input is not None:
        strategy = MaskingStrategy.TRAIN_ON_ALL if train_on_input else MaskingStrategy.TRAIN_ON_ASSISTANT
        warnings.warn(
            f"train_on_input={train_on_input} is deprecated: use masking_strategy='{strategy.value}'.",
            FutureWarning,
            stacklevel=3,
        )
        return strategy
    return parse_masking_strategy(masking_strategy or MaskingStrategy.TRAIN_ON_ASSISTANT)


def image_column(sample: Mapping[str, Any], name: str, image_dir: Path | None) -> list[Any]:
    """Return the images of a column, with ``image_dir`` before file names; return an empty list for null."""
    value = column(sample, name)
    values = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    return [
        image_dir / one if image_dir is not None and isinstance(one, str | Path) and not is_url(one) else one
        for one in values
    ]


class InputOutputToMessages(Transform):
    """Transform of a row with a question and an answer to a user turn and an assistant turn.

    Question and answer may also be lists of turns (a conversational prompt with its completion). Turns of the prompt
    are then trained on with ``train_on_all`` only.

    Args:
        train_on_input: deprecated; use ``masking_strategy``.
        column_map: maps ``input``, ``output`` and, optionally, ``image`` (an image, a list of images, or null) to
            columns.
        new_system_prompt: system prompt to insert.
        image_dir: folder that contains the images, if rows have file names.
        masking_strategy: see :func:`mask_messages`.

    Raises:
        DataError: ``column_map`` lacks a key; when called, a column is missing or is not a text.

    Example:
        >>> transform = torchtune.data.InputOutputToMessages(column_map={"input": "question", "output": "answer"})
        >>> [message.text_content for message in transform({"question": "Why?", "answer": "So."})["messages"]]
        ['Why?', 'So.']
    """

    takes_encoded_images = True  # encoded files need not be decoded first

    def __init__(
        self,
        train_on_input: bool | None = None,
        column_map: Mapping[str, str] | None = None,
        new_system_prompt: str | None = None,
        image_dir: Path | None = None,
        masking_strategy: str | MaskingStrategy | None = "train_on_assistant",
    ) -> None:
        defaults = {"input": "input", "output": "output", "image": "image"}
        self.column_map = check_column_map(column_map, defaults, ("input", "output"))
        self.wants_image = column_map is not None and "image" in column_map
        self.new_system_prompt = new_system_prompt
        self.image_dir = None if image_dir is None else Path(image_dir)
        self.masking_strategy = resolve_masking(train_on_input, masking_strategy)

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``{"messages": [...]}``, with ``tools`` if the row has them."""
        sample, images = unfold_prompt(sample, self.column_map["input"]), []
        if self.wants_image or "image" in sample:
            images = image_column(sample, self.column_map.get("image", "image"), self.image_dir)
        conversation = read_conversation(
            sample,
            [*self._question(sample, images), *answer_turns(sample, self.column_map["output"])],
            new_system_prompt=self.new_system_prompt,
            masking_strategy=self.masking_strategy,
            columns=self.column_map.values(),
        )
        return conversation.as_sample()

    def _question(self, sample: Mapping[str, Any], images: list[Any]) -> list[Message]:
        name = self.column_map["input"]
        question = column(sample, name)
        if isinstance(question, str):
            parts = [{"type": "image", "content": image} for image in images]
            return [Message(role="user", content=[*parts, {"type": "text", "content": question}])]
        return _prompt_turns(with_images(check_turns(question, name), images), self.masking_strategy)


def _prompt_turns(turns: Sequence[Any], masking_strategy: MaskingStrategy) -> list[Message]:
    """Return the turns of a prompt, of which none is an answer: they are trained on with ``train_on_all`` only."""
    messages = as_messages(turns)
    if masking_strategy is not MaskingStrategy.TRAIN_ON_ALL:
        for message in messages:
            message.stated_training = False
    return messages


class AlpacaToMessages(Transform):
    """Transform of a row in Alpaca format to a user turn, with the Alpaca preamble, and an assistant turn.

    A column ``history``, a list of ``[question, answer]`` from the oldest on, or its JSON text, becomes earlier turns
    without preamble.

    Args:
        train_on_input: deprecated; use ``masking_strategy``.
        column_map: maps ``instruction``, ``output`` and, optionally, ``input`` to columns.
        masking_strategy: see :func:`mask_messages`.

    Raises:
        DataError: ``column_map`` lacks a key; when called, a column is missing or is not a text.

    Example:
        >>> row = {"instruction": "Count.", "input": "", "output": "1 2 3"}
        >>> messages = torchtune.data.AlpacaToMessages()(row)["messages"]
        >>> messages[0].text_content.endswith("### Instruction:\\nCount.\\n\\n### Response:\\n")
        True
    """

    template: ClassVar[dict[str, str]] = {
        "prompt_input": (
            "Below is an instruction that describes a task, paired with an input that provides further context. "
            "Write a response that appropriately completes the request.\n\n"
            "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
        ),
        "prompt_no_input": (
            "Below is an instruction that describes a task. "
            "Write a response that appropriately completes the request.\n\n"
            "### Instruction:\n{instruction}\n\n### Response:\n"
        ),
    }

    def __init__(
        self,
        train_on_input: bool | None = None,
        column_map: Mapping[str, str] | None = None,
        masking_strategy: str | MaskingStrategy | None = "train_on_all",
    ) -> None:
        defaults = {"instruction": "instruction", "input": "input", "output": "output"}
        self.column_map = check_column_map(column_map, defaults, ("instruction", "output"))
        self.masking_strategy = resolve_masking(train_on_input, masking_strategy)

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``{"messages": [user, assistant]}``, and the row's earlier turns, system prompt and ``tools``."""
        instruction = text_column(sample, self.column_map["instruction"])
        name = self.column_map.get("input", "input")
        if name != "input":
            column(sample, name)  # a name that was chosen is the name of a column
        given = "" if sample.get(name) is None else text_column(sample, name)
        layout = self.template["prompt_input" if given else "prompt_no_input"]
        turns = [
            *_earlier_turns(sample.get("history")),
            Message(role="user", content=layout.format(instruction=instruction, input=given)),
            Message(role="assistant", content=text_column(sample, self.column_map["output"])),
        ]
        conversation = read_conversation(
            sample, turns, masking_strategy=self.masking_strategy, columns=self.column_map.values()
        )
        return conversation.as_sample()


def _earlier_turns(history: Any) -> list[Message]:
    """Return the turns of a ``history`` in Alpaca format: a list of ``[question, answer]``, or nothing."""
    if isinstance(history, str):  # a cell of a table
        history = parse_json_text(history, "the turns in column 'history'") if history.strip() else None
    if history is None:
        return []
    if not isinstance(history, list | tuple):
        raise DataError(f"column 'history' holds {type(history).__name__}, not a list of [question, answer]")
    turns = []
    for pair in history:
        is_pair = isinstance(pair, list | tuple) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise DataError("column 'history' must be a list of [question, answer], two texts each")
        question, answer = pair
        turns += [Message(role="user", content=question), Message(role="assistant", content=answer)]
    return turns


class ChosenRejectedToMessages(Transform):
    """Transform of a row with a chosen and a rejected conversation (lists of ``{"role", "content"}``) to messages.

    If ``chosen`` and ``rejected`` are texts, or begin with an assistant turn, they are answers to the ``prompt`` of the
    row, which is a text or a list of turns. Turns of the prompt are then trained on with ``train_on_all`` only.

    Args:
        train_on_input: deprecated; use ``masking_strategy``.
        column_map: maps ``chosen``, ``rejected`` and, optionally, ``prompt`` to columns.
        new_system_prompt: system prompt that replaces the system turns of both conversations.
        masking_strategy: see :func:`mask_messages`.

    Raises:
        DataError: ``column_map`` lacks a key; when called, a column is missing or is not a conversation.

    Example:
        >>> question = {"role": "user", "content": "Why?"}
        >>> row = {side: [question, {"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
        >>> sorted(torchtune.data.ChosenRejectedToMessages()(row))
        ['chosen', 'rejected']
    """

    def __init__(
        self,
        train_on_input: bool | None = None,
        column_map: Mapping[str, str] | None = None,
        new_system_prompt: str | None = None,
        masking_strategy: str | MaskingStrategy | None = "train_on_assistant",
    ) -> None:
        defaults = {"chosen": "chosen", "rejected": "rejected"}
        column_map = dict(column_map or {})
        self._prompt = column_map.pop("prompt", "prompt")
        self.column_map = check_column_map(column_map or None, defaults, ("chosen", "rejected"))
        self.new_system_prompt = new_system_prompt
        self.masking_strategy = resolve_masking(train_on_input, masking_strategy)

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``{"chosen": [...], "rejected": [...]}``, with ``tools`` if the row has them."""
        sample, sides = unfold_prompt(sample, self._prompt), {}
        for side, name in self.column_map.items():
            sides[side] = read_conversation(
                sample,
                turns_with_answer(sample, name, self._prompt, self.masking_strategy),
                new_system_prompt=self.new_system_prompt,
                masking_strategy=self.masking_strategy,
                columns=(*self.column_map.values(), self._prompt),
            )
        check_same_prompt(sides["chosen"].messages, sides["rejected"].messages)
        pair = {side: conversation.messages for side, conversation in sides.items()}
        return pair | tools_entry(sides["chosen"].tools)


def turns_with_answer(
    sample: Mapping[str, Any], name: str, prompt: str, masking_strategy: MaskingStrategy
) -> Sequence[Any]:
    """Return the turns of an answer, preceded by the prompt's turns unless the answer already contains the prompt.

    Images in the row's column ``image`` or ``images`` are inserted; see :func:`with_images`.

    Args:
        sample: the row.
        name: column of the answer, a text, a turn, or turns.
        prompt: column of the prompt, a text or turns.
        masking_strategy: strategy with which the turns of the prompt column are marked as trained on or not.

    Raises:
        DataError: the answer is neither a text nor turns, neither the answer nor the row has a prompt, or the prompt is
            an Alpaca instruction with an input.
    """
    answer = answer_turns(sample, name)
    images = images_of_columns(sample)
    if not answer or role_of(answer[0]) != "assistant":
        return with_images(answer, images)
    question = column(sample, prompt)
    for other in ("input", "history"):
        if prompt == "instruction" and sample.get(other):
            raise DataError(
                f"column '{other}' belongs to column 'instruction' and is not read: write both in one column"
            )
    if not isinstance(question, str | list | tuple):
        kind = "nothing" if question is None else type(question).__name__
        raise DataError(f"column '{prompt}' holds {kind}, not a text or a list of turns")
    return [*_prompt_turns(with_images(question, images), masking_strategy), *answer]


def answer_turns(sample: Mapping[str, Any], name: str) -> Sequence[Any]:
    """Return the turns of a column that holds a text of the assistant, a turn, or a list of turns."""
    answer = column(sample, name)
    if isinstance(answer, str):
        return [Message(role="assistant", content=answer)]
    if isinstance(answer, Mapping):
        return [answer]
    if not isinstance(answer, list | tuple):
        kind = "nothing" if answer is None else type(answer).__name__
        raise DataError(f"column '{name}' holds {kind}, not a text or a list of turns")
    return answer


def check_turns(value: Any, name: str) -> Sequence[Any]:
    """Return the turns of a column, which may be JSON text, as in tables.

    Raises:
        DataError: they are not a list of at least one turn.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_json_text(value, f"the turns in column '{name}'")
    if not isinstance(value, list | tuple):
        kind = "nothing" if value is None else type(value).__name__
        raise DataError(f"column '{name}' holds {kind}, not a list of turns")
    if not value:
        raise DataError(f"column '{name}' holds a conversation without turns")
    return value
