"""Qwen 2's tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtune.data import ChatMLTemplate, DataError, Message, PromptTemplateInterface
from torchtune.data._prompt_templates import TemplateType, get_prompt_template
from torchtune.data._truncate import truncate_row
from torchtune.modules.transforms.tokenizers import ModelTokenizer, parse_hf_tokenizer_json
from torchtune.modules.transforms.tokenizers._byte_level_bpe import ByteLevelBPE
from torchtune.modules.transforms.tokenizers._guard import TextGuard
from torchtune.modules.transforms.tokenizers._protocols import MessageTransform, end_tokens, text_only

PRETOKENIZE_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ENDOFTEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
QWEN2_SPECIAL_TOKENS = {ENDOFTEXT: 151643, IM_START: 151644, IM_END: 151645}
DEFAULT_QWEN2_TOKENIZER_BPE_CACHE_SIZE = 152064


class Qwen2Tokenizer(MessageTransform, ModelTokenizer):
    """Byte-level BPE with Qwen 2's layout of conversations.

    Control tokens (``<|…|>``) that the text of a turn spells are plain text, unless ``parse_special_tokens`` asks for
    them; marks that are written in texts, such as ``<think>``, are always read.

    Args:
        path: ``vocab.json``.
        merges_file: ``merges.txt``.
        special_tokens: text -> id.
        max_seq_len: longest row; ``None`` does not cut.
        prompt_template: texts added to the turns before the layout.
        errors: accepted for compatibility; bytes that are no character decode to the replacement character.
        unk_token: special token of the unknown, unused by a byte-level vocabulary.
        bos_token: special token put first, if there is one.
        eos_token: special token put last.
        pad_token: special token of padding.
        bpe_cache_size: accepted for compatibility.
        truncation_type: which end of a long row is kept: ``"right"`` cuts the end, ``"left"`` the beginning.
        parse_special_tokens: control tokens in the text of a turn become their ids.

    Raises:
        DataError: a file is missing or broken, or ``special_tokens`` lacks one that is named.
    """

    def __init__(
        self,
        path: str,
        merges_file: str,
        special_tokens: Mapping[str, int] = QWEN2_SPECIAL_TOKENS,
        max_seq_len: int | None = None,
        *,
        prompt_template: PromptTemplateInterface | None = None,
        errors: str = "replace",
        unk_token: str | None = None,
        bos_token: str | None = None,
        eos_token: str = IM_END,
        pad_token: str | None = ENDOFTEXT,
        bpe_cache_size: int = DEFAULT_QWEN2_TOKENIZER_BPE_CACHE_SIZE,
        truncation_type: str = "right",
        parse_special_tokens: bool = False,
    ) -> None:
        if isinstance(prompt_template, ChatMLTemplate):
            raise DataError("prompt_template: Qwen's tokenizer writes ChatML itself, leave ChatMLTemplate out.")
        self.special_tokens = dict(special_tokens)
        named = {token for token in (unk_token, bos_token, eos_token, pad_token, IM_START, IM_END) if token is not None}
        if missing := sorted(named - self.special_tokens.keys()):
            raise DataError(f"special_tokens lacks {', '.join(missing)}.")
        self._bpe = ByteLevelBPE(
            path, merges_file, pattern=PRETOKENIZE_REGEX, special_tokens=self.special_tokens, nfc=True
        )
        self._guard = TextGuard([] if parse_special_tokens else [t for t in self.special_tokens if t.startswith("<|")])
        self.bos_id = None if bos_token is None else self.special_tokens[bos_token]
        self.eos_id = self.special_tokens[eos_token]
        self.pad_id = self.special_tokens[pad_token] if pad_token is not None else self.eos_id
        self.im_start_id, self.im_end_id = self.special_tokens[IM_START], self.special_tokens[IM_END]
        self.stop_tokens = list(dict.fromkeys([self.eos_id, self.pad_id]))
        self.max_seq_len = max_seq_len
        self.prompt_template = prompt_template
        self.truncation_type = truncation_type

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self._bpe.vocab_size

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens in it become their ids."""
        ids = self._bpe.encode(text, change=self._guard.show)
        if add_bos and self.bos_id is not None:
            ids = [self.bos_id, *ids]
        return [*ids, self.eos_id] if add_eos else ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids."""
        return self._bpe.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def _turn(self, messages: list[Message], index: int, begun: str = "") -> str:
        """The text of a turn, ``begun`` before its own; the assistant's last one stays open."""
        message = messages[index]
        body = text_only(message, type(self).__name__)
        if message.role == "ipython":
            return body
        return self._block(message.role, begun + body, is_open=self._stays_open(messages, index))

    def _prepare(self, messages: list[Message], closed: bool) -> tuple[list[Message], list[str]]:
        """The turns as the layout shows them, and what it puts before the text of each."""
        return messages, [""] * len(messages)

    @staticmethod
    def _stays_open(messages: list[Message], index: int) -> bool:
        return messages[index].role == "assistant" and index == len(messages) - 1

    @staticmethod
    def _block(role: str, body: str, *, is_open: bool = False) -> str:
        return f"{IM_START}{role}\n{body}{'' if is_open else f'{IM_END}' + chr(10)}"

    def tokenize_messages(
        self, messages: list[Message], *, add_end_tokens: bool = True, add_eos: bool | None = None
    ) -> tuple[list[int], list[bool]]:
        """Tokenize a conversation.

        Args:
            messages: the conversation.
            add_end_tokens: end the last turn.
            add_eos: old spelling of ``add_end_tokens``.

        Returns:
            token ids, and for each whether it is masked (not trained on).

        Raises:
            DataError: the content has no place in the layout.
        """
        closed = end_tokens(add_end_tokens, add_eos)
        messages = [self._guard.hide_message(message) for message in messages]
        if self.prompt_template is not None:
            messages = self.prompt_template(messages, inference=not closed)
        messages, begun = self._prepare(messages, closed)
        tokens: list[int] = []
        mask: list[bool] = []
        for i, message in enumerate(messages):
            ids = self.encode(self._turn(messages, i, begun[i]), add_bos=i == 0, add_eos=False)
            tokens += ids
            mask += [message.masked] * len(ids)
            if self.truncation_type == "right" and self.max_seq_len and len(tokens) > self.max_seq_len:
                break
        if closed:
            tokens, mask = [*tokens, self.eos_id], [*mask, mask[-1] if mask else True]
        eos_id = self.eos_id if closed else None
        return truncate_row(tokens, mask, self.max_seq_len, self.truncation_type, eos_id)


