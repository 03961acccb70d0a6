"""Phi-3's tokenizer."""

from collections.abc import Mapping

from torchtune.data import PromptTemplateInterface
from torchtune.models._tokenizer_builders import tokenizer_builder
from torchtune.tokenizers import MarkedTurnsTokenizer, PublishedFiles, SentencePieceBaseTokenizer, required_ids

PHI3_SPECIAL_TOKENS = {
    "<|endoftext|>": 32000,
    "<|assistant|>": 32001,
    "<|placeholder1|>": 32002,
    "<|placeholder2|>": 32003,
    "<|placeholder3|>": 32004,
    "<|placeholder4|>": 32005,
    "<|system|>": 32006,
    "<|end|>": 32007,
    "<|placeholder5|>": 32008,
    "<|placeholder6|>": 32009,
    "<|user|>": 32010,
}


class Phi3MiniTokenizer(MarkedTurnsTokenizer):
    """SentencePiece tokenizer with Phi-3's chat format, ``<|user|>\\n{text}<|end|>\\n`` for every turn.

    Args:
        path: path of ``tokenizer.model``.
        special_tokens: text -> id; by default Phi-3's.
        max_seq_len: maximum number of tokens; ``None``: no truncation.
        prompt_template: adds texts to the messages before they are formatted.
        truncation_type: ``"right"`` cuts the end of a long row, ``"left"`` the beginning.

    Raises:
        DataError: the file is missing or broken, or a required special token is missing.
    """

    def __init__(
        self,
        path: str,
        special_tokens: Mapping[str, int] | None = None,
        max_seq_len: int | None = None,
        prompt_template: PromptTemplateInterface | None = None,
        truncation_type: str = "right",
    ) -> None:
        super().__init__(max_seq_len, prompt_template, truncation_type)
        self.published = PublishedFiles(path)
        self.special_tokens = dict(special_tokens if special_tokens is not None else PHI3_SPECIAL_TOKENS)
        names = ("<|endoftext|>", "<|end|>", *(f"<|{role}|>" for role in self.roles))
        self.eos_id, self.end_id, *headers = required_ids(self.special_tokens, names, "Phi-3")
        self._headers = dict(zip(self.roles, headers, strict=True))
        self._special_texts = {token_id: token for token, token_id in self.special_tokens.items()}
        self._spm_model = SentencePieceBaseTokenizer(path)
        self.bos_id = self._spm_model.bos_id
        self.pad_id = self.eos_id
        self.stop_tokens = [self.eos_id, self.end_id]

    @property
    def vocab_size(self) -> int:
        """Largest token id plus 1."""
        return max(self._spm_model.vocab_size - 1, *self.special_tokens.values()) + 1

    def encode(
        self, text: str, add_bos: bool = True, add_eos: bool = True, trim_leading_whitespace: bool = False
    ) -> list[int]:
        """Encode ``text`` to token ids; special tokens in it are encoded as plain text."""
        ids = self._spm_model.encode(
            text, add_bos=add_bos, add_eos=False, trim_leading_whitespace=trim_leading_whitespace
        )
        return [*ids, self.eos_id] if add_eos else ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Decode token ids to text, by default without special tokens."""
        texts: list[str] = []
        plain: list[int] = []
        for token_id in ids:
            if token_id < self._spm_model.vocab_size:
                plain.append(token_id)
            elif not skip_special_tokens and token_id in self._special_texts:
                texts += [self._spm_model.decode(plain), self._special_texts[token_id]]
                plain = []
        return "".join([*texts, self._spm_model.decode(plain)])

    def opening(self) -> list[int]:
        """Return the beginning-of-sequence token."""
        return [self.bos_id]

    def header(self, role: str) -> list[int]:
        """Return ``<|role|>``; the newline after it is encoded with the text."""
        return [self._headers[role]]

    def body(self, text: str) -> list[int]:
        """Encode a newline and ``text`` as the continuation of a special token."""
        return self.encode(f"\n{text}", add_bos=False, add_eos=False, trim_leading_whitespace=True)

    def turn_end(self) -> list[int]:
        """Return ``<|end|>`` and a newline."""
        return [self.end_id, *self.body("")]

    def closing(self) -> list[int]:
        """Return ``<|endoftext|>``."""
        return [self.eos_id]


phi3_mini_tokenizer = tokenizer_builder(Phi3MiniTokenizer, "phi3_mini_tokenizer", "Phi-3 mini")
