"""Prompts of several threads, answered in one continuous batch."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from torchtune.generation._continuous_batch import Batch, Request, Row, decode
from torchtune.generation._fast_linear import fast_linears
from torchtune.generation._generate import check_finite
from torchtune.generation._sampling import GenerationError, Sampling, draw_tokens
from torchtune.modules.transformer import TransformerDecoder


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
        while (result := self.results.get()) is not None:
            if isinstance(result, Exception):
                raise result
            yield result


class BatchServer:
    """Answers jobs in the order of their arrival, in a thread that runs the models.

    Jobs of the same model share a batch: one that arrives joins the running batch, unless an earlier job of another
    model is waiting.

    Args:
        models: name -> model, in evaluation mode; they may share parameters.
        stop_tokens: tokens that end an answer; they are yielded.
        max_sequences: number of jobs in the batch.
        max_waiting: maximum number of waiting jobs.

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
    ) -> None:
        self._models = models
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
            if self._is_closed or (self._waiting and len(self._waiting) + len(jobs) > self._max_waiting):
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
        with ExitStack() as stack:
            if len(self._models) == 1:  # models that share parameters pack them in turns
                stack.enter_context(fast_linears(*self._models.values(), pack=True))
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting or self._is_closed)
                    if self._is_closed:
                        break
                self._answer_batch()
        for job in self._waiting:
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
        name = self._waiting[0].model
        model = self._models[name]
        device = model.tok_embeddings.weight.device
        jobs: list[Job] = []  # of the batch, by the index of their sequence
        running: set[int] = set()  # indices of unfinished jobs
        counts: dict[int, int] = {}  # tokens of each job
        most_likely: dict[int, list[tuple[int, float]]] = {}  # of the running step, for jobs that ask for them

        def newcomers(_: Batch | None = None) -> list[Request]:
            requests = []
            with self._changed:
                while self._waiting and self._waiting[0].model == name and len(running) < self._size:
                    job = self._waiting.popleft()
                    failure = self._failure(job)
                    if failure is not None:
                        job.results.put(failure)
                        continue
                    index = len(jobs)
                    jobs.append(job)
                    running.add(index)
                    requests.append(Request(index, job.tokens, job.limit, 1))
            return requests

        def draw(logits: Tensor, rows: list[Row]) -> tuple[Tensor, Tensor]:
            # Row by row, because each job has its own settings and random generator.
            tokens = []
            log_probs = []
            for row, row_logits in zip(rows, logits.split(1), strict=True):
                job = jobs[row.index]
                uniform = torch.rand(1, generator=job.rng).to(device)
                token, probabilities = draw_tokens(row_logits, job.sampling, uniform)  # [1, 1], [1, v]
                tokens.append(token)
                log_probs.append(probabilities[0, token[0, 0]].log())
                if job.num_top:
                    values, ids = probabilities[0].topk(min(job.num_top, probabilities.shape[-1]))
                    most_likely[row.index] = list(zip(ids.tolist(), values.log().tolist(), strict=True))
            return torch.cat(tokens), torch.stack(log_probs)  # [m, 1], [m]

        def ends(index: int, token: int) -> bool:
            return self._failure(jobs[index]) is not None or jobs[index].is_cancelled or token in self._stop

        requests = newcomers()
        if not requests:  # all of them have left
            return
        steps = decode(
            model,
            requests,
            size=self._size,
            device=device,
            use_cache=True,
            draw=draw,
            ends=ends,
            processors=lambda index: jobs[index].sampling.logits_processors,
            more=newcomers,
        )
        try:
            with closing(steps):
                for ((indices, tokens, log_probs),) in steps:  # one step: the server checks every token
                    check_finite(log_probs, model)
                    for index, token, log_prob in zip(indices, tokens[:, 0].tolist(), log_probs.tolist(), strict=True):
                        job = jobs[index]
                        job.results.put(Drawn(token, log_prob, most_likely.get(index, [])))
                        counts[index] = counts.get(index, 0) + 1
                        if ends(index, token) or counts[index] == job.limit:
                            running.discard(index)
                            job.results.put(self._failure(job))
        except Exception as error:  # noqa: BLE001 - of one batch; later ones may work
            for index in running:
                jobs[index].results.put(GenerationError(f"The model failed: {error}"))
