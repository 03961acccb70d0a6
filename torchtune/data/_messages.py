"""Conversation turns, label masks and weights."""

import itertools
import logging
import math
import re
from collections.abc import Mapping, MutableMapping, Sequence
from enum import Enum
from typing import Any, Literal, NamedTuple, get_args

from torchtune._lazy import former_names
from torchtune.data._rows import DataError, kind_of
from torchtune.data._tool_calls import call_of_text, read_tool_calls
from torchtune.utils import get_logger, log_once

Role = Literal["system", "user", "assistant", "ipython", "tool"]
# Name of a speaker in any format -> role.
ROLE_NAMES: dict[str, Role] = {
    **{role: role for role in get_args(Role)},
    "developer": "system",  # OpenAI's newer name
    "human": "user",  # ShareGPT
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "function_call": "assistant",  # handled in as_message
    "function": "tool",  # OpenAI's older name
    "observation": "tool",
}
# Names of the field with a turn's reasoning; chat templates read one of them.
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
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
    frames = part["content"]
    fps = part.get("fps")
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

    Attributes:
        stated_training: whether the turn is trained on, if its row states it (``weight``, ``train``, ``loss``,
            ``masked``); ``None`` if not. See :func:`mask_messages`.
        weight: factor of the turn's tokens in the loss, from the ``weight`` or ``loss_scale`` of the turn in its row.

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
        if isinstance(content, str):
            content = [{"type": "text", "content": content}]
        self.content = list(content)
        self.masked = masked
        self.ipython = ipython
        self.eot = eot
        self.extra = dict(extra or {})
        self.stated_training: bool | None = None
        self.weight = 1.0
        if ipython and (self.contains_media or role != "assistant"):
            turn = f"one of role '{role}'"
            if self.contains_media:
                turn += " with media"
            raise ValueError(f"Only a text turn of the assistant can call a tool (ipython=True), not {turn}.")

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> "Message":
        """Build from a mapping with ``role``, ``content`` and, optionally, the other arguments."""
        names = ("role", "content", "masked", "ipython", "eot", "extra")
        return cls(**{name: d[name] for name in names if name in d})

    def get_media(self) -> list[Any]:
        """Return the images of the turn, and its videos as :class:`Video`, in order."""
        media = []
        for item in self.content:
            if item["type"] == "image":
                media.append(item["content"])
            elif item["type"] == "video":
                media.append(as_video(item))
        return media

    @property
    def contains_media(self) -> bool:
        """Whether the turn contains an image or a video."""
        if len(self.content) == 1:  # fast path
            return self.content[0]["type"] in _MEDIA
        return any(item["type"] in _MEDIA for item in self.content)

    @property
    def is_empty(self) -> bool:
        """Whether the turn has neither text nor media, tool calls or reasoning."""
        if self.text_content.strip() or self.contains_media:
            return False
        return not any(self.extra.get(field) for field in ("tool_calls", *REASONING_FIELDS))

    @property
    def text_content(self) -> str:
        """Concatenated text of the turn."""
        if len(self.content) == 1 and self.content[0]["type"] == "text":  # fast path
            return self.content[0]["content"]
        return "".join(item["content"] for item in self.content if item["type"] == "text")

    @property
    def has_untrained_parts(self) -> bool:
        """Whether a text part of the turn says that it is not trained on (``train: false``)."""
        return any(item.get("train") is False for item in self.content)

    def __repr__(self) -> str:
        parts = []
        for item in self.content:
            if item["type"] == "text":
                parts.append(item["content"])
            else:
                parts.append(f"<{item['type']}>")
        return f"Message(role='{self.role}', content={parts!r})"


