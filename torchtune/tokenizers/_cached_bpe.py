"""Byte-level BPE with a cache of the ids of words."""

import json
import random
import re
import unicodedata
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import regex
from tokenizers import Tokenizer, models

_LONG = 100  # characters; longer texts rarely repeat and are not cached
_ID = array("i").itemsize
# Ids (int32) and mask (1 = masked); arrays, because a list creates one object per id.
Tokens = tuple[array, bytearray]
_BYTES = [byte for byte in range(256) if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174]
_CHARACTERS = {byte: chr(byte) for byte in _BYTES} | {
    byte: chr(256 + i) for i, byte in enumerate(byte for byte in range(256) if byte not in _BYTES)
}
_CONTRACTIONS = r"'(?:[sdmt]|ll|ve|re)"
# The splits of the `tokenizers` pre-tokenizers, as one regular expression.
_PLAIN = rf" ?\p{{L}}+|{_CONTRACTIONS}| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_DIGITS = rf" ?\p{{L}}+|\p{{N}}|{_CONTRACTIONS}| ?[^\s\p{{L}}\p{{N}}]+|\s+(?![^\s\p{{N}}])|\s+"


def _pattern(pre_tokenizer: Any) -> str | None:
    """Return the regular expression of a byte-level pre-tokenizer's words; None for other kinds."""
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    *before, last = steps
    if last.get("use_regex", True):
        if not before:
            return _PLAIN
        is_digits = len(before) == 1 and before[0] == {"type": "Digits", "individual_digits": True}
        return _DIGITS if is_digits else None
    if len(before) != 1 or before[0]["type"] != "Split" or before[0].get("invert"):
        return None
    return before[0]["pattern"].get("Regex") if before[0]["behavior"] == "Isolated" else None


_OTHER_SPACES = "\t\r\v\f\x1c\x1d\x1e\x1f"  # ASCII white space except the newline

# Unicode character class -> its ASCII members.
_ASCII = {"L": "A-Za-z", "N": "0-9", "Lu": "A-Z", "Ll": "a-z", "Lt": "", "Lm": "", "Lo": "", "M": ""}


def _of_ascii(pattern: str) -> re.Pattern[str] | None:
    """Rewrite a pattern for ASCII texts, so that the faster `re` can run it; None if that is impossible."""
    pieces, is_inside = [], False
    for token in re.findall(r"\\p\{\w+\}|\\.|.", pattern, re.S):
        if token.startswith("\\p{"):
            found = _ASCII.get(token[3:-1])
            if found is None or not (found or is_inside):
                return None
            token = found if is_inside else f"[{found}]"
        elif token in "[]":
            is_inside = token == "["
        pieces.append(token)
    try:
        return re.compile("".join(pieces), re.ASCII)
    except re.error:
        return None


_PART = re.compile(r"\[(?:\\.|[^\]\\])*\]|\\[pP]\{\w+\}|\\.|.", re.S)  # a character class or one character
_OF_SPACES = re.compile(r"\\s(?:[+*]\+?)?(?:\$|\[\\r\\n\][+*]?\+?|\(\?!\\S\)|\(\?!\[\^\\s[^\]]*\]\))?")
_BEGINNING = re.compile(r"(?: |\[\^(?:\\.|[^\]\\])*\])\?\+?")  # optional first character, maybe a space


def _begins_words_with_spaces(pattern: str) -> bool:
    """Return whether each word is white space or has a space only as its first character, without lookaround.

    Made for the patterns in use: alternatives of character classes.
    """
    alternatives, depth = [""], 0
    for part in _PART.findall(pattern):
        depth += (part == "(") - (part == ")")
        if part == "|" and not depth:
            alternatives.append("")
        else:
            alternatives[-1] += part
    words = [one[found.end() :] if (found := _BEGINNING.match(one)) else one for one in alternatives]
    return all(_OF_SPACES.fullmatch(word) or _has_no_space(word) for word in words)


def _has_no_space(word: str) -> bool:
    for part in _PART.findall(word):
        escapes = set(re.findall(r"\\[A-Za-z]", part))
        if part[0] == "[":
            ok = " " not in part and escapes <= {r"\s", r"\p", r"\r", r"\n"} and (r"\s" in escapes) == (part[1] == "^")
        else:
            ok = part not in (" ", ".", "^", "$") and escapes <= {r"\p", r"\r", r"\n"}
        if not ok:
            return False
    return not re.search(r"\(\?(?:<?[=!])", word)


class _Kept(dict[str, Any]):
    """Cache text -> ``find(text)``, cleared when it has ``most`` entries."""

    def __init__(self, find: Callable[[str], Any], most: int = 1 << 17) -> None:
        self._find, self._most = find, most

    def __missing__(self, text: str) -> Any:
        found = self._find(text)
        if len(text) <= _LONG:
            if len(self) >= self._most:
                self.clear()
            self[text] = found
        return found


