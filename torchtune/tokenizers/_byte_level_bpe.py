"""Byte-level BPE tokenizers from ``vocab.json`` and ``merges.txt``, and GPT-2's."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from torchtune.data import DataError
from torchtune.tokenizers._files import PublishedFiles, SavesPublishedFiles, read_json, read_text
from torchtune.tokenizers._masked_encoding import WordEncoder, bytes_to_unicode
from torchtune.tokenizers._protocols import BaseTokenizer, any_text_pattern, check_text


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
