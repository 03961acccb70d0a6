"""Inference servers: requests for answers, and loading of new weights."""

import json
import re
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
from torchtune.rlhf._http import post_json
from torchtune.rlhf._rollouts import MOST_LOG_PROB, Rollout, RolloutError
from torchtune.utils import read_json, write_json

# Limits of a reply's size: an answer token with text and log-probs takes about 300 bytes, a prompt token about 8.
_REPLY_BYTES, _TOKEN_BYTES, _PROMPT_TOKEN_BYTES = 2**20, 1024, 16
_LEAST_LOG_PROB = -9999.0  # vLLM's value for minus infinity
_SURROGATE = re.compile("[\ud800-\udfff]")


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
        asked: settings of requests.

    Attributes:
        gives_log_probs: whether the server returns log-probs of sampled tokens.
        requests: maximum number of concurrent requests.
    """

    gives_log_probs = True
    requests = 64

    def __init__(self, url: str, model_name: str | None, settings: RequestSettings) -> None:
        self.url, self.root = url.rstrip("/"), url.rstrip("/").removesuffix("/v1")
        self.model_name, self.settings = model_name, settings

    def contents(self, model: nn.Module) -> str:
        """Return the contents to save for the server; see :meth:`CheckpointStore.save`."""
        return "merged" if owned_parameters(model) else "model"

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
        of_answer = _TOKEN_BYTES * self.settings.max_new_tokens + _PROMPT_TOKEN_BYTES * len(prompt)
        most_bytes = _REPLY_BYTES + num_samples * of_answer
        reply = post_json(url, body, timeout=self.settings.timeout, most_bytes=most_bytes)
        choices = reply.get("choices") if isinstance(reply, dict) else None
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise RolloutError(f"{url} replies without choices: is it an OpenAI-compatible server?")
        served = reply.get("model")
        if not isinstance(served, str) or served.removesuffix("@main") != body["model"]:
            raise RolloutError(
                f"{url} answers with the model {_format_value(served)}, not with '{body['model']}': start the server "
                "without a fixed model, or correct the url."
            )
        if len(choices) != num_samples:
            raise RolloutError(f"{url} gave {len(choices)} answers in the place of {num_samples} to a prompt.")
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
    return repr(value)[:100] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


class VLLMServer(Server):
    """vLLM server: receives token ids, and returns token ids with log-probs.

    Each adapter is loaded under a new name (``/v1/load_lora_adapter``), so that the server does not reuse caches of old
    adapters. Full weights are reloaded from the folder (``/collective_rpc`` with ``reload_weights``), then the prefix
    cache is cleared.
    """

    _start_hint = ""

    def contents(self, model: nn.Module) -> str:
        """Return ``"adapter"``, ``"merged"`` for adapters that PEFT lacks, or ``"model"`` without adapters."""
        if any(one.owned_parameters(model) and not one.peft_config(model) for one in get_conversions(model)):
            self._start_hint = "start vLLM with VLLM_SERVER_DEV_MODE=1"
            return "merged"
        has_adapters = bool(owned_parameters(model))
        self._start_hint = (
            "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            if has_adapters
            else "start vLLM with VLLM_SERVER_DEV_MODE=1"
        )
        return "adapter" if has_adapters else "model"

    def check(self) -> None:
        """Check the server, see :class:`Server`."""
        reply = post_json(f"{self.url}/models", None, timeout=self.settings.timeout)
        entries = reply.get("data") if isinstance(reply, dict) else None
        entries = entries if isinstance(entries, list) else []
        names = [str(entry["id"]) for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
        if self.model_name not in names:
            raise RolloutError(
                f"{self.url} serves {', '.join(names)[:200] or 'no model'}, not '{self.model_name}': correct "
                "sampler.model_name or the url."
            )

    def load_weights(self, folder: Path, previous: Path | None) -> None:
        """Load weights, see :class:`Server`."""
        try:
            if (folder / "adapter_config.json").exists():
                self.model_name = name = _adapter_name(folder)
                try:
                    self._post_control("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
                except RolloutError as error:
                    if "already been loaded" not in str(error):
                        raise
                if previous is not None:
                    self._post_control("/v1/unload_lora_adapter", {"lora_name": _adapter_name(previous)})
            else:
                reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
                self._post_control("/collective_rpc", reload)
                said = self._post_control("/reset_prefix_cache", {})
                if '"success":false' in said.replace(" ", ""):
                    raise RolloutError(f"{self.root}/reset_prefix_cache did not succeed: another client is using it.")
        except RolloutError as error:
            raise type(error)(f"The server takes no new weights: {self._start_hint} ({error})") from error

    def _post_control(self, path: str, body: dict[str, Any]) -> str:
        return post_json(f"{self.root}{path}", body, timeout=self.settings.weights_timeout, reads_json=False)

    def sample(self, prompt: Sequence[int], num_samples: int, seed: int | None) -> list[Rollout]:
        """Sample answers, see :class:`Server`."""
        body = {
            "model": self.model_name,
            "prompt": list(prompt),
            "n": num_samples,
            "max_tokens": self.settings.max_new_tokens,
            "temperature": 0.0 if seed is None else self.settings.temperature,
            "stop_token_ids": self.settings.stop_tokens,
            "logprobs": 1,
            "return_token_ids": True,
            # Overrides the model's generation_config.json, which would truncate the distribution.
            **{"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
        }
        if seed is not None:
            body["seed"] = seed & (2**63 - 1)
        choices = self._request_completions(body, prompt, num_samples)["choices"]
        places = [choice.get("index", place) for place, choice in enumerate(choices)]
        if any(type(place) is not int for place in places) or sorted(places) != list(range(num_samples)):
            raise RolloutError(f"{self.url} does not number its answers from 0 to {num_samples - 1} (index).")
        return [self._rollout(prompt, choices[places.index(place)]) for place in range(num_samples)]

    def _rollout(self, prompt: Sequence[int], choice: dict[str, Any]) -> Rollout:
        tokens, log_probs = choice.get("token_ids"), choice.get("logprobs")
        log_probs = log_probs.get("token_logprobs") if isinstance(log_probs, dict) else None
        is_whole = isinstance(tokens, list) and isinstance(log_probs, list) and len(tokens) == len(log_probs) > 0
        if not is_whole or None in log_probs:
            raise RolloutError(
                f"{self.url} gave an answer without token ids and a log-prob for each: use a vLLM that knows "
                "return_token_ids, or sampler.server: transformers."
            )
        self._check_count(len(tokens))
        read = choice.get("prompt_token_ids")
        size = self.settings.vocab_size
        wrong = [token for token in tokens if type(token) is not int or not 0 <= token < size]
        if wrong or (read is not None and read != list(prompt)):
            what = f" ({_format_value(wrong[0])} is no token id below {size})" if wrong else ""
            raise RolloutError(f"{self.url} reads or writes other tokens than this model{what}: it serves another one.")
        for value in log_probs:
            if type(value) not in (int, float) or not _LEAST_LOG_PROB < value <= MOST_LOG_PROB:
                raise RolloutError(
                    f"{self.url} gave a token the log-prob {_format_value(value)}, which is no number from "
                    f"{_LEAST_LOG_PROB:g} to 0: look at the server's log, its weights or their dtype may be wrong."
                )
        whole = torch.tensor([*prompt, *tokens], dtype=torch.int64)
        return Rollout(whole, len(prompt), torch.tensor(log_probs).float(), choice.get("finish_reason") == "stop")


def _adapter_name(folder: Path) -> str:
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
        self._tokenizer, self._stop = Tokenizer.from_file(str(tokenizer_file)), stop_token
        self._bos_tokens = self._tokenizer.encode("").ids  # special tokens that the server adds before each text

    def check(self) -> None:
        """Check the server, see :class:`Server`."""
        post_json(f"{self.root}/health", None, timeout=self.settings.timeout)

    def load_weights(self, folder: Path, previous: Path | None) -> None:
        """Load weights, see :class:`Server`."""
        # Requests define the sampling, and a tokenizer that cleans up text would change the tokens.
        write_json(folder / "generation_config.json", self._generation_config())
        if (path := folder / "tokenizer_config.json").is_file():
            write_json(path, {**read_json(path), "clean_up_tokenization_spaces": False})
        if previous is not None:
            post_json(f"{self.root}/reset", {}, timeout=self.settings.weights_timeout)
        self.model_name = str(folder)
        body = {"model": self.model_name}
        said = post_json(f"{self.root}/load_model", body, timeout=self.settings.weights_timeout, reads_json=False)
        if '"ready"' not in said:
            raise RolloutError(f"The server did not load {folder} ({said.strip()[-300:]}): it has to see this folder.")

    def _generation_config(self) -> dict[str, Any]:
        return {
            "do_sample": True,
            "temperature": self.settings.temperature,
            "top_k": 0,
            "top_p": 1.0,
            "repetition_penalty": 1.0,
            "max_new_tokens": self.settings.max_new_tokens,
            "eos_token_id": self._stop,
            "pad_token_id": self._stop,
        }

    def sample(self, prompt: Sequence[int], num_samples: int, seed: int | None) -> list[Rollout]:
        """Sample answers, see :class:`Server`."""
        return [self._sample_one(prompt, seed, number) for number in range(num_samples)]

    def _sample_one(self, prompt: Sequence[int], seed: int | None, number: int) -> Rollout:
        begins = len(self._bos_tokens) if list(prompt[: len(self._bos_tokens)]) == self._bos_tokens else 0
        text = self._tokenizer.decode(list(prompt[begins:]), skip_special_tokens=False)
        how = self._generation_config()
        if seed is None:
            how = {name: how[name] for name in ("max_new_tokens", "eos_token_id", "pad_token_id")} | {
                "do_sample": False
            }
        body = {"model": self.model_name, "prompt": text, "generation_config": json.dumps(how)}
        if seed is not None:
            body["seed"] = (seed + number) & (2**63 - 1)
        reply = self._request_completions(body, prompt, 1)
        usage = reply.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        read, count = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if type(read) is not int or type(count) is not int or count < 0:
            raise RolloutError(f"{self.url} does not say how many tokens it read and wrote (usage).")
        if read != len(prompt):
            raise RolloutError(
                f"{self.url} reads {read} tokens in the place of the prompt's {len(prompt)}: its text does not become "
                "the same tokens there; change the prompt, or use a server that takes token ids."
            )
        self._check_count(count)
        return self._rollout(prompt, reply["choices"][0], count)

    def _rollout(self, prompt: Sequence[int], choice: dict[str, Any], count: int) -> Rollout:
        text = choice.get("text")
        if not isinstance(text, str):
            raise RolloutError(f"{self.url} gave an answer without a text, its text is {_format_value(text)}.")
        text = _SURROGATE.sub("\ufffd", text)  # a tokenizer cannot encode a lone surrogate
        tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        finished = len(tokens) + 1 == count
        whole = len(tokens) == count and choice.get("finish_reason") == "length"
        if "\ufffd" in text or not (finished or whole):
            tokens, finished = [], False  # an empty answer, which is dropped and counted
        elif finished:
            tokens = [*tokens, self._stop]
        return Rollout(torch.tensor([*prompt, *tokens], dtype=torch.int64), len(prompt), None, finished)
