"""Where the turns of a conversation lie in the text that a chat template makes of it.

A template is a program: it may strip texts, drop the reasoning of earlier turns, add a system prompt or move it into
another turn. So turns are not found by their text but by what the template does: with a conversation that ends
earlier, and with a text put in the place of one turn's.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchtune.data import DataError
from torchtune.modules.transforms.tokenizers._template_limits import TemplateLimit

Turn = Mapping[str, Any]
Span = tuple[int, int]
# (messages, add_generation_prompt) -> text
Render = Callable[[Sequence[Turn], bool], str]

_STAND_IN = "Standin{}Text"


def _common_prefix(one: str, other: str) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def first_special(text: str, special: Sequence[str]) -> str | None:
    """The special token with which ``text`` begins, after white space."""
    text = text.lstrip()
    return max((token for token in special if text.startswith(token)), key=len, default=None)


def learn_stops(render: Render, special: Sequence[str]) -> tuple[list[str], list[str]]:
    """The special tokens with which a template ends the assistant's turn.

    Found by rendering a small conversation; a template that refuses it gives none.

    Returns:
        those at which generation stops: at the end, or before another turn where the end has none; and all of them.
    """
    stand_in = _STAND_IN.format(0)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": stand_in}]
    stops = []
    for following in ([], [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]):
        try:
            text = render([*turns, *following], False)
        except TemplateLimit:
            raise
        except DataError:
            continue
        token = first_special(text.partition(stand_in)[2], special)
        if token is not None and token not in stops:
            stops.append(token)
    return stops[:1], stops


class TurnFinder:
    """Finds the turns of one rendered conversation.

    Args:
        render: renders (part of) the conversation.
        messages: the conversation, as the template sees it.
        text: the whole of it, rendered.
        stops: the special tokens that may end a turn of the assistant.
        special: all special tokens.
    """

    def __init__(
        self, render: Render, messages: Sequence[Turn], text: str, stops: Sequence[str], special: Sequence[str] = ()
    ) -> None:
        self._render = render
        self.messages = list(messages)
        self.text = text
        self.stops = tuple(stops)
        self.special = tuple(special)
        number = 0
        while _STAND_IN.format(number) in text:
            number += 1
        self._stand_in = _STAND_IN.format(number)
        self._contents: dict[int, Span | None] = {}

    def assistant(self, index: int) -> Span:
        """What the model writes in turn ``index``: from the end of the generation prompt to the end-of-turn token.

        White space after the end-of-turn token is not part of it.

        Raises:
            DataError: it cannot be determined.
        """
        start = self._start(index)
        end = self._end(index, start)
        if end < start:
            raise self._lost(index)
        return start, end

    def other(self, index: int) -> Span:
        """The text of a turn that is not the assistant's, with the token that ends it.

        Raises:
            DataError: it cannot be determined.
        """
        content = self._content(index)
        if content is None:
            raise self._lost(index)
        return content[0], self._stop_after(content[1]) or content[1]

    def _lost(self, index: int) -> DataError:
        return DataError(
            f"cannot tell which part of the rendered conversation is turn {index} ({self.messages[index]['role']}): "
            "the chat template rearranges it; mark the assistant's part with {% generation %} in the template"
        )

    def _try(self, messages: Sequence[Turn], add_generation_prompt: bool) -> str | None:
        """The rendered messages, or None where the template refuses a conversation that ends here."""
        try:
            return self._render(messages, add_generation_prompt)
        except TemplateLimit:
            raise
        except DataError:
            return None

    def _with_stand_in(self, index: int) -> list[Turn]:
        return [{**turn, "content": self._stand_in} if i == index else turn for i, turn in enumerate(self.messages)]

    def _content(self, index: int) -> Span | None:
        """Where the text of a turn lies; its beginning may be late where the template adds a part of the text."""
        if index not in self._contents:
            self._contents[index] = self._find_content(index)
        return self._contents[index]

    def _find_content(self, index: int) -> Span | None:
        text = self._try(self._with_stand_in(index), False)
        if text is None or text.count(self._stand_in) != 1:
            return None
        before, _, after = text.partition(self._stand_in)
        if not self.text.endswith(after):
            return None
        start = _common_prefix(self.text, before)
        return start, max(start, len(self.text) - len(after))

    def _start(self, index: int) -> int:
        prompt = self._try(self.messages[:index], True)
        if prompt is not None and self.text.startswith(prompt):
            return len(prompt)
        content = self._content(index)
        before = self._content(index - 1) if index else None
        if before is not None:
            prompt = self._try(self._with_stand_in(index - 1)[:index], True) or ""
            header = prompt.rpartition(self._stand_in)[2] if self._stand_in in prompt else None
            if header is not None and self.text.startswith(header, before[1]):
                return before[1] + len(header)
            if header is not None and content is not None and header.startswith(self.text[before[1] : content[0]]):
                return content[0]  # the generation prompt opens more than a finished turn has, such as <think>
            if header is not None:
                shared = _common_prefix(header, self.text[before[1] :])
                marks = max((header.rfind(token) + len(token) for token in self.special if token in header), default=0)
                if 0 < marks < shared:
                    return before[1] + shared  # or opens it in another way
        if content is None:
            raise self._lost(index)
        header = self._generation_header()
        if header and self.text.endswith(header, 0, content[0]):
            return content[0]
        raise self._lost(index)

    def _generation_header(self) -> str:
        """What the generation prompt adds after a user's turn."""
        user = [{"role": "user", "content": self._stand_in}]
        opened, closed = self._try(user, True), self._try(user, False)
        return opened[len(closed) :] if opened and closed and opened.startswith(closed) else ""

    def _end(self, index: int, start: int) -> int:
        last = index == len(self.messages) - 1
        until = self.text if last else self._try(self.messages[: index + 1], False)
        if until is not None and self.text.startswith(until) and len(until) >= start:
            closing = self._closing(start, len(until))
            if closing is not None:
                return closing
            return self._stop_after(len(until)) or len(until)
        content = self._content(index)
        following = None if last else self._content(index + 1)
        if following is None and not last:
            raise self._lost(index)
        begin = start if content is None else max(start, content[1])
        limit = following[0] if following is not None else len(self.text)
        return self._first_end(begin, limit)

    def _first_end(self, begin: int, limit: int) -> int:
        """End of the first end-of-turn token between the two that the assistant does not go on after."""
        again = self._generation_header().strip()
        end = begin
        while found := [
            (position, position + len(stop))
            for stop in self.stops
            if (position := self.text.find(stop, end, limit)) >= 0
        ]:
            end = min(found)[1]
            if not again or not self.text[end:limit].lstrip().startswith(again):
                break
        return end

    def _closing(self, start: int, end: int) -> int | None:
        """End of the first of the end-of-turn tokens with which ``text[start:end]`` ends."""
        closing = None
        while True:
            end = start + len(self.text[start:end].rstrip())
            token = next((stop for stop in self.stops if self.text.endswith(stop, start, end)), None)
            if token is None:
                return closing
            closing, end = end, end - len(token)

    def _stop_after(self, position: int) -> int | None:
        """End of an end-of-turn token that follows ``position``, white space between them allowed."""
        rest = self.text[position:].lstrip()
        token = first_special(rest, self.stops)
        return None if token is None else len(self.text) - len(rest) + len(token)
