"""Requests to servers that speak JSON."""

import functools
import http.client
import io
import json
import os
import socket
import time
import urllib.error
import urllib.request
from typing import Any

from torchtune.rlhf._rollouts import RolloutError

MOST_BYTES = 16 * 2**20  # of a reply that is short


class NoAnswerError(RolloutError):
    """A server is gone, or too slow."""


def post_json(
    url: str, body: dict[str, Any] | None, *, timeout: float, most_bytes: int = MOST_BYTES, reads_json: bool = True
) -> Any:
    """Send a JSON body (or, without one, a GET request) and return the JSON of the reply.

    A key in the environment variable ``OPENAI_API_KEY`` is sent along. Redirects are errors: they would take the key
    to another server.

    Args:
        url: of the endpoint.
        body: to send.
        timeout: seconds from the connection to the last byte of the reply.
        most_bytes: largest reply, with its headers.
        reads_json: whether the reply is JSON; otherwise its text is returned.

    Raises:
        NoAnswerError: the server is gone, or too slow.
        RolloutError: it replies with an error, something else than JSON, or more than ``most_bytes``.
    """
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        request = _Request(url, data, headers)
        request.most_bytes = most_bytes
    except ValueError as error:
        raise _no_url(url) from error
    try:
        with _opener().open(request, timeout=timeout) as reply:
            text = _read(reply)
    except urllib.error.HTTPError as error:
        raise RolloutError(f"The server replies to {url} with {error.code} {_said(error)}") from error
    except TimeoutError as error:
        raise _too_slow(url, timeout) from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise _too_slow(url, timeout) from error
        raise NoAnswerError(f"No server answers at {url} ({error.reason}): start it, or correct the url.") from error
    except (http.client.InvalidURL, UnicodeError) as error:
        raise _no_url(url) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NoAnswerError(f"The connection to {url} broke ({error!r:.200}): look at the server's log.") from error
    try:
        return json.loads(text) if reads_json else text.decode(errors="replace")
    except (ValueError, RecursionError) as error:
        raise RolloutError(f"The reply of {url} is no JSON: is it an OpenAI-compatible server?") from error


def _read(reply: http.client.HTTPResponse) -> bytes:
    """The body, in pieces: memory is not taken for a length that a server only announces."""
    pieces = list(iter(functools.partial(reply.read, 2**20), b""))
    if reply.length:
        raise http.client.IncompleteRead(b"", reply.length)
    return b"".join(pieces)


def _said(error: urllib.error.HTTPError) -> str:
    """The reason of an error and the beginning of its text, as much of them as arrives."""
    try:
        with error:
            text = error.read(500).decode(errors="replace").strip()
    except (OSError, ValueError, http.client.HTTPException, RolloutError):
        text = ""
    return f"{error.reason:.200}: {text or 'no text'}"


def _no_url(url: str) -> RolloutError:
    return RolloutError(f"'{url}' is no url: write it as http://host:port/v1.")


def _too_slow(url: str, timeout: float) -> NoAnswerError:
    return NoAnswerError(f"{url} has not answered within {timeout:g} s: raise timeout, or look at the server's log.")


class _Request(urllib.request.Request):
    most_bytes = MOST_BYTES


class _Bytes(io.RawIOBase):
    """Bytes of a reply, headers included, up to a number and a time."""

    def __init__(self, sock: socket.socket, request: _Request, deadline: float) -> None:
        self._sock, self._file = sock, sock.makefile("rb", buffering=0)
        self._request, self._deadline, self._left = request, deadline, request.most_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._sock.settimeout(left)
        count = self._file.readinto(buffer)
        self._left -= count or 0
        if self._left < 0:
            most = f"{self._request.most_bytes:,}"
            raise RolloutError(f"{self._request.full_url} replies with more than {most} bytes, which nobody asked for.")
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *arguments: Any, request: _Request, deadline: float, **named: Any) -> None:
        super().__init__(sock, *arguments, **named)
        self.fp.close()
        self.fp = io.BufferedReader(_Bytes(sock, request, deadline))


class _Bounded:
    """Mixin of urllib's handlers: the time of a request is that of all of it, not of each packet."""

    def do_open(self, http_class: Any, req: _Request, **named: Any) -> Any:
        def connect(host: str, **settings: Any) -> http.client.HTTPConnection:
            connection = http_class(host, **settings)
            deadline = time.monotonic() + req.timeout
            connection.response_class = functools.partial(_Response, request=req, deadline=deadline)
            return connection

        return super().do_open(connect, req, **named)  # type: ignore[misc]


class _HTTP(_Bounded, urllib.request.HTTPHandler):
    pass


class _HTTPS(_Bounded, urllib.request.HTTPSHandler):
    pass


@functools.cache
def _opener() -> urllib.request.OpenerDirector:
    """Opens http(s) urls alone, through the proxies that the environment names."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        _HTTP,
        _HTTPS,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.UnknownHandler,
    ):
        opener.add_handler(handler())
    return opener
