"""Encoding of a rendered conversation: token ids, and a mask that shows which of them are trained on.

:class:`ControlTokens` hides the control tokens that texts of the data spell, before a template writes its own around
them. :class:`MaskedEncoder` encodes the rendered text: word by word with :class:`WordEncoder` where possible, which is
fast, otherwise with the tokenizer itself.
"""

import functools
import json
import random
import re
import unicodedata
import uuid
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from itertools import accumulate, pairwise
from typing import Any

import regex
from tokenizers import Encoding, Tokenizer, models

from torchtune.data import Message
from torchtune.tokenizers._protocols import any_text_pattern
from torchtune.utils import get_logger, log_once

# Ids (int32) and mask (1 = masked), as arrays: a list would create one object per id.
TokensAndMask = tuple[array, bytearray]

# Letters and digits, which templates, JSON and regular expressions leave unchanged; random, so no text contains it.
_KEY = f"q{uuid.uuid4().hex}"
_PLACEHOLDER = re.compile(rf"{_KEY}n(\d+)q")


class ControlTokens:
    """Replaces control tokens in the data's texts by placeholders, so that only the layout's tokens are parsed.

    Args:
        texts: texts of the control tokens.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        # Sorted, because the order is part of the tokenizer's fingerprint.
        self.texts = sorted((text for text in texts if text), key=len, reverse=True)
        self._number = {text: i for i, text in enumerate(self.texts)}
        self._pattern: re.Pattern[str] | None = None
        self._shortest_length = 0
        if self.texts:
            self._pattern = re.compile(any_text_pattern(self.texts))
            self._shortest_length = len(self.texts[-1])

    def hide(self, value: Any) -> Any:
        """Return a string or nested plain data with placeholders for control tokens, in keys too."""
        if isinstance(value, str):
            if self._pattern is None or len(value) < self._shortest_length:
                return value
            return self._pattern.sub(self._placeholder, value)
        if type(value) is dict or isinstance(value, Mapping):  # dict: fast path
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide(item) for item in value]
        return value

    def _placeholder(self, token: re.Match[str]) -> str:
        """Return the placeholder of a control token in a text, and say once that it is read as text."""
        log_once(
            get_logger(),
            f"A text of the data spells '{token[0]}': it is read as text. Where the control token is meant, set the "
            "tokenizer's parse_special_tokens to True.",
        )
        return f"{_KEY}n{self._number[token[0]]}q"

    def hide_message(self, message: Message) -> Message:
        """Return a copy of a turn with placeholders in its texts."""
        content = []
        for item in message.content:
            if item["type"] == "text":
                item = {**item, "content": self.hide(item["content"])}
            content.append(item)
        hidden = copy(message)
        hidden.content = content
        hidden.extra = self.hide(message.extra)
        return hidden

    def restore(self, text: str) -> str:
        """Replace the placeholders in ``text`` by their control tokens."""
        if _KEY not in text:
            return text
        return _PLACEHOLDER.sub(lambda placeholder: self.texts[int(placeholder[1])], text)


class MaskedEncoder:
    """Encodes a text to ids with a mask: control tokens become their ids, placeholders are encoded as plain text.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.
        control_tokens: the control tokens of ``tokenizer``.
    """

    def __init__(self, tokenizer: Tokenizer, control_tokens: ControlTokens) -> None:
        self.tokenizer = tokenizer
        self.control_tokens = control_tokens
        # Built when they are needed: each takes a good part of a second.
        self._word_encoder: WordEncoder | None = None
        self._renamed_tokenizer: Tokenizer | None = None

    def fingerprint_parts(self) -> list[Any]:
        """Return the values that determine the ids."""
        return [self.tokenizer, self.control_tokens.texts]

    def encode(self, text: str, spans: Sequence[tuple[int, int]]) -> TokensAndMask:
        """Return ids and mask; a token is masked unless it covers a character of ``spans`` (sorted)."""
        if _KEY in text:
            encoding, spans = self._encode_renamed(text, spans)
        else:
            if self._word_encoder is None:
                self._word_encoder = WordEncoder(self.tokenizer)
            tokens_and_mask = self._word_encoder.encode(text, list(spans))
            if tokens_and_mask is not None:
                return tokens_and_mask
            encoding = self.tokenizer.encode(text, add_special_tokens=False)
        return array("i", encoding.ids), _mask_of_offsets(encoding.offsets, spans)

    def _encode_renamed(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[Encoding, list[tuple[int, int]]]:
        """Encode a text with placeholders.

        The tokenizer would parse the control tokens for which the placeholders stand. So the text is encoded by a copy
        of it, in which the control tokens of the template have other names and the same ids.

        Returns:
            the encoding, and ``spans`` (start, end in characters of ``text``) as offsets into the encoded string.
        """
        if self._renamed_tokenizer is None:
            self._renamed_tokenizer = _rename_tokens(self.tokenizer, self.control_tokens.texts)
        new_text, starts, new_starts = self._rename_in_text(text)

        def new_position(position: int) -> int:
            # An edge of a span lies within an unchanged piece, or where a piece begins: never inside a placeholder.
            index = bisect_right(starts, position) - 1
            return new_starts[index] + position - starts[index]

        new_spans = [(new_position(start), new_position(end)) for start, end in spans]
        return self._renamed_tokenizer.encode(new_text, add_special_tokens=False), new_spans

    def _rename_in_text(self, text: str) -> tuple[str, list[int], list[int]]:
        """Replace control tokens by their names in the renamed tokenizer, and placeholders by their control tokens.

        Returns:
            the new text, and the start of each piece, replaced or unchanged, in ``text`` and in the new text.
        """
        texts = self.control_tokens.texts
        any_token = any_text_pattern(texts)
        pieces: list[str] = []
        starts = [0]
        new_starts = [0]
        position = 0
        new_position = 0
        for match in re.finditer(rf"{_PLACEHOLDER.pattern}|{any_token}", text):
            if match[1] is not None:  # a placeholder
                new_piece = texts[int(match[1])]
            else:
                new_piece = _new_name(texts.index(match[0]))
            unchanged = text[position : match.start()]
            pieces += [unchanged, new_piece]
            position = match.end()
            new_position += len(unchanged)
            starts += [match.start(), match.end()]
            new_starts += [new_position, new_position + len(new_piece)]
            new_position += len(new_piece)
        pieces.append(text[position:])
        return "".join(pieces), starts, new_starts


def _mask_of_offsets(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> bytearray:
    """Return 1 for each token that covers no character of a span. Spans are sorted and disjoint."""
    mask = bytearray(b"\1") * len(offsets)
    remaining_spans = iter(spans)
    no_span = (0, -1)
    start, end = next(remaining_spans, no_span)
    for i, (first, last) in enumerate(offsets):
        while end >= 0 and first >= end:
            start, end = next(remaining_spans, no_span)
        if end < 0:
            break
        is_empty = first == last == start  # a token without characters, at the beginning of the span
        if last > start or is_empty:
            mask[i] = False
    return mask


def _new_name(number: int) -> str:
    """Return the name of a control token in the renamed tokenizer."""
    return f"{_KEY}c{number}q"


def _rename_tokens(tokenizer: Tokenizer, control_tokens: Sequence[str]) -> Tokenizer:
    """Return a copy of the tokenizer with renamed control tokens, so that text with their former names is plain text.

    The ids stay the same.
    """
    names = {text: _new_name(number) for number, text in enumerate(control_tokens)}
    content = json.loads(tokenizer.to_str())
    content["post_processor"] = None  # unused, and may refer to control tokens
    for token in content["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = content["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        for text, name in names.items():
            if text in vocab:
                vocab[name] = vocab.pop(text)
    else:  # a Unigram model: the id of a piece is its position
        for piece in vocab:
            piece[0] = names.get(piece[0], piece[0])
    if model.get("unk_token") in names:  # a name, which must be in the vocabulary
        model["unk_token"] = names[model["unk_token"]]
    return Tokenizer.from_str(json.dumps(content))


_MAX_CACHED_LENGTH = 100  # characters; longer words rarely repeat
_MAX_CACHED_WORDS = 1 << 17
_ID_SIZE = array("i").itemsize
# Splits of the pre-tokenizers in `tokenizers`, as one regular expression.
_CONTRACTIONS = r"'(?:[sdmt]|ll|ve|re)"
_WORDS = rf" ?\p{{L}}+|{_CONTRACTIONS}| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_WORDS_AND_DIGITS = rf" ?\p{{L}}+|\p{{N}}|{_CONTRACTIONS}| ?[^\s\p{{L}}\p{{N}}]+|\s+(?![^\s\p{{N}}])|\s+"


@functools.lru_cache
def bytes_to_unicode() -> dict[int, str]:
    """Return GPT-2's byte -> character map: printable bytes map to themselves, others to code points from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    table = {}
    next_code_point = 256
    for byte in range(256):
        if byte in printable:
            table[byte] = chr(byte)
        else:
            table[byte] = chr(next_code_point)
            next_code_point += 1
    return table


