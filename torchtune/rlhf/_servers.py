"""The servers that answer in the trainer's place: how each is asked, and how it gets new weights."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from torchtune.modules.peft import get_adapter_params
from torchtune.rlhf._http import post_json
from torchtune.rlhf._rollouts import Rollout, RolloutError
from torchtune.utils import read_json, write_json


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
        return "merged" if get_adapter_params(model) else "model"

    @abstractmethod
    def check(self) -> None:
        """See that it is there and serves the model. Raises :class:`RolloutError`."""

    @abstractmethod
    def take(self, folder: Path, previous: Path | None) -> None:
        """Have it take the weights in ``folder``; those in ``previous`` are no longer needed."""

    @abstractmethod
    def answers(self, prompt: Sequence[int], num_samples: int, seed: int | None) -> list[Rollout]:
        """Answer a prompt; without a seed the answers are the likeliest ones."""

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        url = f"{self.url}/completions"
        reply = post_json(url, body, timeout=self.asked.timeout)
        if not isinstance(reply, dict) or not isinstance(reply.get("choices"), list):
            raise RolloutError(f"{url} replies without choices: is it an OpenAI-compatible server?")
        served = str(reply.get("model"))
        if served.removesuffix("@main") != body["model"]:
            raise RolloutError(
                f"{url} answers with the model '{served}', not with '{body['model']}': start the server without a "
                "fixed model, or correct the url."
            )
        return reply


class VLLMServer(Server):
    """vLLM: tokens in, tokens with their log-probs out.

    Adapters are loaded under a new name each time (``/v1/load_lora_adapter``), so that nothing that was cached for the
    former ones is used again. Whole weights are reloaded from the folder (``/collective_rpc`` with
    ``reload_weights``), then its prefix cache is cleared.
    """

    _hint = ""

    def contents(self, model: nn.Module) -> str:
        """Adapters alone, where the model has some."""
        has_adapters = bool(get_adapter_params(model))
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
        names = [str(entry.get("id")) for entry in entries or [] if isinstance(entry, dict)]
        if self.model_name not in names:
            raise RolloutError(
                f"{self.url} serves {', '.join(names) or 'no model'}, not '{self.model_name}': correct "
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
        choices = sorted(self._complete(body)["choices"], key=lambda choice: choice.get("index", 0))
        if len(choices) != num_samples:
            raise RolloutError(f"{self.url} gave {len(choices)} answers in the place of {num_samples} to a prompt.")
        return [self._rollout(prompt, choice) for choice in choices]

    def _rollout(self, prompt: Sequence[int], choice: dict[str, Any]) -> Rollout:
        tokens, log_probs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if not tokens or not log_probs or len(tokens) != len(log_probs) or None in log_probs:
            raise RolloutError(
                f"{self.url} gave an answer without token ids and a log-prob for each: use a vLLM that knows "
                "return_token_ids, or sampler.server: transformers."
            )
        read = choice.get("prompt_token_ids")
        if (read is not None and list(read) != list(prompt)) or max(tokens) >= self.asked.vocab_size:
            raise RolloutError(f"{self.url} reads or writes other tokens than this model: it serves another one.")
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
        reply = self._complete(body)
        usage = reply.get("usage") or {}
        read, count = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if read is None or count is None or not reply["choices"]:
            raise RolloutError(f"{self.url} does not say how many tokens it read and wrote (usage).")
        if read != len(prompt):
            raise RolloutError(
                f"{self.url} reads {read} tokens in the place of the prompt's {len(prompt)}: its text does not become "
                "the same tokens there; change the prompt, or use a server that takes token ids."
            )
        return self._rollout(prompt, reply["choices"][0], count)

    def _rollout(self, prompt: Sequence[int], choice: dict[str, Any], count: int) -> Rollout:
        text = str(choice.get("text", ""))
        tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        finished = len(tokens) + 1 == count
        whole = len(tokens) == count and choice.get("finish_reason") == "length"
        if "\ufffd" in text or not (finished or whole):
            tokens, finished = [], False  # no answer: it is dropped, and counted
        elif finished:
            tokens = [*tokens, self._stop]
        return Rollout(torch.tensor([*prompt, *tokens], dtype=torch.int64), len(prompt), None, finished)
