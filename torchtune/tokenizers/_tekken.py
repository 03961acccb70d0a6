"""Tekken (``tekken.json``), the tokenizer of Mistral checkpoints since Nemo."""

import base64
import binascii
from typing import Any

from tiktoken import Encoding

from torchtune.data import DataError
from torchtune.tokenizers._protocols import BaseTokenizer, check_text
from torchtune.tokenizers._tiktoken import chunks
from torchtune.tokenizers._tokenizer_files import PublishedFiles, SavesPublishedFiles, read_json

# Control tokens of the first releases, which their files do not list.
_FIRST_CONTROL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]",
)  # fmt: skip


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
        self.published = PublishedFiles(path)
        content: Any = read_json(path, "tokenizer file")
        try:
            config, vocab = content["config"], content["vocab"]
            self.num_control = int(config["default_num_special_tokens"])
            self.vocab_size = int(config["default_vocab_size"])
            self.version = str(config.get("version", "v3"))
            ranks = {base64.b64decode(entry["token_bytes"]): int(entry["rank"]) for entry in vocab}
            listed = content.get("special_tokens") or [
                {"rank": i, "token_str": token} for i, token in enumerate(_FIRST_CONTROL)
            ]
            self.special_tokens = {entry["token_str"]: int(entry["rank"]) for entry in listed}
            pattern = config["pattern"]
        except (KeyError, TypeError, ValueError, binascii.Error) as error:
            raise DataError(f"tokenizer file {path} is not a tekken.json ({type(error).__name__}: {error}).") from error
        # The file lists more tokens than the model has.
        ranks = {token: rank for token, rank in ranks.items() if rank < self.vocab_size - self.num_control}
        self._encoding = Encoding("tekken", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        self._control_texts = {token_id: token for token, token_id in self.special_tokens.items()}
        self.bos_id, self.eos_id = self.special_tokens["<s>"], self.special_tokens["</s>"]
        self.pad_id = self.special_tokens.get("<pad>", self.eos_id)

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Encode ``text`` into token ids; control tokens in it are encoded as plain text."""
        check_text(text)
        ids = [self.bos_id] if add_bos else []
        for chunk in chunks(text):
            ids += [self.num_control + i for i in self._encoding.encode_ordinary(chunk)]
        return [*ids, self.eos_id] if add_eos else ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Decode token ids into text, by default without control tokens."""
        parts: list[bytes] = []
        for token_id in token_ids:
            if token_id >= self.num_control:
                parts.append(self._encoding.decode_single_token_bytes(token_id - self.num_control))
            elif not skip_special_tokens:
                parts.append(self._control_texts.get(token_id, f"<SPECIAL_{token_id}>").encode())
        return b"".join(parts).decode("utf-8", errors="replace")