def _word_pattern(pre_tokenizer: Any) -> str | None:
    """Return the regular expression of a byte-level pre-tokenizer's words; None for other kinds.

    Only settings whose words are the matches of one expression are supported, each word a piece of the text unchanged.
    """
    steps = [pre_tokenizer]
    if pre_tokenizer["type"] == "Sequence":
        steps = pre_tokenizer["pretokenizers"]
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    *splits, byte_level = steps
    if byte_level.get("use_regex", True):
        if not splits:
            return _WORDS
        if splits == [{"type": "Digits", "individual_digits": True}]:
            return _WORDS_AND_DIGITS
        return None
    if len(splits) != 1 or splits[0]["type"] != "Split":
        return None
    # Otherwise the matches are not the words: they separate them, or are joined to a neighbor.
    if splits[0].get("invert") or splits[0]["behavior"] != "Isolated":
        return None
    return splits[0]["pattern"].get("Regex")


class _WordCache(dict[str, bytes]):
    """Cache word -> ids, packed as int32; cleared when it is full."""

    def __init__(self, tokenize: Callable[[str], Sequence[int]]) -> None:
        self._tokenize = tokenize

    def __missing__(self, word: str) -> bytes:
        ids = array("i", self._tokenize(word)).tobytes()
        if len(word) <= _MAX_CACHED_LENGTH:
            if len(self) >= _MAX_CACHED_WORDS:
                self.clear()
            self[word] = ids
        return ids


