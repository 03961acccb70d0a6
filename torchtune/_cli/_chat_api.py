"""OpenAI-style API of chats over HTTP, for ``tune serve``."""

import json
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from torchtune.data import read_tools
from torchtune.generation import (
    BatchServer,
    GenerationError,
    Job,
    JSONFilter,
    JSONGrammar,
    Sampling,
    TokenDecoder,
    TokenTexts,
)
from torchtune.rlhf.environments import CallError, Continuation, Sessions, ToolCall, parameters_of, parse_calls
from torchtune.tokenizers import StreamDecoder
from torchtune.training.parallel import Ranks
from torchtune.utils import UserError

_MAX_BYTES = 16 * 2**20  # of a request's body
_MAX_DISCARDED = 1024  # reads, of at most 1 MiB, from a request that is refused
_LOCAL = ("localhost", "127.0.0.1", "[::1]")
# Parameters that are read, with their types. A parameter of type object is checked where it is read.
_READ = {
    "model": str,
    "messages": list,
    "tools": list,
    "tool_choice": object,
    "session": str,
    "stream": bool,
    "stream_options": dict,
    "n": object,
    "stop": object,
    "max_tokens": object,
    "max_completion_tokens": object,
    "temperature": object,
    "top_k": object,
    "top_p": object,
    "min_p": object,
    "seed": object,
    "logprobs": bool,
    "top_logprobs": object,
    "response_format": dict,
    # Notes of the client, which nothing depends on.
    "user": object,
    "metadata": object,
    "store": object,
}
_TYPES = {str: "a text", list: "a list", bool: "true or false", dict: "an object"}
# Values of other parameters that change nothing.
_NEUTRAL = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "parallel_tool_calls": True,
}
_MAX_ANSWERS = 128  # of n, as in the API
_MAX_TOP = 20  # of top_logprobs, as in the API
_MAX_STOPS = 16  # texts
_LONGEST_STOP = 4096  # characters of one text
# Format of tool calls -> text that can begin a call; text before it is streamed.
_STARTS = {
    "hermes": "<tool_call>",
    "qwen_xml": "<tool_call>",
    "llama3": "{",
    "mistral": "[TOOL_CALLS]",
    "harmony": "to=",
    "gemma4": "<|tool_call>",
}


