"""Samplers of answers: in the training process, or from inference servers."""

import shutil
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Protocol
from weakref import finalize

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtune.checkpoints import CheckpointStore
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX
from torchtune.generation import evaluating, generate_tokens, images_of_row, seeded_draws
from torchtune.modules.loss import token_log_probs
from torchtune.rlhf._rollouts import Rollout, RolloutError, collate_rollouts
from torchtune.rlhf._servers import NoReplyError, RequestSettings, Server, make_server
from torchtune.training.parallel import Ranks, checksum_trained
from torchtune.utils import get_logger

# Number of answers per step for which log-probs are compared with the trainer.
_NUM_COMPARED = 4
# Limits of the bias in the first step's answers: absolute (importance ratio, or nats), and in standard errors.
_MOST_BIAS = 0.05
_MOST_STANDARD_ERRORS = 5.0
# Seconds between two attempts to reach a server that restarts.
_RETRY_INTERVAL = 0.5


class Sampler(Protocol):
    """Protocol of samplers, which sample answers to prompts during training.

    Attributes:
        temperature: temperature of the sampling distribution, which is not truncated.
        gives_log_probs: whether answers have log-probs; a missing attribute counts as True.
    """

    temperature: float

    def __call__(
        self, prompts: Sequence[Sequence[int]], num_samples: int, seeds: Sequence[int] | None = None
    ) -> list[Rollout]:
        """Sample ``num_samples`` answers per prompt; answer j of prompt i is item ``i * num_samples + j``.

        Args:
            prompts: token ids of each prompt.
            num_samples: number of answers per prompt.
            seeds: one seed per prompt; the same seed and prompt give the same answers.
        """


class LocalSampler:
    """Sampler that uses the model in training, without a copy of its weights.

    Each prompt is prefilled once for all of its answers. Finished answers leave the batch, and waiting prompts join it.
    Tokens are sampled from the full distribution, because top-k and top-p would make the probability ratio in the loss
    wrong.

    Args:
        model: the trained model; it samples in evaluation mode.
        tokenizer: provides the default stop tokens.
        max_new_tokens: maximum number of tokens in an answer.
        temperature: divides the logits, in sampling and in the loss.
        max_sequences: maximum number of answers to sample at the same time, at least the number per prompt; limits the
            memory of the KV cache. None sets no limit.
        stop_tokens: ids of tokens that end an answer; by default the tokenizer's stop tokens.

    Raises:
        RolloutError: a number is out of range.

    Example:
        >>> sampler = torchtune.rlhf.LocalSampler(model, tokenizer, max_new_tokens=4)
        >>> len(sampler([tokenizer.encode("the cat", add_eos=False)], num_samples=2, seeds=[0]))
        2
    """

    takes_images = True

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        max_sequences: int | None = None,
        stop_tokens: Sequence[int] | None = None,
    ) -> None:
        check_sampling(max_new_tokens, temperature, max_sequences)
        self.model = model
        self.stop_tokens = resolve_stop_tokens(stop_tokens, tokenizer, model)
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.max_sequences = max_sequences

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        num_samples: int,
        seeds: Sequence[int] | None = None,
        images: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Rollout]:
        """Sample answers, see :class:`Sampler <torchtune.rlhf.Sampler>`; without seeds, decoding is greedy.

        ``images`` has the images of each prompt, see :class:`torchtune.rlhf.Prompt`.
        """
        device = self.model.tok_embeddings.weight.device
        draws = None
        temperature = 0.0  # greedy
        if seeds is not None:
            # An answer depends on its seed and its number in the group alone, not on the other prompts of a batch.
            keys = []
            for seed in seeds:
                for number in range(num_samples):
                    keys.append((seed, number))
            draws = seeded_draws(keys, self.max_new_tokens, device)
            temperature = self.temperature
        row_images = None
        if images is not None:
            row_images = [images_of_row(prompt_images, device) for prompt_images in images]
        prompt_tensors = [torch.as_tensor(prompt, dtype=torch.int64) for prompt in prompts]
        generated = generate_tokens(
            self.model,
            [prompt.to(device) for prompt in prompt_tensors],
            max_new_tokens=self.max_new_tokens,
            num_samples=num_samples,
            temperature=temperature,
            stop_tokens=self.stop_tokens,
            draws=draws,
            max_sequences=self.max_sequences,
            images=row_images,
        )
        rollouts = []
        for index, answer in enumerate(generated.tokens):
            group = index // num_samples
            prompt = prompt_tensors[group]
            answer = answer.cpu()
            rollout = Rollout(
                tokens=torch.cat([prompt.cpu(), answer]),
                prompt_len=len(prompt),
                log_probs=generated.log_probs[index].float().cpu(),
                finished=int(answer[-1]) in self.stop_tokens,
                images={} if images is None else images[group],
            )
            rollouts.append(rollout)
        return rollouts


def check_sampling(max_new_tokens: int, temperature: float, max_sequences: int | None = None) -> None:
    """Check a sampler's settings. Raises :class:`RolloutError` if one is out of range."""
    if temperature <= 0:
        raise RolloutError(
            f"sampler.temperature is {temperature}: answers of a group have to differ, set it above 0 (1 is usual)."
        )
    if max_new_tokens < 1 or (max_sequences is not None and max_sequences < 1):
        raise RolloutError("sampler.max_new_tokens and sampler.max_sequences must be at least 1.")


