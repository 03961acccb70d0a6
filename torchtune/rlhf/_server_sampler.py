"""Sampler of answers from inference servers, and the servers: requests for answers, and loading of new weights."""

import json
import re
import shutil
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from weakref import finalize

import torch
from tokenizers import Tokenizer
from torch import nn

from torchtune.checkpoints import CheckpointStore
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX
from torchtune.generation import evaluating
from torchtune.modules.conversion import get_conversions
from torchtune.modules.loss import token_log_probs
from torchtune.modules.peft import owned_parameters
from torchtune.rlhf._http import NoReplyError, post_json
from torchtune.rlhf._local_sampler import check_sampling, check_stop_tokens, is_tensor_parallel
from torchtune.rlhf._rollouts import MOST_LOG_PROB, Rollout, RolloutError, collate_rollouts
from torchtune.training.parallel import Ranks, checksum_trained
from torchtune.utils import get_logger, read_json, write_json

# Limits of a reply's size: an answer token with text and log-probs takes about 300 bytes, a prompt token about 8.
_REPLY_BYTES = 2**20
_TOKEN_BYTES = 1024
_PROMPT_TOKEN_BYTES = 16
_MOST_SEED = 2**63 - 1  # servers take seeds of 64 bits with a sign
_LEAST_LOG_PROB = -9999.0  # vLLM's value for minus infinity
_SURROGATE = re.compile("[\ud800-\udfff]")
# Number of answers per step for which log-probs are compared with the trainer.
_NUM_COMPARED = 4
# Limits of the bias in the first step's answers: absolute (importance ratio, or nats), and in standard errors.
_MOST_BIAS = 0.05
_MOST_STANDARD_ERRORS = 5.0
# Seconds between two attempts to reach a server that restarts.
_RETRY_INTERVAL = 0.5


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
    if isinstance(value, str | int | float | None):
        return repr(value)[:100]
    return f"a {type(value).__name__}"