class ApiError(Exception):
    """Error of a request: HTTP status, message, and a code for programs."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "code": code}}


def _number(
    body: Mapping[str, Any],
    name: str,
    default: Any,
    least: float,
    most: float | None = None,
    kinds: type | tuple = int,
) -> Any:
    """Return a number of a request, which must be at least ``least``, and at most ``most``."""
    value = body.get(name)
    if value is None:
        return default
    if most is None:
        limit = 2**63 - 1  # of 64-bit integers
        bounds = f"of at least {least}"
    else:
        limit = most
        bounds = f"between {least} and {most}"
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= limit:
        kind = "an integer" if kinds is int else "a number"
        raise ApiError(400, f"{name} is {json.dumps(value)[:80]}: it must be {kind} {bounds}.")
    return value


class ChatServer(ThreadingHTTPServer):
    """HTTP server of chats with some models.

    Args:
        address: host and port.
        models: name -> model; see :class:`torchtune.generation.BatchServer`.
        tokenizer: tokenizer of the models.
        tool_format: format of tool calls, or ``None``.
        max_new_tokens: default maximum number of tokens of an answer.
        ranks: the ranks that share the models, if there are several.
        **limits: see :class:`torchtune.generation.BatchServer`.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        models: Mapping[str, Any],
        tokenizer: Any,
        *,
        tool_format: str | None,
        max_new_tokens: int,
        ranks: Ranks | None = None,
        **limits: int,
    ) -> None:
        self.models = models
        self.tokenizer = tokenizer
        self.tool_format = tool_format
        self.max_new_tokens = max_new_tokens
        self.sessions = Sessions(tokenizer)
        self.started = int(time.time())
        self._texts: TokenTexts | None = None
        self._texts_lock = threading.Lock()
        self.decode_token = TokenDecoder(tokenizer)
        self.batch = BatchServer(models, tokenizer.stop_tokens, ranks=ranks, **limits)
        super().__init__(address, _Handler)  # calls server_close if the port cannot be used

    def model_name(self, asked: Any) -> str:
        """Return the name of the model of a request: if there is only one, clients may call it as they like."""
        if asked in self.models:
            return asked
        if len(self.models) == 1:
            return next(iter(self.models))
        raise ApiError(404, f"There is no model {asked!r}: the models are {', '.join(self.models)}.")

    def json_filter(self, response_format: Mapping[str, Any], prompt_length: int) -> JSONFilter | None:
        """Return the logits processor of a request's ``response_format``; None for ``text``, which limits no answer.

        Args:
            response_format: value of the request.
            prompt_length: number of tokens of the prompt, which the processor does not read as JSON.
        """
        kind = response_format.get("type")
        if kind == "text":
            return None
        if kind == "json_object":
            schema = None  # any JSON object
        elif kind == "json_schema":
            schema = None
            described = response_format.get("json_schema")
            if isinstance(described, dict):
                schema = described.get("schema")
            if not isinstance(schema, dict):
                raise ApiError(400, "response_format.json_schema must be an object with a name and a schema.")
        else:
            raise ApiError(400, "response_format.type must be 'text', 'json_object' or 'json_schema'.")
        try:
            grammar = JSONGrammar(schema)
            with self._texts_lock:  # the texts of a large vocabulary take seconds, once
                if self._texts is None:
                    self._texts = TokenTexts(self.tokenizer)
        except (GenerationError, RecursionError) as error:
            reason = str(error) or "the schema is nested too deeply."
            raise ApiError(400, f"response_format: {reason}") from error
        return JSONFilter(self._texts, grammar, prompt_length)

    def service_actions(self) -> None:
        """End :meth:`serve_forever` if the ranks that share the model do not follow any more."""
        if self.batch.failure is not None:
            raise self.batch.failure

    def server_close(self) -> None:
        """End the answers and close the port."""
        self.batch.close()
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print a traceback, unless the client has left or is too slow."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Answer:
    """An answer while it is sampled; iterating over it yields pieces of its text.

    Args:
        server: the server.
        body: body of the request.
        session: name of the session in which the finished answer is recorded.
        index: number of the answer, if the request asks for several.

    Attributes:
        job: the job of the batch server.
    """

    def __init__(self, server: ChatServer, body: dict[str, Any], session: str | None, index: int = 0) -> None:
        self._server = server
        self._session = session
        self.index = index
        stop = body.get("stop")
        if isinstance(stop, str):
            stop = [stop]
        self._stop = stop or []
        self._check(body)  # also checks _stop
        self._tools = body.get("tools") or []
        if body.get("tool_choice") == "none":  # the prompt then shows no tools, and text is not parsed for calls
            self._tools = []
        self.model = server.model_name(body.get("model"))
        self._prompt = self._tokenize(body)
        self.num_read = len(self._prompt.tokens)
        self.num_written = 0
        room = server.models[self.model].max_seq_len - self.num_read
        if room < 1:
            raise ApiError(
                400,
                f"messages have {self.num_read} tokens, which fill the model's context: shorten them.",
                "context_length_exceeded",
            )
        # max_tokens is the former name in the API: max_completion_tokens wins.
        limit = _number(body, "max_tokens", server.max_new_tokens, 1)
        limit = _number(body, "max_completion_tokens", limit, 1)
        self.has_log_probs = bool(body.get("logprobs"))
        num_top = _number(body, "top_logprobs", 0, 0, _MAX_TOP)
        if num_top and not self.has_log_probs:
            raise ApiError(400, "top_logprobs needs logprobs: set it to true.")
        seed = _number(body, "seed", None, 0)
        if seed is not None:
            seed = (seed + index) % 2**63  # each answer of a request has its own, an integer of 64 bits
        self.job = Job(
            self.model, self._prompt.tokens, min(limit, room), self._sampling(body), num_top=num_top, seed=seed
        )
        self._log_probs: list[tuple[int, float]] = []  # each sampled token, for the session and the usage
        self._entries: list[dict[str, Any]] = []  # log-probs for the client that are not sent yet
        self._texts: list[str] = []  # pieces that were sent
        self.end = "length"  # unless a stop token, a stop text or a tool call ends the answer
        self.message: dict[str, Any] = {"role": "assistant", "content": ""}

    def _sampling(self, body: dict[str, Any]) -> Sampling:
        """Read how the answer is sampled, and keep in ``_distribution`` what the session records of it."""
        temperature = _number(body, "temperature", 1.0, 0, kinds=(int, float))
        top_k = _number(body, "top_k", None, 0) or None  # 0 does not limit the tokens either
        top_p = _number(body, "top_p", 1, 0, 1, (int, float))
        min_p = _number(body, "min_p", 0, 0, 1, (int, float))
        # Settings that change nothing are not recorded, because samples of earlier releases do not have them.
        self._distribution = {"temperature": temperature, "top_k": top_k}
        if top_p < 1:
            self._distribution["top_p"] = top_p
        if min_p > 0:
            self._distribution["min_p"] = min_p
        processors = []
        json_filter = self._server.json_filter(body.get("response_format") or {"type": "text"}, self.num_read)
        if json_filter is not None:
            if self._tools:
                raise ApiError(400, "response_format cannot go with tools, whose calls are not in it: leave one out.")
            processors.append(json_filter)
            self._distribution["response_format"] = body["response_format"]["type"]
        return Sampling(temperature, top_k, top_p, min_p, processors)

    def _check(self, body: dict[str, Any]) -> None:
        """Refuse parameters that this server does not read, or that have a wrong type."""
        for name, value in body.items():
            # Clients also send parameters that they do not set: as null, or with the value that changes nothing.
            if value is None or value == _NEUTRAL.get(name):
                continue
            if name in _READ and not isinstance(value, _READ[name]):
                raise ApiError(400, f"{name} must be {_TYPES[_READ[name]]}.")
            if name not in _READ:
                setting = name
                if name in _NEUTRAL:
                    setting += f" other than {json.dumps(_NEUTRAL[name])}"
                raise ApiError(400, f"This server samples without {setting}: leave it out.")
        # An empty text would stop every answer at its beginning.
        are_texts = isinstance(self._stop, list) and all(isinstance(text, str) and text for text in self._stop)
        if not are_texts:
            raise ApiError(400, "stop must be a text, or a list of texts.")
        longest = max(map(len, self._stop), default=0)
        if len(self._stop) > _MAX_STOPS or longest > _LONGEST_STOP:
            raise ApiError(
                400,
                f"stop has {len(self._stop):,} texts of up to {longest:,} characters: give at most {_MAX_STOPS} of at "
                f"most {_LONGEST_STOP:,}.",
            )
        if body.get("tool_choice") not in (None, "auto", "none"):
            raise ApiError(400, "tool_choice must be 'auto' or 'none': no call can be forced.")
        if body.get("tools") and self._server.tool_format is None:
            raise ApiError(400, "The chat template shows no format of tool calls: start tune serve with --tool-format.")

    def _tokenize(self, body: dict[str, Any]) -> Continuation:
        """Tokenize the conversation, up to the answer."""
        messages = body.get("messages")
        try:
            if messages[-1]["role"] == "assistant":
                raise ApiError(400, "messages end with the assistant's turn: the server does not continue it.")
            self._tools = read_tools(self._tools) or []
            parameters_of(self._tools)
            return self._server.sessions.begin(self._session, self.model, messages, self._tools)
        except UserError as error:
            raise ApiError(400, f"messages: {error}") from error
        except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
            message = f"messages or tools are not in the format of the chat API ({error!r:.200})."
            raise ApiError(400, message) from error

    def __iter__(self) -> Iterator[str]:
        """Yield a piece of text for each token, empty while the text is held back; complete the message at the end."""
        tokenizer = self._server.tokenizer
        # A piece is held back for as long as it may begin a stop text or a tool call.
        marks = list(self._stop)
        call_start = None
        if self._tools:
            call_start = _STARTS[self._server.tool_format]
            marks.append(call_start)
        buffer = _MarkBuffer(marks, call_start)
        decoder = StreamDecoder(tokenizer)
        for token, log_prob, top in self.job:
            self._log_probs.append((token, log_prob))
            if token in tokenizer.stop_tokens:
                self.end = "stop"
                break
            if self.has_log_probs:
                entry = self._described(token, log_prob)
                entry["top_logprobs"] = [self._described(candidate, value) for candidate, value in top]
                self._entries.append(entry)
            text = decoder.put(token)
            raw = text  # with special tokens, which may begin a tool call
            # A special token has no text of its own, unlike a token that is a part of a character.
            if not text and not tokenizer.decode([token]):
                raw = tokenizer.decode([token], skip_special_tokens=False)
            yield self._put(buffer.put(text, raw))
            if buffer.mark in self._stop:
                self.end = "stop"
                break
        last_text = decoder.end()  # of a character that is not complete
        yield self._put(buffer.put(last_text, last_text))
        self.num_written = len(self._log_probs)
        calls = {}
        if self._tools:
            calls = self._calls()
        # What the buffer still holds: text before a mark, text that only began like one, or a call that is not valid.
        if calls or buffer.mark in self._stop:
            yield self._put(buffer.text_before)
        else:
            yield self._put(buffer.text)
        self._finish(calls)

    def _described(self, token: int, log_prob: float) -> dict[str, Any]:
        """Return a token and its log-probability, as the API writes them."""
        text = self._server.decode_token(token) or self._server.tokenizer.decode([token], skip_special_tokens=False)
        text_bytes = None
        if "\ufffd" not in text:  # else it is a part of a character, whose bytes are not known
            text_bytes = list(text.encode())
        # JSON has no infinity; the API writes -9999 for tokens that are not likely at all.
        return {"token": text, "logprob": max(log_prob, -9999.0), "bytes": text_bytes}

    @property
    def has_entries(self) -> bool:
        """Whether there are log-probs that :meth:`take_log_probs` has not returned yet."""
        return bool(self._entries)

    def take_log_probs(self) -> dict[str, Any] | None:
        """Return ``logprobs`` of the tokens since the last call, or ``None`` if the request has none."""
        if not self.has_log_probs:
            return None
        entries = self._entries
        self._entries = []
        return {"content": entries, "refusal": None}

    def _put(self, text: str) -> str:
        """Keep a piece for the message of the whole answer, and return it."""
        self._texts.append(text)
        return text

    def _calls(self) -> dict[str, ToolCall]:
        """Return the tool calls of the answer by new ids; text that is not a valid call remains text."""
        raw = self._server.tokenizer.decode([token for token, _ in self._log_probs], skip_special_tokens=False)
        try:
            calls = parse_calls(raw, self._server.tool_format, parameters_of(self._tools))
        except CallError:
            return {}
        return {secrets.token_hex(5)[:9]: call for call in calls}  # Mistral's templates require nine characters

    def _finish(self, calls: Mapping[str, ToolCall]) -> None:
        """Complete the message, and record the answer in its session, if the request names one."""
        self.message["content"] = "".join(self._texts)
        tokens, log_probs = zip(*self._log_probs, strict=True)
        finished = tokens[-1] in self._server.tokenizer.stop_tokens  # and not cut by max_tokens or a stop text
        if calls:
            self.end = "tool_calls"
            # As in the answers of OpenAI: null beside calls without text.
            self.message["content"] = self.message["content"].strip() or None
            self.message["tool_calls"] = [
                {
                    "id": name,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
                }
                for name, call in calls.items()
            ]
        if self._session is not None:
            self._server.sessions.end(
                self._session,
                self._prompt,
                self.message,
                tokens=tokens,
                log_probs=log_probs,
                finished=finished,
                calls=calls,
                **self._distribution,
            )


