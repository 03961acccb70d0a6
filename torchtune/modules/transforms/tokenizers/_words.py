"""Byte-level BPE with the ids of words kept: most words of a text have been seen before."""

import json
import random
import re
import unicodedata
from itertools import accumulate, chain, pairwise
from typing import Any

import regex
from tokenizers import Tokenizer, models

_KEPT = 1 << 17  # words
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


class _Ids(dict[str, list[int]]):
    """word -> its ids, found by the tokenizer's own model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._model = tokenizer.model

    def __missing__(self, word: str) -> list[int]:
        if len(self) >= _KEPT:
            self.clear()
        spelled = "".join(map(_CHARACTERS.__getitem__, word.encode("utf-8", "surrogatepass")))
        self[word] = ids = [token.id for token in self._model.tokenize(spelled)]
        return ids


class WordEncoder:
    """Encodes texts as ``tokenizer.encode(text, add_special_tokens=False)`` does, about three times as fast.

    Words are found by the tokenizer's own expression, but by another engine, and their ids by the tokenizer's model.
    The two engines may differ in which characters are letters, so each character is tried once in front of and behind
    all kinds of others; texts with one that differs are left to the tokenizer, as are tokenizers of other kinds.

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
        self._ids = _Ids(tokenizer)
        self._special_ids = {
            token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }
        longest_first = sorted(self._special_ids, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None
        self._known: set[str] = set()
        self._different: set[str] = set()
        ascii_words = _of_ascii(pattern)
        is_same = ascii_words is not None and all(self._splits_alike(chr(i), ascii_words) for i in range(128))
        self._ascii_words = ascii_words if is_same else None
        self.is_used = self._agrees_on_ascii()

    def fingerprint_parts(self) -> list[Any]:
        """Nothing: the ids are the tokenizer's."""
        return []

    def encode(self, text: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[bool]] | None:
        """Ids, and for each whether it is masked: whether it lies outside ``spans``, in characters of ``text``.

        None where the text has to be left to the tokenizer, or a span begins or ends inside a word.
        """
        if not self.is_used:
            return None
        pattern = self._words
        if self._ascii_words is not None and text.isascii():
            pattern = self._ascii_words
        elif not self._agrees(text):
            return None
        find, id_lists = pattern.findall, self._ids.__getitem__
        ids: list[int] = []
        mask: list[bool] = []
        position = 0
        edges = [edge for span in spans for edge in span]  # in order: outside, inside, outside …
        passed = 0
        for i, piece in enumerate(self._special.split(text) if self._special else [text]):
            words = [piece] if i % 2 else find(piece)
            end, begun, place = position + len(piece), 0, position
            while passed < len(edges) and edges[passed] < end:
                until = begun
                while place < edges[passed]:
                    place += len(words[until])
                    until += 1
                if place > edges[passed]:
                    return None
                ids += chain.from_iterable(map(id_lists, words[begun:until]))
                mask += [passed % 2 == 0] * (len(ids) - len(mask))
                begun = until
                passed += 1
            if i % 2:
                ids.append(self._special_ids[piece])
            else:
                ids += chain.from_iterable(map(id_lists, words[begun:] if begun else words))
            mask += [passed % 2 == 0] * (len(ids) - len(mask))
            position = end
        return ids, mask

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
        starts = [0, *accumulate(map(len, words))]
        return [span for _, span in expected] == list(pairwise(starts)) and starts[-1] == len(text)

    def _agrees_on_ascii(self) -> bool:
        """Whether ids are the tokenizer's for texts of all kinds of characters beside each other."""
        draw = random.Random(0)
        parts = ["'s", "'LL", "'ve", " ", "  ", "\n", "\n\n", "\t", "\r\n", "a", "The", " cat", "1", "234", ".", "..."]
        for _ in range(40):
            text = "".join(draw.choices(parts, k=24))
            found = self.encode(text, [])
            if found is not None and found[0] != self._tokenizer.encode(text, add_special_tokens=False).ids:
                return False
        return True
