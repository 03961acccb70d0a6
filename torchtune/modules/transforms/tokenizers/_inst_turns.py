"""Turns between control tokens, ``[INST]…[/INST]``, and tools."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtune.data import DataError, Message, MessageLike, PromptTemplateInterface, as_messages
from torchtune.data._truncate import truncate_row
from torchtune.modules.transforms.tokenizers._protocols import MessagesWithToolsTransform, ModelTokenizer, end_tokens
from torchtune.modules.transforms.tokenizers._sentencepiece import SentencePieceBaseTokenizer
from torchtune.modules.transforms.tokenizers._tekken import TekkenTokenizer

_CONTROL = (
    "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]",
)  # fmt: skip
_SINCE_7 = ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]")
_OWN_TEMPLATE = "use the checkpoint's own chat template (torchtune.modules.transforms.tokenizers.hf_tokenizer)"


class InstTurnsTokenizer(MessagesWithToolsTransform, ModelTokenizer):
    """``<s>[INST]{user}[/INST]{assistant}</s>…`` with control tokens that no text can spell, and tools.

    The third version puts the system's text before that of the last user turn, later ones in ``[SYSTEM_PROMPT]``.
    Tools stand before the last user turn. Calls are ``Message.extra["tool_calls"]``, each with its ``id``; a tool's
    answer names it in ``tool_call_id``. After the seventh version the layout of tools differs: they are refused.

    Args:
        path: ``tekken.json``, or the SentencePiece model of a checkpoint of the third version.
        version: version of the layout; by default what the file says, 3 for SentencePiece.
        max_seq_len: longest row; ``None`` does not cut.
        prompt_template: texts added to the turns before the layout.
        truncation_type: which end of a long row is kept: ``"right"`` cuts the end, ``"left"`` the beginning.

    Raises:
        DataError: the file is missing, broken or lacks the control tokens of the version.
    """

    def __init__(
        self,
        path: str,
        version: int | None = None,
        max_seq_len: int | None = None,
        prompt_template: PromptTemplateInterface | None = None,
        truncation_type: str = "right",
    ) -> None:
        self.base: Any = TekkenTokenizer(path) if Path(path).suffix == ".json" else SentencePieceBaseTokenizer(path)
        self.version = version if version is not None else _version_of(self.base, path)
        names = (*_CONTROL, *(_SINCE_7 if self.version >= 7 else ()))
        self.special_tokens = _control_ids(self.base, names)
        if missing := [name for name in names if name not in self.special_tokens]:
            raise DataError(
                f"tokenizer file {path} has no control tokens {', '.join(missing)}, which the layout of version "
                f"{self.version} needs: set version to that of the checkpoint, or use mistral_tokenizer for the first."
            )
        self.bos_id, self.eos_id, self.vocab_size = self.base.bos_id, self.base.eos_id, self.base.vocab_size
        self.pad_id = max(self.base.pad_id, 0)
        self.stop_tokens = [self.eos_id]
        self.max_seq_len = max_seq_len
        self.prompt_template = prompt_template
        self.truncation_type = truncation_type

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Token ids of ``text``; control tokens in it are encoded as plain text."""
        return self.base.encode(text, add_bos=add_bos, add_eos=add_eos)

    def decode(self, token_ids: list[int]) -> str:
        """Text of token ids, without control tokens."""
        return self.base.decode(list(token_ids))

    def _between(self, name: str, text: str) -> list[int]:
        """``[NAME]text[/NAME]``."""
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
    ) -> tuple[list[int], list[bool]]:
        """Tokenize a conversation.

        Args:
            messages: the conversation.
            add_end_tokens: end the last turn; otherwise a last turn of the assistant stays open.
            add_eos: old spelling of ``add_end_tokens``.
            tools: descriptions of tools.

        Returns:
            token ids, and for each whether it is masked (not trained on).

        Raises:
            DataError: the content has no place in the layout.
        """
        closed = end_tokens(add_end_tokens, add_eos)
        messages = as_messages(messages)
        if self.prompt_template is not None:
            messages = self.prompt_template(messages, inference=not closed)
        if any(message.contains_media for message in messages):
            raise DataError("The layout of [INST] takes text only, but a turn holds an image.")
        if self.version > 7 and (tools or any(_is_about_tools(message) for message in messages)):
            raise DataError(f"Tools have no layout here in version {self.version}: {_OWN_TEMPLATE}.")
        last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
        system = "".join(f"{message.text_content}\n\n" for message in messages if message.role == "system")
        tokens, mask = [self.bos_id], [True]
        for i, message in enumerate(messages):
            ids: list[int] = []
            if message.role == "user":
                ids += self._between("AVAILABLE_TOOLS", _json(tools)) if tools and i == last_user else []
                before = system if self.version < 7 and i == last_user else ""
                ids += self._between("INST", before + message.text_content)
            elif message.role == "assistant":
                is_open = not closed and i == len(messages) - 1
                ids += self._assistant(message) + ([] if is_open else [self.eos_id])
            elif message.role != "system":
                ids += self._tool(message)
            elif self.version >= 7:
                ids += self._between("SYSTEM_PROMPT", message.text_content)
            tokens += ids
            mask += [message.masked] * len(ids)
            if self.truncation_type == "right" and self.max_seq_len and len(tokens) > self.max_seq_len:
                break
        eos_id = self.eos_id if closed else None
        return truncate_row(tokens, mask, self.max_seq_len, self.truncation_type, eos_id, self.stop_tokens)

    def _assistant(self, message: Message) -> list[int]:
        calls = message.extra.get("tool_calls")
        if not calls:
            head = [self.special_tokens["[TOOL_CALLS]"]] if message.ipython else []
            return head + self._plain(message.text_content)
        if message.text_content and self.version < 7:
            raise DataError(
                "The layout of [INST] has no place for a turn with both text and tool_calls before version 7."
            )
        written = [_call(call) for call in calls]
        text = self._plain(message.text_content) if message.text_content else []
        return [*text, self.special_tokens["[TOOL_CALLS]"], *self._plain(_json(written))]

    def _tool(self, message: Message) -> list[int]:
        call_id = message.extra.get("tool_call_id")
        if not isinstance(call_id, str):
            raise DataError("The layout of [INST] needs the 'tool_call_id' of a tool's answer: the id of the call.")
        if self.version < 7:
            content = _parsed(message.text_content)
            return self._between("TOOL_RESULTS", _json({"content": content, "call_id": call_id}))
        start, middle, end = (self.special_tokens[f"[{n}]"] for n in ("TOOL_RESULTS", "TOOL_CONTENT", "/TOOL_RESULTS"))
        return [start, *self._plain(call_id), middle, *self._plain(message.text_content), end]


def _version_of(base: Any, path: str) -> int:
    if isinstance(base, SentencePieceBaseTokenizer):
        return 3
    try:
        return int(base.version.removeprefix("v"))
    except ValueError as error:
        raise DataError(f"tokenizer file {path} is of version '{base.version}': set version.") from error


def _control_ids(base: Any, names: Sequence[str]) -> dict[str, int]:
    if isinstance(base, TekkenTokenizer):
        return {name: base.special_tokens[name] for name in names if name in base.special_tokens}
    model = base.spm_model
    ids = {name: model.piece_to_id(name) for name in names}
    return {name: token_id for name, token_id in ids.items() if model.is_control(token_id)}


def _is_about_tools(message: Message) -> bool:
    return message.role in ("tool", "ipython") or message.ipython or bool(message.extra.get("tool_calls"))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _parsed(text: str) -> Any:
    """What a text says where it is JSON, else the text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if not isinstance(call.get("id"), str):
        raise DataError("The layout of [INST] needs the 'id' of every tool call.")
    arguments = _parsed(arguments) if isinstance(arguments, str) else arguments
    return {"name": function.get("name"), "arguments": arguments, "id": call["id"]}