class _MarkBuffer:
    """Buffer of text that may begin a mark, or follows a mark.

    Each character is compared once per mark, by the algorithm of Knuth, Morris and Pratt.

    Attributes:
        text: buffered text.
        text_before: text before the mark, with special tokens.
        mark: the mark, if it has appeared: a stop text, which ends the answer, or the beginning of a tool call.
    """

    def __init__(self, marks: list[str], call_start: str | None) -> None:
        self._marks = marks
        self._call_start = call_start
        self._borders = [_borders(mark) for mark in marks]
        self._matched = [0] * len(marks)  # how much of each mark the text ends with
        self._texts: list[str] = []  # without special tokens, since text was sent
        self._raw: list[str] = []  # with special tokens
        self.text_before = ""
        self.mark: str | None = None

    @property
    def text(self) -> str:
        """The buffered text."""
        return "".join(self._texts)

    def put(self, text: str, raw: str) -> str:
        """Add text (``raw``: with special tokens); return the text that can be sent."""
        if self.mark is not None and self.mark != self._call_start:  # nothing follows a stop text
            return ""
        self._texts.append(text)
        self._raw.append(raw)
        for count, char in enumerate(raw, 1):
            completed = self._match(char)
            # A stop text ends the answer within a tool call, too.
            if completed is not None and (self.mark is None or completed != self._call_start):
                buffered = "".join(self._raw)
                end = len(buffered) - len(raw) + count
                self.mark = completed
                self.text_before = buffered[: end - len(completed)]
                if completed != self._call_start:
                    return ""
        # The calls are parsed from the whole text at the end; before a mark, its beginning may still become one.
        if self.mark is not None or any(self._matched):
            return ""
        sendable = self.text
        self._texts = []
        self._raw = []
        return sendable

    def _match(self, char: str) -> str | None:
        """Read a character; return the longest mark that it completes."""
        completed = None
        for index, mark in enumerate(self._marks):
            matched = self._matched[index]
            borders = self._borders[index]
            # After a mismatch, the text may still end with a shorter beginning of the mark.
            while matched and mark[matched] != char:
                matched = borders[matched - 1]
            if mark[matched] == char:
                matched += 1
            if matched == len(mark):
                if completed is None or len(mark) > len(completed):
                    completed = mark
                matched = borders[matched - 1]
            self._matched[index] = matched
        return completed


