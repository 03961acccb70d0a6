"""Transforms of rows to messages: questions with answers, preferences, and conversations."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torchtune.data._conversation import Conversation, check_same_prompt, read_conversation, tools_entry, unfold_prompt
from torchtune.data._images import (
    format_content_with_images,
    images_before_text,
    images_of_columns,
    insert_images,
    is_url,
    with_images,
)
from torchtune.data._messages import MaskingStrategy, Message, as_messages, parse_masking_strategy, role_of
from torchtune.data._rows import DataError, Transform, check_column_map, column, kind_of, text_column
from torchtune.data._tool_calls import parse_json_text


def resolve_masking(train_on_input: bool | None, masking_strategy: str | MaskingStrategy | None) -> MaskingStrategy:
    """Return the masking strategy; the deprecated ``train_on_input`` takes precedence if it is set.

    Raises:
        DataError: the strategy is unknown.
    """
    if train_on_input is not None:
        strategy = MaskingStrategy.TRAIN_ON_ASSISTANT
        if train_on_input:
            strategy = MaskingStrategy.TRAIN_ON_ALL
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
    if value is None:
        return []
    images = [value]
    if isinstance(value, list | tuple):
        images = list(value)
    if image_dir is None:
        return images
    located = []
    for image in images:
        if isinstance(image, str | Path) and not is_url(image):
            image = image_dir / image
        located.append(image)
    return located


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
        self.image_dir: Path | None = None
        if image_dir is not None:
            self.image_dir = Path(image_dir)
        self.masking_strategy = resolve_masking(train_on_input, masking_strategy)

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``{"messages": [...]}``, with ``tools`` if the row has them."""
        sample = unfold_prompt(sample, self.column_map["input"])
        images: list[Any] = []
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
        """Return the turns of the question with the images of the row: one of a text, or those of a prompt."""
        name = self.column_map["input"]
        question = column(sample, name)
        if isinstance(question, str):
            return [Message(role="user", content=images_before_text(images, question))]
        return _prompt_turns(with_images(turns_of_column(question, name), images), self.masking_strategy)


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
            column(sample, name)  # raises: a name that was chosen is the name of a column
        input_text = ""
        if sample.get(name) is not None:
            input_text = text_column(sample, name)
        layout = self.template["prompt_no_input"]
        if input_text:
            layout = self.template["prompt_input"]
        turns = [
            *_earlier_turns(sample.get("history")),
            Message(role="user", content=layout.format(instruction=instruction, input=input_text)),
            Message(role="assistant", content=text_column(sample, self.column_map["output"])),
        ]
        conversation = read_conversation(
            sample, turns, masking_strategy=self.masking_strategy, columns=self.column_map.values()
        )
        return conversation.as_sample()


def _earlier_turns(history: Any) -> list[Message]:
    """Return the turns of a ``history`` in Alpaca format: a list of ``[question, answer]``, or nothing."""
    if history is None:
        return []
    if isinstance(history, str):  # a cell of a table
        if not history.strip():
            return []
        history = parse_json_text(history, "the turns in column 'history'")
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
        # Apart from the answers: a row need not have it, and both answers share it.
        self._prompt = column_map.pop("prompt", "prompt")
        self.column_map = check_column_map(column_map or None, defaults, ("chosen", "rejected"))
        self.new_system_prompt = new_system_prompt
        self.masking_strategy = resolve_masking(train_on_input, masking_strategy)

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``{"chosen": [...], "rejected": [...]}``, with ``tools`` if the row has them."""
        sample = unfold_prompt(sample, self._prompt)
        conversations: dict[str, Conversation] = {}
        for side, name in self.column_map.items():
            conversations[side] = read_conversation(
                sample,
                turns_with_answer(sample, name, self._prompt, self.masking_strategy),
                new_system_prompt=self.new_system_prompt,
                masking_strategy=self.masking_strategy,
                columns=(*self.column_map.values(), self._prompt),
            )
        chosen = conversations["chosen"]
        rejected = conversations["rejected"]
        check_same_prompt(chosen.messages, rejected.messages)
        return {"chosen": chosen.messages, "rejected": rejected.messages, **tools_entry(chosen.tools)}


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
    if prompt == "instruction":  # the row is perhaps in Alpaca format, with a part of the question elsewhere
        for alpaca_column in ("input", "history"):
            if sample.get(alpaca_column):
                raise DataError(
                    f"column '{alpaca_column}' belongs to column 'instruction' and is not read: write both in one "
                    "column"
                )
    if not isinstance(question, str | list | tuple):
        raise DataError(f"column '{prompt}' holds {kind_of(question)}, not a text or a list of turns")
    return [*_prompt_turns(with_images(question, images), masking_strategy), *answer]


def answer_turns(sample: Mapping[str, Any], name: str) -> Sequence[Any]:
    """Return the turns of a column that holds a text of the assistant, a turn, or a list of turns."""
    answer = column(sample, name)
    if isinstance(answer, str):
        return [Message(role="assistant", content=answer)]
    if isinstance(answer, Mapping):
        return [answer]
    if not isinstance(answer, list | tuple):
        raise DataError(f"column '{name}' holds {kind_of(answer)}, not a text or a list of turns")
    return answer


def turns_of_column(value: Any, name: str) -> Sequence[Any]:
    """Return the turns of a column, which may be JSON text, as in tables.

    Raises:
        DataError: they are not a list of at least one turn.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_json_text(value, f"the turns in column '{name}'")
    if not isinstance(value, list | tuple):
        raise DataError(f"column '{name}' holds {kind_of(value)}, not a list of turns")
    if not value:
        raise DataError(f"column '{name}' holds a conversation without turns")
    return value


