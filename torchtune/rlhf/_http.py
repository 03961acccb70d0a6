"""HTTP requests with JSON."""

import functools
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from typing import Any

from torchtune.rlhf._rollouts import RolloutError

MOST_BYTES = 16 * 2**20  # default limit of a reply's size


class NoReplyError(RolloutError):
    """Raised if a server is unreachable, too slow, or lacks the requested model, for example after a restart."""


def post_json(
    url: str, body: dict[str, Any] | None, *, timeout: float, most_bytes: int = MOST_BYTES, reads_json: bool = True
) -> Any:
    """Send a JSON body (or a GET request without one) and return the parsed JSON reply.

    The environment variable ``OPENAI_API_KEY`` is sent as a bearer token. Redirects are errors, because they would send
    the token to another server.

    Args:
        url: URL of the endpoint.
        body: request body.
        timeout: maximum seconds for each socket operation, and from the request to the last byte of the reply.
        most_bytes: maximum size of the reply's body.
        reads_json: parse the reply as JSON; otherwise return its text.

    Raises:
        NoReplyError: the server is unreachable or too slow, or replies that it is not ready.
        RolloutError: the reply is an error, not JSON, or larger than ``most_bytes``.
    """
    headers = {"Content-Type": "application/json"}
    api_key = os.environ.get("OPENAI_API_KEY")
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    deadline = time.monotonic() + timeout
    try:
        if not url.startswith(("http://", "https://")):
            raise ValueError(url)
        request = urllib.request.Request(url, data, headers)
    except ValueError as error:
        raise _invalid_url_error(url) from error
    try:
        with _opener().open(request, timeout=timeout) as reply:
            text = _read_body(reply, url, deadline, most_bytes)
    except urllib.error.HTTPError as error:
        # A server that restarts is not ready yet, or does not yet have the requested model.
        is_restarting = error.code in (502, 503) or (error.code == 404 and url.endswith("/completions"))
        error_class = NoReplyError if is_restarting else RolloutError
        raise error_class(f"The server replies to {url} with {error.code} {_describe_http_error(error)}") from error
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


def _read_body(reply: http.client.HTTPResponse, url: str, deadline: float, most_bytes: int) -> bytes:
    """Read the body in chunks as they arrive, so that a slow or endless reply raises an error."""
    body = bytearray()
    while True:
        chunk = reply.read1(2**20)
        if not chunk:
            break
        body += chunk
        if len(body) > most_bytes:
            raise RolloutError(f"{url} replies with more than {most_bytes:,} bytes, which nobody asked for.")
        if time.monotonic() > deadline:
            raise TimeoutError
    if reply.length:  # the connection ended before all announced bytes arrived
        raise http.client.IncompleteRead(bytes(body[-100:]), reply.length)
    return bytes(body)


def _describe_http_error(error: urllib.error.HTTPError) -> str:
    """Return the reason of an HTTP error and the received beginning of its body."""
    try:
        with error:
            text = error.read(500).decode(errors="replace").strip()
    except (OSError, ValueError, http.client.HTTPException):
        text = ""
    return f"{error.reason:.200}: {text or 'no text'}"


def _invalid_url_error(url: str) -> RolloutError:
    return RolloutError(f"'{url}' is no url: write it as http://host:port/v1.")


def _timeout_error(url: str, timeout: float) -> NoReplyError:
    return NoReplyError(f"{url} has not answered within {timeout:g} s: raise timeout, or look at the server's log.")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Return None, so that a redirect is raised as an error."""


@functools.cache
def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_NoRedirects)
