"""Prompts of several threads, answered in one continuous batch."""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtune.generation._continuous_batch import Batch, Request, Row, decode
from torchtune.generation._fast_linear import fast_linears
from torchtune.generation._generate import check_finite
from torchtune.generation._sampling import GenerationError, Sampling, draw_tokens
from torchtune.modules.transformer import TransformerDecoder
from torchtune.training.parallel import Ranks
from torchtune.utils import first_line


class Drawn(NamedTuple):
    """A sampled token.

    Attributes:
        token: the token.
        log_prob: its log-probability, see :func:`stream_tokens`.
        top: the most likely tokens and their log-probabilities, most likely first.
    """

    token: int
    log_prob: float
    top: list[tuple[int, float]]


@dataclass(eq=False)
class Job:
    """A prompt and the settings of its answer; iterating over it yields :class:`Drawn` as tokens are sampled.

    Attributes:
        model: name of the model.
        tokens: the prompt.
        limit: maximum number of new tokens.
        sampling: how tokens are chosen, see :class:`Sampling`.
        num_top: number of the most likely tokens to return with each token.
        seed: seed of sampling; ``None`` draws one.
        is_cancelled: set it to end the answer.
        has_left: returns whether nobody waits for the answer any more; called before every token.

    Raises:
        GenerationError: from the iterator, if the model fails, the server is closed, or nobody waits.
    """

    model: str
    tokens: list[int]
    limit: int
    sampling: Sampling = field(default_factory=Sampling)
    num_top: int = 0
    seed: int | None = None
    is_cancelled: bool = False
    has_left: Callable[[], bool] = lambda: False
    # From the server's thread to the iterator: tokens, then an error, or None at the end.
    results: SimpleQueue = field(default_factory=SimpleQueue)

    def __post_init__(self) -> None:
        self.rng = torch.Generator()
        if self.seed is None:
            self.rng.seed()
        else:
            self.rng.manual_seed(self.seed)

    def __iter__(self) -> Iterator[Drawn]:
        while True:
            result = self.results.get()
            if result is None:
                return
            if isinstance(result, Exception):
                raise result
            yield result


class _Step(NamedTuple):
    """What the other ranks need to know of a step of rank 0, which alone has the jobs.

    Attributes:
        tokens: the next token of each row.
        ended_indices: indices of the sequences that end with it, besides those at their limit.
        failure: error that ends the batch on all ranks; None if there is none.
    """

    tokens: list[int]
    ended_indices: frozenset[int]
    failure: str | None


@dataclass(eq=False)
class _JobBatch:
    """Unfinished jobs of a model that share a batch, and the state of its running step.

    Attributes:
        model_name: name of the model.
        jobs: the jobs, by the index of their sequence.
        num_admitted: number of jobs so far, finished ones included.
        counts: number of tokens of each job, by index.
        most_likely: most likely tokens in the running step, by the index of a job that asks for them.
        ended_indices: indices of the sequences that end in the running step, besides those at their limit.
        is_failure_known: whether the other ranks know that the batch has failed.
    """

    model_name: str
    jobs: dict[int, Job] = field(default_factory=dict)
    num_admitted: int = 0
    counts: Counter[int] = field(default_factory=Counter)
    most_likely: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    ended_indices: frozenset[int] = frozenset()
    is_failure_known: bool = False

    def admit(self, job: Job) -> int:
        """Add a job, and return the index of its sequence."""
        index = self.num_admitted
        self.num_admitted += 1
        self.jobs[index] = job
        return index

    def forget(self, index: int) -> None:
        """Remove a finished job: a batch that others join again and again never ends."""
        del self.jobs[index]
        del self.counts[index]
        self.most_likely.pop(index, None)


@torch.inference_mode()
def follow_batches(models: Mapping[str, TransformerDecoder], ranks: Ranks, *, max_sequences: int) -> None:
    """Run the batches of the :class:`BatchServer` of rank 0 on another rank that shares its models, until it closes.

    Args:
        models: see :class:`BatchServer`; this rank's shards of them.
        ranks: the ranks that share the models.
        max_sequences: see :class:`BatchServer`.
    """
    while True:
        batch = ranks.broadcast(None)
        if batch is None:  # the server of rank 0 is closed
            return
        name, requests = batch
        with suppress(GenerationError):  # rank 0 reports it to the waiting requests
            _follow_batch(models[name], requests, ranks, max_sequences)