# A turn: a message, or a mapping with ``role`` and ``content`` in the format of chat APIs.
MessageLike = Message | Mapping[str, Any]
# Fields of a turn, or of a text part of its content, that say whether it is trained on. `training` is an older name of
# Axolotl's `train`.
_TRAINING_FIELDS = ("train", "training", "loss")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
# Factors of a turn's tokens in the loss; ms-swift's name is `loss_scale`.
_WEIGHT_FIELDS = ("weight", "loss_scale")
# Axolotl's fields that take ranges of characters out of training, and its older name.
_TRAINING_DETAIL_FIELDS = ("train_detail", "training_detail")
# Fields of a turn that are not stored in ``extra`` as they are.
_READ_FIELDS = {
    "role",
    "content",
    "masked",
    "ipython",
    "eot",
    "extra",
    "tool_calls",
    "function_call",
    *_TRAINING_FIELDS,
    *_WEIGHT_FIELDS,
    *_TRAINING_DETAIL_FIELDS,
}
# Fields that look as if they said whether or how much a turn is trained on, but that no format has.
_SIMILAR_FIELDS = frozenset(
    "trainable trained train_on is_trained no_train mask mask_loss loss_mask label_mask weights loss_weight "
    "loss_weights sample_weight importance".split()
)
# The same for columns of a row; others, such as loss, may be measurements.
_SIMILAR_COLUMNS = frozenset(
    "train trainable trained is_trained no_train masked loss_weight loss_scale sample_weight row_weight".split()
)
_KNOWN_FIELDS = "train, loss, masked, weight, loss_scale and train_detail"
_TOOL_ROLES = ("tool", "ipython")


def as_message(value: MessageLike) -> Message:
    """Convert a turn to a :class:`Message`; every format of turns is read here.

    A mapping is a turn of a chat API (``role`` and ``content``) or of ShareGPT (``from`` and ``value``), and may have
    any argument of :class:`Message`. Its content is a text or a list of parts; a turn with ``tool_calls`` (or with the
    older ``function_call``) needs no content. Arguments of tool calls may be JSON text. ``train`` (``training``),
    ``loss`` and ``masked`` say whether the turn is trained on; without them, only turns of the assistant are.
    ``weight`` (``loss_scale``) is the factor of the turn's tokens in the loss; a turn of weight 0 is not trained on.
    ``train_detail`` takes ranges of characters out of training. Other fields are stored in ``extra``; a field that is
    null is absent.

    Raises:
        DataError: the turn is neither a message nor such a mapping, or a field that says whether or how much it is
            trained on has an impossible value.
    """
    if isinstance(value, Message):
        return value
    role = role_of(value)
    if "role" not in value:  # a turn in ShareGPT format
        if not isinstance(value["value"], str):
            raise DataError(f"a turn of '{value['from']}' has no text: 'value' holds {kind_of(value['value'])}")
        fields = {key: item for key, item in value.items() if key not in ("from", "value")}
        value = {"role": value["from"], "content": value["value"], **fields}
    name = value["role"]
    content = value.get("content")
    if len(value) == 2 and type(content) is str and name != "function_call":  # fast path: nothing else to read
        return Message(role, content, masked=role != "assistant")
    extra = value.get("extra") or {}
    if not isinstance(extra, Mapping):
        raise DataError(f"the 'extra' of a turn must be a mapping, not {type(extra).__name__}")
    calls = _calls_of_turn({**extra, **value})  # `extra` may have calls, too; the turn's own count
    if name == "function_call":  # the content is the call
        calls = [*calls, *call_of_text(content)]
        content = None
    extra = {key: item for key, item in extra.items() if key != "tool_calls"}  # they are in `calls`, in one form
    for key, item in value.items():
        if key not in _READ_FIELDS and item is not None:
            extra[key] = item
            if key in _SIMILAR_FIELDS:
                log_once(
                    get_logger(),
                    f"Turns have a field '{key}', which does not change what is trained on: only {_KNOWN_FIELDS} do.",
                    logging.WARNING,
                )
    if calls:
        extra["tool_calls"] = calls
    if content is None:
        if not calls and not any(extra.get(field) for field in REASONING_FIELDS):
            raise DataError(f"a turn of '{name}' has no content")
        content = ""
    elif isinstance(content, list | tuple):
        content = [parse_content_part(part) for part in content]
    elif not isinstance(content, str):
        raise DataError(f"the content of a turn of '{name}' must be a text or a list, not {type(content).__name__}")
    try:
        message = Message(role, content, extra=extra, ipython=bool(value.get("ipython")))
    except ValueError as error:
        raise DataError(str(error).rstrip(".")) from error  # a report goes on after the reason of a row
    message.eot = value.get("eot") is not False
    _set_training(message, value)
    return message


def _set_training(message: Message, turn: Mapping[str, Any]) -> None:
    """Set whether and how much a message is trained on, from the fields of its turn; see :func:`as_message`."""
    message.stated_training = _stated_training(turn)
    for field in _WEIGHT_FIELDS:
        message.weight *= read_weight(turn.get(field), "a turn", field)
    for field in _TRAINING_DETAIL_FIELDS:
        if turn.get(field):
            message.content = _parts_by_detail(message, turn[field], field)
            is_trained = any(part.get("train") is not False for part in message.content)
            if message.stated_training is None and is_trained:
                message.stated_training = True
    if message.stated_training is not None:
        message.masked = not message.stated_training
    elif turn.get("masked") is False:
        message.masked = False
    else:
        message.masked = message.role != "assistant"


