"""Requests to servers that speak JSON."""

import http.client
import json
import os
import urllib.error
import urllib.request
from typing import Any

from torchtune.rlhf._rollouts import RolloutError


class NoAnswerError(RolloutError):
    """A server is gone, or too slow."""


def post_json(url: str, body: dict[str, Any] | None, *, timeout: float, reads_json: bool = True) -> Any:
    """Send a JSON body (or, without one, a GET request) and return the JSON of the reply.

    A key in the environment variable ``OPENAI_API_KEY`` is sent along.

    Args:
        url: of the endpoint.
        body: to send.
        timeout: seconds without any byte of a reply.
        reads_json: whether the reply is JSON; otherwise its text is returned.

    Raises:
        NoAnswerError: the server is gone, or too slow.
        RolloutError: it replies with an error or something else than JSON.
    """
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=timeout) as reply:
            text = reply.read()
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(500).decode(errors="replace").strip()
        raise RolloutError(
            f"The server replies to {url} with {error.code} {error.reason}: {said or 'no text'}"
        ) from error
    except TimeoutError as error:
        raise _too_slow(url, timeout) from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise _too_slow(url, timeout) from error
        raise NoAnswerError(f"No server answers at {url} ({error.reason}): start it, or correct the url.") from error
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswerError(f"The connection to {url} broke ({error!r}): look at the server's log.") from error
    except ValueError as error:
        raise RolloutError(f"'{url}' is no url: write it as http://host:port/v1.") from error
    try:
        return json.loads(text) if reads_json else text.decode(errors="replace")
    except ValueError as error:
        raise RolloutError(f"The reply of {url} is no JSON: is it an OpenAI-compatible server?") from error


def _too_slow(url: str, timeout: float) -> NoAnswerError:
    return NoAnswerError(f"{url} has not answered within {timeout:g} s: raise timeout, or look at the server's log.")
