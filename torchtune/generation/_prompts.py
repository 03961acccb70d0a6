"""Read a file of prompts, and write the file of their answers."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtune.data import DataError, Message, images_of_columns, read_conversation, unfold_prompt, with_images
from torchtune.generation._generation_error import GenerationError
from torchtune.utils import UserError, atomic_write, convert_os_errors, numbered_lines, parse_json_line


@dataclass(frozen=True)
class Prompt:
    """A prompt of a file: the number of its line (from 1), the parsed line, and the conversation.

    Attributes:
        tools: definitions of the tools that can be called, or ``None``.
        expects_call: whether the right answer is a tool call; its special tokens are then kept in the answer's text.

    Example:
        >>> prompt = torchtune.generation.Prompt(1, "Why?", [torchtune.data.Message(role="user", content="Why?")])
        >>> prompt.messages[0].role
        'user'
    """

    line: int
    given: Any
    messages: list[Message]
    tools: list[Any] | None = field(default=None, kw_only=True)
    expects_call: bool = field(default=False, kw_only=True)

    @property
    def has_images(self) -> bool:
        """Whether an image is in the conversation."""
        return any(message.contains_media for message in self.messages)


def read_prompts(path: str | Path, system: str | None = None) -> list[Prompt]:
    """Read a JSONL file of prompts: each line is a text, a list of messages, or an object with either.

    An object has the text or the messages under ``prompt`` or ``messages``, and optionally images under ``image`` or
    ``images``: a path, or a list of paths. ``tools`` are the tools that can be called, and ``system`` is the system
    prompt. Images replace ``<image>`` in the text, or precede it; in messages, they
    replace parts ``{"type": "image"}``. Other keys are ignored. Empty lines are skipped.

    Args:
        path: the file.
        system: system prompt of conversations without one.

    Raises:
        GenerationError: the file is missing, not UTF-8 or empty, a line is not a prompt, or a conversation ends with
            a turn of the assistant.

    Example:
        >>> _ = (folder / "prompts.jsonl").write_text('"Why?"\\n{"prompt": "Who wrote Faust?"}\\n')
        >>> [prompt.messages[0].text_content for prompt in torchtune.generation.read_prompts(folder / "prompts.jsonl")]
        ['Why?', 'Who wrote Faust?']
    """
    try:
        found = [_prompt(path, number, line, system) for number, line in numbered_lines(Path(path))]
    except OSError as error:
        raise GenerationError(f"prompts: {path} cannot be read ({error.strerror}): give a JSONL file.") from error
    if not found:
        raise GenerationError(f"prompts: {path} is empty: write one prompt per line.")
    return found


def _prompt(path: str | Path, number: int, line: bytes, system: str | None) -> Prompt:
    where = f"prompts: {path}, line {number}"
    try:
        given = parse_json_line(line)
    except UserError as error:
        raise GenerationError(f'{where}: {error}; correct the line, and write texts in quotes, "…".') from error
    content, row, columns = given, {}, []
    if isinstance(given, Mapping):
        keys = [key for key in ("prompt", "messages") if key in given]
        if len(keys) != 1:
            raise GenerationError(f"{where}: the object needs either prompt or messages, it has {', '.join(given)}.")
        row, columns = unfold_prompt(given, keys[0]), keys
        content = row[keys[0]]
    try:
        conversation = read_conversation(row, with_images(content, images_of_columns(row)), columns=columns)
    except DataError as error:
        raise GenerationError(f"{where}: {str(error).rstrip('.')}: give a text or a list of messages.") from error
    messages = to_be_answered(conversation.messages, system, where)
    return Prompt(number, given, messages, tools=conversation.tools)


def to_be_answered(messages: Sequence[Message], system: str | None, where: str) -> list[Message]:
    """Return a conversation, with a system prompt if it has none; raise if its last turn is the assistant's."""
    if not messages or messages[-1].role == "assistant":
        raise GenerationError(f"{where}: there is no turn to answer: end with a turn of the user.")
    if system and messages[0].role != "system":
        return [Message(role="system", content=system), *messages]
    return list(messages)


class AnswerFile:
    """Answers as JSON lines, in the order in which they end; an interrupted run continues after them.

    Each line has ``line`` (of the prompt), ``prompt``, ``answer``, ``end``, ``tokens`` and ``settings``, a digest of
    the model and the sampling settings.

    Args:
        path: the file; an incomplete last line is removed.
        prompts: all prompts.
        settings: settings that the answers depend on.

    Raises:
        GenerationError: the file has other content, or answers to other prompts or with other settings.
        UserError: the file cannot be written, also when an answer is added.

    Attributes:
        done: the file's object for each prompt, by the line of the prompt.

    Example:
        >>> prompt = torchtune.generation.Prompt(1, "Why?", [torchtune.data.Message(role="user", content="Why?")])
        >>> file = torchtune.generation.AnswerFile(folder / "answers.jsonl", [prompt], {"temperature": 0})
        >>> file.add(prompt, "Because.", "stop", tokens=2)
        >>> file.finish()
        >>> file.done[1]["answer"]
        'Because.'
    """

    def __init__(self, path: str | Path, prompts: Sequence[Prompt], settings: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:12]
        self.done: dict[int, dict[str, Any]] = {}
        given = {prompt.line: prompt.given for prompt in prompts}
        with convert_os_errors(self.path):
            content = self.path.read_bytes() if self.path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        for number, text in enumerate(whole.splitlines(), start=1):
            self._check(number, text, given)
        with convert_os_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab")
            self._file.truncate(len(whole))

    def _check(self, number: int, text: bytes, given: Mapping[int, Any]) -> None:
        where, cure = f"output: {self.path}, line {number}", "name another file, or delete it to begin anew."
        try:
            row = json.loads(text)
            line, prompt, settings = row["line"], row["prompt"], row["settings"]
        except (ValueError, KeyError, TypeError) as error:
            raise GenerationError(f"{where}: it is not an answer of this recipe: {cure}") from error
        if line not in given or given[line] != prompt:
            raise GenerationError(f"{where}: it answers a prompt that is not in the file of prompts: {cure}")
        if settings != self._digest:
            raise GenerationError(f"{where}: it is the answer of another model or of other settings: {cure}")
        self.done[line] = row

    def add(self, prompt: Prompt, answer: str, end: str, tokens: int) -> None:
        """Append an answer; ``end`` is stop, max_new_tokens or context."""
        row = {"line": prompt.line, "prompt": prompt.given, "answer": answer, "end": end, "tokens": tokens}
        self.done[prompt.line] = {**row, "settings": self._digest}
        with convert_os_errors(self.path):
            self._file.write(_json_line(self.done[prompt.line]))
            self._file.flush()

    def finish(self, notes: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        """Sort the answers by the lines of their prompts, and add the notes of each line."""
        self.close()
        for line, note in (notes or {}).items():
            self.done[line] |= note
        with atomic_write(self.path) as file:
            file.writelines(_json_line(self.done[line]) for line in sorted(self.done))

    def close(self) -> None:
        """Close the file, with the answers so far."""
        with convert_os_errors(self.path):
            if not self._file.closed:
                os.fsync(self._file.fileno())
            self._file.close()


def _json_line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
