"""Byte-level byte-pair encoding from its published rules, in plain Python, to compare tokenizers with.

Text is cut by a regular expression, every piece is written as one character a byte (the printable characters of
Latin-1 stand for themselves, other bytes for the characters from 256 on), and then the neighbors whose merge comes
first in the list are joined until none is left.
"""

import random
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import regex

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
PATTERNS = {"default": _GPT2, "gpt-2": _GPT2, "smollm": _GPT2, "llama-bpe": _WORDS % "{1,3}", "qwen2": _WORDS % ""}


def byte_characters() -> dict[int, str]:
    """Byte -> the character that stands for it."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}


_CHARACTERS = byte_characters()


@dataclass
class ReferenceBPE:
    """A tokenizer.

    Attributes:
        tokens: by id.
        merges: pairs, the first to be merged first.
        kind: key of ``PATTERNS``.
        special: tokens that are cut out of the text before anything else.
        bos: put before everything if it is set.
    """

    tokens: list[str]
    merges: list[tuple[str, str]]
    kind: str
    special: list[str]
    bos: str | None = None
    cache: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        self.ranks = {pair: rank for rank, pair in enumerate(self.merges)}
        self.cut = regex.compile("|".join(map(regex.escape, sorted(self.special, key=len, reverse=True))) or r"(?!)")
        self.pattern = regex.compile(PATTERNS[self.kind])

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        ids = [] if self.bos is None else [self.ids[self.bos]]
        end = 0
        for match in self.cut.finditer(text):
            ids += [*self._encode_plain(text[end : match.start()]), self.ids[match[0]]]
            end = match.end()
        return ids + self._encode_plain(text[end:])

    def _encode_plain(self, text: str) -> list[int]:
        if self.kind == "qwen2":
            text = unicodedata.normalize("NFC", text)
        return [index for piece in self._pieces(text) for index in self._encode_piece(piece)]

    def _pieces(self, text: str) -> Iterator[str]:
        # Digits by themselves first: what is between them is cut on its own.
        parts = regex.split(r"(\p{N})", text) if self.kind == "smollm" else [text]
        for part in parts:
            yield from self.pattern.findall(part)

    def _encode_piece(self, piece: str) -> list[int]:
        if piece not in self.cache:
            self.cache[piece] = self._merge("".join(_CHARACTERS[byte] for byte in piece.encode()))
        return self.cache[piece]

    def _merge(self, word: str) -> list[int]:
        if self.kind == "llama-bpe" and word in self.ids:
            return [self.ids[word]]
        parts = list(word)
        while len(parts) > 1:
            best = min(pairwise(parts), key=lambda pair: self.ranks.get(pair, 1 << 30))
            if best not in self.ranks:
                break
            joined, index = [], 0
            while index < len(parts):
                if tuple(parts[index : index + 2]) == best:
                    joined.append("".join(best))
                    index += 2
                else:
                    joined.append(parts[index])
                    index += 1
            parts = joined
        return [self.ids[part] for part in parts]


def texts(count: int, special: list[str], seed: int = 0) -> list[str]:
    """Texts that show where rules differ: digits, scripts, marks, runs of white space, contractions, special tokens."""
    rng = random.Random(seed)
    words = (
        "the The quick don't we'll I'M they're YOU'D x1y2 naïve café cafe\u0301 Straße 東京 こんにちは мир שלום مرحبا "
        "नमस्ते ไทย 한국어 한 \U0001d4b3\U0001d4ce 🤖 👩‍👩‍👧 ½ Ⅷ ٣٤٥ e=mc² foo_bar() {'a':[1,2]} "
        "https://x.org/?q=1&b=2 -> != … — ''' "
        "\u200b \u00a0 \u3000 \ufeff \u2028 \x00 \x7f ß ﬁ Å Å ' 's 'S '' \\n #!/bin/sh"
    ).split(" ")
    spaces = [" ", "  ", "   ", "\n", "\n\n", "\t", " \n ", "\r\n", "\r", "", "\x0b", "\u00a0 "]

    def number() -> str:
        digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(1, 9)))
        return rng.choice([digits, f"{digits}.{digits}", f"-{digits}", f"{digits},{digits}%"])

    made = ["", " ", "\n", "0", "12345", " 12345", "a1", "1 2  3   4", "'", "'s's", *special]
    while len(made) < count:
        parts = []
        for _ in range(rng.randint(1, 14)):
            kind = rng.random()
            if kind < 0.25:
                parts.append(number())
            elif kind < 0.33 and special:
                parts.append(rng.choice(special))
            elif kind < 0.4:
                parts.append(
                    "".join(chr(rng.choice([rng.randint(32, 0x2FF), rng.randint(0x370, 0xD7FF)])) for _ in "abc")
                )
            else:
                parts.append(rng.choice(words))
            parts.append(rng.choice(spaces))
        made.append("".join(parts))
    return made
