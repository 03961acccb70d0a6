"""Harmony: turns with channels."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchtune.data import DataError, Message, MessageLike, PromptTemplateInterface, as_messages
from torchtune.data._truncate import truncate_row
from torchtune.modules.transforms.tokenizers._marked_turns import required_ids
from torchtune.modules.transforms.tokenizers._protocols import MessagesWithToolsTransform, ModelTokenizer, end_tokens

_NEEDED = ("start", "end", "message", "channel", "return", "call", "endoftext")
# Names under which a turn's reasoning is found.
_REASONING = ("thinking", "reasoning_content", "reasoning")


class HarmonyTokenizer(MessagesWithToolsTransform, ModelTokenizer):
    """``<|start|>{role}<|channel|>{channel}<|message|>{text}<|end|>``.

    A system turn is written as the developer's, after a system message of the layout's own. Reasoning (``thinking``
    in ``Message.extra``) goes to the channel "analysis", and is shown before the last answer, or before a call that
    no answer follows yet. The last answer ends with ``<|return|>``, a call with ``<|call|>``. What the model writes
    after ``<|start|>assistant`` is trained on. Descriptions of tools are left to the checkpoint's chat template.

    Args:
        base: has ``encode(text, add_bos, add_eos)``, which gives no special tokens, and ``vocab_size``.
        decode: text of ids that are not special.
        special_tokens: text -> id.
        system_text: the system message.
        max_seq_len: longest row; ``None`` does not cut.
        prompt_template: texts added to the turns before the layout.
        truncation_type: which end of a long row is kept: ``"right"`` cuts the end, ``"left"`` the beginning.

    Raises:
        DataError: a special token that the layout needs is missing.
    """

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
        self.special_tokens = dict(special_tokens)
        ids = required_ids(self.special_tokens, tuple(f"<|{name}|>" for name in _NEEDED), "Harmony")
        self._control = dict(zip(_NEEDED, ids, strict=True))
        self.bos_id, self.eos_id, self.pad_id = None, self._control["return"], self._control["endoftext"]
        self.stop_tokens = [self._control[name] for name in ("return", "endoftext", "call")]
        self.base, self._decode_plain = base, decode
        self._special_texts = {token_id: token for token, token_id in self.special_tokens.items()}
        self.system_text = system_text
        self.max_seq_len = max_seq_len
        self.prompt_template = prompt_template
        self.truncation_type = truncation_type

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self.base.vocab_size, max(self.special_tokens.values()) + 1)

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens in it are encoded as plain text. There is no token of the beginning."""
        ids = self.base.encode(text, add_bos=False, add_eos=False)
        return [*ids, self.eos_id] if add_eos else ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids, without special tokens unless they are asked for."""
        texts: list[str] = []
        plain: list[int] = []
        for token_id in [*token_ids, None]:
            if token_id is not None and token_id not in self._special_texts:
                plain.append(token_id)
                continue
            if plain:
                texts.append(self._decode_plain(plain))
                plain = []
            if token_id is not None and not skip_special_tokens:
                texts.append(self._special_texts[token_id])
        return "".join(texts)

    def _write(self, *parts: str) -> list[int]:
        """Ids of texts and, where a part is the name of a control token in brackets, of the token."""
        ids: list[int] = []
        for part in parts:
            name = part[2:-2] if part.startswith("<|") else None
            ids += [self._control[name]] if name is not None else self.encode(part, add_bos=False, add_eos=False)
        return ids

    def _message(self, head: str, text: str) -> list[int]:
        """``<|start|>{head}<|message|>{text}<|end|>``; no part of ``text`` is read as a control token."""
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
    ) -> tuple[list[int], list[bool]]:
        """Tokenize a conversation.

        Args:
            messages: the conversation.
            add_end_tokens: end the last turn; otherwise a last turn of the assistant is left to the model: it begins
                with its channel.
            add_eos: old spelling of ``add_end_tokens``.
            tools: refused, see above.

        Returns:
            token ids, and for each whether it is masked (not trained on).

        Raises:
            DataError: the content has no place in the layout.
        """
        closed = end_tokens(add_end_tokens, add_eos)
        messages = as_messages(messages)
        if tools:
            raise DataError(
                "Harmony is written here without descriptions of tools: use the checkpoint's own chat template "
                "(torchtune.modules.transforms.tokenizers.hf_tokenizer)."
            )
        if any(message.contains_media for message in messages):
            raise DataError("Harmony takes text only, but a turn holds an image.")
        if self.prompt_template is not None:
            messages = self.prompt_template(messages, inference=not closed)
        tokens = self._message("system", self.system_text)
        mask = [True] * len(tokens)
        called = ""
        for i, message in enumerate(messages):
            if message.role == "assistant":
                header = self._write("<|start|>", "assistant")
                ids = self._assistant(messages, i, closed)
                called = _called(message)[0] if message.extra.get("tool_calls") else ""
            else:
                header, ids = [], self._other(message, called)
            tokens += header + ids
            mask += [True] * len(header) + [message.masked] * len(ids)
            if self.truncation_type == "right" and self.max_seq_len and len(tokens) > self.max_seq_len:
                break
        eos_id = self.eos_id if closed else None
        ends = [*self.stop_tokens, self._control["end"]]
        return truncate_row(tokens, mask, self.max_seq_len, self.truncation_type, eos_id, ends)

    def _other(self, message: Message, called: str) -> list[int]:
        """A turn that is not the assistant's; ``called`` is the function that was called before it."""
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
        """What the model writes in its turn."""
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
    """Name and arguments, as JSON, of the one function that a turn calls."""
    calls = message.extra["tool_calls"]
    if len(calls) != 1:
        raise DataError(f"a turn calls one tool in this layout, not {len(calls)}")
    function = calls[0].get("function", calls[0])
    arguments = function.get("arguments")
    return function["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