def _cumulative_lengths(parts: Sequence[str | bytes]) -> list[int]:
    """Return the cumulative lengths of the parts, from 0."""
    return [0, *accumulate(map(len, parts))]


class WordEncoder:
    """Equivalent of ``tokenizer.encode(text, add_special_tokens=False)``, about three times as fast.

    It splits a text with the tokenizer's own pattern in another regex engine, and encodes words with the tokenizer's
    model. The engines may classify characters differently, so each new character is checked once, next to characters of
    all kinds. Texts with a character that differs, and other kinds of tokenizers, are encoded by the tokenizer itself.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.

    Attributes:
        is_used: whether the tokenizer is of a kind that is supported.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        pattern, self._needs_nfc = self._read_settings(tokenizer)
        self.is_used = pattern is not None
        if pattern is None:
            return
        try:
            self._words = regex.compile(pattern)
        except regex.error:  # syntax that only the tokenizer's engine supports
            self.is_used = False
            return
        self._ids_of_word = _WordCache(self._tokenize_word)
        self._special_ids = {token.content: token_id for token_id, token in added.items()}
        self._special = re.compile(f"({any_text_pattern(self._special_ids)})")
        self._agreeing_characters: set[str] = set()
        self._differing_characters: set[str] = set()
        # Compare the ids with the tokenizer's on random ASCII texts, whatever its settings say.
        draw = random.Random(0)
        parts = ["'s", "'LL", "'ve", " ", "  ", "\n", "\n\n", "\t", "\r\n", "a", "The", " cat", "1", "234", ".", "..."]
        for _ in range(80):
            text = "".join(draw.choices(parts, k=24))
            tokens_and_mask = self.encode(text, [])
            expected_ids = tokenizer.encode(text, add_special_tokens=False).ids
            # None: the encoder leaves the text to the tokenizer, so that there is nothing to compare.
            if tokens_and_mask is not None and tokens_and_mask[0].tolist() != expected_ids:
                self.is_used = False
                return

    @staticmethod
    def _read_settings(tokenizer: Tokenizer) -> tuple[str | None, bool]:
        """Return the pattern of words, or None if a setting is not supported, and whether texts are NFC-normalized."""
        # Serialize the parts separately: the vocabulary alone takes a quarter of a second.
        pattern = None
        if tokenizer.pre_tokenizer is not None:
            pattern = _word_pattern(json.loads(tokenizer.pre_tokenizer.__getstate__()))
        normalizer = tokenizer.normalizer
        needs_nfc = normalizer is not None and json.loads(normalizer.__getstate__()) == {"type": "NFC"}
        if normalizer is not None and not needs_nfc:
            return None, False
        model = tokenizer.model
        if not isinstance(model, models.BPE):
            return None, needs_nfc
        # Ids that are random, or depend on the place of a piece in its word.
        if model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
            return None, needs_nfc
        added = tokenizer.get_added_tokens_decoder().values()
        # Such tokens also take white space around them, or are only found between other characters than letters.
        if any(token.lstrip or token.rstrip or token.single_word for token in added):
            return None, needs_nfc
        # The tokenizer searches normalized and other tokens one after the other, the encoder all at once.
        if len({token.normalized for token in added}) > 1:
            return None, needs_nfc
        return pattern, needs_nfc

    def fingerprint_parts(self) -> list[Any]:
        """Return an empty list: the ids are equal to the tokenizer's."""
        return []

    def encode(self, text: str, spans: list[tuple[int, int]]) -> TokensAndMask | None:
        """Return ids and mask; a token is masked if it lies outside ``spans`` (in characters of ``text``).

        Returns None if the tokenizer itself has to encode the text, because the encoder does not support the text, or
        because an edge of a span is inside a word of several ids. A word of one id with an edge inside counts as inside
        the span.
        """
        if not self.is_used or not self._supports(text):
            return None
        words: list[str] = []
        # With a group in the pattern, texts and special tokens alternate.
        for i, piece in enumerate(self._special.split(text)):
            if i % 2:
                words.append(piece)  # a special token
            else:
                words += self._words.findall(piece)
        word_ids = list(map(self._ids_of_word.__getitem__, words))
        ids = array("i", b"".join(word_ids))
        mask = bytearray()
        if spans:
            mask = self._mask(words, word_ids, spans)
            if mask is None:
                return None
        mask += b"\1" * (len(ids) - len(mask))
        return ids, mask

    @staticmethod
    def _mask(words: list[str], word_ids: list[bytes], spans: list[tuple[int, int]]) -> bytearray | None:
        """Return the mask up to the end of the last span; None if an edge is inside a word of several ids."""
        mask = bytearray()
        text_ends = _cumulative_lengths(words)
        id_ends = _cumulative_lengths(word_ids)  # in bytes
        for span in spans:
            for edge, is_end in zip(span, (False, True), strict=True):
                index = bisect_left(text_ends, edge)
                if text_ends[index] != edge:
                    if len(word_ids[index - 1]) > _ID_SIZE:
                        return None
                    if not is_end:
                        index -= 1  # the word belongs to the span
                num_ids = id_ends[index] // _ID_SIZE - len(mask)
                if is_end:  # the ids of the span, which are trained on
                    mask += b"\0" * num_ids
                else:  # those before it
                    mask += b"\1" * num_ids
        return mask

    def _tokenize_word(self, word: str) -> list[int]:
        """Return the ids of a word, or of a special token, from the tokenizer's model."""
        if word in self._special_ids:
            return [self._special_ids[word]]
        characters = map(bytes_to_unicode().__getitem__, word.encode("utf-8", "surrogatepass"))
        return [token.id for token in self._tokenizer.model.tokenize("".join(characters))]

    def _supports(self, text: str) -> bool:
        """Return whether both regex engines treat all characters of a text alike; check those that are new."""
        if not text.isascii() and self._needs_nfc and not unicodedata.is_normalized("NFC", text):
            return False
        characters = set(text) - self._agreeing_characters
        for character in characters - self._differing_characters:
            if self._is_split_alike(character):
                self._agreeing_characters.add(character)
            else:
                self._differing_characters.add(character)
        return self._differing_characters.isdisjoint(characters)

    def _is_split_alike(self, c: str) -> bool:
        """Return whether both regex engines split texts alike in which a character is next to all other kinds."""
        neighbors = f"a{c}a1{c}1.{c}.{c}{c} {c} \n{c}\n a {c}{c}'{c}s's{c}'{c}e'{c}l'l{c}'r{c}'v{c}A{c}A{c}b  {c}  1{c}"
        for text in (neighbors, c, f"{c}{c}"):
            try:
                words_and_spans = self._tokenizer.pre_tokenizer.pre_tokenize_str(text)
            except UnicodeEncodeError:  # lone surrogate
                return False
            expected_spans = [span for _, span in words_and_spans]
            edges = _cumulative_lengths(self._words.findall(text))
            if edges[-1] != len(text) or list(pairwise(edges)) != expected_spans:
                return False
        return True
