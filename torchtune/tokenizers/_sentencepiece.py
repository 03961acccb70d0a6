"""SentencePiece tokenizers, for plain text and with a plain-text chat layout."""

import re
from collections.abc import Sequence
from copy import copy
from itertools import pairwise
from typing import Any, ClassVar

from torchtune.data import DataError, Message, MessageLike, PromptTemplateInterface, as_messages
from torchtune.tokenizers._chat_layouts import Row, TurnsTokenizer, tokenize_messages_no_special_tokens
from torchtune.tokenizers._files import PublishedFiles, SavesPublishedFiles, existing_file
from torchtune.tokenizers._protocols import BaseTokenizer, adds_end_tokens, any_text_pattern, check_text

WHITESPACE_CHARS = [" ", "\n", "\t", "\r", "\v"]


class SentencePieceBaseTokenizer(SavesPublishedFiles, BaseTokenizer):
    """``sentencepiece`` tokenizer for plain text.

    Args:
        path: ``tokenizer.model``.

    Raises:
        DataError: the file is missing or broken.

    Example:
        >>> from torchtune.tokenizers import SentencePieceBaseTokenizer
        >>> reader = SentencePieceBaseTokenizer("/tmp/Llama-2-7b-hf/tokenizer.model")  # doctest: +SKIP
    """

    def __init__(self, path: str) -> None:
        from sentencepiece import SentencePieceProcessor  # here, because other layouts import this module as well

        self.published = PublishedFiles(path)
        file = existing_file(path, "tokenizer file")
        self.spm_model = SentencePieceProcessor()
        try:
            self.spm_model.Load(str(file))
        except (OSError, RuntimeError, TypeError) as error:
            raise DataError(f"tokenizer file {path} is not a SentencePiece model: download it again.") from error
        self.vocab_size: int = self.spm_model.vocab_size()
        self.bos_id: int = self.spm_model.bos_id()
        self.eos_id: int = self.spm_model.eos_id()
        self.pad_id: int = self.spm_model.pad_id()
        self.encodes_whitespace = any(self.spm_model.encode(character) for character in WHITESPACE_CHARS)

    def encode(
        self,
        text: str,
        add_bos: bool = True,
        add_eos: bool = True,
        trim_leading_whitespace: bool = False,
        prefix: str | None = None,
    ) -> list[int]:
        """Encode ``text`` into token ids.

        Args:
            text: text to encode.
            add_bos: add the BOS token first.
            add_eos: add the EOS token last.
            trim_leading_whitespace: add no leading space, for a text that continues another: ``prefix + text`` is
                encoded and the prefix's ids are removed.
            prefix: text for ``trim_leading_whitespace``; a newline by default.
        """
        check_text(text)
        if trim_leading_whitespace and self.encodes_whitespace:
            if prefix is None:
                prefix = "\n"  # of which the model makes tokens of its own, whatever follows
            skipped = len(self.spm_model.encode(prefix, add_bos=add_bos, add_eos=False))
            ids = self.spm_model.encode(prefix + text, add_bos=add_bos, add_eos=add_eos)[skipped:]
            if add_bos:  # it was removed with the prefix
                ids = [self.bos_id, *ids]
            return ids
        return self.spm_model.encode(text, add_bos=add_bos, add_eos=add_eos, out_type=int)

    def decode(self, ids: list[int]) -> str:
        """Decode token ids into text."""
        return self.spm_model.decode(list(ids))


