"""Measure the model of a run on the same few rows and prompts, before the first step and after the last."""

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, decode_pieces, texts_of
from torchtune.datasets import instantiate_dataset, workers
from torchtune.generation import GenerationError, generate_tokens, uncompiled
from torchtune.modules import TransformerDecoder, text_decoder
from torchtune.rlhf.loss import KTOLoss
from torchtune.supervision import observe_together, row_lengths
from torchtune.training import RNGState, SettingsView, context_length
from torchtune.utils import ObserverGuard, UserError, get_logger, log_once

# Rows to measure: a twentieth of the rows of the run, within these limits. A forward pass takes a third of a training
# step and there are two, so that this costs about 3 % of the time of a long run.
_FEWEST, _ROWS = 8, 32
_PROMPTS, _SAMPLES, _BINS = 8, 5, 24
# Maximum tokens per answer, and maximum seconds for all answers, estimated from the time of one forward pass.
_ANSWER, _SECONDS = 64, 30.0
_TEXT = 4000  # characters
# Settings of caches, which hold values only for the rows that a run visits.
_CACHES = ("teacher_cache", "reference_cache")


class Probe:
    """Measures a run on rows of its validation data or, if it has none, of its training data.

    Recipes with a method ``sample`` are measured by the reward of greedy answers, others by the loss of each row (of
    each pack, if the data is packed). No random numbers are drawn.

    Args:
        recipe: recipe after ``setup``.
        answers: guard of the answers, which need more of a tokenizer and a model than the losses.
    """

    def __init__(self, recipe: Any, answers: ObserverGuard) -> None:
        self._answers_guard = answers
        self._recipe, loader = recipe, recipe.loader_val or recipe.loader
        self._setting = "dataset" if loader is recipe.loader else "dataset_val"
        self._has_rewards, self._collate = hasattr(recipe, "sample"), loader.collate_fn
        # KTO compares an answer with that of another row.
        self._group = 2 if isinstance(getattr(recipe, "loss_fn", None), KTOLoss) else 1
        in_run = recipe.total_steps * recipe.loader.examples_per_step
        every = recipe.dims.data_size * self._group
        count = max(min(_ROWS, max(_FEWEST, in_run // 20)), every)
        if getattr(loader.dataset, "is_stream", False):
            self._dataset = _first_rows(recipe, count)
            indices = np.arange(len(self._dataset))
        else:
            self._dataset, indices = loader.dataset, np.arange(len(loader.dataset))
            if any(getattr(recipe.cfg, name, None) is not None for name in _CACHES):
                indices = loader.visited_indices(1)
        # The number is the same on every rank; without a loss, there is nothing to measure.
        count = min(count, len(indices)) // every * every if hasattr(recipe, "compute_loss") else 0
        self._indices = _spread(indices, count)

    def measure(self) -> dict[str, Any]:
        """Return ``values`` (digest of a row -> loss or reward; None without labels) and ``answers``. A collective."""
        if not self._indices:
            return {"values": {}, "answers": []}
        recipe, data_size, answers = self._recipe, self._recipe.dims.data_size, []
        start = time.perf_counter()
        with _undisturbed(recipe.model), recipe.step_metrics.validation() as means:
            rows = [self._dataset[index] for index in self._indices]
            groups = [rows[at : at + self._group] for at in range(0, len(rows), self._group)]
            names = [_digest(group[0]) for group in groups]
            mine = slice(recipe.dims.data_rank, None, data_size)
            batches = [self._collate(group) for group in groups[mine]]
            if self._has_rewards:
                scored = recipe.sample(batches, 1, greedy=True)
                figures = [(reward, 1) for reward in scored.rewards.flatten().nan_to_num().tolist()]
                for prompt, text in list(zip(scored.prompts, scored.texts, strict=True))[:_PROMPTS]:
                    answers.append(_as_texts(recipe.tokenizer, prompt.tokens, []) | {"answer": text[:_TEXT]})
            else:
                figures = ((recipe.compute_loss(batch), batch.num_terms) for batch in batches)
            for name, figure in zip(names[mine], figures, strict=True):
                means.add({name: figure})
            found = means.over(recipe.dims)
            if not self._has_rewards:
                seconds = (time.perf_counter() - start) / len(batches)
                answers = observe_together(self._answers_guard, lambda: self._answers(seconds), recipe.dims) or []
        values = {name: found.get(f"val_{name}") for name in names}
        what = "reward" if self._has_rewards else "loss"
        return {"what": what, "on": self._setting, "values": values, "answers": answers}

    def _answers(self, seconds: float) -> list[dict[str, str]]:
        """Return greedy answers; none for images, reward models or context parallelism, or if it takes too long."""
        model, tokenizer = self._recipe.model, getattr(self._recipe, "tokenizer", None)
        if text_decoder(model) is not model or self._recipe.dims.cp > 1:
            return []
        if (missing := _missing_for_answers(model, tokenizer)) is not None:
            log_once(get_logger(), f"The report has no answers: {missing}.")
            return []
        if getattr(model.output, "out_features", 2) == 1:  # a reward model
            return []
        rows = [self._dataset[index] for index in _spread(self._indices, _PROMPTS)]
        turns = [turn for row in rows for turn in _first_turn(row)]
        limit = int(_SECONDS * 1e6) // max(self._recipe.dims.max(int(1e6 * seconds)), 1)
        limit = min(_ANSWER, limit, 8 + max((len(expected) for _, expected in turns), default=0))
        turns = [turn for turn in turns if len(turn[0]) + limit <= model.max_seq_len and limit]
        prompts, stop = [prompt for prompt, _ in turns], list(tokenizer.stop_tokens)
        try:
            tokens = generate_tokens(model, prompts, max_new_tokens=limit, temperature=0.0, stop_tokens=stop).tokens
        except GenerationError:  # no prompts, or an architecture without generation
            return []
        answers = [tokenizer.decode([token for token in row.tolist() if token not in stop]) for row in tokens]
        return [_as_texts(tokenizer, *turn) | {"answer": text} for turn, text in zip(turns, answers, strict=True)]


def describe_data(loader: Any, tokenizer: Any) -> dict[str, Any]:
    """Return facts about a loader's data: number of rows, digest, lengths, and samples with their trained tokens."""
    dataset = loader.dataset
    if getattr(dataset, "is_stream", False):
        return {}
    rows = dataset.ds if hasattr(dataset, "packs") else dataset
    facts: dict[str, Any] = {"rows": len(rows), "examples": len(dataset), "samples": []}
    if (fingerprint := getattr(dataset, "fingerprint", None)) is not None:
        facts["digest"] = hashlib.sha256(repr(fingerprint).encode()).hexdigest()[:16]
    if (lengths := row_lengths(rows)) is not None:
        counts, edges = np.histogram(lengths, _BINS)
        facts |= {"tokens": int(lengths.sum()), "lengths": {"counts": counts.tolist(), "edges": edges.tolist()}}
    with _undisturbed():
        for index in _spread(range(len(rows)), _SAMPLES):
            for _, tokens, labels in texts_of(rows[index]):
                pieces = decode_pieces(tokens[:_TEXT], labels[:_TEXT], tokenizer)
                trained = int((labels != CROSS_ENTROPY_IGNORE_IDX).sum())
                sample = {"row": index, "tokens": len(tokens), "trained": trained}
                facts["samples"].append(
                    sample | {"pieces": [(text[:_TEXT], is_trained) for text, is_trained in pieces]}
                )
    return facts


@contextmanager
def _undisturbed(model: torch.nn.Module | None = None) -> Iterator[None]:
    """Restore the random state after the block, in which ``model`` is in evaluation mode and not compiled."""
    state, model = RNGState().state_dict(), torch.nn.Module() if model is None else model
    # Of each module, because a recipe may keep some of them, such as frozen towers, in evaluation mode.
    was_training = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad(), uncompiled(model.eval()):
            yield
    finally:
        for module, training in was_training.items():
            module.training = training
        RNGState().load_state_dict(state)


def _spread(indices: Sequence[int], count: int) -> list[int]:
    """Return at most ``count`` of the indices, evenly spaced from the first to the last."""
    places = np.linspace(0, len(indices) - 1, min(count, len(indices))).astype(int)
    return [int(indices[place]) for place in places]


def _first_rows(recipe: Any, count: int) -> list[Any]:
    """Return the first rows of a stream from a new reader, so that the run keeps its position; none on errors."""
    settings = SettingsView.of(recipe.cfg)
    try:
        with _undisturbed(), workers(1):
            stream = instantiate_dataset(settings.dataset, recipe.tokenizer, context_length(settings))
            return [stream[index] for index in range(count)]
    except UserError as error:
        get_logger().warning(f"No rows of the stream are measured: {error}")
        return []


def _first_turn(row: Any) -> Iterator[tuple[list[int], list[int]]]:
    """Yield a row's first prompt and the trained tokens after it; a row of only trained tokens is split."""
    for _, tokens, labels in texts_of(row)[:1]:
        is_label = np.append(labels != CROSS_ENTROPY_IGNORE_IDX, False)
        first = int(is_label.argmax())
        end = first + int((~is_label[first:]).argmax())
        first = first or min(16, end // 2)
        if end and "encoder_input" not in row:
            yield tokens[: first + 1].tolist(), tokens[first + 1 : end + 1].tolist()


def _missing_for_answers(model: Any, tokenizer: Any) -> str | None:
    """Return what a model or tokenizer of the user's own, which need not generate, lacks for it; None if nothing."""
    if not isinstance(model, TransformerDecoder):
        return f"{type(model).__name__} is no TransformerDecoder, and others do not generate"
    for name in ("decode", "stop_tokens"):
        if not hasattr(tokenizer, name):
            return f"the tokenizer, {type(tokenizer).__name__}, has no {name}"
    return None


def _as_texts(tokenizer: Any, prompt: list[int], expected: list[int]) -> dict[str, str]:
    return {"prompt": tokenizer.decode(prompt)[:_TEXT], "expected": tokenizer.decode(expected)[:_TEXT]}


def _digest(row: Any) -> str:
    """Return a digest of a row's tokens and labels; for a pack, of all its documents."""
    found = hashlib.sha256()
    for document in row if isinstance(row, list) else [row]:
        for name in sorted(document):
            if name == "tokens" or name.endswith(("input_ids", "labels")):
                found.update(np.asarray(document[name], dtype=np.int64).tobytes())
    return found.hexdigest()[:12]
