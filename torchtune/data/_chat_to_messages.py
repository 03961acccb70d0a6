"""Transforms of conversations to messages."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtune.data._common import DataError, Transform
from torchtune.data._conversation import read_conversation
from torchtune.data._images import format_content_with_images, insert_images
from torchtune.data._messages import MaskingStrategy, Message, as_messages
from torchtune.data._to_messages import check_column_map, check_turns, column, image_column, resolve_masking


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
        self.image_dir = None if image_dir is None else Path(image_dir)
        self.image_tag = image_tag
        self.masking_strategy = resolve_masking(train_on_input, masking_strategy)

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``{"messages": [...]}``, with ``tools`` if the row has them."""
        name = self.column_map["conversations"]
        messages = as_messages(check_turns(column(sample, name), name))
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
                count = len(images) if self.image_tag is None else content.count(self.image_tag)
                message.content = self._with_images(content, images[:count])
                images = images[count:]
        if images:
            where = "a user turn" if self.image_tag is None else f"a '{self.image_tag}' in a user turn"
            raise DataError(f"{len(images)} image(s) have no place: each needs {where}")

    def _with_images(self, content: str, images: list[Any]) -> list[dict[str, Any]]:
        if self.image_tag is not None:
            return format_content_with_images(content, image_tag=self.image_tag, images=images)
        if images and "<image>" in content:
            raise DataError("a turn has '<image>' in its text, but image_tag is not set: set image_tag=<image>")
        return [*({"type": "image", "content": image} for image in images), {"type": "text", "content": content}]


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
        turns = check_turns(column(sample, name), name)
        images = image_column(sample, "images", None) if "images" in sample else []
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