def _as_dict(value: Any) -> dict[str, Any]:
    """Return a dict of a reply; empty for any other value, which a server should not send."""
    return value if isinstance(value, dict) else {}


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
        names = []
        for model in models if isinstance(models, list) else []:
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
        try:
            if (folder / "adapter_config.json").exists():
                self._load_adapter(folder, previous)
            else:
                self._reload_weights(folder)
        except RolloutError as error:
            raise type(error)(f"The server takes no new weights: {self._start_hint} ({error})") from error

    def _load_adapter(self, folder: Path, previous: Path | None) -> None:
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
            "temperature": 0.0 if seed is None else self.settings.temperature,
            "stop_token_ids": self.settings.stop_tokens,
            "logprobs": 1,
            "return_token_ids": True,
            # These override the model's generation_config.json, which would truncate the distribution.
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        if seed is not None:
            body["seed"] = seed & _MOST_SEED
        choices = self._request_completions(body, prompt, num_samples)["choices"]
        choice_of_answer = {}  # by the number of the answer
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
        invalid = [token for token in tokens if type(token) is not int or not 0 <= token < vocab_size]
        prompt_tokens = choice.get("prompt_token_ids")
        has_other_prompt = prompt_tokens is not None and prompt_tokens != list(prompt)
        if invalid or has_other_prompt:
            example = ""
            if invalid:
                example = f" ({_format_value(invalid[0])} is no token id below {vocab_size})"
            raise RolloutError(
                f"{self.url} reads or writes other tokens than this model{example}: it serves another one."
            )
        for value in log_probs:
            if type(value) not in (int, float) or not _LEAST_LOG_PROB < value <= MOST_LOG_PROB:
                raise RolloutError(
                    f"{self.url} gave a token the log-prob {_format_value(value)}, which is no number from "
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
        return [self._sample_one(prompt, seed, number) for number in range(num_samples)]

    def _sample_one(self, prompt: Sequence[int], seed: int | None, number: int) -> Rollout:
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
            body["seed"] = (seed + number) & _MOST_SEED
        reply = self._request_completions(body, prompt, 1)
        usage = _as_dict(reply.get("usage"))
        num_prompt_tokens = usage.get("prompt_tokens")
        num_sampled = usage.get("completion_tokens")
        if type(num_prompt_tokens) is not int or type(num_sampled) is not int or num_sampled < 0:
            raise RolloutError(f"{self.url} does not say how many tokens it read and wrote (usage).")
        if num_prompt_tokens != len(prompt):
            raise RolloutError(
                f"{self.url} reads {num_prompt_tokens} tokens in the place of the prompt's {len(prompt)}: its text "
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
        is_finished = len(tokens) + 1 == num_sampled  # the text lacks the stop token
        is_truncated = len(tokens) == num_sampled and choice.get("finish_reason") == "length"
        # U+FFFD stands for a part of a character, so its tokens are unknown.
        is_dropped = "\ufffd" in text or not (is_finished or is_truncated)
        if is_dropped:
            tokens = []
        elif is_finished:
            tokens = [*tokens, self._stop_token]
        return Rollout(
            tokens=torch.tensor([*prompt, *tokens], dtype=torch.int64),
            prompt_len=len(prompt),
            log_probs=None,
            finished=is_finished and not is_dropped,
        )


class ServerSampler:
    """Sampler that requests answers from a server with an OpenAI-compatible ``/v1/completions`` endpoint.

    Whenever the trained weights have changed, the sampler saves them to a new folder below ``folder``, and the server
    loads them. This also happens once before training, so that a run fails early if the server cannot load weights. The
    last folder is deleted at the end.

    With several URLs, the answers to a prompt come from one of the servers, and all servers load the weights. If a
    server does not reply, another server gets its prompts, until the first server loads the weights of a later step. If
    no server replies, the sampler waits up to ``weights_timeout`` seconds for the server to restart, sends the weights,
    and repeats the request.

    ``vllm`` uses token ids and returns log-probs. Adapters are loaded by name, which requires ``--enable-lora`` and
    ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``; full weights are reloaded, which requires ``VLLM_SERVER_DEV_MODE=1``. For a
    ``temperature`` other than 1, start the server with ``--logprobs-mode processed_logprobs``. This sampler is written
    for the published interface of vLLM 0.33, but not yet tested with a server.

    ``transformers`` (``transformers serve``) uses text and returns no log-probs. The trainer computes the old log-probs
    before the first update. An answer is dropped if tokenizing its text does not give the number of sampled tokens;
    ``answers/dropped`` counts dropped answers. The server must run without a fixed model, and unloads all its models
    whenever the weights change.

    Args:
        model: the trained model.
        tokenizer: provides the default stop tokens.
        url: URL of the server, ending with ``/v1``, or a list of URLs.
        server: kind of the servers.
        checkpoint_dir: folder of the model's checkpoint, for the tokenizer and other small files.
        folder: folder for the weights; trainer and server must access it under the same path.
        model_name: name of the model in vLLM; by default ``checkpoint_dir``.
        max_new_tokens: maximum number of tokens in an answer.
        temperature: divides the logits, in sampling and in the loss.
        stop_tokens: ids of tokens that end an answer; by default the tokenizer's stop tokens. ``transformers`` uses
            only one of them, ``eos_id`` if possible, because a text does not show which token was sampled.
        timeout: maximum seconds for the answers to a prompt.
        weights_timeout: maximum seconds to load new weights.
        max_difference: maximum mean \\|Δ log π\\| of server and trainer over the first answers of a step; a larger
            difference indicates that the server has other weights. The answers of the first step are also checked for
            a bias of their log-probs, which top-p or top-k cause. None disables the checks.

    Attributes:
        gives_log_probs: whether answers have log-probs.

    Raises:
        RolloutError: the server is unreachable, too slow, serves another model, or cannot load the weights.
        CheckpointError: the weights cannot be saved.

    Example:
        >>> sampler = torchtune.rlhf.ServerSampler(
        ...     model, tokenizer, url="http://localhost:8000/v1", server="vllm",
        ...     checkpoint_dir=checkpoint, folder=folder, temperature=1.0
        ... )  # doctest: +SKIP
        >>> rollouts = sampler([[1, 65, 66], [1, 70]], num_samples=8, seeds=[0, 1])  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        url: str | Sequence[str],
        server: Literal["vllm", "transformers"],
        checkpoint_dir: str,
        folder: str,
        model_name: str | None = None,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        stop_tokens: Sequence[int] | None = None,
        timeout: float = 600.0,
        weights_timeout: float = 600.0,
        max_difference: float | None = 0.2,
    ) -> None:
        check_sampling(max_new_tokens, temperature)
        if is_tensor_parallel(model):
            raise RolloutError(
                "sampler: the ranks of a tensor-parallel group could get different answers from a server: set "
                "tensor_parallel_dim to 1, or sample with torchtune.rlhf.LocalSampler."
            )
        self.model = model
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.stop_tokens = check_stop_tokens(stop_tokens, tokenizer, model)
        self.max_difference = max_difference
        settings = RequestSettings(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            stop_tokens=self.stop_tokens,
            vocab_size=model.tok_embeddings.weight.shape[0],
            timeout=timeout,
            weights_timeout=weights_timeout,
        )
        urls = [url] if isinstance(url, str) else url
        if not urls:
            raise RolloutError("sampler.url is empty: give the url of a server, or of several.")
        self._servers = []
        for server_url in urls:
            self._servers.append(
                _make_server(
                    server, server_url, model_name or checkpoint_dir, settings, Path(checkpoint_dir), tokenizer
                )
            )
        self._urls = ", ".join(endpoint.url for endpoint in self._servers)
        self.gives_log_probs = self._servers[0].gives_log_probs  # all servers are of one kind
        self._ranks = Ranks(RolloutError)
        self._ranks.run_on_rank_0(self._check_servers)

        weights_folder = self._ranks.broadcast(Path(folder).resolve() / f"weights-{uuid.uuid4().hex[:12]}")
        self._store = CheckpointStore(
            {"policy": {"checkpoint_dir": checkpoint_dir}}, weights_folder, keep_last_n_checkpoints=1
        )
        # Every server notes how it has to be started for these contents, which are the same for all.
        contents = [endpoint.contents(model) for endpoint in self._servers]
        self._contents = contents[0]
        self._store.check_contents(model, contents=self._contents, resumable=False)
        if self._ranks.rank == 0:
            finalize(self, shutil.rmtree, weights_folder, ignore_errors=True)
        self._loaded_fingerprint: list[int] | None = None
        self._num_saves = 0
        self._num_dropped = 0
        self._lock = threading.Lock()  # one request at a time waits for a server that restarts
        self._is_distribution_checked = max_difference is None
        self._lost: set[str] = set()  # URLs of servers that failed to reply since the last weights
        self._send_weights()

    def _check_servers(self) -> None:
        for server in self._servers:
            server.check()

    def _send_weights(self) -> None:
        """Save the weights if they have changed, and let the servers load them."""
        fingerprint = checksum_trained(self.model)
        if not self._ranks.any(fingerprint != self._loaded_fingerprint):
            return
        previous = None
        if self._num_saves:
            previous = self._store.output_dir / f"step_{self._num_saves}"
        self._num_saves += 1
        self._path = self._store.save(f"step_{self._num_saves}", self.model, contents=self._contents)
        # Rank 0 notifies the servers; every rank stores the new model name.
        name, self._lost = self._ranks.run_on_rank_0(lambda: self._load_weights(previous))
        for server in self._servers:
            server.model_name = name
        self._loaded_fingerprint = fingerprint

    def _load_weights(self, previous: Path | None) -> tuple[str | None, set[str]]:
        """Let all servers load the weights concurrently; return the model's name and the servers that do not reply."""

        def load(server: Server) -> None:
            try:
                server.load_weights(self._path, None if server.url in self._lost else previous)
                self._lost.discard(server.url)
            except NoReplyError as error:
                if previous is None:  # before training: end the run early
                    raise
                self._lose(server, error)

        with ThreadPoolExecutor(len(self._servers)) as pool:
            list(pool.map(load, self._servers))
        if len(self._lost) == len(self._servers):
            self._wait_for(self._servers[0])
        reached = [server for server in self._servers if server.url not in self._lost]
        return reached[0].model_name, self._lost

    def _lose(self, server: Server, error: NoReplyError) -> None:
        """Note that a server does not reply; it gets no more prompts until it loads the next weights."""
        if server.url not in self._lost:  # the first of several requests that failed
            self._lost.add(server.url)
            get_logger().warning(f"{error} Other servers answer its prompts, or it is waited for.")

    def _wait_for(self, server: Server) -> None:
        """Wait until a server replies again, and let it load the weights."""
        deadline = time.monotonic() + server.settings.weights_timeout
        while True:
            try:
                server.load_weights(self._path, None)
                self._lost.discard(server.url)
                return
            except NoReplyError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_INTERVAL)

    def _sample(self, first: Server, prompt: Sequence[int], num_samples: int, seed: int | None) -> list[Rollout]:
        """Sample answers to a prompt; use another server if ``first`` does not reply, or retry after its restart."""
        for server in (first, *self._servers):
            if server.url not in self._lost:
                try:
                    return server.sample(prompt, num_samples, seed)
                except NoReplyError as error:
                    self._lose(server, error)
        with self._lock:
            if first.url in self._lost:  # another request may have waited for it meanwhile
                self._wait_for(first)
        return first.sample(prompt, num_samples, seed)

    def __call__(
        self, prompts: Sequence[Sequence[int]], num_samples: int, seeds: Sequence[int] | None = None
    ) -> list[Rollout]:
        """Sample answers, see :class:`Sampler <torchtune.rlhf.Sampler>`; without seeds, decoding is greedy."""
        self._send_weights()
        rollouts: list[Rollout] = []
        num_requests = sum(server.requests for server in self._servers)
        with self._ranks.raise_on_all(), ThreadPoolExecutor(num_requests) as pool:
            futures = []
            for i, prompt in enumerate(prompts):
                server = self._servers[i % len(self._servers)]
                seed = None if seeds is None else seeds[i]
                futures.append(pool.submit(self._sample, server, prompt, num_samples, seed))
            try:
                for future in futures:
                    rollouts.extend(future.result())
            finally:  # after an error, no more requests
                pool.shutdown(wait=False, cancel_futures=True)
        self._count_dropped(rollouts)
        if seeds is None:  # greedy answers are no samples
            return rollouts
        if self.gives_log_probs and self.max_difference is not None:
            compared = []
            for group in range(min(len(self._servers), len(prompts))):  # a prompt of each server
                first = group * num_samples
                compared += rollouts[first : first + min(num_samples, _NUM_COMPARED)]
            self._check_log_probs(compared)
        if not self._is_distribution_checked:
            self._is_distribution_checked = True
            self._check_distribution(rollouts)
        return rollouts

    def _count_dropped(self, rollouts: list[Rollout]) -> None:
        """Warn of the first answers that are dropped; dropped answers are empty."""
        dropped = sum(not rollout.answer for rollout in rollouts)
        if dropped and not self._num_dropped:
            get_logger().warning(
                f"{dropped} of {len(rollouts)} answers are dropped, as their texts do not become the tokens that the "
                "server sampled; answers/dropped counts them."
            )
        self._num_dropped += dropped

    @torch.no_grad()
    def _evaluate(self, rollouts: list[Rollout]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the model's log-probs and entropies at answer tokens, and the server's log-probs, ``[t]`` each."""
        batch = collate_rollouts(rollouts, [0.0] * len(rollouts)).to(self.model.tok_embeddings.weight.device)
        is_labeled = batch.labels != CROSS_ENTROPY_IGNORE_IDX
        with evaluating(self.model):
            hidden = self.model(**batch.model_inputs(), output="hidden")
            log_probs, entropies = token_log_probs(
                hidden, batch.labels, self.model.output, self.temperature, return_entropy=True
            )
        server_log_probs = None
        if "sampled" in batch.per_token:
            server_log_probs = batch.per_token["sampled"][is_labeled]
        return log_probs[is_labeled], entropies[is_labeled], server_log_probs

    def _check_distribution(self, rollouts: list[Rollout]) -> None:
        """Check that answers are samples from the model's full distribution.

        For such samples, the mean log-prob is the negative entropy, and the mean of π / π_server is 1. With top-p or
        top-k, the mean log-prob is larger, and the mean ratio is the probability of the tokens that are not cut off.
        """
        if self._ranks.any(not all(rollout.answer for rollout in rollouts)):  # dropping answers biases the means
            return
        ratio_biases = []
        entropy_biases = []
        for rollout in rollouts:  # one by one, which needs the least memory
            log_probs, entropies, server_log_probs = self._evaluate([rollout])
            if server_log_probs is not None:
                ratio_biases.append((log_probs - server_log_probs).exp() - 1.0)
            entropy_biases.append(log_probs + entropies)
        with self._ranks.raise_on_all():
            if ratio_biases:
                self._check_bias(torch.cat(ratio_biases), "above 1 in the importance ratio")
            self._check_bias(torch.cat(entropy_biases), "nats above the negative entropy")

    def _check_bias(self, deviations: torch.Tensor, description: str) -> None:
        """Check that the mean of the tokens' deviations ``[t]`` is near 0. Raises :class:`RolloutError`."""
        mean = deviations.mean().item()
        standard_error = (deviations.std() / len(deviations) ** 0.5).item()
        if abs(mean) > max(_MOST_BIAS, _MOST_STANDARD_ERRORS * standard_error):
            raise RolloutError(
                f"The answers of {self._urls} are no draws from the model's distribution at temperature "
                f"{self.temperature:g}: over {len(deviations)} tokens they are {mean:+.3f} ± {standard_error:.3f} "
                f"{description}. Start the server without top-p, top-k or a temperature of its own."
            )

    def _check_log_probs(self, rollouts: list[Rollout]) -> None:
        """Compare log-probs with the servers, to check that they have the model's weights."""
        log_probs, _, server_log_probs = self._evaluate(rollouts)
        difference = (log_probs - server_log_probs).abs().mean().item()
        with self._ranks.raise_on_all():
            if not difference <= self.max_difference:  # also for NaN
                raise RolloutError(
                    f"The log-probs of {self._urls} differ from the trainer's by {difference:.3g} on average "
                    f"(sampler.max_difference is {self.max_difference:g}): it has another model or other weights, or "
                    "gives them without temperature (start vLLM with --logprobs-mode processed_logprobs)."
                )


def _make_server(
    kind: str, url: str, model_name: str, settings: RequestSettings, checkpoint_dir: Path, tokenizer: Any
) -> Server:
    if kind == "vllm":
        return VLLMServer(url, model_name, settings)
    if kind == "transformers":
        stop_token = getattr(tokenizer, "eos_id", None)
        if stop_token not in settings.stop_tokens:
            stop_token = settings.stop_tokens[0]
        return TransformersServer(url, None, settings, checkpoint_dir / "tokenizer.json", stop_token)
    raise RolloutError(f"sampler.server is {kind!r}: it must be vllm or transformers.")
