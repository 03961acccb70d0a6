"""Byte-pair encoding, for families whose vocabulary is no ``tokenizer.json``.

A vocabulary is ``vocab.json`` with ``merges.txt`` (GPT-2 and Qwen), a rank file of tiktoken (Llama 3 and 4), or
Mistral's ``tekken.json``.
"""

import base64
import binascii
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from torchtune.data import DataError
from torchtune.tokenizers._files import PublishedFiles, SavesPublishedFiles, existing_file, read_json, read_text
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
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),  # `pattern` has made the words
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

        ``change`` is applied to the text between special tokens after splitting: control tokens that it puts back are
        not parsed.
        """
        check_text(text)
        pieces = [text]
        if parse_special:  # texts and special tokens alternate
            pieces = self._special.split(text)
        ids: list[int] = []
        for i, piece in enumerate(pieces):
            if i % 2:  # a special token
                ids.append(self.special_tokens[piece])
            elif piece:
                if change is not None:
                    piece = change(piece)
                tokens_and_mask = self._word_encoder.encode(piece, [])
                if tokens_and_mask is not None:
                    piece_ids, _ = tokens_and_mask
                    ids += piece_ids
                else:  # the faster encoder does not support the text
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


# With longer inputs, tiktoken's regular expressions take quadratic time or overflow the stack.
MAX_ENCODE_CHARS = 400_000
MAX_NO_WHITESPACE_CHARS = 25_000
_LONG_RUN = re.compile(rf"\S{{{MAX_NO_WHITESPACE_CHARS}}}|\s{{{MAX_NO_WHITESPACE_CHARS}}}")


def read_ranks(path: str) -> dict[bytes, int]:
    """Read a file with a base64 token and its rank per line.

    Raises:
        DataError: the file is missing or a line has another format.
    """
    ranks = {}
    with existing_file(path, "tokenizer file").open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except (ValueError, binascii.Error) as error:
                raise DataError(
                    f"tokenizer file {path} is broken at line {number}: a token in base64 and its rank are expected; "
                    "download it again."
                ) from error
    return ranks


def chunks(text: str) -> Iterator[str]:
    """Split ``text`` into pieces of bounded length; runs with or without white space are bounded too."""
    for start in range(0, len(text), MAX_ENCODE_CHARS):
        part = text[start : start + MAX_ENCODE_CHARS]
        position = 0
        for run in _LONG_RUN.finditer(part):
            yield part[position : run.end()]
            position = run.end()
        if position < len(part):
            yield part[position:]


class TikTokenBaseTokenizer(SavesPublishedFiles, BaseTokenizer):
    """``tiktoken`` tokenizer for plain text. Special tokens in a text are encoded as plain text.

    Args:
        path: rank file.
        name: name of the encoding.
        pattern: pre-tokenization pattern.
        bos_id: BOS token, added first if ``add_bos``.
        eos_id: EOS token, added last if ``add_eos``.
        special_tokens: text -> id.

    Raises:
        DataError: the file is missing or broken.

    Example:
        >>> import base64
        >>> lines = [base64.b64encode(bytes([i])).decode() + f" {i}" for i in range(256)]
        >>> _ = (folder / "bytes.tiktoken").write_text("\\n".join(lines))
        >>> reader = torchtune.tokenizers.TikTokenBaseTokenizer(
        ...     str(folder / "bytes.tiktoken"), "bytes", r"\\w+|\\W+", 256, 257, {"<s>": 256, "</s>": 257}
        ... )
        >>> reader.encode("ab")
        [256, 97, 98, 257]
    """

    def __init__(
        self, path: str, name: str, pattern: str, bos_id: int, eos_id: int, special_tokens: Mapping[str, int]
    ) -> None:
        from tiktoken import Encoding  # here, because models import this module where tiktoken may be missing

        self.published = PublishedFiles(path)
        ranks = read_ranks(path)
        self.base_vocab_size = len(ranks)
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.tt_model = Encoding(name=name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=dict(special_tokens))

    @property
    def vocab_size(self) -> int:
        """Largest id plus 1."""
        return self.tt_model.n_vocab

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Encode ``text`` into token ids; an empty text has no ids, not even BOS or EOS."""
        check_text(text)
        if not text:
            return []
        ids = []
        if add_bos:
            ids.append(self.bos_id)
        for chunk in chunks(text):
            ids += self.tt_model.encode(chunk, allowed_special=set(), disallowed_special=())
        if add_eos:
            ids.append(self.eos_id)
        return ids

    def decode(self, token_ids: list[int], truncate_at_eos: bool = True) -> str:
        """Decode token ids into text, by default up to the first EOS token."""
        token_ids = list(token_ids)
        if truncate_at_eos and self.eos_id in token_ids:
            token_ids = token_ids[: token_ids.index(self.eos_id)]
        return self.tt_model.decode(token_ids)


