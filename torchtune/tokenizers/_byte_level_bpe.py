"""Byte-level BPE from ``vocab.json`` and ``merges.txt``."""

import functools
import json
import random
import re
import unicodedata
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import regex
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from torchtune.data import DataError
from torchtune.tokenizers._decoding import decode_around
from torchtune.tokenizers._files import PublishedFiles, SavesPublishedFiles, read_json, read_text
from torchtune.tokenizers._protocols import BaseTokenizer, check_text


def _read_merges(path: str) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(read_text(path, "merges file").split("\n"), start=1):
        if (number == 1 and line.startswith("#version")) or not line.strip():
            continue
        pair = line.rstrip("\r").split(" ")
        if len(pair) != 2:
            raise DataError(
                f"merges file {path} is broken at line {number}: two parts are expected, not {line[:40]!r}."
            )
        merges.append((pair[0], pair[1]))
    return merges


class ByteLevelBPE:
    """Byte-level BPE tokenizer; special tokens in a text are encoded to their ids.

    Args:
        vocab_path: ``vocab.json``, token -> id.
        merges_path: ``merges.txt``, one pair of tokens per line, in merge order.
        pattern: pre-tokenization pattern.
        special_tokens: text -> id of tokens that are never split.
        nfc: apply Unicode NFC normalization first.

    Raises:
        DataError: a file is missing or broken, or ``merges.txt`` has tokens that ``vocab.json`` lacks.
    """

    def __init__(
        self, vocab_path: str, merges_path: str, *, pattern: str, special_tokens: Mapping[str, int], nfc: bool
    ) -> None:
        vocab: Any = read_json(vocab_path, "vocabulary file")
        if not all(isinstance(token_id, int) for token_id in vocab.values()):
            raise DataError(f"vocabulary file {vocab_path} is not a mapping token -> id.")
        merges = _read_merges(merges_path)
        for left, right in merges:
            if not {left, right, left + right} <= vocab.keys():
                raise DataError(
                    f"merges file {merges_path} merges {left!r} and {right!r}, which {vocab_path} does not know: "
                    "take both files from the same checkpoint."
                )
        self.tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
        if nfc:
            self.tokenizer.normalizer = normalizers.NFC()
        self.tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        self.tokenizer.decoder = decoders.ByteLevel()
        self._words = WordEncoder(self.tokenizer)
        self.special_tokens = dict(special_tokens)
        self._special_texts = {token_id: token for token, token_id in self.special_tokens.items()}
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
        self.vocab_size = max([*vocab.values(), *self.special_tokens.values()]) + 1

    def encode(self, text: str, parse_special: bool = True, change: Callable[[str], str] | None = None) -> list[int]:
        """Encode ``text`` into token ids; without ``parse_special``, special tokens in it are encoded as plain text.

        ``change`` is applied to the text between special tokens after splitting.
        """
        check_text(text)
        pieces = self._special.split(text) if parse_special and self._special is not None else [text]
        ids: list[int] = []
        for i, piece in enumerate(pieces):
            if i % 2:
                ids.append(self.special_tokens[piece])
            elif piece:
                piece = piece if change is None else change(piece)
                found = self._words.encode(piece, [])
                ids += self.tokenizer.encode(piece, add_special_tokens=False).ids if found is None else found[0]
        return ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        """Decode token ids into text; invalid UTF-8 becomes the replacement character."""
        return decode_around(
            token_ids,
            self._special_texts,
            lambda ids: self.tokenizer.decode(ids, skip_special_tokens=False),
            skip=skip_special_tokens,
        )


GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?[\w]+| ?\d+| ?[^\s\w\d]+|\s+(?!\S)|\s+"


