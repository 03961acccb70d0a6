"""Byte-level BPE with the ids of words kept: most words of a text have been seen before."""

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

_LONG = 100  # characters of a text that hardly comes again
_ID = array("i").itemsize
# Ids, and for each 1 where it is masked: a list would make an object of every id.
Tokens = tuple[array, bytearray]
_BYTES = [byte for byte in range(256) if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174]
_CHARACTERS = {byte: chr(byte) for byte in _BYTES} | {
    byte: chr(256 + i) for i, byte in enumerate(byte for byte in range(256) if byte not in _BYTES)
}
_CONTRACTIONS = r"'(?:[sdmt]|ll|ve|re)"
# How the package's own pre-tokenizers split, as one expression for all of a text.
_PLAIN = rf" ?\p{{L}}+|{_CONTRACTIONS}| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_DIGITS = rf" ?\p{{L}}+|\p{{N}}|{_CONTRACTIONS}| ?[^\s\p{{L}}\p{{N}}]+|\s+(?![^\s\p{{N}}])|\s+"


def _pattern(pre_tokenizer: Any) -> str | None:
    """The expression that finds the words of a byte-level pre-tokenizer; None for one of another kind."""
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


_OTHER_SPACES = "\t\r\v\f\x1c\x1d\x1e\x1f"  # ASCII's, but for the new line

# Classes of characters, by those of them that are ASCII.
_ASCII = {"L": "A-Za-z", "N": "0-9", "Lu": "A-Z", "Ll": "a-z", "Lt": "", "Lm": "", "Lo": "", "M": ""}


def _of_ascii(pattern: str) -> re.Pattern[str] | None:
    """The expression for ASCII texts alone, which a faster engine reads; None where it cannot be written for that."""
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


_PART = re.compile(r"\[(?:\\.|[^\]\\])*\]|\\[pP]\{\w+\}|\\.|.", re.S)  # a class of characters, or one
_OF_SPACES = re.compile(r"\\s(?:[+*]\+?)?(?:\$|\[\\r\\n\][+*]?\+?|\(\?!\\S\)|\(\?!\[\^\\s[^\]]*\]\))?")
_BEGINNING = re.compile(r"(?: |\[\^(?:\\.|[^\]\\])*\])\?\+?")  # what may be a space, and is the first of a word


def _begins_words_with_spaces(pattern: str) -> bool:
    """Whether words are white space, or have a space as the first character at most, and end alone by what they are.

    Tells it of the expressions in use, which are alternatives of classes of characters.
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
    """text -> what is found for it; forgets all where it has ``most`` of them."""

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
    """Where each part ends, after the first one's beginning."""
    return [0, *accumulate(map(len, parts))]


def _packed(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


class WordEncoder:
    """Encodes texts as ``tokenizer.encode(text, add_special_tokens=False)`` does, about three times as fast.

    Words are found by the tokenizer's own expression, but by another engine, and their ids by the tokenizer's model.
    The two engines may differ in which characters are letters, so each character is tried once in front of and behind
    all kinds of others; texts with one that differs are left to the tokenizer, as are tokenizers of other kinds.

    A space that follows no other white space begins a word. Where the expression does not look back, what is between
    two such spaces has the same ids everywhere, and is kept as a whole; likewise what is between a special token and
    the next space. Ids are kept as bytes, int32: joining these is much faster than joining lists.

    Args:
        tokenizer: any of the ``tokenizers`` package.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Each part on its own: the vocabulary takes a quarter of a second to write.
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
        except regex.error:  # an expression that only the tokenizer's engine reads
            self.is_used = False
            return
        self._ids = _Kept(self._ids_of_word)
        self._spaced = _Kept(self._ids_after_space)
        self._begun = _Kept(self._ids_and_edges, 1 << 14)  # about 0.5 kB each
        added_tokens = tokenizer.get_added_tokens_decoder().items()
        self._special_ids = {token.content: token_id for token_id, token in added_tokens}
        longest_first = sorted(self._special_ids, key=len, reverse=True)
        # Tokens of several spaces are not in texts that are divided at spaces.
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
        """Nothing: the ids are the tokenizer's."""
        return []

    def encode(self, text: str, spans: list[tuple[int, int]]) -> Tokens | None:
        """Ids, and for each whether it is masked: whether it lies outside ``spans``, in characters of ``text``.

        None where the text has to be left to the tokenizer.
        """
        if not self.is_used:
            return None
        if not (self._ascii_words is not None and text.isascii()) and not self._agrees(text):
            return None
        edges = [edge for span in spans for edge in span]  # in order: outside, inside, outside …
        found = self._by_spaces(text, edges) if self._divides else self._by_words(text, edges)
        if found is None:
            return None
        ids, sizes = found
        mask = bytearray()
        for number, size in enumerate([*sizes, len(ids)]):
            mask += (b"\0" if number % 2 else b"\1") * (size // _ID - len(mask))
        return array("i", ids), mask

    def _is_spaced(self, text: str) -> bool:
        """Whether no space follows white space, as far as that is seen at once, and each begins a word."""
        if "  " in text or "\n " in text or any(map(text.__contains__, _OTHER_SPACES)):
            return False
        return text.isascii() or text.replace("\n", "").isprintable()  # of all other white space only spaces are

    def _by_spaces(self, text: str, edges: list[int]) -> tuple[bytes, list[int]] | None:
        """:meth:`_by_words`, in less time."""
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
                    if first:  # the text does not begin with a special token
                        ids = self._begun[first][0] + ids
                else:
                    ids = b"".join(self._found(piece)[1])
                found.append(ids)
                size += len(ids)
            position = end
        return b"".join(found), sizes + [size] * (len(edges) - len(sizes))

    def _by_words(self, text: str, edges: Sequence[int]) -> tuple[bytes, list[int]] | None:
        """Ids of a text, and the bytes of those before each edge; None where an edge is inside a word of several ids.

        A word of one id that an edge divides is inside: it has characters of a span.
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
        """The words and special tokens of a text."""
        pattern = self._ascii_words if self._ascii_words is not None and text.isascii() else self._words
        pieces = self._special.split(text)
        if len(pieces) == 1:
            return pattern.findall(text)
        return [word for i, piece in enumerate(pieces) for word in ([piece] if i % 2 else pattern.findall(piece))]

    def _found(self, text: str) -> tuple[list[str], list[bytes]]:
        """The words of a text, and their ids."""
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
        """Ids, and for each end of a word the bytes of those before it."""
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
        except UnicodeEncodeError:  # half of a pair of surrogates
            return False
        words = pattern.findall(text)
        starts = _ends(words)
        return [span for _, span in expected] == list(pairwise(starts)) and starts[-1] == len(text)

    def _agrees_on_ascii(self) -> bool:
        """Whether ids are the tokenizer's for texts of all kinds of characters beside each other, at spaces too."""
        draw = random.Random(0)
        parts = ["'s", "'LL", "'ve", " ", "  ", "\n", "\n\n", "\t", "\r\n", "a", "The", " cat", "1", "234", ".", "..."]
        spaced = [*(part for part in parts if not part.isspace()), " 's", " 1", " ...", " The"]
        for i in range(80):
            text = "".join(draw.choices(spaced if i % 2 else parts, k=24))
            found = self.encode(text, [])
            if found is not None and found[0].tolist() != self._tokenizer.encode(text, add_special_tokens=False).ids:
                return False
        return True
