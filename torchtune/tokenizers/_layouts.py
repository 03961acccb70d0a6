"""Cache of the positions of turns, per sequence of roles."""

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from torchtune.data import DataError

Span = tuple[int, int]
_MOST = 4096  # cached sequences of roles
# (turns, masked) -> rendered text and its trained spans
Find = Callable[[list[dict[str, Any]], list[bool]], tuple[str, list[Span]]]
_TEXT = re.compile("(Text\ue010\\d+\ue011)")
# (number of turn texts that end before a position, layout characters before it)
_Place = tuple[int, int]


class Layouts:
    """Cache of the trained spans of conversations, for turns with only a role and a text.

    The layout (the text that the template writes around turns) is learned from a conversation with the same roles and
    placeholder texts. It applies to a conversation if layout and turn texts together equal the rendered text.
    Otherwise, for example if the template strips a text or drops reasoning, the result is None.

    Args:
        find: renders a conversation and finds its spans from further renderings.
    """

    def __init__(self, find: Find) -> None:
        self._find = find
        self._known: dict[Any, tuple[list[str], list[tuple[_Place, _Place]]] | None] = {}

    def fingerprint_parts(self) -> list[Any]:
        """Return an empty list: the template determines the cache."""
        return []

    def spans(self, text: str, turns: Sequence[Mapping[str, Any]], masked: Sequence[bool]) -> list[Span] | None:
        """Return (start, end) of the trained spans of ``text``, the rendered ``turns``; None if not known."""
        contents = []
        for turn in turns:
            content = turn.get("content")
            if len(turn) != 2 or not isinstance(content, str) or not content or content[-1].isspace():
                return None
            contents.append(content)
        key = (tuple(turn["role"] for turn in turns), tuple(masked))
        if key not in self._known:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = self._learn(*key)
        layout = self._known[key]
        if layout is None:
            return None
        around, places = layout
        pieces = [around[0]]
        for content, after in zip(contents, around[1:], strict=True):
            pieces += (content, after)
        if "".join(pieces) != text:
            return None
        ends = [0]
        for content in contents:
            ends.append(ends[-1] + len(content))
        return [(ends[a] + b, ends[c] + d) for (a, b), (c, d) in places]

    def _learn(
        self, roles: Sequence[str], masked: Sequence[bool]
    ) -> tuple[list[str], list[tuple[_Place, _Place]]] | None:
        texts = [f"Text\ue010{i}\ue011" for i in range(len(roles))]  # private-use characters, which no layout has
        turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        try:
            text, spans = self._find(turns, list(masked))
        except DataError:  # the template rejects the placeholder texts
            return None
        pieces = _TEXT.split(text)
        around = pieces[::2]
        if pieces[1::2] != texts:
            return None
        before = [0, *accumulate(map(len, around))]  # layout characters before each piece
        ends = list(accumulate(map(len, pieces)))[::2]  # end of each layout piece in the text

        def place(position: int) -> _Place | None:
            count = bisect_left(ends, position)
            inside = position - (ends[count] - len(around[count]))
            return (count, before[count] + inside) if inside >= 0 else None

        places = [(place(start), place(end)) for start, end in spans]
        return (around, places) if all(None not in pair for pair in places) else None
