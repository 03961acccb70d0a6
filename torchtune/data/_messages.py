"""Conversation turns and label masks."""

from collections.abc import Mapping, MutableMapping, Sequence
from enum import Enum
from typing import Any, Literal, NamedTuple

from torchtune.data._common import DataError

Role = Literal["system", "user", "assistant", "ipython", "tool"]
ROLES: tuple[str, ...] = ("system", "user", "assistant", "ipython", "tool")
_MEDIA = ("image", "video")


class Video(NamedTuple):
    """Frames of a video.

    Attributes:
        frames: images in order; see :func:`torchtune.data.open_image` for their types.
        fps: frames per second.
    """

    frames: tuple[Any, ...]
    fps: float


def as_video(part: Mapping[str, Any]) -> Video:
    """Return the video of a content part ``{"type": "video", "content": frames, "fps": ...}``.

    Raises:
        DataError: the part has no frames, or ``fps`` is not a positive number.
    """
    frames, fps = part["content"], part.get("fps")
    if isinstance(frames, Video):
        return frames
    if not isinstance(frames, list | tuple) or not frames:
        raise DataError(
            "a video must be a list of one or more images, its frames, because video files are not decoded: extract "
            "the frames first"
        )
    if not isinstance(fps, int | float) or not fps > 0:
        raise DataError(f"a video has fps = {fps!r}: give the number of its frames in a second")
    return Video(tuple(frames), fps)


