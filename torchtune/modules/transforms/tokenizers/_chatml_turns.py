"""ChatML over byte-level BPE, as Qwen writes it."""

from collections.abc import Mapping, Sequence

from torchtune.data import ChatMLTemplate, DataError, Message, MessageLike, PromptTemplateInterface, as_messages
from torchtune.data._truncate import truncate_row
from torchtune.modules.transforms.tokenizers._byte_level_bpe import ByteLevelBPE
from torchtune.modules.transforms.tokenizers._guard import TextGuard
from torchtune.modules.transforms.tokenizers._protocols import MessageTransform, ModelTokenizer, end_tokens, text_only

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"


class ChatMLTurns(MessageTransform, ModelTokenizer):
    """Byte-level BPE tokenizer with ChatML turns.

    Args:
        path: ``vocab.json``.
        merges_file: ``merges.txt``.
        special_tokens: text -> id.
        pattern: regular expression of the pieces that are merged.
        bos_token: special token put first, if there is one.
        eos_token: special token put last.
        pad_token: special token of padding.
        max_seq_len: longest row; ``None`` does not cut.
        prompt_template: texts added to the turns before the layout.
        truncation_type: which end of a long row is kept: ``"right"`` cuts the end, ``"left"`` the beginning.
        parse_special_tokens: control tokens in the text of a turn or a document become their ids.

    Raises:
        DataError: a file is missing or broken, or ``special_tokens`` lacks one that is named.
    """

    def __init__(
        self,
        path: str,
        merges_file: str,
        special_tokens: Mapping[str, int],
        *,
        pattern: str,
        bos_token: str | None,
        eos_token: str,
        pad_token: str | None,
        max_seq_len: int | None,
        prompt_template: PromptTemplateInterface | None,
        truncation_type: str,
        parse_special_tokens: bool,
    ) -> None:
        if isinstance(prompt_template, ChatMLTemplate):
            raise DataError("prompt_template: this tokenizer writes ChatML itself, leave ChatMLTemplate out.")
        self.special_tokens = dict(special_tokens)
        named = {token for token in (bos_token, eos_token, pad_token, IM_START, IM_END) if token is not None}
        if missing := sorted(named - self.special_tokens.keys()):
            raise DataError(f"special_tokens lacks {', '.join(missing)}.")
        self._bpe = ByteLevelBPE(path, merges_file, pattern=pattern, special_tokens=self.special_tokens, nfc=True)
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

    def encode_text(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """The same for a text of training data: control tokens in it are plain text."""
        return self.encode(self._guard.hide(text), add_bos=add_bos, add_eos=add_eos)

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
        self, messages: Sequence[MessageLike], *, add_end_tokens: bool = True, add_eos: bool | None = None
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
        messages = as_messages(messages)
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
        return truncate_row(
            tokens, mask, self.max_seq_len, self.truncation_type, eos_id, [*self.stop_tokens, self.im_end_id]
        )
