"""Byte-level BPE from ``vocab.json`` and ``merges.txt``."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from torchtune.data import DataError
from torchtune.tokenizers._cached_bpe import WordEncoder
from torchtune.tokenizers._protocols import check_text
from torchtune.tokenizers._tokenizer_files import read_json, read_text
from torchtune.tokenizers._turns import decode_around


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
