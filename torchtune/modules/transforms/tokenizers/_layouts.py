"""Where turns lie, found once for all conversations of one shape."""

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from torchtune.data import DataError
from torchtune.modules.transforms.tokenizers._template_limits import TemplateLimit

Span = tuple[int, int]
_MOST = 4096  # shapes
# (turns, masked) -> text and spans
Find = Callable[[list[dict[str, Any]], list[bool]], tuple[str, list[Span]]]
_TEXT = re.compile("(Text\ue010\\d+\ue011)")
# A place: (how many texts of turns end before it, characters of the layout before it)
_Place = tuple[int, int]


class Layouts:
    """The spans of conversations whose turns have roles and texts alone.

    What the template writes around texts is learnt from a conversation of the same roles with other texts. It holds
    for a conversation if it gives, with its texts, the very text that the template makes of it; where it does not
    (the template trims a text, or drops reasoning), there is no answer.

    Args:
        find: finds the spans of a conversation from what the template does with parts of it.
    """

    def __init__(self, find: Find) -> None:
        self._find = find
        self._known: dict[Any, tuple[list[str], list[tuple[_Place, _Place]]] | None] = {}

    def fingerprint_parts(self) -> list[Any]:
        """Nothing: what is known follows from the template."""
        return []

    def spans(self, text: str, turns: Sequence[Mapping[str, Any]], masked: Sequence[bool]) -> list[Span] | None:
        """(start, end) of what is trained on in ``text``, the rendered ``turns``; None where that is not known."""
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
        texts = [f"Text\ue010{i}\ue011" for i in range(len(roles))]  # of a private area: no layout has them
        turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        try:
            text, spans = self._find(turns, list(masked))
        except TemplateLimit:
            raise
        except DataError:  # the template wants other texts
            return None
        pieces = _TEXT.split(text)
        around = pieces[::2]
        if pieces[1::2] != texts:
            return None
        before = [0, *accumulate(map(len, around))]  # characters of the layout before each piece of it
        ends = list(accumulate(map(len, pieces)))[::2]  # of each piece of the layout, in the text

        def place(position: int) -> _Place | None:
            count = bisect_left(ends, position)
            inside = position - (ends[count] - len(around[count]))
            return (count, before[count] + inside) if inside >= 0 else None

        places = [(place(start), place(end)) for start, end in spans]
        return (around, places) if all(None not in pair for pair in places) else None