CL100K_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


# Control tokens of the first releases, which their files do not list.
_FIRST_CONTROL_TOKENS = (
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
)


class TekkenTokenizer(SavesPublishedFiles, BaseTokenizer):
    """Tekken tokenizer for plain text. Control tokens take the first ids; no text encodes to them.

    Args:
        path: ``tekken.json``.

    Raises:
        DataError: the file is missing, broken or of another kind.

    Example:
        >>> from torchtune.tokenizers import TekkenTokenizer
        >>> reader = TekkenTokenizer("/tmp/Mistral-Nemo-Instruct-2407/tekken.json")  # doctest: +SKIP
    """

    def __init__(self, path: str) -> None:
        from tiktoken import Encoding

        self.published = PublishedFiles(path)
        content: Any = read_json(path, "tokenizer file")
        try:
            config = content["config"]
            self.num_control = int(config["default_num_special_tokens"])
            self.vocab_size = int(config["default_vocab_size"])
            self.version = str(config.get("version", "v3"))
            # The file lists more tokens than the model has.
            num_ranks = self.vocab_size - self.num_control
            ranks: dict[bytes, int] = {}
            for entry in content["vocab"]:
                token = base64.b64decode(entry["token_bytes"])
                rank = int(entry["rank"])
                if rank < num_ranks:
                    ranks[token] = rank
            self.special_tokens: dict[str, int] = {}
            for entry in content.get("special_tokens") or ():
                self.special_tokens[entry["token_str"]] = int(entry["rank"])
            if not self.special_tokens:
                self.special_tokens = {token: token_id for token_id, token in enumerate(_FIRST_CONTROL_TOKENS)}
            pattern = config["pattern"]
        except (KeyError, TypeError, ValueError, binascii.Error) as error:
            raise DataError(f"tokenizer file {path} is not a tekken.json ({type(error).__name__}: {error}).") from error
        # Without special tokens: no text encodes to them, and their ids are below the ranks, which `encode` shifts.
        self._encoding = Encoding("tekken", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        self._control_texts = {token_id: token for token, token_id in self.special_tokens.items()}
        self.bos_id = self.special_tokens["<s>"]
        self.eos_id = self.special_tokens["</s>"]
        self.pad_id = self.special_tokens.get("<pad>", self.eos_id)

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Encode ``text`` into token ids; control tokens in it are encoded as plain text."""
        check_text(text)
        ids = []
        if add_bos:
            ids.append(self.bos_id)
        for chunk in chunks(text):
            ids += [self.num_control + i for i in self._encoding.encode_ordinary(chunk)]
        if add_eos:
            ids.append(self.eos_id)
        return ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Decode token ids into text, by default without control tokens."""
        parts: list[bytes] = []
        for token_id in token_ids:
            if token_id >= self.num_control:
                parts.append(self._encoding.decode_single_token_bytes(token_id - self.num_control))
            elif not skip_special_tokens:
                parts.append(self._control_texts.get(token_id, f"<SPECIAL_{token_id}>").encode())
        return b"".join(parts).decode("utf-8", errors="replace")