def _ends(parts: Sequence[str | bytes]) -> list[int]:
    """Return the cumulative lengths of the parts, from 0."""
    return [0, *accumulate(map(len, parts))]


def _packed(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


class WordEncoder:
    """Equivalent of ``tokenizer.encode(text, add_special_tokens=False)``, about three times as fast.

    Splits a text with the tokenizer's own pattern in another regex engine and encodes words with the tokenizer's model.
    The engines may classify characters differently, so each new character is checked once next to all kinds of others.
    Texts with a character that differs, and other kinds of tokenizers, fall back to the tokenizer.

    A space that does not follow white space begins a word. If the pattern has no lookaround, the text between two such
    spaces always has the same ids and is cached as one entry, as is the text from a special token to the next space.
    Ids are cached as bytes (int32): joining bytes is much faster than joining lists.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Serialize the parts separately: the vocabulary alone takes a quarter of a second.
        normalizer, pre_tokenizer, model = tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.model
        added = tokenizer.get_added_tokens_decoder().values()
        pattern = None if pre_tokenizer is None else _pattern(json.loads(pre_tokenizer.__getstate__()))
        is_plain = not any(token.lstrip or token.rstrip or token.single_word for token in added)
        self._needs_nfc = normalizer is not None and json.loads(normalizer.__getstate__()) == {"type": "NFC"}
        self.is_used = (
            pattern is not None
            and isinstance(model, models.BPE)
            and not (model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix)
            and (normalizer is None or self._needs_nfc)
            and is_plain
            and len({token.normalized for token in added}) <= 1
        )
        if not self.is_used:
            return
        try:
            self._words = regex.compile(pattern)
        except regex.error:  # syntax that only the tokenizer's engine supports
            self.is_used = False
            return
        self._ids = _Kept(self._ids_of_word)
        self._spaced = _Kept(self._ids_after_space)
        self._begun = _Kept(self._ids_and_edges, 1 << 14)  # about 0.5 kB each
        added_tokens = tokenizer.get_added_tokens_decoder().items()
        self._special_ids = {token.content: token_id for token_id, token in added_tokens}
        longest_first = sorted(self._special_ids, key=len, reverse=True)
        # Splitting at spaces would break special tokens that contain one.
        has_spaces = any(" " in text and text.strip() for text in self._special_ids)
        self._divides = _begins_words_with_spaces(pattern) and not has_spaces
        special = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._special, self._beginnings = re.compile(f"({special})"), re.compile(f"((?:{special})[^ ]*)")
        self._known: set[str] = set()
        self._different: set[str] = set()
        ascii_words = _of_ascii(pattern)
        is_same = ascii_words is not None and all(self._splits_alike(chr(i), ascii_words) for i in range(128))
        self._ascii_words = ascii_words if is_same else None
        self.is_used = self._agrees_on_ascii()

    def fingerprint_parts(self) -> list[Any]:
        """Return nothing: the ids are the tokenizer's."""
        return []

    def encode(self, text: str, spans: list[tuple[int, int]]) -> Tokens | None:
        """Return ids and mask; a token is masked if it lies outside ``spans`` (in characters of ``text``).

        None if the tokenizer itself has to encode the text.
        """
        if not self.is_used:
            return None
        if not (self._ascii_words is not None and text.isascii()) and not self._agrees(text):
            return None
        edges = [edge for span in spans for edge in span]  # sorted; alternately the start and end of a span
        found = self._by_spaces(text, edges) if self._divides else self._by_words(text, edges)
        if found is None:
            return None
        ids, sizes = found
        mask = bytearray()
        for number, size in enumerate([*sizes, len(ids)]):
            mask += (b"\0" if number % 2 else b"\1") * (size // _ID - len(mask))
        return array("i", ids), mask

    def _is_spaced(self, text: str) -> bool:
        """Return whether every space begins a word; a fast check, which may be False for such a text."""
        if "  " in text or "\n " in text or any(map(text.__contains__, _OTHER_SPACES)):
            return False
        return text.isascii() or text.replace("\n", "").isprintable()  # no white space but the space is printable

    def _by_spaces(self, text: str, edges: list[int]) -> tuple[bytes, list[int]] | None:
        """Faster :meth:`_by_words`, with a cache of the ids between spaces."""
        is_spaced = self._is_spaced(text)
        found: list[bytes] = []
        sizes: list[int] = []
        position = size = 0
        following = edges[0] if edges else len(text)
        for i, piece in enumerate(self._beginnings.split(text)):
            end = position + len(piece)
            if i % 2:  # from a special token to the next space
                ids, places = self._begun[piece]
                while following < end:
                    if following - position not in places:
                        return self._by_words(text, edges)
                    sizes.append(size + places[following - position])
                    following = edges[len(sizes)] if len(sizes) < len(edges) else len(text)
                found.append(ids)
                size += len(ids)
            elif piece:
                if following < end or (position and text[position - 1].isspace()):
                    return self._by_words(text, edges)
                if is_spaced or self._is_spaced(piece):
                    first, *rest = piece.split(" ")
                    ids = b"".join(map(self._spaced.__getitem__, rest))
                    if first:  # nonempty at the beginning of a text
                        ids = self._begun[first][0] + ids
                else:
                    ids = b"".join(self._found(piece)[1])
                found.append(ids)
                size += len(ids)
            position = end
        return b"".join(found), sizes + [size] * (len(edges) - len(sizes))

    def _by_words(self, text: str, edges: Sequence[int]) -> tuple[bytes, list[int]] | None:
        """Return a text's ids and the bytes of ids before each edge; None if an edge is inside a word of several ids.

        A word of one id that an edge divides counts as inside the span.
        """
        words, found = self._found(text)
        if not edges:
            return b"".join(found), []
        ends, sizes = _ends(words), _ends(found)
        before = []
        for number, edge in enumerate(edges):
            place = bisect_left(ends, edge)
            if ends[place] != edge:
                if len(found[place - 1]) > _ID:
                    return None
                place -= number % 2 == 0
            before.append(sizes[place])
        return b"".join(found), before

    def _find(self, text: str) -> list[str]:
        """Split a text into words and special tokens."""
        pattern = self._ascii_words if self._ascii_words is not None and text.isascii() else self._words
        pieces = self._special.split(text)
        if len(pieces) == 1:
            return pattern.findall(text)
        return [word for i, piece in enumerate(pieces) for word in ([piece] if i % 2 else pattern.findall(piece))]

    def _found(self, text: str) -> tuple[list[str], list[bytes]]:
        words = self._find(text)
        return words, list(map(self._ids.__getitem__, words))

    def _ids_of_word(self, word: str) -> bytes:
        if word in self._special_ids:
            return _packed([self._special_ids[word]])
        spelled = "".join(map(_CHARACTERS.__getitem__, word.encode("utf-8", "surrogatepass")))
        return _packed([token.id for token in self._tokenizer.model.tokenize(spelled)])

    def _ids_after_space(self, text: str) -> bytes:
        return b"".join(self._found(f" {text}")[1])

    def _ids_and_edges(self, text: str) -> tuple[bytes, dict[int, int]]:
        """Return a text's ids, and end of each word -> bytes of ids before it."""
        words, found = self._found(text)
        return b"".join(found), dict(zip(_ends(words), _ends(found), strict=True))

    def _agrees(self, text: str) -> bool:
        if not text.isascii() and self._needs_nfc and not unicodedata.is_normalized("NFC", text):
            return False
        new = set(text) - self._known
        for character in new:
            if character not in self._different:
                (self._known if self._splits_alike(character, self._words) else self._different).add(character)
        return not new or self._different.isdisjoint(new)

    def _splits_alike(self, c: str, words: Any) -> bool:
        around = f"a{c}a1{c}1.{c}.{c}{c} {c} \n{c}\n a {c}{c}'{c}s's{c}'{c}e'{c}l'l{c}'r{c}'v{c}A{c}A{c}b  {c}  1{c}"
        return all(self._is_same(text, words) for text in (around, c, f"{c}{c}"))

    def _is_same(self, text: str, pattern: Any) -> bool:
        try:
            expected = self._tokenizer.pre_tokenizer.pre_tokenize_str(text)
        except UnicodeEncodeError:  # lone surrogate
            return False
        words = pattern.findall(text)
        starts = _ends(words)
        return [span for _, span in expected] == list(pairwise(starts)) and starts[-1] == len(text)

    def _agrees_on_ascii(self) -> bool:
        """Compare the ids with the tokenizer's on random ASCII texts."""
        draw = random.Random(0)
        parts = ["'s", "'LL", "'ve", " ", "  ", "\n", "\n\n", "\t", "\r\n", "a", "The", " cat", "1", "234", ".", "..."]
        spaced = [*(part for part in parts if not part.isspace()), " 's", " 1", " ...", " The"]
        for i in range(80):
            text = "".join(draw.choices(spaced if i % 2 else parts, k=24))
            found = self.encode(text, [])
            if found is not None and found[0].tolist() != self._tokenizer.encode(text, add_special_tokens=False).ids:
                return False
        return True