def _follow_batch(model: TransformerDecoder, requests: list[Request], ranks: Ranks, size: int) -> None:
    """Run a batch with the tokens that rank 0 samples; the logits of this rank are not read.

    The forward passes of this rank take part in the collectives of rank 0's. Every broadcast here answers one of
    :class:`BatchServer`, in the same order: the tokens of a step, then the jobs that join.
    """
    device = model.tok_embeddings.weight.device
    ended_indices: frozenset[int] = frozenset()  # in the running step

    def draw(logits: Tensor, rows: list[Row]) -> tuple[Tensor, Tensor]:
        nonlocal ended_indices
        step = ranks.broadcast(None)
        if step.failure is not None:  # rank 0 ends the batch, and this rank must end it as well
            raise GenerationError(step.failure)
        ended_indices = step.ended_indices
        tokens = torch.tensor(step.tokens, device=device)[:, None]  # [m, 1]
        unread_log_probs = torch.zeros(len(rows), device=device)
        return tokens, unread_log_probs

    steps = decode(
        model,
        requests,
        size=size,
        device=device,
        use_cache=True,
        draw=draw,
        ends=lambda index, token: index in ended_indices,
        more=lambda batch: ranks.broadcast(None),
    )
    with closing(steps):
        for _ in steps:  # runs the steps
            pass


