"""SentencePiece tokenizers with a plain-text chat layout."""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

from torchtune.data import DataError, Message, MessageLike, PromptTemplateInterface, as_messages
from torchtune.modules.transforms.tokenizers._messages import tokenize_messages_no_special_tokens
from torchtune.modules.transforms.tokenizers._protocols import MessageTransform, ModelTokenizer, end_tokens
from torchtune.modules.transforms.tokenizers._sentencepiece import SentencePieceBaseTokenizer


class SentencePieceChatTokenizer(MessageTransform, ModelTokenizer):
    """SentencePiece tokenizer; a template writes the layout, tokens of the beginning and the end part the exchanges.

    Args:
        path: ``tokenizer.model``.
        max_seq_len: longest row; ``None`` does not cut.
        prompt_template: layout of conversations; ``None`` joins the texts as they are.
        truncation_type: which end of a long row is kept: ``"right"`` cuts the end, ``"left"`` the beginning.

    Raises:
        DataError: the file is missing or broken.
    """

    # Texts that the model's file makes one token wherever they stand; in a turn's own text they are taken apart.
    control_texts: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        path: str,
        max_seq_len: int | None = None,
        prompt_template: PromptTemplateInterface | None = None,
        truncation_type: str = "right",
    ) -> None:
        self._spm_model = SentencePieceBaseTokenizer(path)
        self.special_tokens: dict[str, int] = {}
        self.max_seq_len = max_seq_len
        self.prompt_template = prompt_template
        self.truncation_type = truncation_type
        self.stop_tokens = [self.eos_id]
        # A template that ends turns itself is the whole layout.
        self._end_of_turn: str | None = getattr(prompt_template, "end_of_turn", None)
        if self._end_of_turn is not None:
            end = self.encode(self._end_of_turn, add_bos=False, add_eos=False, trim_leading_whitespace=True)
            if len(end) != 1:
                raise DataError(f"tokenizer file {path} has no token {self._end_of_turn}, which its template needs.")
            self.stop_tokens = [*end, self.eos_id]

    @property
    def eos_id(self) -> int:
        """Token of the end."""
        return self._spm_model.eos_id

    @property
    def bos_id(self) -> int:
        """Token of the beginning."""
        return self._spm_model.bos_id

    @property
    def pad_id(self) -> int:
        """Token of padding; the model has none of its own, 0 is the unknown token."""
        return 0

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self._spm_model.vocab_size

    def encode(
        self, text: str, add_bos: bool = True, add_eos: bool = True, trim_leading_whitespace: bool = False
    ) -> list[int]:
        """Token ids of ``text``; see :meth:`SentencePieceBaseTokenizer.encode`."""
        return self._spm_model.encode(
            text, add_bos=add_bos, add_eos=add_eos, trim_leading_whitespace=trim_leading_whitespace
        )

    def encode_text(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """The same for a text of training data: control texts in it are plain text."""
        pieces = _halves(text, self.control_texts)
        ids: list[int] = []
        for i, piece in enumerate(pieces):
            is_first, is_last = i == 0, i == len(pieces) - 1
            ids += self.encode(piece, add_bos and is_first, add_eos and is_last, trim_leading_whitespace=not is_first)
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """Text of token ids."""
        return self._spm_model.decode(token_ids)

    def tokenize_messages(
        self,
        messages: Sequence[MessageLike],
        *,
        add_start_tokens: bool = True,
        add_end_tokens: bool = True,
        add_eos: bool | None = None,
    ) -> tuple[list[int], list[bool]]:
        """Tokenize a conversation.

        Args:
            messages: the conversation.
            add_start_tokens: put the token of the beginning before every exchange.
            add_end_tokens: put the token of the end after every turn of the assistant, the last one included.
            add_eos: old spelling of ``add_end_tokens``.

        Returns:
            token ids, and for each whether it is masked (not trained on).

        Raises:
            DataError: a message holds an image.
        """
        messages = as_messages(messages)
        if any(message.extra.get("tool_calls") for message in messages):
            raise DataError(f"{type(self).__name__} has no layout for tool_calls.")
        closed = end_tokens(add_end_tokens, add_eos)
        messages = [self._without_control(message) for message in messages]
        if self.prompt_template is not None:
            messages = self.prompt_template(messages, inference=not closed)
        return tokenize_messages_no_special_tokens(
            self,
            messages,
            bos_id=self.bos_id if add_start_tokens else None,
            eos_id=self.eos_id if self._end_of_turn is None else None,
            truncation_type=self.truncation_type,
            is_open=not closed,
            begins_once=self._end_of_turn is not None,
        )

    def _without_control(self, message: Message) -> Message:
        """The turn with its control texts in two items each, so that none is encoded as a whole."""
        content: list[dict[str, Any]] = []
        for item in message.content:
            pieces = _halves(item["content"], self.control_texts) if item["type"] == "text" else []
            content += [{"type": "text", "content": piece} for piece in pieces] if len(pieces) > 1 else [item]
        if len(content) == len(message.content):
            return message
        return Message(
            role=message.role,
            content=content,
            masked=message.masked,
            ipython=message.ipython,
            eot=message.eot,
            extra=message.extra,
        )


def _halves(text: str, control_texts: tuple[str, ...]) -> list[str]:
    """``text``, cut after the first character of each control text in it."""
    if not control_texts:
        return [text]
    found = re.finditer("|".join(map(re.escape, control_texts)), text)
    return [text[start:end] for start, end in pairwise([0, *(match.start() + 1 for match in found), len(text)])]
