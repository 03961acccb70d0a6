"""The servers that answer in the trainer's place: how each is asked, and how it gets new weights."""

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

from torchtune.modules.conversion import complete_conversions
from torchtune.modules.peft import owned_parameters
from torchtune.rlhf._http import post_json
from torchtune.rlhf._rollouts import MOST_LOG_PROB, Rollout, RolloutError
from torchtune.utils import read_json, write_json

# Most bytes of a reply: a token with its text and log-probs has about 300, a token of the prompt about 8.
_REPLY_BYTES, _TOKEN_BYTES, _PROMPT_TOKEN_BYTES = 2**20, 1024, 16
_LEAST_LOG_PROB = -9999.0  # vLLM writes it for minus infinity
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Asked:
    """What a server is asked for.

    Attributes:
        max_new_tokens: most tokens of an answer.
        temperature: divides the logits.
        stop_tokens: each ends an answer.
        vocab_size: tokens of an answer are below it.
        timeout: seconds for the answers to a prompt.
        weights_timeout: seconds for new weights.
    """

    max_new_tokens: int
    temperature: float
    stop_tokens: list[int]
    vocab_size: int
    timeout: float
    weights_timeout: float


class Server(ABC):
    """A server with an OpenAI-compatible ``/v1/completions`` endpoint.

    Args:
        url: up to and with ``/v1``.
        model_name: that it gives the model; None where the folder of the weights is the name.
        asked: of every answer.

    Attributes:
        gives_log_probs: whether it gives those of the tokens that it samples.
        requests: number of them at once.
    """

    gives_log_probs = True
    requests = 64

    def __init__(self, url: str, model_name: str | None, asked: Asked) -> None:
        self.url, self.root = url.rstrip("/"), url.rstrip("/").removesuffix("/v1")
        self.model_name, self.asked = model_name, asked

    def contents(self, model: nn.Module) -> str:
        """What of the model is written for it; see :meth:`CheckpointStore.save`."""
        return "merged" if owned_parameters(model) else "model"

    @abstractmethod
    def check(self) -> None:
        """See that it is there and serves the model. Raises :class:`RolloutError`."""

    @abstractmethod
    def take(self, folder: Path, previous: Path | None) -> None:
        """Have it take the weights in ``folder``; those in ``previous`` are no longer needed."""

    @abstractmethod
    def answers(self, prompt: Sequence[int], num_samples: int, seed: int | None) -> list[Rollout]:
        """Answer a prompt; without a seed the answers are the likeliest ones."""

    def _complete(self, body: dict[str, Any], prompt: Sequence[int], num_samples: int) -> dict[str, Any]:
        """Send a request; return a reply of the right model with a choice, a mapping, for each answer."""
        url = f"{self.url}/completions"
        of_answer = _TOKEN_BYTES * self.asked.max_new_tokens + _PROMPT_TOKEN_BYTES * len(prompt)
        most_bytes = _REPLY_BYTES + num_samples * of_answer
        reply = post_json(url, body, timeout=self.asked.timeout, most_bytes=most_bytes)
        choices = reply.get("choices") if isinstance(reply, dict) else None
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise RolloutError(f"{url} replies without choices: is it an OpenAI-compatible server?")
        served = reply.get("model")
        if not isinstance(served, str) or served.removesuffix("@main") != body["model"]:
            raise RolloutError(
                f"{url} answers with the model {_shown(served)}, not with '{body['model']}': start the server without "
                "a fixed model, or correct the url."
            )
        if len(choices) != num_samples:
            raise RolloutError(f"{url} gave {len(choices)} answers in the place of {num_samples} to a prompt.")
        return reply

    def _check_count(self, count: int) -> None:
        """Raise where an answer has more tokens than were asked for."""
        if count > self.asked.max_new_tokens:
            raise RolloutError(
                f"{self.url} gave an answer of {count} tokens, and max_new_tokens is {self.asked.max_new_tokens}: it "
                "does not read the limit of a request."
            )