def role_of(turn: Any) -> Role:
    """Return the role of a turn in any format; raise :class:`DataError` if it has none."""
    if isinstance(turn, Message):
        return turn.role
    if not isinstance(turn, Mapping):
        raise DataError(f"a turn must have 'role' and 'content', not {type(turn).__name__}")
    if "role" in turn:
        name = turn["role"]
        kind = "role"
    elif "from" in turn and "value" in turn:
        name = turn["from"]
        kind = "speaker"
    else:
        raise DataError(f"a turn must have 'role' and 'content', not {sorted(map(str, turn))}")
    if not isinstance(name, str) or name not in ROLE_NAMES:
        raise DataError(f"'{name}' is not a {kind}: use {', '.join(ROLE_NAMES)}")
    return ROLE_NAMES[name]


def _calls_of_turn(turn: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tool calls of a turn, from ``tool_calls`` or from the older ``function_call``."""
    calls = []
    if turn.get("tool_calls") is not None:
        calls = read_tool_calls(turn["tool_calls"])
    if turn.get("function_call") is not None:
        if calls:
            raise DataError("a turn has both tool_calls and function_call: leave out function_call, the older form")
        calls = call_of_text(turn["function_call"])
    return calls


def _stated_training(turn: Mapping[str, Any]) -> bool | None:
    """Return whether a turn says that it is trained on.

    None if it says nothing, or no more than that its weight is not 0, or that it is not masked: neither overrides the
    masking strategy.
    """
    if turn.get("masked") not in (None, 0, 1):  # also False and True
        raise DataError(f"a turn has masked {turn['masked']!r}: only true and false work")
    stated = None
    for field in _TRAINING_FIELDS:
        value = turn.get(field)
        # As ms-swift says, a loss_scale counts instead of a loss.
        if value is None or (field == "loss" and turn.get("loss_scale") is not None):
            continue
        if value not in (0, 1):  # also False and True
            raise DataError(f"a turn has {field} {value!r}: only true and false work")
        if not value:
            return False
        stated = True
    # Any other weight says nothing about a turn that is not trained on anyway: OpenAI's weight is 1 unless stated.
    has_no_weight = any(read_weight(turn.get(field), "a turn", field) == 0 for field in _WEIGHT_FIELDS)
    if has_no_weight or turn.get("masked"):
        return False
    return stated


def _parts_by_detail(message: Message, detail: Any, field: str) -> list[dict[str, Any]]:
    """Return the text of a turn in parts: those that are trained on, and those that are not (Axolotl's format).

    Args:
        message: the turn, whose content is one text.
        detail: list of ``{"begin_offset", "end_offset", "train"}``, with the first and the last character of a range.
            Characters in no range are trained on; of ranges that overlap, the last one counts.
        field: name of the field, for messages.

    Raises:
        DataError: the turn has no single text, or a range is not one of it.
    """
    if len(message.content) != 1 or message.contains_media:
        raise DataError(f"a turn has {field}, but its content is not one text: put train: false in its parts instead")
    text = message.text_content
    if not isinstance(detail, list | tuple):
        raise DataError(f"a turn has {field} {detail!r}: give a list of ranges with begin_offset, end_offset and train")
    is_trained = [True] * len(text)  # of each character
    for span in detail:
        first = None
        last = None
        if isinstance(span, Mapping) and isinstance(span.get("train"), bool):
            first = span.get("begin_offset")
            last = span.get("end_offset")
        if type(first) is not int or type(last) is not int or not 0 <= first <= last < len(text):
            raise DataError(
                f"a turn of {len(text)} characters has the {field} {span!r}: give begin_offset and end_offset of its "
                "first and last character, from 0 on, and train"
            )
        is_trained[first : last + 1] = [span["train"]] * (last + 1 - first)
    parts: list[dict[str, Any]] = []
    start = 0
    for trained, characters in itertools.groupby(is_trained):
        end = start + len(list(characters))
        part: dict[str, Any] = {"type": "text", "content": text[start:end]}
        if not trained:
            part["train"] = False
        parts.append(part)
        start = end
    return parts or message.content  # an empty text has no parts


def read_weight(value: Any, owner: str, name: str = "weight") -> float:
    """Return the weight of a turn or of a row in the loss; 1 for null.

    Args:
        value: the weight in the row.
        owner: what has the weight, for the message.
        name: name of the weight, for the message.

    Raises:
        DataError: it is not a number, or negative or infinite.
    """
    if value is None:
        return 1.0
    # Also not a number (nan).
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise DataError(f"{owner} has {name} {value!r}: a weight is a number of at least 0")
    return float(value)


def read_row_weight(row: Mapping[str, Any], column: str | None) -> float:
    """Return the weight of a row in the loss; 1 if ``column`` is None, or is missing or holds no number.

    A text that is a number is one, because every cell of a table is a text.

    Raises:
        DataError: the weight is negative, infinite or 0, with which nothing of the row is trained on.
    """
    value = None
    if column is not None:
        value = row.get(column)
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = float(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return 1.0
    weight = read_weight(value, f"column '{column}' (which weight_column=null does not read)")
    if weight == 0:
        raise DataError(f"column '{column}' is 0, so nothing is trained on: leave the row out")
    return weight


def warn_of_similar_columns(row: Mapping[str, Any], weight_column: str | None) -> None:
    """Warn once of a column that looks as if it said whether or how much a row is trained on, but that is not read."""
    for name in sorted(_SIMILAR_COLUMNS & row.keys()):
        if name != weight_column and isinstance(row[name], int | float):
            log_once(
                get_logger(),
                f"Rows have a column '{name}', which does not change what is trained on: only weight (weight_column) "
                "does; leave rows out with filter_fn.",
                logging.WARNING,
            )


def warn_of_row_weight(row: Mapping[str, Any], reader: str) -> None:
    """Warn once if a row has a numeric column ``weight`` that ``reader`` does not read."""
    value = row.get("weight")
    if isinstance(value, int | float) and not isinstance(value, bool) and value != 1:
        log_once(
            get_logger(),
            f"Rows have a column 'weight', which {reader} does not read: every row counts once. Repeat rows, or drop "
            "them with filter_fn.",
            logging.WARNING,
        )


def as_messages(messages: Sequence[MessageLike]) -> list[Message]:
    """Convert a conversation to messages. Raises :class:`DataError` if it is not a list of turns.

    For each mapping, see :func:`as_message`, ``ipython`` and ``eot`` are set by whether a tool's answer follows.

    Example:
        >>> [message.role for message in torchtune.data.as_messages([{"role": "user", "content": "Why?"}])]
        ['user']
    """
    if not isinstance(messages, list | tuple):
        raise DataError(f"a conversation must be a list of turns, not {type(messages).__name__}")
    converted: list[Message] = []
    previous: Message | None = None  # the turn before, if it was converted
    for turn in messages:
        message = as_message(turn)
        is_converted = message is not turn  # a message states ipython and eot itself
        if is_converted and message.role in _TOOL_ROLES:
            message.eot = False  # the assistant goes on with its turn
            # The assistant's turn before a tool's answer is its call.
            if previous is not None and previous.role == "assistant":
                previous.ipython = True
                previous.eot = False
        converted.append(message)
        previous = None
        if is_converted:
            previous = message
    return converted


def parse_content_part(part: Any) -> dict[str, Any]:
    """Convert a content part in chat API format. Raises :class:`DataError` for parts other than text, image, video."""
    if not isinstance(part, Mapping):
        raise _unknown_part(type(part).__name__)
    part = {key: value for key, value in part.items() if value is not None}  # tables store missing fields as nulls
    kind = part.get("type")
    if kind == "text":
        if "content" not in part and "text" not in part:
            raise _unknown_part(kind)
        item = dict(part)
        if "content" not in part:
            item = {"type": "text", "content": part["text"]}
        if not isinstance(item["content"], str):
            raise DataError(f"a part of a turn of type 'text' holds {type(item['content']).__name__}, not a text")
        # Of all fields about training, the item keeps one at most: train: false.
        is_trained = True
        for field in (*_TRAINING_FIELDS, *_WEIGHT_FIELDS):
            if part.get(field) not in (None, 0, 1):  # also False and True
                raise DataError(f"a part of a turn has {field} {part[field]!r}: only whole turns have such weights")
            if item.pop(field, part.get(field)) in (0, False):
                is_trained = False
        if not is_trained:
            item["train"] = False
        return item
    if kind in _MEDIA and "content" in part:  # in the form of Message already
        return part
    if kind == "image_url":
        image = part.get("image_url")
        if not isinstance(image, Mapping) or "url" not in image:
            raise DataError("a part of a turn of type 'image_url' must have an 'image_url' with a 'url'")
        return {"type": "image", "content": image["url"]}
    if kind == "image":
        for name in ("image", "path", "url"):
            if name in part:
                return {"type": "image", "content": part[name]}
        if "base64" in part:
            # A URL, because bare base64 would be taken for a path; the image's format is read from its bytes.
            return {"type": "image", "content": f"data:image;base64,{part['base64']}"}
        raise DataError("a part of a turn of type 'image' must have an 'image', a 'path' or a 'url'")
    if kind == "video" and "video" in part:
        return {"type": "video", "content": part["video"], "fps": part.get("fps")}  # as_video refuses a missing fps
    raise _unknown_part(kind)


def _unknown_part(kind: Any) -> DataError:
    """Return the error for a content part of a type that no format has."""
    return DataError(f"a part of a turn has the type '{kind}': only text, image, image_url and video are known")


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
    ``train_on_all`` also on user and tool turns, except user turns with media, because the tokens of an image are no
    text to predict. System turns are always masked.
    A turn whose row says that it is not trained on (``weight: 0``, ``loss_scale: 0``, ``train: false``,
    ``loss: false``, ``masked: true``) is always masked; a turn can only be taken out of what the strategy trains on,
    not added to it.

    Raises:
        DataError: the strategy is unknown, or a turn that it does not train on says ``train: true`` and is not the
            assistant's.

    Example:
        >>> turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
        >>> messages = torchtune.data.as_messages(turns)
        >>> torchtune.data.mask_messages(messages, "train_on_assistant")
        >>> [message.masked for message in messages]
        [True, False]
    """
    strategy = parse_masking_strategy(masking_strategy)
    # Mappings are read as messages, so that the aliases of roles and of weights count; the mappings are then changed.
    turns = messages
    if not all(type(message) is Message for message in messages):
        turns = []
        for message in messages:
            if not isinstance(message, Message):  # an earlier strategy may have set `masked`
                message = {key: value for key, value in message.items() if key != "masked"}
            turns.append(message)
        turns = as_messages(turns)
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
        if turn.stated_training is False:
            masked = True
        elif turn.stated_training and masked and turn.role != "assistant":
            raise DataError(
                f"turn {i} of '{turn.role}' says that it is trained on, but masking_strategy={strategy.value} does not "
                "train on it: leave that out, or set masking_strategy=train_on_all for turns of users and tools"
            )
        if isinstance(message, Message):
            message.masked = masked
        else:
            message["masked"] = masked


def validate_messages(messages: Sequence[MessageLike]) -> None:
    """Check the order of the turns of a conversation; datasets with ``allow_any_order`` do not call it.

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
    switch = "allow_any_order=true leaves the order to the chat template"
    last_role = ""
    calls_tool = False  # whether the turn before calls a tool
    for i, message in enumerate(messages):
        if message.role == "system" and i:
            raise DataError(f"turn {i} is a system turn, which may only be the first ({switch})")
        if message.role == "user" and last_role == "user":
            raise DataError(f"turn {i} is a second user turn in a row ({switch})")
        if message.role == "assistant" and last_role not in ("user", "tool", "ipython"):
            raise DataError(
                f"turn {i} of the assistant follows {last_role or 'nothing'} instead of a user or tool turn ({switch})"
            )
        # A mistake of the data in any order: no setting is recommended.
        if message.role in ("tool", "ipython") and last_role not in ("tool", "ipython") and not calls_tool:
            raise DataError(f"turn {i} is a tool's answer, but the turn before it calls no tool")
        last_role = message.role
        calls_tool = message.ipython or bool(message.extra.get("tool_calls"))


def check_answers(messages: Sequence[Message]) -> None:
    """Raise :class:`DataError` for a turn that is trained on and says nothing: the model would learn to end at once."""
    for number, message in enumerate(messages):
        if message.role == "assistant" and not message.masked and message.is_empty:
            raise DataError(
                f"turn {number} of the assistant is empty, from which the model learns to say nothing (train on such "
                "turns with allow_empty_answers=true)"
            )


__getattr__ = former_names(__name__)