class Message:
    """One turn of a conversation.

    Args:
        role: role of the speaker.
        content: a text, or a list of ``{"type": "text" | "image" | "video", "content": ...}``; the content of a video
            is a list of frames, and its ``fps`` is the number of frames per second.
        masked: exclude all tokens of the turn from the loss.
        ipython: the turn is a tool call of the assistant.
        eot: the turn ends with an end-of-turn token; False if a tool response follows.
        extra: other fields of the turn, for chat templates (``tool_calls``, ``name``,
            ``reasoning_content`` …).

    Raises:
        ValueError: ``ipython`` is True for a role other than assistant, or for a turn with media.

    Example:
        >>> message = torchtune.data.Message(role="user", content="Why?")
        >>> message.text_content
        'Why?'
    """

    def __init__(
        self,
        role: Role,
        content: str | list[dict[str, Any]],
        masked: bool = False,
        ipython: bool = False,
        eot: bool = True,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self.role = role
        self.content = [{"type": "text", "content": content}] if isinstance(content, str) else list(content)
        self.masked = masked
        self.ipython = ipython
        self.eot = eot
        self.extra = dict(extra or {})
        if ipython and (self.contains_media or role != "assistant"):
            raise ValueError(
                f"Only a text turn of the assistant can call a tool (ipython=True), not one of role '{role}'"
                f"{' with media' if self.contains_media else ''}."
            )

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> "Message":
        """Build from a mapping with ``role``, ``content`` and, optionally, the other arguments."""
        names = ("role", "content", "masked", "ipython", "eot", "extra")
        return cls(**{name: d[name] for name in names if name in d})

    def get_media(self) -> list[Any]:
        """Return the images of the turn, and its videos as :class:`Video`, in order."""
        media = [item for item in self.content if item["type"] in _MEDIA]
        return [as_video(item) if item["type"] == "video" else item["content"] for item in media]

    @property
    def contains_media(self) -> bool:
        """Whether the turn contains an image or a video."""
        if len(self.content) == 1:  # fast path
            return self.content[0]["type"] in _MEDIA
        return any(item["type"] in _MEDIA for item in self.content)

    @property
    def text_content(self) -> str:
        """Concatenated text of the turn."""
        if len(self.content) == 1 and self.content[0]["type"] == "text":  # fast path
            return self.content[0]["content"]
        return "".join(item["content"] for item in self.content if item["type"] == "text")

    def __repr__(self) -> str:
        parts = [item["content"] if item["type"] == "text" else f"<{item['type']}>" for item in self.content]
        return f"Message(role='{self.role}', content={parts!r})"


# A turn: a message, or a mapping with ``role`` and ``content`` in the format of chat APIs.
MessageLike = Message | Mapping[str, Any]
_FIELDS = ("masked", "ipython", "eot")


def as_message(value: MessageLike) -> Message:
    """Convert a turn to a :class:`Message`.

    A mapping may have any argument of :class:`Message`; other fields are stored in ``extra``. Its content is a text or
    a list of parts; a turn with ``tool_calls`` needs no content.

    Raises:
        DataError: the turn is neither a message nor such a mapping.
    """
    if isinstance(value, Message):
        return value
    if not isinstance(value, Mapping) or "role" not in value:
        found = sorted(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
        raise DataError(f"a turn must have 'role' and 'content', not {found}")
    role, content = value["role"], value.get("content")
    if role not in ROLES:
        raise DataError(f"'{role}' is not a role: use {', '.join(ROLES)}")
    if content is None and not value.get("tool_calls"):
        raise DataError(f"a turn of '{role}' has no content")
    if not isinstance(content, str):
        if content is not None and not isinstance(content, list | tuple):
            raise DataError(f"the content of a turn of '{role}' must be a text or a list, not {type(content).__name__}")
        content = [parse_content_part(part) for part in content or []]
    known = {"role", "content", "extra", *_FIELDS}
    extra = {**(value.get("extra") or {}), **{key: item for key, item in value.items() if key not in known}}
    fields = {name: value[name] for name in _FIELDS if value.get(name) is not None}
    try:
        return Message(role=role, content=content, extra=extra, **fields)
    except ValueError as error:
        raise DataError(str(error).rstrip(".")) from error


def as_messages(messages: Sequence[MessageLike]) -> list[Message]:
    """Convert a conversation to messages. Raises :class:`DataError` if it is not a list of turns.

    Example:
        >>> [message.role for message in torchtune.data.as_messages([{"role": "user", "content": "Why?"}])]
        ['user']
    """
    if not isinstance(messages, list | tuple):
        raise DataError(f"a conversation must be a list of turns, not {type(messages).__name__}")
    return [message if type(message) is Message else as_message(message) for message in messages]


def parse_content_part(part: Any) -> dict[str, Any]:
    """Convert a content part in chat API format. Raises :class:`DataError` for parts other than text, image, video."""
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    found = None
    if isinstance(part, Mapping) and kind in ("text", *_MEDIA) and "content" in part:
        found = dict(part)
    elif isinstance(part, Mapping) and kind == "text" and "text" in part:
        found = {"type": "text", "content": part["text"]}
    elif isinstance(part, Mapping) and kind == "image_url":
        image = part.get("image_url")
        if not isinstance(image, Mapping) or "url" not in image:
            raise DataError("a part of a turn of type 'image_url' must have an 'image_url' with a 'url'")
        found = {"type": "image", "content": image["url"]}
    elif isinstance(part, Mapping) and kind == "image":
        names = [name for name in ("image", "path", "url", "base64") if part.get(name) is not None]
        if not names:
            raise DataError("a part of a turn of type 'image' must have an 'image', a 'path' or a 'url'")
        value = part[names[0]]
        found = {"type": "image", "content": f"data:image;base64,{value}" if names[0] == "base64" else value}
    elif kind == "video" and "video" in part:
        found = {"type": "video", "content": part["video"], "fps": part.get("fps")}
    if found is None:
        raise DataError(f"a part of a turn has the type '{kind}': only text, image, image_url and video are known")
    if kind == "text" and not isinstance(found["content"], str):
        raise DataError(f"a part of a turn of type 'text' holds {type(found['content']).__name__}, not a text")
    return found


class MaskingStrategy(Enum):
    """Choice of the turns to train on.

    Example:
        >>> torchtune.data.MaskingStrategy("train_on_last").name
        'TRAIN_ON_LAST'
    """

    TRAIN_ON_ALL = "train_on_all"
    TRAIN_ON_ASSISTANT = "train_on_assistant"
    TRAIN_ON_LAST = "train_on_last"


# Values of the setting masking_strategy.
MaskingName = Literal["train_on_all", "train_on_assistant", "train_on_last"]


def parse_masking_strategy(value: MaskingStrategy | str) -> MaskingStrategy:
    """Convert a name to a :class:`MaskingStrategy`. Raises :class:`DataError` for an unknown name."""
    try:
        return MaskingStrategy(value)
    except ValueError as error:
        names = ", ".join(strategy.value for strategy in MaskingStrategy)
        raise DataError(f"masking_strategy must be one of {names}, not '{value}'.") from error


def mask_messages(
    messages: Sequence[Message | MutableMapping[str, Any]], masking_strategy: MaskingStrategy | str
) -> None:
    """Set ``masked`` on every message (or mapping), in place.

    ``train_on_assistant`` trains on all assistant turns, ``train_on_last`` on the last assistant turn, and
    ``train_on_all`` also on user and tool turns, except user turns with media. System turns are always masked.

    Raises:
        DataError: the strategy is unknown.

    Example:
        >>> turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
        >>> messages = torchtune.data.as_messages(turns)
        >>> torchtune.data.mask_messages(messages, "train_on_assistant")
        >>> [message.masked for message in messages]
        [True, False]
    """
    strategy = parse_masking_strategy(masking_strategy)
    turns = as_messages(messages)
    last = max((i for i, turn in enumerate(turns) if turn.role == "assistant"), default=-1)
    for i, (message, turn) in enumerate(zip(messages, turns, strict=True)):
        if turn.role == "system":
            masked = True
        elif strategy is MaskingStrategy.TRAIN_ON_LAST:
            masked = i != last
        elif strategy is MaskingStrategy.TRAIN_ON_ALL:
            masked = turn.role == "user" and turn.contains_media
        else:
            masked = turn.role != "assistant"
        if isinstance(message, Message):
            message.masked = masked
        else:
            message["masked"] = masked


def validate_messages(messages: Sequence[MessageLike]) -> None:
    """Check the order of the turns of a conversation.

    Raises:
        DataError: there are fewer than two turns, an assistant turn follows neither a user nor a tool turn, two user
            turns are adjacent, a system turn is not the first, or a tool turn follows no tool call.

    Example:
        >>> turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
        >>> torchtune.data.validate_messages(turns)
    """
    messages = as_messages(messages)
    if len(messages) < 2:
        raise DataError(f"a conversation needs at least 2 turns, this one has {len(messages)}")
    last_role = ""
    for i, message in enumerate(messages):
        before = messages[i - 1] if i else None
        if message.role == "system" and i:
            raise DataError(f"turn {i} is a system turn, which may only be the first")
        if message.role == "user" and last_role == "user":
            raise DataError(f"turn {i} is a second user turn in a row")
        if message.role == "assistant" and last_role not in ("user", "tool", "ipython"):
            raise DataError(
                f"turn {i} of the assistant follows {last_role or 'nothing'} instead of a user or tool turn"
            )
        if message.role in ("tool", "ipython") and last_role not in ("tool", "ipython") and not _calls_tool(before):
            raise DataError(f"turn {i} is a tool's answer, but the turn before it calls no tool")
        last_role = message.role


def _calls_tool(message: Message | None) -> bool:
    return message is not None and (message.ipython or bool(message.extra.get("tool_calls")))