class BatchServer:
    """Answers jobs in the order of their arrival, in a thread that runs the models.

    Jobs of the same model share a batch: one that arrives joins the running batch, unless an earlier job of another
    model is waiting. If ranks share the models, rank 0 has the server, and the others call :func:`follow_batches`.

    Args:
        models: name -> model, in evaluation mode; they may share parameters.
        stop_tokens: tokens that end an answer; they are yielded.
        max_sequences: number of jobs in the batch.
        max_waiting: maximum number of waiting jobs.
        ranks: the ranks that share the models; None: each model is on one device.

    Attributes:
        failure: error after which the other ranks do not follow any more, so that the server is closed.

    Example:
        >>> server = torchtune.generation.BatchServer({"tiny": model}, tokenizer.stop_tokens)
        >>> job = torchtune.generation.Job("tiny", [5, 40, 7], limit=4)
        >>> server.submit(job)
        True
        >>> tokens = [drawn.token for drawn in job]
        >>> server.close()
    """

    def __init__(
        self,
        models: Mapping[str, TransformerDecoder],
        stop_tokens: Sequence[int],
        *,
        max_sequences: int = 8,
        max_waiting: int = 256,
        ranks: Ranks | None = None,
    ) -> None:
        self.failure: GenerationError | None = None
        self._models = models
        self._ranks = ranks
        if ranks is not None and ranks.size == 1:
            self._ranks = None
        self._stop = frozenset(stop_tokens)
        self._size = max_sequences
        self._max_waiting = max_waiting
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, *jobs: Job) -> bool:
        """Queue jobs, all or none; return False if too many jobs are waiting, or the server is closed."""
        with self._changed:
            # The jobs of one request may be more than can wait, but only if no other waits.
            num_waiting = len(self._waiting)
            is_full = num_waiting > 0 and num_waiting + len(jobs) > self._max_waiting
            if self._is_closed or is_full:
                return False
            self._waiting.extend(jobs)
            self._changed.notify()
            return True

    def close(self) -> None:
        """End all jobs with an error, and the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    @torch.inference_mode()
    def _run(self) -> None:
        """Answer jobs until the server is closed; the thread's function."""
        with ExitStack() as stack:
            if len(self._models) == 1:  # models that share parameters pack them in turns
                stack.enter_context(fast_linears(*self._models.values(), pack=True))
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting or self._is_closed)
                    if self._is_closed:
                        break
                self._answer_batch()
        if self.failure is None:
            self._tell_ranks(None)
        for job in self._waiting:
            self._end(job)

    def _tell_ranks(self, message: Any) -> None:
        """Broadcast a message to the other ranks, which wait for it at the same point."""
        if self._ranks is not None:
            self._ranks.broadcast(message)

    def _end(self, job: Job) -> None:
        """End the iteration over a job: None ends it as usual, an error is raised there."""
        job.results.put(self._failure(job))

    def _failure(self, job: Job) -> GenerationError | None:
        """Return the reason to stop answering a job; None if there is none."""
        if self._is_closed:
            return GenerationError("The server is closed.")
        if job.has_left():
            return GenerationError("The client has closed the connection.")
        return None

    def _answer_batch(self) -> None:
        """Answer jobs of the model that the first waiting job asks for, until another model is next or none waits."""
        batch = _JobBatch(self._waiting[0].model)
        requests = self._admit_jobs(batch)
        if not requests:  # the clients of all of them have left: there is no batch for the other ranks to run
            return
        try:
            self._tell_ranks((batch.model_name, requests))
            self._decode(batch, requests)
        except Exception as error:  # noqa: BLE001 - of one batch; later ones may work
            failure = GenerationError(f"The model failed: {error}")
            if self._ranks is not None and not batch.is_failure_known:
                # The other ranks are in the middle of a step, or one of them is lost.
                failure = GenerationError(
                    f"The processes that share the model have lost each other: {first_line(error)}."
                )
                failure.__cause__ = error
                self.failure = failure
                self._is_closed = True
            for job in batch.jobs.values():
                job.results.put(failure)

    def _admit_jobs(self, batch: _JobBatch) -> list[Request]:
        """Let waiting jobs of the model join the batch, while it has room, and return their requests."""
        requests = []
        with self._changed:
            while self._waiting and self._waiting[0].model == batch.model_name and len(batch.jobs) < self._size:
                job = self._waiting.popleft()
                failure = self._failure(job)
                if failure is not None:
                    job.results.put(failure)
                    continue
                requests.append(Request(batch.admit(job), job.tokens, job.limit, 1))
        return requests

    def _decode(self, batch: _JobBatch, requests: list[Request]) -> None:
        """Sample the answers of a batch, and hand each token to its job."""
        model = self._models[batch.model_name]

        def admit_newcomers(_: Batch) -> list[Request]:
            newcomers = self._admit_jobs(batch)
            self._tell_ranks(newcomers)  # an empty list as well: they wait for it after every step
            return newcomers

        steps = decode(
            model,
            requests,
            size=self._size,
            device=model.tok_embeddings.weight.device,
            use_cache=True,
            draw=partial(self._draw, batch),
            ends=lambda index, token: index in batch.ended_indices,
            processors=lambda index: batch.jobs[index].sampling.logits_processors,
            more=admit_newcomers,
        )
        with closing(steps):
            for ((indices, tokens, log_probs),) in steps:  # one step: the server checks every token
                host_tokens = tokens[:, 0].tolist()
                host_log_probs = log_probs.tolist()
                for index, token, log_prob in zip(indices, host_tokens, host_log_probs, strict=True):
                    job = batch.jobs[index]
                    job.results.put(Drawn(token, log_prob, batch.most_likely.get(index, [])))
                    batch.counts[index] += 1
                    if index in batch.ended_indices or batch.counts[index] == job.limit:
                        batch.forget(index)  # frees a place for _admit_jobs
                        self._end(job)

    def _draw(self, batch: _JobBatch, logits: Tensor, rows: list[Row]) -> tuple[Tensor, Tensor]:
        """Sample the next tokens ``[m, 1]`` of a batch, with log-probs ``[m]``, and tell the other ranks."""
        # Row by row, because each job has its own settings and random generator.
        tokens = []
        log_probs = []
        for row, row_logits in zip(rows, logits.split(1), strict=True):
            job = batch.jobs[row.index]
            uniform = torch.rand(1, generator=job.rng).to(logits.device)  # the generator is on the host
            token, probabilities = draw_tokens(row_logits, job.sampling, uniform)  # [1, 1], [1, v]
            tokens.append(token)
            log_probs.append(probabilities[0, token[0, 0]].log())
            if job.num_top:
                num_top = min(job.num_top, probabilities.shape[-1])
                top_probabilities, ids = probabilities[0].topk(num_top)
                top_log_probs = top_probabilities.log()
                batch.most_likely[row.index] = list(zip(ids.tolist(), top_log_probs.tolist(), strict=True))
        step_tokens = torch.cat(tokens)  # [m, 1]
        step_log_probs = torch.stack(log_probs)  # [m]
        try:
            check_finite(step_log_probs, self._models[batch.model_name])
        except GenerationError as error:
            # The other ranks wait for this step: they end the batch, too, and can run the next one.
            self._tell_ranks(_Step([], frozenset(), str(error)))
            batch.is_failure_known = True
            raise
        host_tokens = step_tokens[:, 0].tolist()
        ended_indices = set()  # those at their limit are known to all ranks
        for row, token in zip(rows, host_tokens, strict=True):
            job = batch.jobs[row.index]
            if token in self._stop or job.is_cancelled or self._failure(job) is not None:
                ended_indices.add(row.index)
        batch.ended_indices = frozenset(ended_indices)
        self._tell_ranks(_Step(host_tokens, batch.ended_indices, None))
        return step_tokens, step_log_probs
