"""ChatML layout with byte-level BPE, as in Qwen."""

from collections.abc import Iterator, Mapping
from typing import Any

from torchtune.data import ChatMLTemplate, DataError, Message, PromptTemplateInterface
from torchtune.tokenizers._byte_level_bpe import ByteLevelBPE
from torchtune.tokenizers._chat_layouts import Part, Row, TurnsTokenizer
from torchtune.tokenizers._control_tokens import ControlTokens
from torchtune.tokenizers._files import PublishedFiles
from torchtune.tokenizers._protocols import text_only

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"


class ChatMLTurns(TurnsTokenizer):
    """Byte-level BPE tokenizer with ChatML turns.

    Args:
        path: ``vocab.json``.
        merges_file: ``merges.txt``.
        special_tokens: text -> id.
        pattern: pre-tokenization pattern.
        bos_token: BOS token; ``None`` adds none.
        eos_token: EOS token.
        pad_token: padding token; ``None`` uses the EOS token.
        max_seq_len: maximum row length in tokens; ``None`` disables truncation.
        prompt_template: texts added to the turns before the layout is applied.
        truncation_type: ``"right"`` cuts the end of a long row, ``"left"`` the beginning.
        parse_special_tokens: encode control tokens in the text of a turn or a document to their ids.

    Raises:
        DataError: a file is missing or broken, or ``special_tokens`` lacks a required token.
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
        super().__init__(max_seq_len, prompt_template, truncation_type)
        self.published = PublishedFiles(path)
        if isinstance(prompt_template, ChatMLTemplate):
            raise DataError("prompt_template: this tokenizer writes ChatML itself, leave ChatMLTemplate out.")
        self.special_tokens = dict(special_tokens)
        required = {eos_token, IM_START, IM_END}
        if bos_token is not None:
            required.add(bos_token)
        if pad_token is not None:
            required.add(pad_token)
        if missing := sorted(required - self.special_tokens.keys()):
            raise DataError(f"special_tokens lacks {', '.join(missing)}.")
        self._bpe = ByteLevelBPE(path, merges_file, pattern=pattern, special_tokens=self.special_tokens, nfc=True)
        hidden_tokens = []  # in texts of training data
        if not parse_special_tokens:
            hidden_tokens = [token for token in self.special_tokens if token.startswith("<|")]
        self._control_tokens = ControlTokens(hidden_tokens)
        self.bos_id = None
        if bos_token is not None:
            self.bos_id = self.special_tokens[bos_token]
        self.eos_id = self.special_tokens[eos_token]
        self.pad_id = self.eos_id
        if pad_token is not None:
            self.pad_id = self.special_tokens[pad_token]
        self.im_start_id = self.special_tokens[IM_START]
        self.im_end_id = self.special_tokens[IM_END]
        # Qwen's base models end texts with the padding token, and chats with the EOS token.
        self.stop_tokens = list(dict.fromkeys([self.eos_id, self.pad_id]))
        self.turn_ends = [self.im_end_id]

    @property
    def vocab_size(self) -> int:
        """Largest id plus 1."""
        return self._bpe.vocab_size

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Encode ``text`` into token ids; special tokens in it become their ids."""
        ids = self._bpe.encode(text, change=self._control_tokens.restore)
        if add_bos and self.bos_id is not None:
            ids = [self.bos_id, *ids]
        if add_eos:
            ids = [*ids, self.eos_id]
        return ids

    def encode_text(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Encode a text of training data: control tokens in it are plain text, unless ``parse_special_tokens``."""
        return self.encode(self._control_tokens.hide(text), add_bos=add_bos, add_eos=add_eos)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        """Decode token ids into text."""
        return self._bpe.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def _turn(self, messages: list[Message], index: int, begun: str = "") -> str:
        """Write a turn, with ``begun`` before its text; a last assistant turn stays open."""
        message = messages[index]
        body = text_only(message, type(self).__name__)
        if message.role == "ipython":
            return body
        return self._block(message.role, begun + body, is_open=self._stays_open(messages, index))

    def _prepare(self, messages: list[Message], closed: bool) -> tuple[list[Message], list[str]]:
        """Return the turns to write, and the text that the layout adds before each turn's text."""
        return messages, [""] * len(messages)

    @staticmethod
    def _stays_open(messages: list[Message], index: int) -> bool:
        """Return whether a turn is the last and the assistant's: the EOS token ends it, or the model goes on."""
        return messages[index].role == "assistant" and index == len(messages) - 1

    @staticmethod
    def _block(role: str, body: str, *, is_open: bool = False) -> str:
        """Write a turn with its header, and with its end unless it stays open."""
        block = f"{IM_START}{role}\n{body}"
        if not is_open:
            block += f"{IM_END}\n"
        return block

    def _row(self, messages: list[Message], closed: bool, **options: Any) -> Row:
        hidden = [self._control_tokens.hide_message(message) for message in messages]
        return super()._row(hidden, closed)

    def _parts(self, messages: list[Message], closed: bool) -> Iterator[Part]:
        messages, begun = self._prepare(messages, closed)
        for i, message in enumerate(messages):
            text = self._turn(messages, i, begun[i])
            yield self.encode(text, add_bos=i == 0, add_eos=False), message.masked
        if closed:  # the EOS token is trained on if the last turn is
            is_masked = not messages or messages[-1].masked
            yield [self.eos_id], is_masked
