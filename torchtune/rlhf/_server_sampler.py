"""Sampling from a server, which gets the weights of the model in training before every step."""

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
from torchtune.modules.loss import token_log_probs
from torchtune.rlhf._local_sampler import check_sampling, check_stop_tokens
from torchtune.rlhf._rollouts import Rollout, RolloutError, collate_rollouts
from torchtune.rlhf._servers import Asked, Server, TransformersServer, VLLMServer
from torchtune.training import CheckpointStore
from torchtune.training.parallel._ranks import Ranks
from torchtune.utils import get_logger

# Answers of a step whose log-probs are compared with the trainer's.
_COMPARED = 4


class ServerSampler:
    """Samples answers from a server with an OpenAI-compatible ``/v1/completions`` endpoint.

    Whenever the trained weights have changed, they are written into a new folder below ``folder``, and the server is
    told to take them. It is asked for that once before training starts, so that a server that cannot take them ends
    the run then. The folder of the last weights is removed at the end.

    ``vllm`` takes and returns token ids with log-probs. Adapters are loaded by name, which needs ``--enable-lora`` and
    ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``; whole weights are reloaded, which needs ``VLLM_SERVER_DEV_MODE=1``. For a
    ``temperature`` other than 1 start it with ``--logprobs-mode processed_logprobs``. Written to the interface that
    vLLM 0.33 publishes, and not yet run against it.

    ``transformers`` (``transformers serve``) takes and returns text without log-probs, so that the trainer's own before
    the first update are the old ones. An answer whose text does not become as many tokens as were sampled is dropped,
    which ``answers/dropped`` counts. It has to run without a fixed model, and forgets all models that it has loaded
    whenever the weights change.

    Args:
        model: that is trained.
        tokenizer: names the tokens that end an answer.
        url: of the server, up to and with ``/v1``.
        server: which one it is.
        checkpoint_dir: folder that the model was loaded from, for its tokenizer and other small files.
        folder: for the weights; trainer and server see it under this path.
        model_name: what vLLM calls the model that it was started with; by default ``checkpoint_dir``.
        max_new_tokens: most tokens of an answer.
        temperature: divides the logits, when sampling and in the loss.
        stop_tokens: tokens that end an answer; null takes the tokenizer's. Of ``transformers`` only one does, the
            tokenizer's ``eos_id`` if it is one of them, as the text does not say which.
        timeout: seconds for the answers to a prompt.
        weights_timeout: seconds for new weights.
        max_difference: largest mean \\|Δ log π\\| of server and trainer over the first answers of a step; more means
            that the server has other weights. Null compares nothing.

    Attributes:
        gives_log_probs: whether answers come with them.

    Raises:
        RolloutError: the server is gone, too slow, serves another model, or cannot take weights.
        CheckpointError: the weights cannot be written.

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
        if _is_tensor_parallel(model):
            raise RolloutError(
                "sampler: the ranks of a tensor-parallel group could get different answers from a server: set "
                "tensor_parallel_dim to 1, or sample with torchtune.rlhf.LocalSampler."
            )
        self.model, self.max_new_tokens, self.temperature = model, max_new_tokens, temperature
        self.stop_tokens, self.max_difference = check_stop_tokens(stop_tokens, tokenizer, model), max_difference
        rows = model.tok_embeddings.weight.shape[0]
        asked = Asked(max_new_tokens, temperature, self.stop_tokens, rows, timeout, weights_timeout)
        self._server = _make_server(server, url, model_name or checkpoint_dir, asked, Path(checkpoint_dir), tokenizer)
        self.gives_log_probs = self._server.gives_log_probs
        self._ranks = Ranks(RolloutError)
        self._ranks.first(self._server.check)
        root = self._ranks.from_first(Path(folder).resolve() / f"weights-{uuid.uuid4().hex[:12]}")
        self._store = CheckpointStore({"policy": {"checkpoint_dir": checkpoint_dir}}, root, keep_last_n_checkpoints=1)
        self._contents = self._server.contents(model)
        self._store.check_contents(model, contents=self._contents, resumable=False)
        if self._ranks.rank == 0:
            finalize(self, shutil.rmtree, root, ignore_errors=True)
        self._sent: list[int] | None = None
        self._count, self._dropped = 0, 0
        self._send_weights()

    def _send_weights(self) -> None:
        """Have the server take the weights, if they have changed since it did."""
        found = _fingerprint(self.model)
        if not self._ranks.any(found != self._sent):
            return
        previous = self._store.output_dir / f"step_{self._count}" if self._count else None
        self._count += 1
        path = self._store.save(f"step_{self._count}", self.model, contents=self._contents)
        # Every rank notes the new name of the model; the first one tells the server.
        name = self._ranks.first(lambda: self._tell(path, previous))
        self._server.model_name, self._sent = name, found

    def _tell(self, path: Path, previous: Path | None) -> str | None:
        self._server.take(path, previous)
        return self._server.model_name

    def __call__(
        self, prompts: Sequence[Sequence[int]], num_samples: int, seeds: Sequence[int] | None = None
    ) -> list[Rollout]:
        """See :class:`Sampler <torchtune.rlhf.Sampler>`; without seeds the answers are the likeliest ones."""
        self._send_weights()
        found: list[Rollout] = []
        with self._ranks.together(), ThreadPoolExecutor(self._server.requests) as pool:
            asked = [
                pool.submit(self._server.answers, prompt, num_samples, None if seeds is None else seeds[i])
                for i, prompt in enumerate(prompts)
            ]
            try:
                found = [rollout for one in asked for rollout in one.result()]
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        self._count_dropped(found)
        if seeds is not None and self.gives_log_probs and self.max_difference is not None:
            self._compare(found[:_COMPARED])
        return found

    def _count_dropped(self, rollouts: list[Rollout]) -> None:
        dropped = sum(not rollout.answer for rollout in rollouts)
        if dropped and not self._dropped:
            get_logger().warning(
                f"{dropped} of {len(rollouts)} answers are dropped, as their texts do not become the tokens that the "
                "server sampled; answers/dropped counts them."
            )
        self._dropped += dropped

    @torch.no_grad()
    def _compare(self, rollouts: list[Rollout]) -> None:
        """See that the server has the weights of the model."""
        batch = collate_rollouts(rollouts, [0.0] * len(rollouts)).to(self.model.tok_embeddings.weight.device)
        was_training = self.model.training
        self.model.eval()
        try:
            hidden = self.model(**batch.model_inputs(), output="hidden")
            own = token_log_probs(hidden, batch.labels, self.model.output, self.temperature)
        finally:
            self.model.train(was_training)
        known = batch.labels != CROSS_ENTROPY_IGNORE_IDX
        difference = (own[known] - batch.per_token["sampled"][known]).abs().mean().item()
        with self._ranks.together():
            if not difference <= self.max_difference:
                raise RolloutError(
                    f"The log-probs of {self._server.url} differ from the trainer's by {difference:.3g} on average "
                    f"(sampler.max_difference is {self.max_difference:g}): it has another model or other weights, or "
                    "gives them without temperature (start vLLM with --logprobs-mode processed_logprobs)."
                )


def _make_server(kind: str, url: str, model_name: str, asked: Asked, checkpoint_dir: Path, tokenizer: Any) -> Server:
    if kind == "vllm":
        return VLLMServer(url, model_name, asked)
    if kind == "transformers":
        eos = getattr(tokenizer, "eos_id", None)
        stop = eos if eos in asked.stop_tokens else asked.stop_tokens[0]
        return TransformersServer(url, None, asked, checkpoint_dir / "tokenizer.json", stop)
    raise RolloutError(f"sampler.server is {kind!r}: it must be vllm or transformers.")


def _is_tensor_parallel(model: nn.Module) -> bool:
    meshes = [weight.device_mesh for weight in model.parameters() if isinstance(weight, DTensor)]
    return any("tp" in (mesh.mesh_dim_names or ()) for mesh in meshes)


@torch.no_grad()
def _fingerprint(model: nn.Module) -> list[int]:
    """Sums of the bits of this rank's shards of what is trained: they differ when any weight has changed."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = []
    for weight in model.parameters():
        if weight.requires_grad:
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            sums.append(local.detach().contiguous().view(kinds[local.element_size()]).sum(dtype=torch.int64))
    return torch.stack(sums).tolist() if sums else []