class GPT2BaseTokenizer(SavesPublishedFiles, BaseTokenizer):
    """GPT-2 tokenizer for plain text.

    Args:
        vocab_path: ``vocab.json``.
        merges_path: ``merges.txt``.
        unk_id: accepted for compatibility; every byte has a token.
        bos_id: BOS token, added first if ``add_bos``.
        eos_id: EOS token, added last if ``add_eos``.
        pad_id: padding token.

    Raises:
        DataError: a file is missing or broken.

    Example:
        >>> vocab, merges = folder / "vocab.json", folder / "merges.txt"
        >>> _ = vocab.write_text('{"a": 0, "b": 1, "ab": 2}'), merges.write_text("a b\\n")
        >>> torchtune.tokenizers.GPT2BaseTokenizer(vocab, merges).encode("ab")
        [2]
    """

    def __init__(
        self,
        vocab_path: str,
        merges_path: str,
        unk_id: int | None = None,
        bos_id: int | None = None,
        eos_id: int | None = None,
        pad_id: int | None = None,
    ) -> None:
        self.published = PublishedFiles(vocab_path)
        self._bpe = ByteLevelBPE(vocab_path, merges_path, pattern=GPT2_PATTERN, special_tokens={}, nfc=False)
        self.unk_id, self.bos_id, self.eos_id, self.pad_id = unk_id, bos_id, eos_id, pad_id

    @property
    def vocab_size(self) -> int:
        """Largest id of the vocabulary plus 1."""
        return self._bpe.vocab_size

    def bpe(self, token: str) -> str:
        """Split a word, written in GPT-2's byte-to-unicode characters, into BPE tokens joined by spaces."""
        to_byte = {character: byte for byte, character in bytes_to_unicode().items()}
        text = bytes(to_byte[character] for character in token).decode("utf-8", errors="replace")
        return " ".join(part.value for part in self._bpe.tokenizer.model.tokenize(token)) if text else ""

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Encode ``text`` into token ids."""
        ids = self._bpe.encode(text)
        if add_bos and self.bos_id is not None:
            ids = [self.bos_id, *ids]
        return [*ids, self.eos_id] if add_eos and self.eos_id is not None else ids

    def decode(self, tokens: list[int]) -> str:
        """Decode token ids into text."""
        return self._bpe.decode(tokens)


_LONG = 100  # characters; longer words rarely repeat and are not cached
_MOST = 1 << 17  # cached words
_ID = array("i").itemsize
# Ids (int32) and mask (1 = masked), as arrays: a list would create one object per id.
Tokens = tuple[array, bytearray]
_CONTRACTIONS = r"'(?:[sdmt]|ll|ve|re)"
# Splits of the pre-tokenizers in `tokenizers`, as one regular expression.
_PLAIN = rf" ?\p{{L}}+|{_CONTRACTIONS}| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_DIGITS = rf" ?\p{{L}}+|\p{{N}}|{_CONTRACTIONS}| ?[^\s\p{{L}}\p{{N}}]+|\s+(?![^\s\p{{N}}])|\s+"


@functools.lru_cache
def bytes_to_unicode() -> dict[int, str]:
    """Return GPT-2's byte -> character map: printable bytes map to themselves, others to code points from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in printable}
    table |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in table)}
    return dict(sorted(table.items()))


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


class _Cache(dict[str, bytes]):
    """Cache word -> ids, packed as int32; cleared when it is full."""

    def __init__(self, find: Callable[[str], Sequence[int]]) -> None:
        self._find = find

    def __missing__(self, word: str) -> bytes:
        found = array("i", self._find(word)).tobytes()
        if len(word) <= _LONG:
            if len(self) >= _MOST:
                self.clear()
            self[word] = found
        return found


def _ends(parts: Sequence[str | bytes]) -> list[int]:
    """Return the cumulative lengths of the parts, from 0."""
    return [0, *accumulate(map(len, parts))]


