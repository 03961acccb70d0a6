"""What ids and masks a conversation must get, worked out from the truth of its layout."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from tokenizers import Tokenizer

from tests.torchtune.tokenizers.chat_case import Case, Pieces, Turns
from torchtune.data import Message, mask_messages


def messages_of(turns: Turns) -> list[Message]:
    messages = []
    for turn in turns:
        extra = {key: value for key, value in turn.items() if key not in ("role", "content")}
        messages.append(Message(turn["role"], turn["content"], extra=extra))
    mask_messages(messages, "train_on_assistant")
    return messages


def truth_of(case: Case, turns: Turns, tools: list[Any] | None) -> Pieces:
    return case.truth(turns) if tools is None else case.truth(turns, tools)


def by_character(pieces: Iterable[tuple[str, bool]]) -> list[bool]:
    """Whether each character of the texts is trained on."""
    trained = []
    for text, is_trained in pieces:
        trained += [is_trained] * len(text)
    return trained


def expected_mask(pieces: Pieces, offsets: list[tuple[int, int]]) -> list[bool]:
    """A token is trained on if it covers a trained character."""
    trained = by_character(pieces)
    return [not any(trained[start:end]) for start, end in offsets]


def replaced(value: Any, old: list[str], new: list[str]) -> Any:
    """Nested data with every text of ``old`` in it replaced."""
    if isinstance(value, str):
        by_old = dict(zip(old, new, strict=True))
        return re.sub("|".join(map(re.escape, sorted(old, key=len, reverse=True))), lambda m: by_old[m[0]], value)
    if isinstance(value, dict):
        result = {key: replaced(item, old, new) for key, item in value.items()}
        if "role" in value:  # which is not text of the conversation
            result["role"] = value["role"]
        return result
    if isinstance(value, list):
        return [replaced(item, old, new) for item in value]
    return value


def plain_parts(case: Case, pieces: Pieces, control: list[str]) -> Iterator[tuple[str, str, list[bool]]]:
    """The truth as (kind, text, is trained by character): control tokens of the layout apart from the texts."""
    text = "".join(piece for piece, _ in pieces)
    trained = by_character(pieces)
    patterns = []
    for text_of_token in sorted(control, key=len, reverse=True):  # the longest match first
        spaces = r"\s*" if text_of_token in case.takes_spaces else ""
        patterns.append(re.escape(text_of_token) + spaces)
    position = 0
    for match in re.finditer("|".join(patterns), text):
        yield "text", text[position : match.start()], trained[position : match.start()]
        yield "control", match[0].strip(), trained[match.start() : match.end()]
        position = match.end()
    yield "text", text[position:], trained[position:]


def expected_plain(
    case: Case, turns: Turns, tools: list[Any] | None, backend: Tokenizer
) -> tuple[list[int], list[bool]]:
    """Ids and mask where no text of a turn is a control token: the layout's are apart, the rest is encoded without."""
    control = case.special
    stand_ins = [chr(0xE100 + i) for i in range(len(control))]
    pieces = truth_of(case, replaced(turns, control, stand_ins), tools)
    backend.encode_special_tokens = True
    tokens: list[int] = []
    mask: list[bool] = []
    for kind, text, trained in plain_parts(case, pieces, control):
        if kind == "control":
            tokens.append(backend.token_to_id(text))
            mask.append(not any(trained))
            continue
        characters = [replaced(character, stand_ins, control) for character in text]
        trained = by_character(zip(characters, trained, strict=True))
        encoding = backend.encode("".join(characters), add_special_tokens=False)
        tokens += encoding.ids
        mask += [not any(trained[start:end]) for start, end in encoding.offsets]
    backend.encode_special_tokens = False
    return tokens, mask
