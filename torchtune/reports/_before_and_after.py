"""Measure the model of a run on the same few rows and prompts, before the first step and after the last."""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch

from torchtune.config import SettingsView
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, Batch, BatchLoader
from torchtune.datasets import instantiate_dataset, workers
from torchtune.estimate import context_length
from torchtune.generation import GenerationError, evaluating, generate_tokens, uncompiled
from torchtune.modules import TransformerDecoder, text_decoder
from torchtune.supervision import StepMetrics, observe_together
from torchtune.tokenizers import document_texts
from torchtune.training import undisturbed_random_state
from torchtune.training.parallel import ParallelDims
from torchtune.utils import ObserverGuard, UserError, get_logger, log_once

# A twentieth of the rows of the run are measured, within these limits. A forward pass takes a third of a training step
# and there are two, so that this costs about 3 % of the time of a long run.
_FEWEST_ROWS = 8
_MOST_ROWS = 32
_MOST_PROMPTS = 8
_MOST_NEW_TOKENS = 64
_MOST_SECONDS = 30.0  # for all answers, estimated from the time of a forward pass
_MOST_CHARACTERS = 4000  # of a text in the report
_CONTEXT_OF_PLAIN_TEXT = 16  # tokens that begin a text without a prompt
# Settings of caches, which hold values only for the rows that a run visits.
_CACHES = ("teacher_cache", "reference_cache")


