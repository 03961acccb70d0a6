"""Chat layout of Mistral, ``[INST]…[/INST]``, with tools."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtune.data import (
    DataError,
    Message,
    MessageLike,
    PromptTemplateInterface,
    as_messages,
    read_tool_calls,
    read_tools,
)
from torchtune.tokenizers._chat_layouts import Part, Row, TurnsTokenizer
from torchtune.tokenizers._files import PublishedFiles
from torchtune.tokenizers._protocols import end_tokens
from torchtune.tokenizers._sentencepiece import SentencePieceBaseTokenizer
from torchtune.tokenizers._tiktoken import TekkenTokenizer

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
            version = _version_of(self.base, path)
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
        self.pad_id = max(self.base.pad_id, 0)
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
        return self._row(as_messages(messages), end_tokens(add_end_tokens, add_eos), tools=read_tools(tools))

    def _parts(self, messages: list[Message], closed: bool, tools: Sequence[Any] | None = None) -> Iterator[Part]:
        if any(message.contains_media for message in messages):
            raise DataError("The layout of [INST] takes text only, but a turn holds an image.")
        if self.version > 7 and (tools or any(_is_about_tools(message) for message in messages)):
            raise DataError(f"Tools have no layout here in version {self.version}: {_OWN_TEMPLATE}.")
        last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
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
            elif message.role == "system":
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


def _version_of(base: Any, path: str) -> int:
    """Return the version of the layout that a file states; SentencePiece models state none."""
    if isinstance(base, SentencePieceBaseTokenizer):
        return 3
    try:
        return int(base.version.removeprefix("v"))
    except ValueError as error:
        raise DataError(f"tokenizer file {path} is of version '{base.version}': set version.") from error


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


def _is_about_tools(message: Message) -> bool:
    return message.role in ("tool", "ipython") or message.ipython or bool(message.extra.get("tool_calls"))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call as the layout writes it; raise :class:`DataError` for a call without an id."""
    function = call["function"]
    if not isinstance(call.get("id"), str):
        raise DataError("The layout of [INST] needs the 'id' of every tool call.")
    return {"name": function["name"], "arguments": function["arguments"], "id": call["id"]}
