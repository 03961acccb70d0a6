"""Chat layouts of model families: ChatML as in Qwen, the headers of Llama 3, and Mistral's ``[INST]``."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from torchtune.data import (
    ChatMLTemplate,
    DataError,
    Message,
    MessageLike,
    PromptTemplateInterface,
    as_messages,
    read_tool_calls,
    read_tools,
)
from torchtune.tokenizers._byte_pair_encoding import (
    CL100K_PATTERN,
    ByteLevelBPE,
    TekkenTokenizer,
    TikTokenBaseTokenizer,
)
from torchtune.tokenizers._chat_layouts import Part, Row, TurnsTokenizer, required_ids
from torchtune.tokenizers._files import PublishedFiles
from torchtune.tokenizers._masked_encoding import ControlTokens
from torchtune.tokenizers._protocols import adds_end_tokens, text_only
from torchtune.tokenizers._sentencepiece import SentencePieceBaseTokenizer

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
        if not parse_special_tokens:  # others, such as <tool_call>, are parsed in every text
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


class HeaderTurns(TurnsTokenizer):
    """``tiktoken`` tokenizer with the chat layout of Llama: role header, text, end-of-turn token.

    Args:
        path: tiktoken rank file.
        special_tokens: text -> id; by default ``default_tokens`` of the class.
        max_seq_len: maximum row length in tokens; ``None`` disables truncation.
        prompt_template: texts added to the turns before the layout is applied.
        truncation_type: ``"right"`` cuts the end of a long row, ``"left"`` the beginning.

    Raises:
        DataError: the file is missing or broken, or a special token that the layout needs is missing.
    """

    takes_images = False
    family: ClassVar[str] = "Llama 3"
    pattern: ClassVar[str] = CL100K_PATTERN
    default_tokens: ClassVar[Mapping[str, int]]
    # Special tokens: begin and end of text, begin and end of a header, end of message, end of turn, and others.
    required: ClassVar[tuple[str, ...]] = (
        "begin_of_text",
        "end_of_text",
        "start_header_id",
        "end_header_id",
        "eom_id",
        "eot_id",
        "python_tag",
    )
    # Padding, and the step between messages.
    optional: ClassVar[tuple[str, str]] = ("finetune_right_pad_id", "step_id")

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
        if special_tokens is None:
            special_tokens = self.default_tokens
        self.special_tokens = dict(special_tokens)
        # A subclass may name the tokens differently, in the same order.
        names = tuple(f"<|{name}|>" for name in self.required)
        ids = required_ids(self.special_tokens, names, self.family)
        self.bos_id, self.eos_id = ids[:2]
        self.start_header_id, self.end_header_id = ids[2:4]
        self.eom_id, self.eot_id = ids[4:6]
        self.python_tag = self.special_tokens.get("<|python_tag|>")
        self._special_ids = frozenset(self.special_tokens.values())
        pad_name, step_name = self.optional
        self.pad_id = self.special_tokens.get(f"<|{pad_name}|>", self.eos_id)
        self.step_id = self.special_tokens.get(f"<|{step_name}|>")
        self.image_id = self.special_tokens.get("<|image|>")
        self.stop_tokens = [self.eos_id, self.eot_id, self.eom_id]
        self.tt_model = TikTokenBaseTokenizer(
            path=path,
            name=f"{self.family} (tiktoken)",
            pattern=self.pattern,
            bos_id=self.bos_id,
            eos_id=self.eos_id,
            special_tokens=self.special_tokens,
        )

    def __call__(self, sample: Mapping[str, Any], inference: bool = False) -> dict[str, Any]:
        """Replace ``messages`` by ``tokens`` and ``mask`` (True = not trained on).

        Args:
            sample: has ``messages``.
            inference: leave the last turn open for the model to continue.

        Raises:
            DataError: the messages do not fit the chat layout, or contain images and the class does not process images.
        """
        sample = super().__call__(sample, inference)
        if not self.takes_images and self.image_id in sample["tokens"]:  # no text encodes to image_id
            raise DataError(
                f"a turn holds an image, but {type(self).__name__} takes text only: use the transform of a vision model"
            )
        return sample

    @property
    def base_vocab_size(self) -> int:
        """Number of tokens without special tokens."""
        return self.tt_model.base_vocab_size

    @property
    def vocab_size(self) -> int:
        """Largest token id that occurs in text, plus 1: the number of rows of a text model's embedding.

        The id of ``<|image|>`` is larger; only vision models embed it.
        """
        ids = {token_id for token, token_id in self.special_tokens.items() if token != "<|image|>"}
        return max(self.base_vocab_size - 1, *ids) + 1

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Encode ``text`` into token ids; special tokens in it are encoded as plain text."""
        return self.tt_model.encode(text, add_bos=add_bos, add_eos=add_eos)

    def decode(self, token_ids: list[int], truncate_at_eos: bool = True, skip_special_tokens: bool = True) -> str:
        """Decode token ids into text.

        Args:
            token_ids: ids to decode.
            truncate_at_eos: stop at the first ``<|end_of_text|>``.
            skip_special_tokens: omit headers (``<|start_header_id|>user<|end_header_id|>``) and special tokens.
        """
        token_ids = list(token_ids)
        if truncate_at_eos and self.eos_id in token_ids:
            token_ids = token_ids[: token_ids.index(self.eos_id)]
        if not skip_special_tokens:
            return self.tt_model.decode(token_ids, truncate_at_eos=False)
        texts: list[str] = []
        text_ids: list[int] = []  # ids since the last special token
        is_header = False
        follows_header = False
        for token_id in (*token_ids, None):  # None ends the last text, as a special token does
            if token_id is not None and token_id not in self._special_ids:
                text_ids.append(token_id)
                continue
            if not is_header:
                text = self.tt_model.decode(text_ids, truncate_at_eos=False)
                if follows_header:  # the layout writes two newlines there
                    text = text.removeprefix("\n\n")
                texts.append(text)
            text_ids = []
            is_header = token_id == self.start_header_id
            follows_header = token_id == self.end_header_id
        return "".join(texts)

    def _body(self, message: Message) -> list[int]:
        """Return the token ids of a message between its header and the end-of-turn token."""
        ids: list[int] = []
        if message.ipython and self.python_tag is not None:
            ids.append(self.python_tag)
        # A turn that is not trained on may lose its calls, if it has a text to stand for it.
        if message.extra.get("tool_calls") and not (message.text_content and message.masked):
            raise DataError(
                f"{type(self).__name__} has no layout for structured tool_calls: write the call as the turn's text, or "
                "use the checkpoint's own chat template (torchtune.tokenizers.hf_tokenizer)."
            )
        for item in message.content:
            if item["type"] == "text":
                # Stripped, as Meta's layout does.
                ids += self.encode(item["content"].strip(), add_bos=False, add_eos=False)
            elif item["type"] == "image" and self.image_id is not None:
                ids += self._image_ids(item["content"])
            else:
                raise DataError(f"{self.family}'s layout has no place for content of type '{item['type']}'.")
        return ids

    def _image_ids(self, image: Any) -> list[int]:
        """Return the token ids of an image in the text; models with image tokens have several."""
        return [self.image_id]

    def tokenize_message(
        self, message: Message, *, add_start_tokens: bool = True, add_end_tokens: bool = True
    ) -> list[int]:
        """Tokenize one message: header, text, ``<|eot_id|>`` (``<|eom_id|>`` if ``message.eot`` is False).

        Args:
            message: the message.
            add_start_tokens: add the header.
            add_end_tokens: add the end-of-turn token.

        Raises:
            DataError: the layout does not support the content.
        """
        ids: list[int] = []
        if add_start_tokens:
            role = self.encode(message.role.strip(), add_bos=False, add_eos=False)
            newlines = self.encode("\n\n", add_bos=False, add_eos=False)
            ids = [self.start_header_id, *role, self.end_header_id, *newlines]
        ids += self._body(message)
        if add_end_tokens:
            if message.eot:
                ids.append(self.eot_id)
            else:  # the assistant's turn goes on behind the answer of a tool
                ids.append(self.eom_id)
        return ids

    def _parts(self, messages: list[Message], closed: bool) -> Iterator[Part]:
        yield [self.bos_id], True
        for i, message in enumerate(messages):
            is_last = i == len(messages) - 1
            yield self.tokenize_message(message, add_end_tokens=closed or not is_last), message.masked
        if closed:
            yield [self.eos_id], True


