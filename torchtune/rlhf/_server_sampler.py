"""Sampling from a server, which receives the trained weights before every step."""

import shutil
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal
from weakref import finalize

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX
from torchtune.generation import evaluating
from torchtune.modules.loss import token_log_probs
from torchtune.rlhf._local_sampler import check_sampling, check_stop_tokens, is_tensor_parallel
from torchtune.rlhf._rollouts import Rollout, RolloutError, collate_rollouts
from torchtune.rlhf._servers import RequestSettings, Server, TransformersServer, VLLMServer
from torchtune.training import CheckpointStore
from torchtune.training.parallel import Ranks
from torchtune.utils import get_logger

# Answers per step that are used to compare log-probs with the trainer.
_NUM_COMPARED = 4


class ServerSampler:
    """Sampler that requests answers from a server with an OpenAI-compatible ``/v1/completions`` endpoint.

    Whenever the trained weights have changed, they are saved to a new folder below ``folder``, and the server loads
    them. This also happens once before training, to fail early if the server cannot load them. The last folder is
    deleted at the end.

    ``vllm`` uses token ids and returns log-probs. Adapters are loaded by name, which needs ``--enable-lora`` and
    ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``; full weights are reloaded, which needs ``VLLM_SERVER_DEV_MODE=1``. For a
    ``temperature`` other than 1, start it with ``--logprobs-mode processed_logprobs``. Written for the published
    interface of vLLM 0.33, but not yet tested with it.

    ``transformers`` (``transformers serve``) uses text and returns no log-probs, so the trainer's log-probs before the
    first update are the old ones. An answer is dropped if its text is not tokenized to the number of sampled tokens;
    ``answers/dropped`` counts these. The server must run without a fixed model, and unloads all its models whenever the
    weights change.

    Args:
        model: the trained model.
        tokenizer: defines the default stop tokens.
        url: URL of the server, ending with ``/v1``.
        server: kind of the server.
        checkpoint_dir: folder of the model's checkpoint, for its tokenizer and other small files.
        folder: folder for the weights; trainer and server must see it under the same path.
        model_name: name of the model in vLLM; by default ``checkpoint_dir``.
        max_new_tokens: maximum tokens of an answer.
        temperature: divides the logits, in sampling and in the loss.
        stop_tokens: tokens that end an answer; ``None``: the tokenizer's. ``transformers`` uses only one, the
            tokenizer's ``eos_id`` if it is included, because a text does not show which one was sampled.
        timeout: seconds for the answers to a prompt.
        weights_timeout: seconds to load new weights.
        max_difference: maximum mean \\|Δ log π\\| of server and trainer over the first answers of a step; a larger one
            indicates that the server has other weights. ``None`` disables the check.

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
        url: str,
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
        self._server = _make_server(
            server, url, model_name or checkpoint_dir, settings, Path(checkpoint_dir), tokenizer
        )
        self.gives_log_probs = self._server.gives_log_probs
        self._ranks = Ranks(RolloutError)
        self._ranks.run_on_rank_0(self._server.check)
        root = self._ranks.broadcast(Path(folder).resolve() / f"weights-{uuid.uuid4().hex[:12]}")
        self._store = CheckpointStore({"policy": {"checkpoint_dir": checkpoint_dir}}, root, keep_last_n_checkpoints=1)
        self._contents = self._server.contents(model)
        self._store.check_contents(model, contents=self._contents, resumable=False)
        if self._ranks.rank == 0:
            finalize(self, shutil.rmtree, root, ignore_errors=True)
        self._loaded_fingerprint: list[int] | None = None
        self._num_saves, self._num_dropped = 0, 0
        self._send_weights()

    def _send_weights(self) -> None:
        """Save the weights and let the server load them, if they have changed."""
        found = _fingerprint(self.model)
        if not self._ranks.any(found != self._loaded_fingerprint):
            return
        previous = self._store.output_dir / f"step_{self._num_saves}" if self._num_saves else None
        self._num_saves += 1
        path = self._store.save(f"step_{self._num_saves}", self.model, contents=self._contents)
        # Rank 0 notifies the server; every rank stores the new model name.
        name = self._ranks.run_on_rank_0(lambda: self._load_weights(path, previous))
        self._server.model_name, self._loaded_fingerprint = name, found

    def _load_weights(self, path: Path, previous: Path | None) -> str | None:
        self._server.load_weights(path, previous)
        return self._server.model_name

    def __call__(
        self, prompts: Sequence[Sequence[int]], num_samples: int, seeds: Sequence[int] | None = None
    ) -> list[Rollout]:
        """Sample answers, see :class:`Sampler <torchtune.rlhf.Sampler>`; without seeds decoding is greedy."""
        self._send_weights()
        found: list[Rollout] = []
        with self._ranks.raise_on_all(), ThreadPoolExecutor(self._server.requests) as pool:
            futures = [
                pool.submit(self._server.sample, prompt, num_samples, None if seeds is None else seeds[i])
                for i, prompt in enumerate(prompts)
            ]
            try:
                found = [rollout for future in futures for rollout in future.result()]
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        self._count_dropped(found)
        if seeds is not None and self.gives_log_probs and self.max_difference is not None:
            self._check_log_probs(found[:_NUM_COMPARED])
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
    def _check_log_probs(self, rollouts: list[Rollout]) -> None:
        """Check that the server has the model's weights, by comparing log-probs."""
        batch = collate_rollouts(rollouts, [0.0] * len(rollouts)).to(self.model.tok_embeddings.weight.device)
        with evaluating(self.model):
            hidden = self.model(**batch.model_inputs(), output="hidden")
            own = token_log_probs(hidden, batch.labels, self.model.output, self.temperature)
        known = batch.labels != CROSS_ENTROPY_IGNORE_IDX
        difference = (own[known] - batch.per_token["sampled"][known]).abs().mean().item()
        with self._ranks.raise_on_all():
            if not difference <= self.max_difference:
                raise RolloutError(
                    f"The log-probs of {self._server.url} differ from the trainer's by {difference:.3g} on average "
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


@torch.no_grad()
def _fingerprint(model: nn.Module) -> list[int]:
    """Sum the bits of each trained parameter's local shard, to detect changes."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = []
    for weight in model.parameters():
        if weight.requires_grad:
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            sums.append(local.detach().contiguous().view(kinds[local.element_size()]).sum(dtype=torch.int64))
    return torch.stack(sums).tolist() if sums else []
