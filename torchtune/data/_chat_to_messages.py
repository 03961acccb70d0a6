"""Transforms of conversations to messages."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torchtune.data._common import DataError, Transform
from torchtune.data._images import format_content_with_images, insert_images
from torchtune.data._messages import MaskingStrategy, Message, as_message
from torchtune.data._to_messages import (
    check_column_map,
    check_turn,
    column,
    image_column,
    prompted_and_masked,
    resolve_masking,
)

_TOOL_ROLES = ("tool", "ipython")


def _check_turns(value: Any, name: str) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        kind = "nothing" if value is None else type(value).__name__
        raise DataError(f"column '{name}' holds {kind}, not a list of turns")
    if not value:
        raise DataError(f"column '{name}' holds a conversation without turns")
    return value


def _drop_nulls(value: Any) -> Any:
    """Remove null fields from nested data; table formats store missing fields as nulls."""
    if type(value) is dict or isinstance(value, Mapping):  # fast path for plain dicts
        return {
            key: item if type(item) is str else _drop_nulls(item) for key, item in value.items() if item is not None
        }
    if isinstance(value, list):
        return [_drop_nulls(item) for item in value]
    return value


class ShareGPTToMessages(Transform):
    """Transform of a conversation in ShareGPT format: turns ``{"from": "system" | "human" | "gpt", "value": text}``.

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

    roles: ClassVar[dict[str, str]] = {
        "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
        "tool": "tool", "observation": "tool",
    }  # fmt: skip

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
        self.image_dir = None if image_dir is None else Path(image_dir)
        self.image_tag = image_tag
        self.masking_strategy = resolve_masking(train_on_input, masking_strategy)

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``{"messages": [...]}``."""
        name = self.column_map["conversations"]
        images = None
        if self.wants_image or "image" in sample:
            images = image_column(sample, self.column_map.get("image", "image"), self.image_dir)
        messages = []
        for turn in _check_turns(column(sample, name), name):
            check_turn(turn, "from", "value")
            if not isinstance(turn["from"], str) or turn["from"] not in self.roles:
                raise DataError(f"'{turn['from']}' is not a speaker: use {', '.join(self.roles)}")
            role, content = self.roles[turn["from"]], turn["value"]
            if not isinstance(content, str):
                raise DataError(f"a turn of '{turn['from']}' has no text")
            if role == "user" and images is not None:
                count = len(images) if self.image_tag is None else content.count(self.image_tag)
                content = self._with_images(content, images[:count])
                images = images[count:]
            messages.append(Message(role=role, content=content))
        if images:
            where = "a user turn" if self.image_tag is None else f"a '{self.image_tag}' in a user turn"
            raise DataError(f"{len(images)} image(s) have no place: each needs {where}")
        return {"messages": prompted_and_masked(messages, self.new_system_prompt, self.masking_strategy)}

    def _with_images(self, content: str, images: list[Any]) -> list[dict[str, Any]]:
        if self.image_tag is not None:
            return format_content_with_images(content, image_tag=self.image_tag, images=images)
        if images and "<image>" in content:
            raise DataError("a turn has '<image>' in its text, but image_tag is not set: set image_tag=<image>")
        return [*({"type": "image", "content": image} for image in images), {"type": "text", "content": content}]


class OpenAIToMessages(Transform):
    """Transform of a conversation in OpenAI format to messages: turns ``{"role", "content"}``.

    Tool calls, names, reasoning and other fields of a turn are stored in ``Message.extra``. A column ``tools`` is
    returned with the messages. Images are content parts ``{"type": "image_url", "image_url": {"url": …}}`` or
    ``{"type": "image", "image": …}``; the images in a column ``images`` fill empty parts ``{"type": "image"}``, in
    order.

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
        turns = [_drop_nulls(turn) for turn in _check_turns(column(sample, name), name)]
        images = image_column(sample, "images", None) if "images" in sample else []
        if images:
            turns = insert_images(turns, images)
        messages = [self._message(turn, after) for turn, after in zip(turns, [*turns[1:], None], strict=True)]
        messages = prompted_and_masked(messages, self.new_system_prompt, self.masking_strategy)
        tools = {"tools": _drop_nulls(sample["tools"])} if sample.get("tools") else {}
        return {"messages": messages, **tools}

    def _message(self, turn: Any, after: Any) -> Message:
        if isinstance(turn, dict) and turn.get("tool_calls"):
            turn = {"content": "", **turn}
        message = as_message(turn)
        is_answered = isinstance(after, dict) and after.get("role") in _TOOL_ROLES
        message.ipython = message.role == "assistant" and is_answered
        message.eot = message.role not in _TOOL_ROLES and not message.ipython
        return message