_CONTROL_TOKENS = (
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
)
_CONTROL_TOKENS_SINCE_7 = ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]")
_OWN_TEMPLATE = "use the checkpoint's own chat template (torchtune.tokenizers.hf_tokenizer)"


class InstTurnsTokenizer(TurnsTokenizer):
    """Tokenizer for ``<s>[INST]{user}[/INST]{assistant}</s>…``; no text encodes to the control tokens.

    Versions below 7 put the system text before the text of the last user turn, later versions in ``[SYSTEM_PROMPT]``.
    Tools precede the last user turn. Tool calls are in ``Message.extra["tool_calls"]``, each with an ``id`` to which a
    tool's answer refers by ``tool_call_id``. Tools in versions above 7 are not supported, because their layout differs.

    Args:
        path: ``tekken.json``, or the SentencePiece model of a version 3 checkpoint.
        version: version of the layout; by default the file's, 3 for SentencePiece.
        max_seq_len: maximum row length in tokens; ``None`` disables truncation.
        prompt_template: texts added to the turns before the layout is applied.
        truncation_type: ``"right"`` cuts the end of a long row, ``"left"`` the beginning.

    Raises:
        DataError: the file is missing, broken or lacks the control tokens of the version.
    """

    takes_tools = True

    def __init__(
        self,
        path: str,
        version: int | None = None,
        max_seq_len: int | None = None,
        prompt_template: PromptTemplateInterface | None = None,
        truncation_type: str = "right",
    ) -> None:
        super().__init__(max_seq_len, prompt_template, truncation_type)
        self.published = PublishedFiles(path)
        self.base: Any
        if Path(path).suffix == ".json":
            self.base = TekkenTokenizer(path)
        else:
            self.base = SentencePieceBaseTokenizer(path)
        if version is None:
            version = 3  # a SentencePiece model states none
            if isinstance(self.base, TekkenTokenizer):
                try:
                    version = int(self.base.version.removeprefix("v"))
                except ValueError as error:
                    raise DataError(
                        f"tokenizer file {path} is of version '{self.base.version}': set version."
                    ) from error
        self.version = version
        names = _CONTROL_TOKENS
        if self.version >= 7:
            names += _CONTROL_TOKENS_SINCE_7
        self.special_tokens = _control_ids(self.base, names)
        if missing := [name for name in names if name not in self.special_tokens]:
            raise DataError(
                f"tokenizer file {path} has no control tokens {', '.join(missing)}, which the layout of version "
                f"{self.version} needs: set version to that of the checkpoint, or use mistral_tokenizer for the first."
            )
        self.bos_id = self.base.bos_id
        self.eos_id = self.base.eos_id
        self.vocab_size = self.base.vocab_size
        self.pad_id = max(self.base.pad_id, 0)  # SentencePiece has -1 for none, which no embedding takes
        self.stop_tokens = [self.eos_id]

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Encode ``text`` into token ids; control tokens in it are encoded as plain text."""
        return self.base.encode(text, add_bos=add_bos, add_eos=add_eos)

    def decode(self, token_ids: list[int]) -> str:
        """Decode token ids into text, without control tokens."""
        return self.base.decode(list(token_ids))

    def _between(self, name: str, text: str) -> list[int]:
        """Encode ``[NAME]text[/NAME]``."""
        return [self.special_tokens[f"[{name}]"], *self._plain(text), self.special_tokens[f"[/{name}]"]]

    def _plain(self, text: str) -> list[int]:
        return self.encode(text, add_bos=False, add_eos=False)

    def tokenize_messages(
        self,
        messages: Sequence[MessageLike],
        *,
        add_end_tokens: bool = True,
        add_eos: bool | None = None,
        tools: Sequence[Any] | None = None,
    ) -> Row:
        """Tokenize a conversation.

        Args:
            messages: the conversation.
            add_end_tokens: end the last turn; otherwise a last assistant turn stays open.
            add_eos: deprecated name of ``add_end_tokens``.
            tools: tool definitions.

        Returns:
            token ids and mask (True = not trained on).

        Raises:
            DataError: the layout does not support the content.
        """
        return self._row(as_messages(messages), adds_end_tokens(add_end_tokens, add_eos), tools=read_tools(tools))

    def _parts(self, messages: list[Message], closed: bool, tools: Sequence[Any] | None = None) -> Iterator[Part]:
        mentions_tools = bool(tools)
        last_user = -1
        for i, message in enumerate(messages):
            if message.role == "user":
                last_user = i
            if message.contains_media:
                raise DataError("The layout of [INST] takes text only, but a turn holds an image.")
            if message.role in ("tool", "ipython") or message.ipython or message.extra.get("tool_calls"):
                mentions_tools = True
        if mentions_tools and self.version > 7:
            raise DataError(f"Tools have no layout here in version {self.version}: {_OWN_TEMPLATE}.")
        # Before version 7 there are no tokens for a system prompt: it begins the last user turn. Tools are declared
        # before that turn in all versions that have them, so that they stand close to the answer.
        system = "".join(f"{message.text_content}\n\n" for message in messages if message.role == "system")
        yield [self.bos_id], True
        for i, message in enumerate(messages):
            ids: list[int] = []
            if message.role == "user":
                text = message.text_content
                if i == last_user and tools:
                    ids += self._between("AVAILABLE_TOOLS", _json(tools))
                if i == last_user and self.version < 7:
                    text = system + text
                ids += self._between("INST", text)
            elif message.role == "assistant":
                ids += self._assistant(message)
                is_open = not closed and i == len(messages) - 1
                if not is_open:
                    ids.append(self.eos_id)
            elif message.role == "system":  # before version 7 no tokens: `system` has the text
                if self.version >= 7:
                    ids += self._between("SYSTEM_PROMPT", message.text_content)
            else:
                ids += self._tool(message)
            yield ids, message.masked

    def _assistant(self, message: Message) -> list[int]:
        """Return the token ids of a turn of the assistant, without the EOS token: its text, its calls, or both."""
        calls = read_tool_calls(message.extra.get("tool_calls") or [])
        if not calls:
            ids = self._plain(message.text_content)
            if message.ipython:  # a call that is written as text
                ids = [self.special_tokens["[TOOL_CALLS]"], *ids]
            return ids
        if message.text_content and self.version < 7:
            raise DataError(
                "The layout of [INST] has no place for a turn with both text and tool_calls before version 7."
            )
        written = [_call(call) for call in calls]
        text = []
        if message.text_content:
            text = self._plain(message.text_content)
        return [*text, self.special_tokens["[TOOL_CALLS]"], *self._plain(_json(written))]

    def _tool(self, message: Message) -> list[int]:
        """Return the token ids of a tool's answer, with the id of the call."""
        call_id = message.extra.get("tool_call_id")
        if not isinstance(call_id, str):
            raise DataError("The layout of [INST] needs the 'tool_call_id' of a tool's answer: the id of the call.")
        if self.version < 7:
            content: Any = message.text_content
            with suppress(json.JSONDecodeError):
                content = json.loads(content)  # a result that is JSON is not quoted once more
            return self._between("TOOL_RESULTS", _json({"content": content, "call_id": call_id}))
        return [
            self.special_tokens["[TOOL_RESULTS]"],
            *self._plain(call_id),
            self.special_tokens["[TOOL_CONTENT]"],
            *self._plain(message.text_content),
            self.special_tokens["[/TOOL_RESULTS]"],
        ]


def _control_ids(base: Any, names: Sequence[str]) -> dict[str, int]:
    """Return the ids of the control tokens that a file has, by name."""
    if isinstance(base, TekkenTokenizer):
        return {name: base.special_tokens[name] for name in names if name in base.special_tokens}
    ids = {}
    for name in names:
        token_id = base.spm_model.piece_to_id(name)
        if base.spm_model.is_control(token_id):  # otherwise the unknown token, or a piece of text
            ids[name] = token_id
    return ids


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call as the layout writes it; raise :class:`DataError` for a call without an id."""
    function = call["function"]
    if not isinstance(call.get("id"), str):
        raise DataError("The layout of [INST] needs the 'id' of every tool call.")
    return {"name": function["name"], "arguments": function["arguments"], "id": call["id"]}
