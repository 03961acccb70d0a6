"""Phi-3's tokenizer."""

from collections.abc import Mapping

from torchtune.data import PromptTemplateInterface
from torchtune.data._prompt_templates import TemplateType, get_prompt_template
from torchtune.modules.transforms.tokenizers import SentencePieceBaseTokenizer, parse_hf_tokenizer_json
from torchtune.modules.transforms.tokenizers._marked_turns import MarkedTurnsTokenizer, required_ids

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
    """SentencePiece tokenizer with Phi-3's layout, ``<|user|>\\n{text}<|end|>\\n`` for every turn.

    Args:
        path: ``tokenizer.model``.
        special_tokens: text -> id; by default Phi-3's.
        max_seq_len: longest row; ``None`` does not cut.
        prompt_template: texts added to the turns before the layout.
        truncation_type: which end of a long row is kept: ``"right"`` cuts the end, ``"left"`` the beginning.

    Raises:
        DataError: the file is missing or broken, or a special token that the layout needs is missing.
    """

    def __init__(
        self,
        path: str,
        special_tokens: Mapping[str, int] | None = None,
        max_seq_len: int | None = None,
        prompt_template: PromptTemplateInterface | None = None,
        truncation_type: str = "right",
    ) -> None:
        self.special_tokens = dict(special_tokens if special_tokens is not None else PHI3_SPECIAL_TOKENS)
        names = ("<|endoftext|>", "<|end|>", *(f"<|{role}|>" for role in self.roles))
        self.eos_id, self.end_id, *headers = required_ids(self.special_tokens, names, "Phi-3")
        self._headers = dict(zip(self.roles, headers, strict=True))
        self._special_texts = {token_id: token for token, token_id in self.special_tokens.items()}
        self._spm_model = SentencePieceBaseTokenizer(path)
        self.bos_id = self._spm_model.bos_id
        self.pad_id = self.eos_id
        self.stop_tokens = [self.eos_id, self.end_id]
        self.max_seq_len = max_seq_len
        self.prompt_template = prompt_template
        self.truncation_type = truncation_type

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self._spm_model.vocab_size - 1, *self.special_tokens.values()) + 1

    def encode(
        self, text: str, add_bos: bool = True, add_eos: bool = True, trim_leading_whitespace: bool = False
    ) -> list[int]:
        """Token ids of ``text``; special tokens in it are encoded as plain text."""
        ids = self._spm_model.encode(
            text, add_bos=add_bos, add_eos=False, trim_leading_whitespace=trim_leading_whitespace
        )
        return [*ids, self.eos_id] if add_eos else ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids, without special tokens unless they are asked for."""
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
        """The token of the beginning."""
        return [self.bos_id]

    def header(self, role: str) -> list[int]:
        """``<|role|>``; the newline after it is encoded with the text."""
        return [self._headers[role]]

    def body(self, text: str) -> list[int]:
        """Token ids of a newline and ``text``, as they continue a special token."""
        return self.encode(f"\n{text}", add_bos=False, add_eos=False, trim_leading_whitespace=True)

    def turn_end(self) -> list[int]:
        """``<|end|>`` and a newline."""
        return [self.end_id, *self.body("")]

    def closing(self) -> list[int]:
        """``<|endoftext|>``."""
        return [self.eos_id]


def phi3_mini_tokenizer(
    path: str,
    special_tokens_path: str | None = None,
    max_seq_len: int | None = None,
    prompt_template: TemplateType | None = None,
    truncation_type: str = "right",
) -> Phi3MiniTokenizer:
    """Phi-3 mini's tokenizer.

    Args:
        path: ``tokenizer.model``.
        special_tokens_path: a ``tokenizer.json`` with special tokens that replace Phi-3's.
        max_seq_len: longest row; ``None`` does not cut.
        prompt_template: dotted path of a template, or a mapping role -> [text before, text after].
        truncation_type: which end of a long row is kept: ``"right"`` cuts the end, ``"left"`` the beginning.

    Raises:
        DataError: a file is missing or broken.
    """
    return Phi3MiniTokenizer(
        path,
        special_tokens=parse_hf_tokenizer_json(special_tokens_path) if special_tokens_path is not None else None,
        max_seq_len=max_seq_len,
        prompt_template=get_prompt_template(prompt_template),
        truncation_type=truncation_type,
    )