class WordEncoder:
    """Equivalent of ``tokenizer.encode(text, add_special_tokens=False)``, about three times as fast.

    It splits a text with the tokenizer's own pattern in another regex engine, and encodes words with the tokenizer's
    model. The engines may classify characters differently, so each new character is checked once, next to characters of
    all kinds. Texts with a character that differs, and other kinds of tokenizers, are encoded by the tokenizer itself.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Serialize the parts separately: the vocabulary alone takes a quarter of a second.
        normalizer, pre_tokenizer, model = tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.model
        added = tokenizer.get_added_tokens_decoder()
        pattern = None if pre_tokenizer is None else _pattern(json.loads(pre_tokenizer.__getstate__()))
        self._needs_nfc = normalizer is not None and json.loads(normalizer.__getstate__()) == {"type": "NFC"}
        self.is_used = (
            pattern is not None
            and isinstance(model, models.BPE)
            and not (model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix)
            and (normalizer is None or self._needs_nfc)
            and not any(token.lstrip or token.rstrip or token.single_word for token in added.values())
            and len({token.normalized for token in added.values()}) <= 1
        )
        if not self.is_used:
            return
        try:
            self._words = regex.compile(pattern)
        except regex.error:  # syntax that only the tokenizer's engine supports
            self.is_used = False
            return
        self._ids = _Cache(self._ids_of_word)
        self._special_ids = {token.content: token_id for token_id, token in added.items()}
        longest_first = sorted(self._special_ids, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._known: set[str] = set()
        self._different: set[str] = set()
        self.is_used = self._agrees_on_ascii()

    def fingerprint_parts(self) -> list[Any]:
        """Return an empty list: the ids are equal to the tokenizer's."""
        return []

    def encode(self, text: str, spans: list[tuple[int, int]]) -> Tokens | None:
        """Return ids and mask; a token is masked if it lies outside ``spans`` (in characters of ``text``).

        Returns None if the tokenizer itself has to encode the text, because the encoder does not support the text, or
        because an edge of a span is inside a word of several ids. A word of one id with an edge inside counts as inside
        the span.
        """
        if not self.is_used or not self._agrees(text):
            return None
        pieces = self._special.split(text)
        words = [word for i, piece in enumerate(pieces) for word in ([piece] if i % 2 else self._words.findall(piece))]
        found = list(map(self._ids.__getitem__, words))
        ids, mask = array("i", b"".join(found)), bytearray()
        edges = [edge for span in spans for edge in span]  # sorted; alternately the start and end of a span
        ends, sizes = (_ends(words), _ends(found)) if edges else ([], [])
        for number, edge in enumerate(edges):
            place = bisect_left(ends, edge)
            if ends[place] != edge:
                if len(found[place - 1]) > _ID:
                    return None
                place -= number % 2 == 0
            mask += (b"\0" if number % 2 else b"\1") * (sizes[place] // _ID - len(mask))
        mask += b"\1" * (len(ids) - len(mask))
        return ids, mask

    def _ids_of_word(self, word: str) -> list[int]:
        if word in self._special_ids:
            return [self._special_ids[word]]
        spelled = "".join(map(bytes_to_unicode().__getitem__, word.encode("utf-8", "surrogatepass")))
        return [token.id for token in self._tokenizer.model.tokenize(spelled)]

    def _agrees(self, text: str) -> bool:
        if not text.isascii() and self._needs_nfc and not unicodedata.is_normalized("NFC", text):
            return False
        new = set(text) - self._known
        for character in new - self._different:
            (self._known if self._splits_alike(character) else self._different).add(character)
        return self._different.isdisjoint(new)

    def _splits_alike(self, c: str) -> bool:
        around = f"a{c}a1{c}1.{c}.{c}{c} {c} \n{c}\n a {c}{c}'{c}s's{c}'{c}e'{c}l'l{c}'r{c}'v{c}A{c}A{c}b  {c}  1{c}"
        return all(self._is_same(text) for text in (around, c, f"{c}{c}"))

    def _is_same(self, text: str) -> bool:
        try:
            expected = self._tokenizer.pre_tokenizer.pre_tokenize_str(text)
        except UnicodeEncodeError:  # lone surrogate
            return False
        starts = _ends(self._words.findall(text))
        return [span for _, span in expected] == list(pairwise(starts)) and starts[-1] == len(text)

    def _agrees_on_ascii(self) -> bool:
        """Compare the ids with the tokenizer's on random ASCII texts."""
        draw = random.Random(0)
        parts = ["'s", "'LL", "'ve", " ", "  ", "\n", "\n\n", "\t", "\r\n", "a", "The", " cat", "1", "234", ".", "..."]
        for _ in range(80):
            text = "".join(draw.choices(parts, k=24))
            found = self.encode(text, [])
            if found is not None and found[0].tolist() != self._tokenizer.encode(text, add_special_tokens=False).ids:
                return False
        return True
