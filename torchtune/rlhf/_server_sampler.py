"""Sampling from an inference server, which receives the trained weights before every step."""

import shutil
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import Any, Literal
from weakref import finalize

import torch
from torch import nn

from torchtune.checkpoints import CheckpointStore
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX
from torchtune.generation import evaluating
from torchtune.modules.loss import token_log_probs
from torchtune.rlhf._http import NoReplyError
from torchtune.rlhf._local_sampler import check_sampling, check_stop_tokens, is_tensor_parallel
from torchtune.rlhf._rollouts import Rollout, RolloutError, collate_rollouts
from torchtune.rlhf._servers import RequestSettings, Server, TransformersServer, VLLMServer
from torchtune.training import checksum_trained
from torchtune.training.parallel import Ranks
from torchtune.utils import get_logger

# Number of answers per step for which log-probs are compared with the trainer.
_NUM_COMPARED = 4
# Limits of the bias in the first step's answers: absolute (importance ratio, or nats), and in standard errors.
_MOST_BIAS, _MOST_ERRORS = 0.05, 5.0


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
        self.model, self.max_new_tokens, self.temperature = model, max_new_tokens, temperature
        self.stop_tokens, self.max_difference = check_stop_tokens(stop_tokens, tokenizer, model), max_difference
        rows = model.tok_embeddings.weight.shape[0]
        settings = RequestSettings(max_new_tokens, temperature, self.stop_tokens, rows, timeout, weights_timeout)
        self._servers = [
            _make_server(server, one, model_name or checkpoint_dir, settings, Path(checkpoint_dir), tokenizer)
            for one in ([url] if isinstance(url, str) else url)
        ]
        if not self._servers:
            raise RolloutError("sampler.url is empty: give the url of a server, or of several.")
        self._urls = ", ".join(one.url for one in self._servers)
        self.gives_log_probs = self._servers[0].gives_log_probs
        self._ranks = Ranks(RolloutError)
        self._ranks.run_on_rank_0(lambda: [one.check() for one in self._servers] and None)
        root = self._ranks.broadcast(Path(folder).resolve() / f"weights-{uuid.uuid4().hex[:12]}")
        self._store = CheckpointStore({"policy": {"checkpoint_dir": checkpoint_dir}}, root, keep_last_n_checkpoints=1)
        (self._contents,) = {one.contents(model) for one in self._servers}
        self._store.check_contents(model, contents=self._contents, resumable=False)
        if self._ranks.rank == 0:
            finalize(self, shutil.rmtree, root, ignore_errors=True)
        self._loaded_fingerprint: list[int] | None = None
        self._num_saves, self._num_dropped = 0, 0
        self._lock, self._is_compared = threading.Lock(), max_difference is None
        self._lost: set[str] = set()  # URLs of servers that failed to reply since the last weights
        self._send_weights()

    def _send_weights(self) -> None:
        """Save the weights if they have changed, and let the servers load them."""
        found = checksum_trained(self.model)
        if not self._ranks.any(found != self._loaded_fingerprint):
            return
        previous = self._store.output_dir / f"step_{self._num_saves}" if self._num_saves else None
        self._num_saves += 1
        self._path = self._store.save(f"step_{self._num_saves}", self.model, contents=self._contents)
        # Rank 0 notifies the servers; every rank stores the new model name.
        name, self._lost = self._ranks.run_on_rank_0(lambda: self._load_weights(previous))
        for server in self._servers:
            server.model_name = name
        self._loaded_fingerprint = found

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
        return next(one.model_name for one in self._servers if one.url not in self._lost), self._lost

    def _lose(self, server: Server, error: NoReplyError) -> None:
        if server.url not in self._lost:  # the first of several requests that failed
            self._lost.add(server.url)
            get_logger().warning(f"{error} Other servers answer its prompts, or it is waited for.")

    def _wait_for(self, server: Server) -> None:
        """Wait until a server replies again, and let it load the weights."""
        deadline = time.monotonic() + server.settings.weights_timeout
        while True:
            try:
                server.load_weights(self._path, None)
                return self._lost.discard(server.url)
            except NoReplyError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.5)

    def _sample(self, first: Server, *request: Any) -> list[Rollout]:
        """Sample answers to a prompt; use another server if ``first`` does not reply, or retry after its restart."""
        for server in (first, *self._servers):
            if server.url not in self._lost:
                try:
                    return server.sample(*request)
                except NoReplyError as error:
                    self._lose(server, error)
        with self._lock:
            if first.url in self._lost:
                self._wait_for(first)
        return first.sample(*request)

    def __call__(
        self, prompts: Sequence[Sequence[int]], num_samples: int, seeds: Sequence[int] | None = None
    ) -> list[Rollout]:
        """Sample answers, see :class:`Sampler <torchtune.rlhf.Sampler>`; without seeds, decoding is greedy."""
        self._send_weights()
        found: list[Rollout] = []
        with self._ranks.raise_on_all(), ThreadPoolExecutor(sum(one.requests for one in self._servers)) as pool:
            futures = [
                pool.submit(self._sample, server, prompt, num_samples, None if seeds is None else seeds[i])
                for i, (prompt, server) in enumerate(zip(prompts, cycle(self._servers)))
            ]
            try:
                found = [rollout for future in futures for rollout in future.result()]
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        self._count_dropped(found)
        if seeds is not None and self.gives_log_probs and self.max_difference is not None:
            groups = range(min(len(self._servers), len(prompts)))
            some = [found[i * num_samples + j] for i in groups for j in range(min(num_samples, _NUM_COMPARED))]
            self._check_log_probs(some)
        if seeds is not None and not self._is_compared:
            self._is_compared = True
            self._check_distribution(found)
        return found

    def _count_dropped(self, rollouts: list[Rollout]) -> None:
        dropped = sum(not rollout.answer for rollout in rollouts)
        if dropped and not self._num_dropped:
            get_logger().warning(
                f"{dropped} of {len(rollouts)} answers are dropped, as their texts do not become the tokens that the "
                "server sampled; answers/dropped counts them."
            )
        self._num_dropped += dropped

    @torch.no_grad()
    def _own(self, rollouts: list[Rollout]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the model's log-probs and entropies at answer tokens, and the server's log-probs, ``[t]`` each."""
        batch = collate_rollouts(rollouts, [0.0] * len(rollouts)).to(self.model.tok_embeddings.weight.device)
        known = batch.labels != CROSS_ENTROPY_IGNORE_IDX
        with evaluating(self.model):
            hidden = self.model(**batch.model_inputs(), output="hidden")
            found = token_log_probs(hidden, batch.labels, self.model.output, self.temperature, return_entropy=True)
        sampled = batch.per_token.get("sampled")
        return found[0][known], found[1][known], None if sampled is None else sampled[known]

    def _check_distribution(self, rollouts: list[Rollout]) -> None:
        """Check that answers are samples from the model's full distribution.

        For such samples, the mean log-prob is the negative entropy, and the mean of π / π_server is 1. With top-p or
        top-k, the mean log-prob is larger, and the mean ratio is the probability of the tokens that are not cut off.
        """
        if self._ranks.any(not all(one.answer for one in rollouts)):  # dropping answers biases the means
            return
        parts = [self._own([one]) for one in rollouts]
        with self._ranks.raise_on_all():
            own, entropy, sampled = (None if part[0] is None else torch.cat(part) for part in zip(*parts, strict=True))
            values = {} if sampled is None else {"above 1 in the importance ratio": (own - sampled).exp() - 1.0}
            values["nats above the negative entropy"] = own + entropy
            for name, value in values.items():
                mean, error = value.mean().item(), (value.std() / len(value) ** 0.5).item()
                if abs(mean) > max(_MOST_BIAS, _MOST_ERRORS * error):
                    raise RolloutError(
                        f"The answers of {self._urls} are no draws from the model's distribution at temperature "
                        f"{self.temperature:g}: over {len(value)} tokens they are {mean:+.3f} ± {error:.3f} {name}. "
                        "Start the server without top-p, top-k or a temperature of its own."
                    )

    def _check_log_probs(self, rollouts: list[Rollout]) -> None:
        """Compare log-probs with the servers, to check that they have the model's weights."""
        own, _, sampled = self._own(rollouts)
        difference = (own - sampled).abs().mean().item()
        with self._ranks.raise_on_all():
            if not difference <= self.max_difference:
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
        eos = getattr(tokenizer, "eos_id", None)
        stop = eos if eos in settings.stop_tokens else settings.stop_tokens[0]
        return TransformersServer(url, None, settings, checkpoint_dir / "tokenizer.json", stop)
    raise RolloutError(f"sampler.server is {kind!r}: it must be vllm or transformers.")
