"""Byte-pair encoding with tiktoken, from a rank file or from Mistral's ``tekken.json``."""

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torchtune.data import DataError
from torchtune.tokenizers._files import PublishedFiles, SavesPublishedFiles, existing_file, read_json
from torchtune.tokenizers._protocols import BaseTokenizer, check_text

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