def resolve_stop_tokens(stop_tokens: Sequence[int] | None, tokenizer: Any, model: nn.Module) -> list[int]:
    """Return the stop tokens, by default the tokenizer's. Raises :class:`RolloutError` for invalid ids."""
    if stop_tokens is None:
        return list(tokenizer.stop_tokens)
    vocab_size = model.tok_embeddings.weight.shape[0]
    if not stop_tokens or not all(0 <= token < vocab_size for token in stop_tokens):
        raise RolloutError(
            f"stop_tokens is {list(stop_tokens)}: give token ids below {vocab_size:,}, one at least, or null for the "
            "tokenizer's."
        )
    return list(stop_tokens)


def is_tensor_parallel(model: nn.Module) -> bool:
    """Return whether the model is tensor parallel."""
    for weight in model.parameters():
        if isinstance(weight, DTensor) and "tp" in (weight.device_mesh.mesh_dim_names or ()):
            return True
    return False


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
    before the first update. An answer is dropped if tokenizing its text does not give the number of sampled tokens, or
    if it may have been cut before its stop token; ``answers/dropped`` counts dropped answers. The server must run
    without a fixed model, and unloads all its models whenever the weights change.

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
        self.stop_tokens = resolve_stop_tokens(stop_tokens, tokenizer, model)
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
        model_name = model_name or checkpoint_dir
        self._servers: list[Server] = []
        for server_url in urls:
            self._servers.append(make_server(server, server_url, model_name, settings, Path(checkpoint_dir), tokenizer))
        self._urls = ", ".join(endpoint.url for endpoint in self._servers)
        self.gives_log_probs = self._servers[0].gives_log_probs  # all servers are of one kind

        def check_servers() -> None:
            for endpoint in self._servers:
                endpoint.check()

        self._ranks = Ranks(RolloutError)
        self._ranks.run_on_rank_0(check_servers)

        # Of this run alone, because it is deleted at the end, and vLLM keeps adapters by the name of their folder.
        weights_folder = self._ranks.broadcast(Path(folder).resolve() / f"weights-{uuid.uuid4().hex[:12]}")
        self._store = CheckpointStore(
            {"policy": {"checkpoint_dir": checkpoint_dir}}, weights_folder, keep_last_n_checkpoints=1
        )
        # Every server notes how it has to be started for these contents, which are the same for all.
        contents = [endpoint.contents(model) for endpoint in self._servers]
        self._contents = contents[0]
        # Weights are saved for the servers, without the training state of a checkpoint.
        self._store.check_contents(model, contents=self._contents, resumable=False)
        if self._ranks.rank == 0:
            finalize(self, shutil.rmtree, weights_folder, ignore_errors=True)
        self._loaded_fingerprint: list[int] | None = None  # of the weights on the servers; None: not sent yet
        self._num_saves = 0
        self._has_dropped = False  # whether dropped answers have been logged
        self._lock = threading.Lock()  # one request at a time waits for a server that restarts
        self._is_distribution_checked = max_difference is None
        self._lost: set[str] = set()  # URLs of servers that failed to reply since the last weights
        self._send_weights()  # a server that cannot load them ends the run here

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
        """Let all servers load the weights concurrently; return the model's name and the servers that do not reply.

        Args:
            previous: folder of the weights to unload; None before training.
        """

        def load(server: Server) -> None:
            # A server that was lost has restarted, and has no previous weights.
            unloaded = None if server.url in self._lost else previous
            try:
                server.load_weights(self._path, unloaded)
                self._lost.discard(server.url)
            except NoReplyError as error:
                if previous is None:  # before training: end the run early
                    raise
                self._lose(server, error)

        with ThreadPoolExecutor(len(self._servers)) as pool:
            list(pool.map(load, self._servers))  # `list` raises the error of a call
        if len(self._lost) == len(self._servers):  # without any server, the run waits for one
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
            if server.url in self._lost:
                continue
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
        num_requests = sum(server.requests for server in self._servers)  # as many as the servers take at a time
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
        # Dropped answers are empty; the first ones are logged, the metric answers/dropped counts all.
        num_dropped = sum(not rollout.answer for rollout in rollouts)
        if num_dropped and not self._has_dropped:
            self._has_dropped = True
            get_logger().warning(
                f"{num_dropped} of {len(rollouts)} answers are dropped, as their texts do not become the tokens that "
                "the server sampled; answers/dropped counts them."
            )
        if seeds is None:  # greedy answers are not samples
            return rollouts
        if self.gives_log_probs and self.max_difference is not None:
            compared = []
            num_compared = min(num_samples, _NUM_COMPARED)
            # Prompts are dealt out in the order of the servers: the first ones are a prompt of each.
            for group in range(min(len(self._servers), len(prompts))):
                first = group * num_samples
                compared += rollouts[first : first + num_compared]
            self._check_log_probs(compared)
        if not self._is_distribution_checked:  # once, because it takes a forward pass per answer
            self._is_distribution_checked = True
            self._check_distribution(rollouts)
        return rollouts

    @torch.no_grad()
    def _evaluate(self, rollouts: list[Rollout]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the model's log-probs and entropies at answer tokens, and the server's log-probs, ``[t]`` each."""
        device = self.model.tok_embeddings.weight.device
        batch = collate_rollouts(rollouts, advantages=[0.0] * len(rollouts)).to(device)  # advantages are not read
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
                f"The answers of {self._urls} are not samples from the model's distribution at temperature "
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
