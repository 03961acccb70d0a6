"""Where turns lie, found once for all conversations of one shape."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchtune.data import DataError
from torchtune.modules.transforms.tokenizers._template_limits import TemplateLimit

Span = tuple[int, int]
_MOST = 4096  # shapes
# (turns, masked) -> text and spans
Find = Callable[[list[dict[str, Any]], list[bool]], tuple[str, list[Span]]]
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
        texts = [f"Text{chr(0xE010 + i)}" for i in range(len(roles))]  # of a private area: no layout has them
        turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        try:
            text, spans = self._find(turns, list(masked))
        except TemplateLimit:
            raise
        except DataError:  # the template wants other texts
            return None
        around, rest = [], text
        for inserted in texts:
            before, found, rest = rest.partition(inserted)
            if not found:
                return None
            around.append(before)
        around.append(rest)
        if any(inserted in piece for piece in around for inserted in texts):
            return None
        places = []
        for span in spans:
            found_places = [_place(position, around, texts) for position in span]
            if None in found_places:
                return None
            places.append(tuple(found_places))
        return around, places


def _place(position: int, around: Sequence[str], texts: Sequence[str]) -> _Place | None:
    """The place of a position; None where it lies inside a text."""
    layout = 0
    for count, piece in enumerate(around):
        if position <= len(piece):
            return (count, layout + position) if position >= 0 else None
        position -= len(piece)
        layout += len(piece)
        if count < len(texts):
            position -= len(texts[count])
    return None