class Measurement:
    """Measures a model on rows of the validation data or, without it, of the training data; draws no random numbers.

    Args:
        cfg: settings of the run.
        dims: processes of the run.
        model: the trained model.
        tokenizer: tokenizer of the run.
        loader: loader of the training data.
        loader_val: loader of the validation data, or None.
        total_steps: steps of the run.
        rows_per_loss: number of rows that the loss compares with each other.
        recorded_rows: the rows that were measured before the first step of a run that is resumed, None in a new run.
            A resume may have more epochs or other processes, from which other rows would follow.
        answers_guard: guard of the answers, which need more of a tokenizer and a model than the losses.
    """

    def __init__(
        self,
        cfg: SettingsView,
        dims: ParallelDims,
        model: torch.nn.Module,
        tokenizer: Any,
        loader: BatchLoader,
        loader_val: BatchLoader | None,
        *,
        total_steps: int,
        rows_per_loss: int,
        recorded_rows: Sequence[int] | None = None,
        answers_guard: ObserverGuard,
    ) -> None:
        self._dims = dims
        self._model = model
        self._tokenizer = tokenizer
        self._rows_per_loss = rows_per_loss
        self._answers_guard = answers_guard
        if loader_val is None:
            self._setting = "dataset"
            measured_loader = loader
        else:
            self._setting = "dataset_val"
            measured_loader = loader_val
        self._collate = measured_loader.collate_fn

        # All ranks measure the same number of batches, because the model may communicate. A twentieth of the rows of
        # the run costs about 3 % of its time.
        multiple = dims.data_size * rows_per_loss
        rows_of_run = total_steps * loader.examples_per_step
        count = min(_MOST_ROWS, max(_FEWEST_ROWS, rows_of_run // 20))
        count = max(count, multiple)
        if recorded_rows is not None:  # a stream must be read up to the last of these rows
            count = max(recorded_rows, default=0) + 1
        if measured_loader.dataset.is_stream:
            self._rows = _first_rows_of_stream(cfg, tokenizer, count)
            indices = np.arange(len(self._rows))
        else:
            self._rows = measured_loader.dataset
            indices = np.arange(len(self._rows))
            if any(getattr(cfg.source, name, None) is not None for name in _CACHES):
                # A cache has values only for the rows that the run visits.
                indices = measured_loader.visited_indices(1)
        if recorded_rows is None:
            count = min(count, len(indices)) // multiple * multiple  # rounded down to whole batches on every rank
            self._indices = _evenly_spaced(indices, count)
        else:
            # Rounded up by measuring the first rows twice, which changes no value.
            count = -(-len(recorded_rows) // multiple) * multiple
            self._indices = list(islice(cycle(recorded_rows), count))

    def losses(self, compute_loss: Callable[[Batch], torch.Tensor], step_metrics: StepMetrics) -> dict[str, Any]:
        """Return the loss of each row (of each pack, if the data is packed), and greedy answers. A collective.

        Args:
            compute_loss: returns the sum of the losses of a batch.
            step_metrics: where ``compute_loss`` logs; the run's own values stay as they are.

        Returns:
            ``what`` and ``on`` (what was measured, and the setting of the data), ``rows`` (their indices in the data),
            ``values`` (digest of a row -> loss, None without labels) and ``answers``.
        """
        if not self._indices:
            return {"values": {}, "answers": []}
        start = time.perf_counter()
        with _undisturbed(self._model), step_metrics.validation() as means:
            names, batches = self._read_batches()
            for name, batch in zip(names[self._own_batches], batches, strict=True):
                means.add({name: (compute_loss(batch), batch.num_terms)})
            averages = means.over(self._dims)
            seconds = (time.perf_counter() - start) / len(batches)
            answers = observe_together(self._answers_guard, lambda: self._generate_answers(seconds), self._dims)
        values = {name: averages.get(f"val_{name}") for name in names}
        return self._result("loss", values, answers or [])

    def rewards(self, sample: Callable[..., Any], step_metrics: StepMetrics) -> dict[str, Any]:
        """Return the reward of a greedy answer to each prompt, and the answers; see :meth:`losses`. A collective.

        Args:
            sample: ``sample(batches, 1, greedy=True)`` returns scored answers
                (:class:`~torchtune.rlhf.ScoredRollouts`).
            step_metrics: where ``sample`` logs; the run's own values stay as they are.
        """
        if not self._indices:
            return {"values": {}, "answers": []}
        with _undisturbed(self._model), step_metrics.validation() as means:
            names, batches = self._read_batches()
            scored = sample(batches, 1, greedy=True)
            rewards = scored.rewards.flatten().nan_to_num().tolist()  # NaN of dropped answers
            for name, reward in zip(names[self._own_batches], rewards, strict=True):
                means.add({name: (reward, 1)})
            averages = means.over(self._dims)
        answers = []
        shown_prompts = scored.prompts[:_MOST_PROMPTS]
        for prompt, text in zip(shown_prompts, scored.texts, strict=False):  # there are more texts
            question = self._tokenizer.decode(prompt.tokens)[:_MOST_CHARACTERS]
            answers.append({"prompt": question, "expected": "", "answer": text[:_MOST_CHARACTERS]})
        values = {name: averages.get(f"val_{name}") for name in names}
        return self._result("reward", values, answers)

    def _result(self, what: str, values: dict[str, float | None], answers: list[dict[str, str]]) -> dict[str, Any]:
        return {"what": what, "on": self._setting, "rows": self._indices, "values": values, "answers": answers}

    @property
    def _own_batches(self) -> slice:
        """The batches that this rank measures."""
        return slice(self._dims.data_rank, None, self._dims.data_size)

    def _read_batches(self) -> tuple[list[str], list[Batch]]:
        """Return the names of all batches, and the batches of this rank."""
        rows = [self._rows[index] for index in self._indices]
        names = []
        batches_of_rows = []
        for start in range(0, len(rows), self._rows_per_loss):
            batch_rows = rows[start : start + self._rows_per_loss]
            names.append(_row_digest(batch_rows[0]))
            batches_of_rows.append(batch_rows)
        batches = [self._collate(batch_rows) for batch_rows in batches_of_rows[self._own_batches]]
        return names, batches

    def _generate_answers(self, seconds: float) -> list[dict[str, str]]:
        """Return greedy answers; none for images, reward models or context parallelism, or if it takes too long.

        Args:
            seconds: time of a forward pass of a batch.
        """
        model = self._model
        tokenizer = self._tokenizer
        if text_decoder(model) is not model or self._dims.cp > 1:  # ranks with parts of a sequence cannot generate
            return []
        obstacle = _answers_obstacle(model, tokenizer)
        if obstacle is not None:
            log_once(get_logger(), f"The report has no answers: {obstacle}.")
            return []
        is_reward_model = getattr(model.output, "out_features", None) == 1  # a head with one number for each token
        if is_reward_model:
            return []
        turns = []
        for index in _evenly_spaced(self._indices, _MOST_PROMPTS):
            turn = _first_turn(self._rows[index])
            if turn is not None:
                turns.append(turn)
        # The slowest rank decides, in whole microseconds, because ranks exchange integers.
        microseconds = max(self._dims.max(int(1e6 * seconds)), 1)
        affordable_tokens = int(_MOST_SECONDS * 1e6) // microseconds
        # Eight tokens more than the longest trained answer show whether the model ends its own.
        longest = max((len(expected) for _, expected in turns), default=0)
        new_tokens = min(_MOST_NEW_TOKENS, affordable_tokens, longest + 8)
        if new_tokens == 0:
            return []
        prompts = []
        expected_answers = []
        for prompt, expected in turns:
            if len(prompt) + new_tokens <= model.max_seq_len:
                prompts.append(prompt)
                expected_answers.append(expected)
        stop_tokens = list(tokenizer.stop_tokens)
        try:
            generated = generate_tokens(
                model, prompts, max_new_tokens=new_tokens, temperature=0.0, stop_tokens=stop_tokens
            )
        except GenerationError:  # no prompts, or an architecture without generation
            return []
        answers = []
        for prompt, expected, row in zip(prompts, expected_answers, generated.tokens, strict=True):
            answer = [token for token in row.tolist() if token not in stop_tokens]
            answers.append(
                {
                    "prompt": tokenizer.decode(prompt)[:_MOST_CHARACTERS],
                    "expected": tokenizer.decode(expected)[:_MOST_CHARACTERS],
                    "answer": tokenizer.decode(answer),
                }
            )
        return answers


@contextmanager
def _undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """Context manager in which a model is in evaluation mode and not compiled; it restores the random state, too."""
    with undisturbed_random_state(), torch.no_grad(), evaluating(model), uncompiled(model):
        yield


def _evenly_spaced(indices: Sequence[int], count: int) -> list[int]:
    """Return at most ``count`` of the indices, evenly spaced from the first to the last."""
    count = min(count, len(indices))
    positions = np.linspace(0, len(indices) - 1, count).astype(int)
    return [int(indices[position]) for position in positions]


def _first_rows_of_stream(cfg: SettingsView, tokenizer: Any, count: int) -> list[Any]:
    """Return the first rows of a stream from a new reader, so that the run keeps its position; none on errors."""
    try:
        with undisturbed_random_state(), workers(1):
            stream = instantiate_dataset(cfg.dataset, tokenizer, context_length(cfg))
            return [stream[index] for index in range(count)]
    except UserError as error:
        get_logger().warning(f"No rows of the stream are measured: {error}")
        return []


def _first_turn(row: Any) -> tuple[list[int], list[int]] | None:
    """Return a row's first prompt and the trained tokens after it; None without trained tokens, or with images.

    A row of only trained tokens, such as plain text, is split after its first tokens.
    """
    documents = document_texts(row)
    if not documents or "encoder_input" in row:
        return None
    title, tokens, labels = documents[0]
    if title == "query":  # of an embedding model, which answers nothing
        return None
    # labels[i] is the token that follows tokens[i].
    is_label = np.append(labels != CROSS_ENTROPY_IGNORE_IDX, False)  # so that the turn ends even at the last token
    first_label = int(is_label.argmax())
    end = first_label + int((~is_label[first_label:]).argmax())  # behind the last label of the turn
    if end == 0:  # no token is trained on
        return None
    if first_label == 0:  # nothing comes before the trained tokens
        first_label = min(_CONTEXT_OF_PLAIN_TEXT, end // 2)
    prompt = tokens[: first_label + 1]
    answer = tokens[first_label + 1 : end + 1]
    return prompt.tolist(), answer.tolist()


def _answers_obstacle(model: Any, tokenizer: Any) -> str | None:
    """Return why a model or tokenizer of the user's own, which need not generate, gives no answers; None if it does."""
    if not isinstance(model, TransformerDecoder):
        return f"{type(model).__name__} is not a TransformerDecoder, and others do not generate"
    for name in ("decode", "stop_tokens"):
        if not hasattr(tokenizer, name):
            return f"the tokenizer, {type(tokenizer).__name__}, has no {name}"
    return None


def _row_digest(row: Any) -> str:
    """Return a digest of a row's tokens and labels; for a pack, of all its documents."""
    digest = hashlib.sha256()
    documents = row if isinstance(row, list) else [row]
    for document in documents:
        for name in sorted(document):
            if name in ("tokens", "query", "positive") or name.endswith(("input_ids", "labels")):
                digest.update(np.asarray(document[name], dtype=np.int64).tobytes())
    return digest.hexdigest()[:12]
