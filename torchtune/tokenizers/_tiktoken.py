"""Byte-pair encoding from a tiktoken rank file."""

import base64
import binascii
import re
from collections.abc import Iterator, Mapping

from tiktoken import Encoding

from torchtune.data import DataError
from torchtune.tokenizers._protocols import BaseTokenizer, check_text
from torchtune.tokenizers._tokenizer_files import PublishedFiles, SavesPublishedFiles, existing_file

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
        self.published = PublishedFiles(path)
        ranks = read_ranks(path)
        self.base_vocab_size = len(ranks)
        self.bos_id, self.eos_id = bos_id, eos_id
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
        ids = [self.bos_id] if add_bos else []
        for chunk in chunks(text):
            ids += self.tt_model.encode(chunk, allowed_special=set(), disallowed_special=())
        return [*ids, self.eos_id] if add_eos else ids

    def decode(self, token_ids: list[int], truncate_at_eos: bool = True) -> str:
        """Decode token ids into text, by default up to the first EOS token."""
        token_ids = list(token_ids)
        if truncate_at_eos and self.eos_id in token_ids:
            token_ids = token_ids[: token_ids.index(self.eos_id)]
        return self.tt_model.decode(token_ids)
