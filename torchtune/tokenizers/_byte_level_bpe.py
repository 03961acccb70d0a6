"""Byte-level BPE: the ids of words with a cache, tokenizers from ``vocab.json`` and ``merges.txt``, and GPT-2."""

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
from torchtune.tokenizers._files import PublishedFiles, SavesPublishedFiles, read_json, read_text
from torchtune.tokenizers._protocols import BaseTokenizer, any_text_pattern, check_text

_MAX_CACHED_LENGTH = 100  # characters; longer words rarely repeat
_MAX_CACHED_WORDS = 1 << 17
_ID_SIZE = array("i").itemsize
# Ids (int32) and mask (1 = masked), as arrays: a list would create one object per id.
TokensAndMask = tuple[array, bytearray]
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
    """Return the regular expression of a byte-level pre-tokenizer's words; None for other kinds."""
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
        if model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
            return None, needs_nfc
        added = tokenizer.get_added_tokens_decoder().values()
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
        merges = []
        for number, line in enumerate(read_text(merges_path, "merges file").split("\n"), start=1):
            if (number == 1 and line.startswith("#version")) or not line.strip():
                continue
            pair = line.rstrip("\r").split(" ")
            if len(pair) != 2:
                raise DataError(
                    f"merges file {merges_path} is broken at line {number}: two parts are expected, not {line[:40]!r}."
                )
            left, right = pair
            # The package tokenizers raises for such a merge as well, but does not say which files do not fit.
            if left not in vocab or right not in vocab or left + right not in vocab:
                raise DataError(
                    f"merges file {merges_path} merges {left!r} and {right!r}, which {vocab_path} does not know: "
                    "take both files from the same checkpoint."
                )
            merges.append((left, right))
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
        self._word_encoder = WordEncoder(self.tokenizer)
        self.special_tokens = dict(special_tokens)
        self._special_texts = {token_id: token for token, token_id in self.special_tokens.items()}
        self._special = re.compile(f"({any_text_pattern(self.special_tokens)})")
        self.vocab_size = max([*vocab.values(), *self.special_tokens.values()]) + 1

    def encode(self, text: str, parse_special: bool = True, change: Callable[[str], str] | None = None) -> list[int]:
        """Encode ``text`` into token ids; without ``parse_special``, special tokens in it are encoded as plain text.

        ``change`` is applied to the text between special tokens after splitting.
        """
        check_text(text)
        pieces = [text]
        if parse_special:  # texts and special tokens alternate
            pieces = self._special.split(text)
        ids: list[int] = []
        for i, piece in enumerate(pieces):
            if i % 2:
                ids.append(self.special_tokens[piece])
            elif piece:
                if change is not None:
                    piece = change(piece)
                tokens_and_mask = self._word_encoder.encode(piece, [])
                if tokens_and_mask is not None:
                    piece_ids, _ = tokens_and_mask
                    ids += piece_ids
                else:
                    ids += self.tokenizer.encode(piece, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        """Decode token ids into text; invalid UTF-8 becomes the replacement character."""
        texts: list[str] = []
        plain_ids: list[int] = []  # since the last special token
        for token_id in token_ids:
            if token_id not in self._special_texts:
                plain_ids.append(token_id)
                continue
            texts.append(self.tokenizer.decode(plain_ids, skip_special_tokens=False))
            plain_ids = []
            if not skip_special_tokens:
                texts.append(self._special_texts[token_id])
        texts.append(self.tokenizer.decode(plain_ids, skip_special_tokens=False))
        return "".join(texts)


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
        self.unk_id = unk_id
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.pad_id = pad_id

    @property
    def vocab_size(self) -> int:
        """Largest id of the vocabulary plus 1."""
        return self._bpe.vocab_size

    def bpe(self, token: str) -> str:
        """Split a word, written in GPT-2's byte-to-unicode characters, into BPE tokens joined by spaces."""
        if not token:
            return ""
        characters = set(bytes_to_unicode().values())
        if unknown := sorted(set(token) - characters):
            raise DataError(f"bpe takes GPT-2's byte-to-unicode characters, and {unknown[0]!r} is not one of them.")
        return " ".join(part.value for part in self._bpe.tokenizer.model.tokenize(token))

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Encode ``text`` into token ids."""
        ids = self._bpe.encode(text)
        if add_bos and self.bos_id is not None:
            ids = [self.bos_id, *ids]
        if add_eos and self.eos_id is not None:
            ids = [*ids, self.eos_id]
        return ids

    def decode(self, tokens: list[int]) -> str:
        """Decode token ids into text."""
        return self._bpe.decode(tokens)