class SentencePieceChatTokenizer(TurnsTokenizer):
    """SentencePiece tokenizer; a prompt template writes the layout, and BOS and EOS tokens separate exchanges.

    Args:
        path: ``tokenizer.model``.
        max_seq_len: maximum row length in tokens; ``None`` disables truncation.
        prompt_template: layout of conversations; ``None`` concatenates the texts unchanged.
        truncation_type: ``"right"`` cuts the end of a long row, ``"left"`` the beginning.

    Raises:
        DataError: the file is missing or broken.
    """

    # Texts that SentencePiece always encodes as one control token; in a turn's text they are split.
    control_texts: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        path: str,
        max_seq_len: int | None = None,
        prompt_template: PromptTemplateInterface | None = None,
        truncation_type: str = "right",
    ) -> None:
        super().__init__(max_seq_len, prompt_template, truncation_type)
        self.published = PublishedFiles(path)
        self._spm_model = SentencePieceBaseTokenizer(path)
        self.special_tokens: dict[str, int] = {}
        self.bos_id = self._spm_model.bos_id
        self.eos_id = self._spm_model.eos_id
        self.vocab_size = self._spm_model.vocab_size
        self.pad_id = 0  # the unknown token, because the model defines none
        self.stop_tokens = [self.eos_id]
        # A template with `end_of_turn` writes the end of each turn itself.
        self._end_of_turn: str | None = getattr(prompt_template, "end_of_turn", None)
        if self._end_of_turn is not None:
            end = self.encode(self._end_of_turn, add_bos=False, add_eos=False, trim_leading_whitespace=True)
            # In a model of another family the text is several tokens, none of which can end generation.
            if len(end) != 1:
                raise DataError(f"tokenizer file {path} has no token {self._end_of_turn}, which its template needs.")
            self.stop_tokens = [*end, self.eos_id]

    def encode(
        self, text: str, add_bos: bool = True, add_eos: bool = True, trim_leading_whitespace: bool = False
    ) -> list[int]:
        """Encode ``text`` into token ids; see :meth:`SentencePieceBaseTokenizer.encode`."""
        return self._spm_model.encode(
            text, add_bos=add_bos, add_eos=add_eos, trim_leading_whitespace=trim_leading_whitespace
        )

    def encode_text(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Encode a text of training data: ``control_texts`` in it are encoded as plain text."""
        pieces = _split_control_texts(text, self.control_texts)
        ids: list[int] = []
        for i, piece in enumerate(pieces):
            is_first = i == 0
            is_last = i == len(pieces) - 1
            ids += self.encode(piece, add_bos and is_first, add_eos and is_last, trim_leading_whitespace=not is_first)
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """Decode token ids into text."""
        return self._spm_model.decode(token_ids)

    def tokenize_messages(
        self,
        messages: Sequence[MessageLike],
        *,
        add_start_tokens: bool = True,
        add_end_tokens: bool = True,
        add_eos: bool | None = None,
    ) -> Row:
        """Tokenize a conversation.

        Args:
            messages: the conversation.
            add_start_tokens: add the BOS token before every exchange.
            add_end_tokens: end the last assistant turn with the EOS token, like earlier ones.
            add_eos: deprecated name of ``add_end_tokens``.

        Returns:
            token ids and mask (True = not trained on).

        Raises:
            DataError: a message contains an image or ``tool_calls``.
        """
        messages = as_messages(messages)
        if any(message.extra.get("tool_calls") for message in messages):
            raise DataError(f"{type(self).__name__} has no layout for tool_calls.")
        closed = adds_end_tokens(add_end_tokens, add_eos)
        messages = [self._without_control(message) for message in messages]
        if self.prompt_template is not None:
            messages = self.prompt_template(messages, inference=not closed)
        bos_id = None
        if add_start_tokens:
            bos_id = self.bos_id
        eos_id = None
        if self._end_of_turn is None:  # else the prompt template has written the end of turns
            eos_id = self.eos_id
        return tokenize_messages_no_special_tokens(
            self,
            messages,
            bos_id=bos_id,
            eos_id=eos_id,
            truncation_type=self.truncation_type,
            is_open=not closed,
            begins_once=self._end_of_turn is not None,  # no EOS token ends an exchange, which a BOS token would follow
        )

    def _without_control(self, message: Message) -> Message:
        """Split each control text of a turn into two items, so that none is encoded as one token."""
        content: list[dict[str, Any]] = []
        for item in message.content:
            pieces = [item["content"]]
            if item["type"] == "text":
                pieces = _split_control_texts(item["content"], self.control_texts)
            if len(pieces) > 1:
                content += [{"type": "text", "content": piece} for piece in pieces]
            else:
                content.append(item)
        if len(content) == len(message.content):
            return message
        split = copy(message)
        split.content = content
        return split


def _split_control_texts(text: str, control_texts: tuple[str, ...]) -> list[str]:
    """Split ``text`` after the first character of each control text, so that no piece has one."""
    if not control_texts:
        return [text]
    cuts = [match.start() + 1 for match in re.finditer(any_text_pattern(control_texts), text)]
    return [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
