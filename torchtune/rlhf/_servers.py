"""Inference servers: HTTP requests with JSON, requests for answers, and loading of new weights."""

import functools
import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from torchtune.modules.conversion import get_conversions
from torchtune.modules.peft import owned_parameters
from torchtune.rlhf._rollouts import MOST_LOG_PROB, Rollout, RolloutError
from torchtune.utils import read_json, write_json

_MOST_BYTES = 16 * 2**20  # default limit of a reply's size
# A reply's limit: an answer token with text and log-probs takes about 300 bytes, a prompt token about 8.
_REPLY_BYTES = 2**20
_TOKEN_BYTES = 1024
_PROMPT_TOKEN_BYTES = 16
_MOST_SEED = 2**63 - 1  # servers take seeds of 64 bits with a sign
_LEAST_LOG_PROB = -9999.0  # vLLM's value for minus infinity
_SURROGATE = re.compile("[\ud800-\udfff]")


class NoReplyError(RolloutError):
    """Raised if a server is unreachable, too slow, or lacks the requested model, for example after a restart."""


def post_json(
    url: str, body: dict[str, Any] | None, *, timeout: float, most_bytes: int = _MOST_BYTES, reads_json: bool = True
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
        if not url.startswith(("http://", "https://")):  # urllib also opens files
            raise ValueError(url)
        request = urllib.request.Request(url, data, headers)
    except ValueError as error:
        raise _invalid_url_error(url) from error
    try:
        with _opener().open(request, timeout=timeout) as reply:
            text = _read_body(reply, url, deadline, most_bytes)
    except urllib.error.HTTPError as error:
        # A server that restarts is not ready yet, or does not yet have the requested model: callers may ask another
        # one, or wait.
        lacks_model = error.code == 404 and url.endswith("/completions")
        is_restarting = error.code in (502, 503) or lacks_model
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
    if not reads_json:
        return text.decode(errors="replace")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RolloutError(f"The reply of {url} is not JSON: is it an OpenAI-compatible server?") from error


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
    return RolloutError(f"'{url}' is not a URL: write it as http://host:port/v1.")


def _timeout_error(url: str, timeout: float) -> NoReplyError:
    return NoReplyError(f"{url} has not answered within {timeout:g} s: raise timeout, or look at the server's log.")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Return None, so that a redirect is raised as an error."""


@functools.cache  # it may load the certificates of all authorities
def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_NoRedirects)


@dataclass(frozen=True)
class RequestSettings:
    """Settings of requests to a server.

    Attributes:
        max_new_tokens: maximum number of tokens in an answer.
        temperature: divides the logits.
        stop_tokens: ids of tokens that end an answer.
        vocab_size: exclusive upper bound of token ids.
        timeout: maximum seconds for the answers to a prompt.
        weights_timeout: maximum seconds to load new weights.
    """

    max_new_tokens: int
    temperature: float
    stop_tokens: list[int]
    vocab_size: int
    timeout: float
    weights_timeout: float


class Server(ABC):
    """Base class of servers with an OpenAI-compatible ``/v1/completions`` endpoint.

    Args:
        url: URL of the server, ending with ``/v1``.
        model_name: name of the model on the server; None if the name is the folder of the weights.
        settings: settings of requests.

    Attributes:
        gives_log_probs: whether the server returns log-probs of sampled tokens.
        requests: maximum number of concurrent requests.
    """

    gives_log_probs = True
    requests = 64

    def __init__(self, url: str, model_name: str | None, settings: RequestSettings) -> None:
        self.url = url.rstrip("/")
        self.root = self.url.removesuffix("/v1")
        self.model_name = model_name
        self.settings = settings

    def contents(self, model: nn.Module) -> str:
        """Return the contents to save for the server; see :meth:`CheckpointStore.save`."""
        has_adapters = bool(owned_parameters(model))
        return "merged" if has_adapters else "model"

    @abstractmethod
    def check(self) -> None:
        """Check that the server is reachable and serves the model. Raises :class:`RolloutError`."""

    @abstractmethod
    def load_weights(self, folder: Path, previous: Path | None) -> None:
        """Load the weights in ``folder``, and unload the weights in ``previous``."""

    @abstractmethod
    def sample(self, prompt: Sequence[int], num_samples: int, seed: int | None) -> list[Rollout]:
        """Sample answers to a prompt; without a seed, decoding is greedy."""

    def _request_completions(self, body: dict[str, Any], prompt: Sequence[int], num_samples: int) -> dict[str, Any]:
        """Send a request and return the reply; check that it has the right model and ``num_samples`` choices."""
        url = f"{self.url}/completions"
        # More bytes than any correct reply has, so that a wrong server cannot fill the memory. Some servers repeat the
        # prompt in every answer.
        answer_bytes = _TOKEN_BYTES * self.settings.max_new_tokens + _PROMPT_TOKEN_BYTES * len(prompt)
        most_bytes = _REPLY_BYTES + num_samples * answer_bytes
        reply = post_json(url, body, timeout=self.settings.timeout, most_bytes=most_bytes)
        choices = _as_dict(reply).get("choices")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise RolloutError(f"{url} replies without choices: is it an OpenAI-compatible server?")
        served_model = reply.get("model")
        # transformers appends the revision.
        if not isinstance(served_model, str) or served_model.removesuffix("@main") != body["model"]:
            raise RolloutError(
                f"{url} answers with the model {_format_value(served_model)}, not with '{body['model']}': start the "
                "server without a fixed model, or correct the url."
            )
        if len(choices) != num_samples:
            raise RolloutError(f"{url} gave {len(choices)} answers instead of {num_samples} to a prompt.")
        return reply

    def _check_count(self, count: int) -> None:
        """Raise :class:`RolloutError` if an answer has more tokens than requested."""
        if count > self.settings.max_new_tokens:
            raise RolloutError(
                f"{self.url} gave an answer of {count} tokens, and max_new_tokens is {self.settings.max_new_tokens}: "
                "it does not read the limit of a request."
            )


def _format_value(value: Any) -> str:
    """Format a value of a reply for messages."""
    if isinstance(value, str | int | float | None):
        return repr(value)[:100]
    return f"a {type(value).__name__}"


def _as_dict(value: Any) -> dict[str, Any]:
    """Return a dict of a reply; empty for any other value, which a server should not send."""
    if isinstance(value, dict):
        return value
    return {}


class VLLMServer(Server):
    """vLLM server: receives token ids, and returns token ids with log-probs.

    Each adapter is loaded under a new name (``/v1/load_lora_adapter``), so that the server does not reuse caches of old
    adapters. Full weights are reloaded from the folder (``/collective_rpc`` with ``reload_weights``), then the prefix
    cache is cleared.
    """

    _start_hint = ""

    def contents(self, model: nn.Module) -> str:
        """Return ``"adapter"``, ``"merged"`` for adapters that PEFT or vLLM lacks, or ``"model"`` without adapters."""
        self._start_hint = "start vLLM with VLLM_SERVER_DEV_MODE=1"
        for conversion in get_conversions(model):
            if conversion.owned_parameters(model) and not conversion.peft_config(model):
                return "merged"
            if conversion.trained_weights(model):  # vLLM refuses adapters with modules_to_save
                return "merged"
        if not owned_parameters(model):
            return "model"
        self._start_hint = "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        return "adapter"

    def check(self) -> None:
        """Check the server, see :class:`Server`."""
        reply = post_json(f"{self.url}/models", None, timeout=self.settings.timeout)
        models = _as_dict(reply).get("data")
        if not isinstance(models, list):
            models = []
        names = []
        for model in models:
            name = _as_dict(model).get("id")
            if isinstance(name, str):
                names.append(name)
        if self.model_name not in names:
            raise RolloutError(
                f"{self.url} serves {', '.join(names)[:200] or 'no model'}, not '{self.model_name}': correct "
                "sampler.model_name or the url."
            )

    def load_weights(self, folder: Path, previous: Path | None) -> None:
        """Load weights, see :class:`Server`."""
        is_adapter = (folder / "adapter_config.json").exists()
        try:
            if is_adapter:
                self._load_adapter(folder, previous)
            else:
                self._reload_weights(folder)
        except RolloutError as error:
            raise type(error)(f"The server takes no new weights: {self._start_hint} ({error})") from error

    def _load_adapter(self, folder: Path, previous: Path | None) -> None:
        """Load an adapter under a new name, which requests then ask for, and unload the previous one."""
        self.model_name = _adapter_name(folder)
        try:
            self._post_control("/v1/load_lora_adapter", {"lora_name": self.model_name, "lora_path": str(folder)})
        except RolloutError as error:
            # An earlier attempt, whose reply did not arrive, may have loaded it.
            if "already been loaded" not in str(error):
                raise
        if previous is not None:
            self._post_control("/v1/unload_lora_adapter", {"lora_name": _adapter_name(previous)})

    def _reload_weights(self, folder: Path) -> None:
        """Reload all weights, under the name that the model has on the server."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._post_control("/collective_rpc", body)
        # The cached keys and values of prompts are of the previous weights.
        reply = self._post_control("/reset_prefix_cache", {})
        if '"success":false' in reply.replace(" ", ""):
            raise RolloutError(f"{self.root}/reset_prefix_cache did not succeed: another client is using it.")

    def _post_control(self, path: str, body: dict[str, Any]) -> str:
        """Send a request that concerns the weights, and return the text of the reply."""
        return post_json(f"{self.root}{path}", body, timeout=self.settings.weights_timeout, reads_json=False)

    def sample(self, prompt: Sequence[int], num_samples: int, seed: int | None) -> list[Rollout]:
        """Sample answers, see :class:`Server`."""
        body = {
            "model": self.model_name,
            "prompt": list(prompt),
            "n": num_samples,
            "max_tokens": self.settings.max_new_tokens,
            "temperature": 0.0,  # greedy, unless there is a seed
            "stop_token_ids": self.settings.stop_tokens,
            "logprobs": 1,  # as `token_logprobs`, of the sampled tokens
            "return_token_ids": True,
            # These override the model's generation_config.json, which would truncate the distribution.
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        if seed is not None:
            body["temperature"] = self.settings.temperature
            body["seed"] = seed & _MOST_SEED  # seeds of servers are signed
        choices = self._request_completions(body, prompt, num_samples)["choices"]
        choice_of_answer = {}  # by the number of the answer; choices may come in any order
        for position, choice in enumerate(choices):
            number = choice.get("index", position)
            if type(number) is int:  # not bool, not a list, which a dict cannot have as a key
                choice_of_answer[number] = choice
        if sorted(choice_of_answer) != list(range(num_samples)):
            raise RolloutError(f"{self.url} does not number its answers from 0 to {num_samples - 1} (index).")
        return [self._rollout(prompt, choice_of_answer[number]) for number in range(num_samples)]

    def _rollout(self, prompt: Sequence[int], choice: dict[str, Any]) -> Rollout:
        """Check the token ids and log-probs of an answer."""
        tokens = choice.get("token_ids")
        log_probs = _as_dict(choice.get("logprobs")).get("token_logprobs")
        are_lists = isinstance(tokens, list) and isinstance(log_probs, list)
        if not are_lists or not tokens or len(tokens) != len(log_probs) or None in log_probs:
            raise RolloutError(
                f"{self.url} gave an answer without token ids and a log-prob for each: use a vLLM that knows "
                "return_token_ids, or sampler.server: transformers."
            )
        self._check_count(len(tokens))
        vocab_size = self.settings.vocab_size
        for token in tokens:
            # Not `isinstance`: True is no token id.
            if type(token) is not int or not 0 <= token < vocab_size:
                raise RolloutError(
                    f"{self.url} reads or writes other tokens than this model ({_format_value(token)} is not a token "
                    f"id below {vocab_size}): it serves another one."
                )
        prompt_tokens = choice.get("prompt_token_ids")  # optional in a reply
        if prompt_tokens is not None and prompt_tokens != list(prompt):
            raise RolloutError(f"{self.url} reads or writes other tokens than this model: it serves another one.")
        for value in log_probs:
            # vLLM writes -9999 for minus infinity, the log-prob of a token that cannot be sampled.
            if type(value) not in (int, float) or not _LEAST_LOG_PROB < value <= MOST_LOG_PROB:
                raise RolloutError(
                    f"{self.url} gave a token the log-prob {_format_value(value)}, which is not a number from "
                    f"{_LEAST_LOG_PROB:g} to 0: look at the server's log, its weights or their dtype may be wrong."
                )
        return Rollout(
            tokens=torch.tensor([*prompt, *tokens], dtype=torch.int64),
            prompt_len=len(prompt),
            log_probs=torch.tensor(log_probs).float(),
            finished=choice.get("finish_reason") == "stop",
        )


def _adapter_name(folder: Path) -> str:
    """Return the name of an adapter on the server, which no other run and no other step has."""
    return f"{folder.parent.name}-{folder.name}"


class TransformersServer(Server):
    """Server of ``transformers serve``: receives text, and returns one text per request, without log-probs.

    New weights are in a new folder; the server loads them when a request names the folder as the model. Answers are
    tokenized again, and dropped if the number of tokens differs from the number of sampled tokens.
    """

    gives_log_probs = False
    requests = 1  # the server samples sequentially, and a request's seed sets the process's seed

    def __init__(
        self, url: str, model_name: str | None, settings: RequestSettings, tokenizer_file: Path, stop_token: int
    ) -> None:
        super().__init__(url, model_name, settings)
        if not tokenizer_file.is_file():
            raise RolloutError(f"sampler: {tokenizer_file} is not there, and a server of texts needs it.")
        self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self._stop_token = stop_token
        self._bos_tokens = self._tokenizer.encode("").ids  # special tokens that the server adds before each text

    def check(self) -> None:
        """Check the server, see :class:`Server`."""
        post_json(f"{self.root}/health", None, timeout=self.settings.timeout)

    def load_weights(self, folder: Path, previous: Path | None) -> None:
        """Load weights, see :class:`Server`."""
        # Requests define the sampling, and a tokenizer that cleans up text would change the tokens.
        write_json(folder / "generation_config.json", self._generation_config())
        tokenizer_config = folder / "tokenizer_config.json"
        if tokenizer_config.is_file():
            write_json(tokenizer_config, {**read_json(tokenizer_config), "clean_up_tokenization_spaces": False})
        if previous is not None:
            post_json(f"{self.root}/reset", {}, timeout=self.settings.weights_timeout)
        self.model_name = str(folder)
        body = {"model": self.model_name}
        reply = post_json(f"{self.root}/load_model", body, timeout=self.settings.weights_timeout, reads_json=False)
        if '"ready"' not in reply:
            raise RolloutError(f"The server did not load {folder} ({reply.strip()[-300:]}): it has to see this folder.")

    def _generation_config(self) -> dict[str, Any]:
        """Return settings that sample from the whole distribution at the temperature, up to the stop token."""
        return {
            "do_sample": True,
            "temperature": self.settings.temperature,
            "top_k": 0,
            "top_p": 1.0,
            "repetition_penalty": 1.0,
            "max_new_tokens": self.settings.max_new_tokens,
            "eos_token_id": self._stop_token,
            "pad_token_id": self._stop_token,
        }

    def sample(self, prompt: Sequence[int], num_samples: int, seed: int | None) -> list[Rollout]:
        """Sample answers, see :class:`Server`."""
        return [self._sample_answer(prompt, seed, number) for number in range(num_samples)]

    def _sample_answer(self, prompt: Sequence[int], seed: int | None, number: int) -> Rollout:
        """Sample the answer with this number to a prompt, by a request of its own."""
        # The server takes texts: a prompt that is decoded here and encoded there must give the same tokens.
        text_tokens = list(prompt)
        num_bos = len(self._bos_tokens)
        if text_tokens[:num_bos] == self._bos_tokens:  # the server adds them
            text_tokens = text_tokens[num_bos:]
        text = self._tokenizer.decode(text_tokens, skip_special_tokens=False)
        generation_config = self._generation_config()
        if seed is None:  # greedy: settings of sampling have no effect
            generation_config["do_sample"] = False
            for name in ("temperature", "top_k", "top_p", "repetition_penalty"):
                del generation_config[name]
        body = {"model": self.model_name, "prompt": text, "generation_config": json.dumps(generation_config)}
        if seed is not None:
            body["seed"] = (seed + number) & _MOST_SEED  # a request has one answer, so that answers need own seeds
        reply = self._request_completions(body, prompt, 1)
        # The numbers of tokens show whether the text became the same tokens on the server.
        usage = _as_dict(reply.get("usage"))
        num_prompt_tokens = usage.get("prompt_tokens")
        num_sampled = usage.get("completion_tokens")
        if type(num_prompt_tokens) is not int or type(num_sampled) is not int or num_sampled < 0:
            raise RolloutError(f"{self.url} does not say how many tokens it read and wrote (usage).")
        if num_prompt_tokens != len(prompt):
            raise RolloutError(
                f"{self.url} reads {num_prompt_tokens} tokens instead of the prompt's {len(prompt)}: its text "
                "does not become the same tokens there; change the prompt, or use a server that takes token ids."
            )
        self._check_count(num_sampled)
        return self._rollout(prompt, reply["choices"][0], num_sampled)

    def _rollout(self, prompt: Sequence[int], choice: dict[str, Any], num_sampled: int) -> Rollout:
        """Tokenize the text of an answer; the answer is empty if its tokens cannot be the sampled ones."""
        text = choice.get("text")
        if not isinstance(text, str):
            raise RolloutError(f"{self.url} gave an answer without a text, its text is {_format_value(text)}.")
        text = _SURROGATE.sub("\ufffd", text)  # a tokenizer cannot encode a lone surrogate
        tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        is_at_limit = choice.get("finish_reason") == "length"
        # The text lacks the stop token. At the limit, a missing token may also be one of two that the text joins, and
        # nothing tells the two cases apart: such an answer is dropped.
        is_finished = len(tokens) + 1 == num_sampled and not is_at_limit
        is_truncated = len(tokens) == num_sampled and is_at_limit
        # U+FFFD stands for a part of a character, so its tokens are unknown. Callers recognize a dropped answer by its
        # length, 0.
        is_dropped = "\ufffd" in text or not (is_finished or is_truncated)
        if is_dropped:
            tokens = []
        elif is_finished:
            tokens = [*tokens, self._stop_token]
        return Rollout(
            tokens=torch.tensor([*prompt, *tokens], dtype=torch.int64),
            prompt_len=len(prompt),
            log_probs=None,  # the trainer computes them
            finished=is_finished and not is_dropped,
        )


def make_server(
    kind: str, url: str, model_name: str, settings: RequestSettings, checkpoint_dir: Path, tokenizer: Any
) -> Server:
    """Build a server by its kind, ``vllm`` or ``transformers``. Raises :class:`RolloutError` for another kind."""
    if kind == "vllm":
        return VLLMServer(url, model_name, settings)
    if kind == "transformers":
        # A text does not show which token ended it, so only one can be appended when it is tokenized again.
        stop_token = getattr(tokenizer, "eos_id", None)
        if stop_token not in settings.stop_tokens:
            stop_token = settings.stop_tokens[0]
        return TransformersServer(url, None, settings, checkpoint_dir / "tokenizer.json", stop_token)
    raise RolloutError(f"sampler.server is {kind!r}: it must be vllm or transformers.")