def tokenizer_arguments(
    default_special_tokens: Mapping[str, int],
    path: str,
    merges_file: str | None,
    special_tokens_path: str | None,
    max_seq_len: int | None,
    prompt_template: TemplateType | None,
    truncation_type: str,
) -> dict[str, Any]:
    """Arguments of a tokenizer of the Qwen family from the settings of its builder."""
    return {
        "path": path,
        "merges_file": merges_file or str(Path(path).expanduser().with_name("merges.txt")),
        "special_tokens": (
            parse_hf_tokenizer_json(special_tokens_path) if special_tokens_path is not None else default_special_tokens
        ),
        "max_seq_len": max_seq_len,
        "prompt_template": get_prompt_template(prompt_template),
        "truncation_type": truncation_type,
    }


def qwen2_tokenizer(
    path: str,
    merges_file: str | None = None,
    special_tokens_path: str | None = None,
    max_seq_len: int | None = None,
    prompt_template: TemplateType | None = None,
    truncation_type: str = "right",
    **kwargs: Any,
) -> Qwen2Tokenizer:
    """Qwen 2's tokenizer.

    Args:
        path: ``vocab.json``.
        merges_file: ``merges.txt``; by default the one beside ``path``.
        special_tokens_path: a ``tokenizer.json`` whose special tokens are used instead of Qwen's.
        max_seq_len: longest row; ``None`` does not cut.
        prompt_template: dotted path of a template, or a mapping role -> [text before, text after].
        truncation_type: which end of a long row is kept: ``"right"`` cuts the end, ``"left"`` the beginning.
        **kwargs: further arguments of :class:`Qwen2Tokenizer`.

    Raises:
        DataError: a file is missing or broken.
    """
    arguments = tokenizer_arguments(
        QWEN2_SPECIAL_TOKENS, path, merges_file, special_tokens_path, max_seq_len, prompt_template, truncation_type
    )
    return Qwen2Tokenizer(**arguments, **kwargs)