class ShareGPTToMessages(Transform):
    """Transform of a conversation in ShareGPT format: turns ``{"from": "system" | "human" | "gpt", "value": text}``.

    A turn of ``function_call`` has the JSON of a call, ``{"name", "arguments"}``, or of a list of calls; a turn of
    ``observation`` has the tool's answer. Columns ``system`` and ``tools`` are read, too.

    Args:
        train_on_input: deprecated; use ``masking_strategy``.
        column_map: maps ``conversations`` and, optionally, ``image`` (an image, a list of images, or null) to columns.
        new_system_prompt: system prompt that replaces the conversation's system turn.
        image_dir: folder that contains the images, if rows have file names.
        image_tag: placeholder of an image in user turns; None puts the images at the start of the first user turn.
        masking_strategy: see :func:`mask_messages`.

    Raises:
        DataError: ``column_map`` lacks a key; when called, a column is missing or is not a conversation.

    Example:
        >>> row = {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]}
        >>> [message.role for message in torchtune.data.ShareGPTToMessages()(row)["messages"]]
        ['user', 'assistant']
    """

    takes_encoded_images = True  # encoded files need not be decoded first

    def __init__(
        self,
        train_on_input: bool | None = None,
        column_map: Mapping[str, str] | None = None,
        new_system_prompt: str | None = None,
        image_dir: Path | None = None,
        image_tag: str | None = "<image>",
        masking_strategy: str | MaskingStrategy | None = "train_on_assistant",
    ) -> None:
        defaults = {"conversations": "conversations", "image": "image"}
        self.column_map = check_column_map(column_map, defaults, ("conversations",))
        self.wants_image = column_map is not None and "image" in column_map
        self.new_system_prompt = new_system_prompt
        self.image_dir: Path | None = None
        if image_dir is not None:
            self.image_dir = Path(image_dir)
        self.image_tag = image_tag
        self.masking_strategy = resolve_masking(train_on_input, masking_strategy)

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``{"messages": [...]}``, with ``tools`` if the row has them."""
        name = self.column_map["conversations"]
        messages = as_messages(turns_of_column(column(sample, name), name))
        if self.wants_image or "image" in sample:
            self._insert(messages, image_column(sample, self.column_map.get("image", "image"), self.image_dir))
        conversation = read_conversation(
            sample,
            messages,
            new_system_prompt=self.new_system_prompt,
            masking_strategy=self.masking_strategy,
            columns=self.column_map.values(),
        )
        return conversation.as_sample()

    def _insert(self, messages: list[Message], images: list[Any]) -> None:
        """Insert the images into the user turns, in order."""
        for message in messages:
            if message.role == "user" and not message.contains_media:
                content = message.text_content
                count = len(images)  # without a tag, the first turn takes all
                if self.image_tag is not None:
                    count = content.count(self.image_tag)
                message.content = self._with_images(content, images[:count])
                images = images[count:]
        if images:
            placeholder = "a user turn"
            if self.image_tag is not None:
                placeholder = f"a '{self.image_tag}' in a user turn"
            raise DataError(f"{len(images)} image(s) have no place: each needs {placeholder}")

    def _with_images(self, content: str, images: list[Any]) -> list[dict[str, Any]]:
        """Return the content items of a user turn: its images in the place of their tags, or before the text."""
        if self.image_tag is not None:
            return format_content_with_images(content, image_tag=self.image_tag, images=images)
        if images and "<image>" in content:
            raise DataError("a turn has '<image>' in its text, but image_tag is not set: set image_tag=<image>")
        return images_before_text(images, content)


class OpenAIToMessages(Transform):
    """Transform of a conversation in OpenAI format to messages: turns ``{"role", "content"}``.

    Tool calls, names, reasoning and other fields of a turn are stored in ``Message.extra``; see
    :func:`torchtune.data.as_messages`. A column ``tools`` is returned with the messages, and a column ``system`` is the
    system turn of conversations without one. Images are content parts
    ``{"type": "image_url", "image_url": {"url": …}}`` or ``{"type": "image", "image": …}``; the images in a column
    ``images`` fill empty parts ``{"type": "image"}``, in order.

    Args:
        train_on_input: deprecated; use ``masking_strategy``.
        column_map: maps ``messages`` to a column.
        new_system_prompt: system prompt that replaces the conversation's system turn.
        masking_strategy: see :func:`mask_messages`.

    Raises:
        DataError: ``column_map`` lacks a key; when called, a column is missing or is not a conversation.

    Example:
        >>> row = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}
        >>> messages = torchtune.data.OpenAIToMessages()(row)["messages"]
        >>> [(message.role, message.masked) for message in messages]
        [('user', True), ('assistant', False)]
    """

    takes_encoded_images = True  # encoded files need not be decoded first

    def __init__(
        self,
        train_on_input: bool | None = None,
        column_map: Mapping[str, str] | None = None,
        new_system_prompt: str | None = None,
        masking_strategy: str | MaskingStrategy | None = "train_on_assistant",
    ) -> None:
        self.column_map = check_column_map(column_map, {"messages": "messages"}, ("messages",))
        self.new_system_prompt = new_system_prompt
        self.masking_strategy = resolve_masking(train_on_input, masking_strategy)

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``{"messages": [...]}``, with ``tools`` if the row has them."""
        name = self.column_map["messages"]
        turns = turns_of_column(column(sample, name), name)
        if "images" in sample:
            images = image_column(sample, "images", None)
            if images:
                turns = insert_images(turns, images)
        conversation = read_conversation(
            sample,
            turns,
            new_system_prompt=self.new_system_prompt,
            masking_strategy=self.masking_strategy,
            columns=(name,),
        )
        return conversation.as_sample()