def _borders(mark: str) -> list[int]:
    """Return, for each beginning of a mark, the length of its longest end that is also a shorter beginning of it."""
    borders = [0] * len(mark)
    length = 0
    for index in range(1, len(mark)):
        while length and mark[index] != mark[length]:
            length = borders[length - 1]
        if mark[index] == mark[length]:
            length += 1
        borders[index] = length
    return borders


class _Handler(BaseHTTPRequestHandler):
    """HTTP handler of a connection."""

    server: ChatServer
    protocol_version = "HTTP/1.1"
    timeout = 60.0  # seconds without a byte from the client, or to it

    def do_GET(self) -> None:
        """Answer ``/v1/models`` and ``/v1/sessions/NAME``."""
        self._answer(self._get_or_delete)

    def do_DELETE(self) -> None:
        """Answer ``/v1/sessions/NAME``, and forget the session."""
        self._answer(self._get_or_delete)

    def do_POST(self) -> None:
        """Answer ``/v1/chat/completions``."""
        self._answer(self._post)

    def _answer(self, method: Callable[[], None]) -> None:
        """Answer with a method, and reply with the error that it raises."""
        host = self.headers.get("Host", "localhost").lower()
        try:
            if host.removesuffix(f":{self.server.server_port}") not in _LOCAL:  # a web page, by DNS rebinding
                raise ApiError(403, f"This server answers on this machine only, not for {host:.80}.")
            method()
        except GenerationError as error:
            self._refuse(ApiError(503, str(error)))
        except ApiError as error:
            self._refuse(error)

    def _refuse(self, error: ApiError) -> None:
        """Send an error, and read the rest of the request: a client that is still sending does not read the reply."""
        self.close_connection = True
        self._reply(error.status, error.body)
        self.connection.shutdown(socket.SHUT_WR)
        for _ in range(_MAX_DISCARDED):
            if not self.rfile.read1(2**20):
                break

    def _has_left(self) -> bool:
        """Return whether the client has closed the connection."""
        try:
            poll = select.poll()
            poll.register(self.connection, select.POLLIN)
            is_readable = bool(poll.poll(0))
            # A closed connection is readable, too, but has no byte to read.
            return is_readable and not self.connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True

    def _reply(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def _get_or_delete(self) -> None:
        """Reply with the models, or with the samples of a session, which DELETE also forgets."""
        path = unquote(self.path).rstrip("/")
        is_delete = self.command == "DELETE"
        if path == "/v1/models" and not is_delete:
            about = {"object": "model", "created": self.server.started, "owned_by": "torchtune"}
            models = [{"id": name, **about} for name in self.server.models]
            self._reply(200, {"object": "list", "data": models})
            return
        hint = ""
        _, separator, name = path.partition("/v1/sessions/")
        if separator:
            samples = self.server.sessions.samples(name, forget=is_delete)
            if samples:  # empty for a session that is unknown or was forgotten
                self._reply(200, {"id": name, "samples": [asdict(sample) for sample in samples]})
                return
            num_forgotten = self.server.sessions.num_forgotten
            if num_forgotten:
                hint = f" {num_forgotten} sessions were forgotten to limit memory: DELETE each when it has ended."
        raise ApiError(404, f"There is no {path} to {self.command}.{hint}")

    def _body(self) -> dict[str, Any]:
        """Read the body of a request."""
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()):
            raise ApiError(400, "The request has no Content-Length, or one that is no number.")
        size = int(length[:20])  # a number of more digits is too large anyway
        if size > _MAX_BYTES:
            raise ApiError(413, f"The body has {size:,} bytes, and at most {_MAX_BYTES:,} are read.")
        try:
            body = json.loads(self.rfile.read(size))
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"The body is not valid JSON ({error}).") from error
        if not isinstance(body, dict):
            raise ApiError(400, "The body must be a JSON object.")
        return body

    def _post(self) -> None:
        """Answer a chat with ``n`` answers, whole or as a stream."""
        if self.path.rstrip("/") != "/v1/chat/completions":
            raise ApiError(404, f"There is no {self.path} to POST to.")
        body = self._body()
        session = self.headers.get("X-Session-Id") or body.get("session")
        count = _number(body, "n", 1, 1, _MAX_ANSWERS)
        answers = [_Answer(self.server, body, session, index) for index in range(count)]
        about = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": answers[0].model}
        for answer in answers:
            answer.job.has_left = self._has_left  # the batch then drops answers for which no client waits
        if not self.server.batch.submit(*(answer.job for answer in answers)):
            raise ApiError(503, "Too many requests are waiting: try again later.", "overloaded")
        try:
            if body.get("stream"):
                stream_options = body.get("stream_options") or {}
                self._stream(answers, about, bool(stream_options.get("include_usage")))
            else:
                choices = [self._choice(answer) for answer in answers]
                about |= {"object": "chat.completion", "choices": choices, "usage": _usage(answers)}
                self._reply(200, about)
        finally:  # of a client that has left, or an error: the batch would go on
            for answer in answers:
                answer.job.is_cancelled = True

    @staticmethod
    def _choice(answer: _Answer) -> dict[str, Any]:
        """Return an answer, when it has ended, as the API writes it."""
        for _ in answer:
            pass
        answer.job.is_cancelled = True  # after a stop text, the batch would go on
        choice = {"index": answer.index, "message": answer.message, "finish_reason": answer.end}
        return {**choice, "logprobs": answer.take_log_probs()}

    def _stream(self, answers: list[_Answer], envelope: dict[str, Any], with_usage: bool) -> None:
        """Send server-sent events until the connection is closed."""
        self.close_connection = True  # without a Content-Length, the end of the connection ends the body
        envelope["object"] = "chat.completion.chunk"

        def write(choices: list[dict[str, Any]], **more: Any) -> None:
            self.wfile.write(f"data: {json.dumps({**envelope, 'choices': choices, **more})}\n\n".encode())

        def send(answer: _Answer, delta: dict[str, Any], end: str | None = None) -> None:
            log_probs = None
            if "content" in delta:
                log_probs = answer.take_log_probs()
            write([{"index": answer.index, "delta": delta, "finish_reason": end, "logprobs": log_probs}])

        streams = [(answer, iter(answer)) for answer in answers]
        first = next(streams[0][1])  # an error before the first piece has its own HTTP status
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            # The first chunk of each answer names its role.
            send(answers[0], {"role": "assistant", "content": first})
            for answer, pieces in streams[1:]:
                send(answer, {"role": "assistant", "content": next(pieces)})
            while streams:
                # A step of the batch gives every answer a token: a piece of each in turn keeps pace with it.
                for answer, pieces in list(streams):
                    text = next(pieces, None)
                    if text is None:
                        streams.remove((answer, pieces))
                        answer.job.is_cancelled = True  # after a stop text, the batch would go on
                        self._send_end(answer, send)
                    elif text:
                        send(answer, {"content": text})
        except GenerationError as error:  # the status 200 is sent already: the error is the last event
            self.wfile.write(f"data: {json.dumps(ApiError(503, str(error)).body)}\n\n".encode())
            return
        if with_usage:
            write([], usage=_usage(answers))
        self.wfile.write(b"data: [DONE]\n\n")

    @staticmethod
    def _send_end(answer: _Answer, send: Callable[..., None]) -> None:
        """Send what follows the text of an answer: the last log-probs, its tool calls, and why it ended."""
        if answer.has_entries:  # of tokens whose text is not sent, such as a stop text
            send(answer, {"content": ""})
        calls = answer.message.get("tool_calls", ())
        if calls:
            send(answer, {"tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]})
        send(answer, {}, answer.end)

    def log_message(self, *arguments: Any) -> None:
        """Print nothing for a request."""


def _usage(answers: list[_Answer]) -> dict[str, int]:
    num_read = answers[0].num_read  # all answers have the same prompt
    num_written = sum(answer.num_written for answer in answers)
    return {"prompt_tokens": num_read, "completion_tokens": num_written, "total_tokens": num_read + num_written}
