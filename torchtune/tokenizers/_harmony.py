"""Harmony, the chat layout of gpt-oss: turns with channels."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torchtune.data import DataError, Message, MessageLike, PromptTemplateInterface, as_messages
from torchtune.tokenizers._marked_turns import required_ids
from torchtune.tokenizers._protocols import end_tokens
from torchtune.tokenizers._turns import Part, Row, TurnsTokenizer, decode_around

_NEEDED = ("start", "end", "message", "channel", "return", "call", "endoftext")
# Fields of a turn's reasoning.
_REASONING = ("thinking", "reasoning_content", "reasoning")


class HarmonyTokenizer(TurnsTokenizer):
    """Tokenizer for ``<|start|>{role}<|channel|>{channel}<|message|>{text}<|end|>``.

    The conversation starts with ``system_text`` as system message; a system turn becomes the developer message.
    Reasoning (``thinking`` in ``Message.extra``) goes to the channel "analysis", only before the last answer or before
    a call without a later answer. The last answer ends with ``<|return|>``, a call with ``<|call|>``. The tokens after
    ``<|start|>assistant`` are trained on. Tool definitions need the checkpoint's chat template.

    Args:
        base: has ``vocab_size`` and ``encode(text, add_bos, add_eos)``, which encodes special tokens as plain text.
        decode: decodes ids without special tokens.
        special_tokens: text -> id.
        system_text: the system message.
        max_seq_len: maximum row length in tokens; ``None`` disables truncation.
        prompt_template: texts added to the turns before the layout is applied.
        truncation_type: ``"right"`` cuts the end of a long row, ``"left"`` the beginning.

    Raises:
        DataError: a special token that the layout needs is missing.
    """

    takes_tools = True

    def __init__(
        self,
        base: Any,
        decode: Callable[[list[int]], str],
        special_tokens: Mapping[str, int],
        system_text: str,
        max_seq_len: int | None = None,
        prompt_template: PromptTemplateInterface | None = None,
        truncation_type: str = "right",
    ) -> None:
        super().__init__(max_seq_len, prompt_template, truncation_type)
        self.special_tokens = dict(special_tokens)
        ids = required_ids(self.special_tokens, tuple(f"<|{name}|>" for name in _NEEDED), "Harmony")
        self._control = dict(zip(_NEEDED, ids, strict=True))
        self.bos_id, self.eos_id, self.pad_id = None, self._control["return"], self._control["endoftext"]
        self.stop_tokens = [self._control[name] for name in ("return", "endoftext", "call")]
        self.turn_ends = [self._control["end"]]
        self.base, self._decode_plain = base, decode
        self._special_texts = {token_id: token for token, token_id in self.special_tokens.items()}
        self.system_text = system_text

    @property
    def vocab_size(self) -> int:
        """Largest id plus 1."""
        return max(self.base.vocab_size, max(self.special_tokens.values()) + 1)

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Encode ``text`` into token ids; special tokens in it are encoded as plain text. There is no BOS token."""
        ids = self.base.encode(text, add_bos=False, add_eos=False)
        return [*ids, self.eos_id] if add_eos else ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Decode token ids into text, by default without special tokens."""
        return decode_around(token_ids, self._special_texts, self._decode_plain, skip=skip_special_tokens)

    def _write(self, *parts: str) -> list[int]:
        """Encode texts and control tokens, such as ``<|start|>``."""
        ids: list[int] = []
        for part in parts:
            name = part[2:-2] if part.startswith("<|") else None
            ids += [self._control[name]] if name is not None else self.encode(part, add_bos=False, add_eos=False)
        return ids

    def _message(self, head: str, text: str) -> list[int]:
        """Encode ``<|start|>{head}<|message|>{text}<|end|>``; control tokens in ``text`` are plain text."""
        return [*self._write("<|start|>", head, "<|message|>"), *self._plain(text), self._control["end"]]

    def _plain(self, text: str) -> list[int]:
        return self.encode(text, add_bos=False, add_eos=False)

    def _channel(self, channel: str, text: str, end: str, to: str = "") -> list[int]:
        head = [*(self._plain(to) if to else []), *self._write("<|channel|>", channel, "<|message|>")]
        return [*head, *self._plain(text), self._control[end]]

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
            add_end_tokens: end the last turn; otherwise a last assistant turn stays open, and the model starts an empty
                one with the channel.
            add_eos: deprecated name of ``add_end_tokens``.
            tools: not supported.

        Returns:
            token ids and mask (True = not trained on).

        Raises:
            DataError: the layout does not support the content, or ``tools`` are passed.
        """
        if tools:
            raise DataError(
                "Harmony is written here without descriptions of tools: use the checkpoint's own chat template "
                "(torchtune.tokenizers.hf_tokenizer)."
            )
        return self._row(as_messages(messages), end_tokens(add_end_tokens, add_eos))

    def _parts(self, messages: list[Message], closed: bool) -> Iterator[Part]:
        if any(message.contains_media for message in messages):
            raise DataError("Harmony takes text only, but a turn holds an image.")
        yield self._message("system", self.system_text), True
        called = ""
        for i, message in enumerate(messages):
            if message.role == "assistant":
                yield self._write("<|start|>", "assistant"), True
                yield self._assistant(messages, i, closed), message.masked
                called = _called(message)[0] if message.extra.get("tool_calls") else ""
            else:
                yield self._other(message, called), message.masked

    def _other(self, message: Message, called: str) -> list[int]:
        """Encode a user, system or tool turn; ``called`` is the function of the preceding call."""
        text = message.text_content
        if message.role == "system":
            return self._message("developer", f"# Instructions\n\n{text}\n\n") if text else []
        if message.role == "user":
            return self._message("user", text)
        if not called:
            raise DataError("a tool's answer has a place in the layout only after a turn with tool_calls")
        head = [*self._write("<|start|>"), *self._plain(f"functions.{called} to=assistant")]
        return [*head, *self._channel("commentary", json.dumps(text, ensure_ascii=False), "end")]

    def _assistant(self, messages: list[Message], index: int, closed: bool) -> list[int]:
        """Encode the tokens that the model generates in its turn."""
        message, last = messages[index], index == len(messages) - 1
        if last and not closed:
            text = message.text_content
            return [*self._write("<|channel|>", "final", "<|message|>"), *self._plain(text)] if text else []
        reasoning = next((message.extra[name] for name in _REASONING if message.extra.get(name)), "")
        calls = bool(message.extra.get("tool_calls"))
        answered = any(m.role == "assistant" and not m.extra.get("tool_calls") for m in messages[index + 1 :])
        if calls and message.text_content:
            if reasoning:
                raise DataError("a turn with tool_calls has a place for its text or its reasoning, not for both")
            reasoning = message.text_content
        ids: list[int] = []
        if reasoning and (not answered if calls else last):
            ids = [*self._channel("analysis", reasoning, "end"), *self._write("<|start|>", "assistant")]
        if not calls:
            return ids + self._channel("final", message.text_content, "return" if last else "end")
        name, arguments = _called(message)
        return ids + self._channel("commentary json", arguments, "call", to=f" to=functions.{name}")


def _called(message: Message) -> tuple[str, str]:
    """Return the name and the JSON arguments of a turn's only call."""
    calls = message.extra["tool_calls"]
    if len(calls) != 1:
        raise DataError(f"a turn calls one tool in this layout, not {len(calls)}")
    function = calls[0].get("function", calls[0])
    arguments = function.get("arguments")
    return function["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
