"""HTTP requests with JSON."""

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

MOST_BYTES = 16 * 2**20  # of a short reply


class NoReplyError(RolloutError):
    """Server that is unreachable or too slow."""


def post_json(
    url: str, body: dict[str, Any] | None, *, timeout: float, most_bytes: int = MOST_BYTES, reads_json: bool = True
) -> Any:
    """Send a JSON body (or a GET request without one) and return the parsed JSON reply.

    The environment variable ``OPENAI_API_KEY`` is sent as a bearer token. Redirects are errors, because they would send
    the token to another server.

    Args:
        url: URL of the endpoint.
        body: request body.
        timeout: seconds from the connection to the last byte of the reply.
        most_bytes: maximum size of the reply, with headers.
        reads_json: parse the reply as JSON; otherwise return its text.

    Raises:
        NoAnswerError: the server is unreachable or too slow.
        RolloutError: the reply is an error, not JSON, or larger than ``most_bytes``.
    """
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        request = _Request(url, data, headers)
        request.most_bytes = most_bytes
    except ValueError as error:
        raise _invalid_url_error(url) from error
    try:
        with _opener().open(request, timeout=timeout) as reply:
            text = _read_body(reply)
    except urllib.error.HTTPError as error:
        raise RolloutError(f"The server replies to {url} with {error.code} {_describe_http_error(error)}") from error
    except TimeoutError as error:
        raise _timeout_error(url, timeout) from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise _timeout_error(url, timeout) from error
        raise NoReplyError(f"No server answers at {url} ({error.reason}): start it, or correct the url.") from error
    except (http.client.InvalidURL, UnicodeError) as error:
        raise _invalid_url_error(url) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NoReplyError(f"The connection to {url} broke ({error!r:.200}): look at the server's log.") from error
    try:
        return json.loads(text) if reads_json else text.decode(errors="replace")
    except (ValueError, RecursionError) as error:
        raise RolloutError(f"The reply of {url} is no JSON: is it an OpenAI-compatible server?") from error


def _read_body(reply: http.client.HTTPResponse) -> bytes:
    """Read the body in chunks, so that no memory is allocated for a wrong Content-Length."""
    pieces = list(iter(functools.partial(reply.read, 2**20), b""))
    if reply.length:
        raise http.client.IncompleteRead(b"", reply.length)
    return b"".join(pieces)


def _describe_http_error(error: urllib.error.HTTPError) -> str:
    """Return the reason of an HTTP error and the beginning of its body, as far as it is received."""
    try:
        with error:
            text = error.read(500).decode(errors="replace").strip()
    except (OSError, ValueError, http.client.HTTPException, RolloutError):
        text = ""
    return f"{error.reason:.200}: {text or 'no text'}"


def _invalid_url_error(url: str) -> RolloutError:
    return RolloutError(f"'{url}' is no url: write it as http://host:port/v1.")


def _timeout_error(url: str, timeout: float) -> NoReplyError:
    return NoReplyError(f"{url} has not answered within {timeout:g} s: raise timeout, or look at the server's log.")


class _Request(urllib.request.Request):
    most_bytes = MOST_BYTES


class _LimitedStream(io.RawIOBase):
    """Raw stream of a reply, headers included, with a limit of bytes and a deadline."""

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
        self.fp = io.BufferedReader(_LimitedStream(sock, request, deadline))


class _DeadlineHandler:
    """Mixin of urllib's handlers that applies the timeout to the whole request instead of each packet."""

    def do_open(self, http_class: Any, req: _Request, **named: Any) -> Any:
        def connect(host: str, **settings: Any) -> http.client.HTTPConnection:
            connection = http_class(host, **settings)
            deadline = time.monotonic() + req.timeout
            connection.response_class = functools.partial(_Response, request=req, deadline=deadline)
            return connection

        return super().do_open(connect, req, **named)  # type: ignore[misc]


class _HTTPHandler(_DeadlineHandler, urllib.request.HTTPHandler):
    pass


class _HTTPSHandler(_DeadlineHandler, urllib.request.HTTPSHandler):
    pass


@functools.cache
def _opener() -> urllib.request.OpenerDirector:
    """Return an opener for http(s) URLs only, with the proxies of the environment."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        _HTTPHandler,
        _HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.UnknownHandler,
    ):
        opener.add_handler(handler())
    return opener