def _shown(value: Any) -> str:
    """A value of a reply for messages: short, on one line."""
    return repr(value)[:100] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


class VLLMServer(Server):
    """vLLM: tokens in, tokens with their log-probs out.

    Adapters are loaded under a new name each time (``/v1/load_lora_adapter``), so that nothing that was cached for the
    former ones is used again. Whole weights are reloaded from the folder (``/collective_rpc`` with
    ``reload_weights``), then its prefix cache is cleared.
    """

    _hint = ""

    def contents(self, model: nn.Module) -> str:
        """Adapters alone, where the model has some and PEFT's layout holds them."""
        if any(one.owned_parameters(model) and not one.peft_config(model) for one in complete_conversions(model)):
            self._hint = "start vLLM with VLLM_SERVER_DEV_MODE=1"
            return "merged"
        has_adapters = bool(owned_parameters(model))
        self._hint = (
            "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            if has_adapters
            else "start vLLM with VLLM_SERVER_DEV_MODE=1"
        )
        return "adapter" if has_adapters else "model"

    def check(self) -> None:
        """See :class:`Server`."""
        reply = post_json(f"{self.url}/models", None, timeout=self.asked.timeout)
        entries = reply.get("data") if isinstance(reply, dict) else None
        entries = entries if isinstance(entries, list) else []
        names = [str(entry["id"]) for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
        if self.model_name not in names:
            raise RolloutError(
                f"{self.url} serves {', '.join(names)[:200] or 'no model'}, not '{self.model_name}': correct "
                "sampler.model_name or the url."
            )

    def take(self, folder: Path, previous: Path | None) -> None:
        """See :class:`Server`."""
        try:
            if (folder / "adapter_config.json").exists():
                self._control("/v1/load_lora_adapter", {"lora_name": _adapter(folder), "lora_path": str(folder)})
                self.model_name = _adapter(folder)
                if previous is not None:
                    self._control("/v1/unload_lora_adapter", {"lora_name": _adapter(previous)})
            else:
                reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
                self._control("/collective_rpc", reload)
                said = self._control("/reset_prefix_cache", {})
                if '"success":false' in said.replace(" ", ""):
                    raise RolloutError(f"{self.root}/reset_prefix_cache did not succeed: another client is using it.")
        except RolloutError as error:
            raise RolloutError(f"The server takes no new weights: {self._hint} ({error})") from error

    def _control(self, path: str, body: dict[str, Any]) -> str:
        return post_json(f"{self.root}{path}", body, timeout=self.asked.weights_timeout, reads_json=False)

    def answers(self, prompt: Sequence[int], num_samples: int, seed: int | None) -> list[Rollout]:
        """See :class:`Server`."""
        body = {
            "model": self.model_name,
            "prompt": list(prompt),
            "n": num_samples,
            "max_tokens": self.asked.max_new_tokens,
            "temperature": 0.0 if seed is None else self.asked.temperature,
            "stop_token_ids": self.asked.stop_tokens,
            "logprobs": 1,
            "return_token_ids": True,
            # A model's own generation_config.json would truncate the distribution.
            **{"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
        }
        if seed is not None:
            body["seed"] = seed & (2**63 - 1)
        choices = self._complete(body, prompt, num_samples)["choices"]
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
        size = self.asked.vocab_size
        wrong = [token for token in tokens if type(token) is not int or not 0 <= token < size]
        if wrong or (read is not None and read != list(prompt)):
            what = f" ({_shown(wrong[0])} is no token id below {size})" if wrong else ""
            raise RolloutError(f"{self.url} reads or writes other tokens than this model{what}: it serves another one.")
        for value in log_probs:
            if type(value) not in (int, float) or not _LEAST_LOG_PROB < value <= MOST_LOG_PROB:
                raise RolloutError(
                    f"{self.url} gave a token the log-prob {_shown(value)}, which is no number from "
                    f"{_LEAST_LOG_PROB:g} to 0: look at the server's log, its weights or their dtype may be wrong."
                )
        whole = torch.tensor([*prompt, *tokens], dtype=torch.int64)
        return Rollout(whole, len(prompt), torch.tensor(log_probs).float(), choice.get("finish_reason") == "stop")


def _adapter(folder: Path) -> str:
    return f"{folder.parent.name}-{folder.name}"


class TransformersServer(Server):
    """``transformers serve``: text in, text out, one answer a request, no log-probs.

    New weights are a folder of another name, which the server loads when it is asked for that model. An answer
    becomes tokens again; it is dropped unless they are as many as the server has sampled.
    """

    gives_log_probs = False
    requests = 1  # it samples one after another, and the seed of a request is that of the process

    def __init__(self, url: str, model_name: str | None, asked: Asked, tokenizer_file: Path, stop_token: int) -> None:
        super().__init__(url, model_name, asked)
        if not tokenizer_file.is_file():
            raise RolloutError(f"sampler: {tokenizer_file} is not there, and a server of texts needs it.")
        self._tokenizer, self._stop = Tokenizer.from_file(str(tokenizer_file)), stop_token
        self._before = self._tokenizer.encode("").ids  # what the server puts before each text

    def check(self) -> None:
        """See :class:`Server`."""
        post_json(f"{self.root}/health", None, timeout=self.asked.timeout)

    def take(self, folder: Path, previous: Path | None) -> None:
        """See :class:`Server`."""
        # Sampled is what the request says, and a text that is cleaned up becomes other tokens.
        write_json(folder / "generation_config.json", self._generation_config())
        if (path := folder / "tokenizer_config.json").is_file():
            write_json(path, {**read_json(path), "clean_up_tokenization_spaces": False})
        if previous is not None:
            post_json(f"{self.root}/reset", {}, timeout=self.asked.weights_timeout)
        self.model_name = str(folder)
        body = {"model": self.model_name}
        said = post_json(f"{self.root}/load_model", body, timeout=self.asked.weights_timeout, reads_json=False)
        if '"ready"' not in said:
            raise RolloutError(f"The server did not load {folder} ({said.strip()[-300:]}): it has to see this folder.")

    def _generation_config(self) -> dict[str, Any]:
        return {
            "do_sample": True,
            "temperature": self.asked.temperature,
            "top_k": 0,
            "top_p": 1.0,
            "repetition_penalty": 1.0,
            "max_new_tokens": self.asked.max_new_tokens,
            "eos_token_id": self._stop,
            "pad_token_id": self._stop,
        }

    def answers(self, prompt: Sequence[int], num_samples: int, seed: int | None) -> list[Rollout]:
        """See :class:`Server`."""
        return [self._answer(prompt, seed, number) for number in range(num_samples)]

    def _answer(self, prompt: Sequence[int], seed: int | None, number: int) -> Rollout:
        begins = len(self._before) if list(prompt[: len(self._before)]) == self._before else 0
        text = self._tokenizer.decode(list(prompt[begins:]), skip_special_tokens=False)
        how = self._generation_config()
        if seed is None:
            how = {name: how[name] for name in ("max_new_tokens", "eos_token_id", "pad_token_id")} | {
                "do_sample": False
            }
        body = {"model": self.model_name, "prompt": text, "generation_config": json.dumps(how)}
        if seed is not None:
            body["seed"] = (seed + number) & (2**63 - 1)
        reply = self._complete(body, prompt, 1)
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
            raise RolloutError(f"{self.url} gave an answer without a text, its text is {_shown(text)}.")
        text = _SURROGATE.sub("\ufffd", text)  # no tokenizer takes half a character
        tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        finished = len(tokens) + 1 == count
        whole = len(tokens) == count and choice.get("finish_reason") == "length"
        if "\ufffd" in text or not (finished or whole):
            tokens, finished = [], False  # no answer: it is dropped, and counted
        elif finished:
            tokens = [*tokens, self._stop]
        return Rollout(torch.tensor([*prompt, *tokens], dtype=torch.int64), len(prompt), None, finished)
