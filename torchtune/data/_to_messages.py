"""Rows to messages: the one reader of conversations, and a transform of each format of rows that calls it."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torchtune.data._images import (
    format_content_with_images,
    images_before_text,
    images_of_columns,
    insert_images,
    is_url,
    with_images,
)
from torchtune.data._messages import (
    MaskingStrategy,
    Message,
    MessageLike,
    as_messages,
    mask_messages,
    parse_masking_strategy,
    role_of,
)
from torchtune.data._rows import DataError, Transform, check_column_map, column, kind_of, text_column
from torchtune.data._tool_calls import canonical_calls, function_tool, parse_json_text, read_tools

# Columns with the system prompt of a row.
_SYSTEM_COLUMNS = ("system", "system_prompt")
_TOOL_COLUMNS = ("tools", "functions")
_COLUMNS = (*_SYSTEM_COLUMNS, *_TOOL_COLUMNS)


@dataclass
class Conversation:
    """A conversation with everything that its row says about it.

    Attributes:
        messages: the turns, with the system prompt first if there is one.
        tools: definitions of the tools that can be called, or ``None``.
    """

    messages: list[Message]
    tools: list[Any] | None = None

    def as_sample(self) -> dict[str, Any]:
        """Return ``{"messages": …}``, with ``tools`` if there are any: the input of a tokenizer."""
        return {"messages": self.messages} | tools_entry(self.tools)


def tools_entry(tools: list[Any] | None) -> dict[str, Any]:
    """Return ``{"tools": tools}``, or an empty mapping without tools."""
    if tools is None:
        return {}
    return {"tools": tools}


def read_conversation(
    row: Mapping[str, Any],
    turns: Sequence[MessageLike],
    *,
    new_system_prompt: str | None = None,
    masking_strategy: MaskingStrategy | str | None = None,
    columns: Collection[str] = (),
) -> Conversation:
    """Return the conversation of a row.

    Every consumer of rows reads its turns, tools and system prompt here.

    Args:
        row: the row; its columns ``tools`` (or OpenAI's older ``functions``) and ``system`` or ``system_prompt`` are
            read.
        turns: turns that were found in the row, in any format that :func:`torchtune.data.as_messages` reads.
        new_system_prompt: replaces the system prompt of the row and of the turns.
        masking_strategy: see :func:`torchtune.data.mask_messages`; None for conversations that are not trained on.
        columns: columns of the turns, which hold no system prompt even if they have the name of such a column.

    Raises:
        DataError: a turn or a tool is invalid, the row has two different system prompts, or variables of the chat
            template.
    """
    if row.get("chat_template_kwargs") and "chat_template_kwargs" not in columns:
        raise DataError(
            "column 'chat_template_kwargs' is of no effect, because all rows have the same variables: remove it, and "
            "set the tokenizer's chat_template_kwargs"
        )
    messages = as_messages(turns)
    if new_system_prompt is not None:
        messages = [message for message in messages if message.role != "system"]
        system = new_system_prompt
    else:
        system = _missing_system_prompt(row, messages, columns)
    if system is not None:
        messages = [Message(role="system", content=system), *messages]
    if masking_strategy is not None:
        mask_messages(messages, masking_strategy)
    return Conversation(messages, tools_of_row(row, columns))


def unfold_prompt(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a row whose prompt is a request, ``{"messages", "tools", …}``, with the request's fields as columns.

    OpenAI's preference format has such prompts; other rows are returned unchanged.

    Args:
        row: the row.
        name: column of the prompt.
    """
    request = row.get(name)
    if not isinstance(request, Mapping) or "messages" not in request:
        return row
    fields = {field: request[field] for field in _COLUMNS if request.get(field) is not None}
    return {**row, **fields, name: request["messages"]}


def tools_of_row(row: Mapping[str, Any], columns: Collection[str] = ()) -> list[Any] | None:
    """Return the tools in the column ``tools`` or ``functions`` of a row; None if there are none.

    Args:
        row: the row.
        columns: columns that hold something else.

    Raises:
        DataError: the column holds no tools, or both columns have some.
    """
    tools = _tools_of_column(row, "tools", columns)
    functions = _tools_of_column(row, "functions", columns)
    if not functions:
        return tools
    if tools:
        raise DataError("the row has both tools and functions: leave out functions, the older form")
    definitions = []
    for function in functions:
        if "function" not in function:
            function = function_tool(function)
        definitions.append(function)
    return definitions


def _tools_of_column(row: Mapping[str, Any], name: str, columns: Collection[str]) -> list[Any] | None:
    """Return the tools in a column; None if there are none, or if the column is one of ``columns``."""
    if name in columns or row.get(name) is None:
        return None
    try:
        return read_tools(row[name])
    except DataError as error:
        raise DataError(f"column '{name}': {error} (rename the column if it holds something else)") from error


def _missing_system_prompt(
    row: Mapping[str, Any], messages: Sequence[Message], turn_columns: Collection[str]
) -> str | None:
    """Return the system prompt in a column of the row, unless the turns already begin with it."""
    prompts: dict[str, str] = {}  # by the name of their column or turn
    for name in _SYSTEM_COLUMNS:
        value = row.get(name)
        if name in turn_columns or value is None or value == "":
            continue
        if not isinstance(value, str):
            raise DataError(
                f"column '{name}' holds {type(value).__name__}, not the text of a system prompt: correct or rename it"
            )
        prompts[f"column '{name}'"] = value
    if not prompts:
        return None
    name, prompt = next(iter(prompts.items()))  # of the first column, with which the others are compared
    has_system_turn = bool(messages) and messages[0].role == "system"
    if has_system_turn:
        prompts = {"the system turn": messages[0].text_content, **prompts}
    for other_name, other_prompt in prompts.items():
        if other_prompt != prompt:
            raise DataError(
                f"{name} and {other_name} are different system prompts: leave one out, or set new_system_prompt, which "
                "replaces both"
            )
    if has_system_turn:
        return None
    return prompt


def reference_answer(message: Message) -> str:
    """Return a turn as the text of a right answer: its tool calls as :func:`canonical_calls`, otherwise its text."""
    calls = [call["function"] for call in message.extra.get("tool_calls") or ()]
    if not calls:
        return message.text_content
    return canonical_calls([(function["name"], function["arguments"]) for function in calls])


def check_same_prompt(chosen: Sequence[Message], rejected: Sequence[Message]) -> None:
    """Raise :class:`DataError` unless two conversations differ first in a turn of the assistant: in their answers.

    Turns after that may differ, too: other tool calls have other results.
    """
    num_common = 0
    for chosen_turn, rejected_turn in zip(chosen, rejected, strict=False):
        if _turn_data(chosen_turn) != _turn_data(rejected_turn):
            break
        num_common += 1
    if num_common == len(chosen) == len(rejected):
        return  # equal answers are refused where they are tokenized
    for side, messages in (("chosen", chosen), ("rejected", rejected)):
        if messages and messages[-1].role != "assistant":
            return  # a missing answer is refused where it is tokenized
        if num_common == len(messages):
            difference = "has ended"
        elif messages[num_common].role != "assistant":
            difference = f"has a turn of '{messages[num_common].role}'"
        else:
            continue  # this side differs in an answer, as it should
        raise DataError(
            f"chosen and rejected have different prompts: they first differ in turn {num_common}, where {side} "
            f"{difference}; a pair is two answers to one prompt"
        )


def _turn_data(message: Message) -> tuple[Any, ...]:
    """Return what a model reads of a turn; whether it is trained on is not part of it."""
    return message.role, message.content, message.extra


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
            column(sample, name)  # raises if it is missing: only the default column may be
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
        if history is None:  # the JSON text null
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
