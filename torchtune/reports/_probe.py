"""Measure the model of a run on the same few rows and prompts, before the first step and after the last."""

import hashlib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, decode_pieces
from torchtune.generation import GenerationError, generate_tokens, uncompiled
from torchtune.modules import text_decoder
from torchtune.rlhf.loss import KTOLoss
from torchtune.supervision import row_lengths
from torchtune.training import RNGState

# Rows whose loss is measured: at most _ROWS, and as many as a twentieth of the rows of the run, but never fewer than
# _FEWEST; measuring them twice, without a backward pass, then takes about 3 % of the time of a long run.
_ROWS, _FEWEST = 32, 8
_PROMPTS, _SAMPLES, _BINS = 8, 5, 24
# Longest answer in tokens, and the seconds that all answers may take, by the time of one forward pass.
_ANSWER, _SECONDS = 64, 30.0
_TEXT = 4000  # characters of a prompt, an answer or a sample


class Probe:
    """Rows of the validation data, or else of the training data, that a run is measured on.

    Supervised recipes and preferences are measured by the loss of single rows (packs of packed data), recipes with a
    method ``sample`` by the reward of greedy answers. No random number is drawn, and all ranks call :meth:`measure`
    together.

    Args:
        recipe: recipe after ``setup``.

    Attributes:
        setting: setting of the data, ``dataset_val`` or ``dataset``.
        rows: indices of the rows; empty for data that is only read while the run trains.
    """

    def __init__(self, recipe: Any) -> None:
        self._recipe, self._loader = recipe, recipe.loader_val or recipe.loader
        self.setting = "dataset" if self._loader is recipe.loader else "dataset_val"
        self._rewards = hasattr(recipe, "sample")
        self.rows: list[int] = []
        dataset, size = self._loader.dataset, recipe.dims.data_size
        if getattr(dataset, "is_stream", False) or not (self._rewards or hasattr(recipe, "compute_loss")):
            return
        in_run = recipe.total_steps * recipe.loader.examples_per_step
        # KTO compares an answer with that of another row.
        self._group = 2 if isinstance(getattr(recipe, "loss_fn", None), KTOLoss) else 1
        count = min(len(dataset), _ROWS, max(_FEWEST, in_run // 20)) // (size * self._group) * size * self._group
        self.rows = _spread(len(dataset), count)

    def measure(self) -> dict[str, Any]:
        """Return what is measured: ``values`` (digest of a row -> mean loss or reward) and ``answers``. A collective."""
        if not self.rows:
            return {"on": self.setting, "rows": 0, "values": {}, "answers": []}
        with _undisturbed(self._recipe.model):
            start = time.perf_counter()
            rows = [self._loader.dataset[index] for index in self.rows]
            names = [_digest(row) for row in rows]
            values, answers = (self._score if self._rewards else self._losses)(rows, names)
            if not self._rewards:
                seconds = (time.perf_counter() - start) / len(rows) * self._recipe.dims.data_size
                answers = self._answers(self._recipe.dims.max(int(1e6 * seconds)) / 1e6)
        found = {name: values.get(f"val_{name}") for name in names}
        what = "reward" if self._rewards else "loss"
        return {"what": what, "on": self.setting, "rows": len(found), "values": found, "answers": answers}

    def _losses(self, rows: list[Any], names: list[str]) -> tuple[dict[str, float], list[Any]]:
        recipe, dims = self._recipe, self._recipe.dims
        with recipe.step_metrics.validation() as means:
            for start in range(dims.data_rank * self._group, len(rows), dims.data_size * self._group):
                batch = self._loader.collate_fn(rows[start : start + self._group])
                means.add({names[start]: (recipe.compute_loss(batch), batch.num_terms)})
            return means.over(dims), []

    def _score(self, rows: list[Any], names: list[str]) -> tuple[dict[str, float], list[dict[str, str]]]:
        recipe, dims = self._recipe, self._recipe.dims
        mine = slice(dims.data_rank, None, dims.data_size)
        scored = recipe.sample([self._loader.collate_fn([row]) for row in rows[mine]], 1, greedy=True)
        with recipe.step_metrics.validation() as means:
            rewards = scored.rewards.flatten()
            for name, reward in zip(names[mine], rewards.nan_to_num().tolist(), strict=True):
                means.add({name: (reward, 1)})
            found = means.over(dims)
        prompts = [_shorten(recipe.tokenizer.decode(prompt.tokens)) for prompt in scored.prompts[:_PROMPTS]]
        pairs = zip(prompts, scored.texts, strict=False)
        return found, [{"prompt": prompt, "expected": "", "answer": _shorten(text)} for prompt, text in pairs]

    def _answers(self, seconds: float) -> list[dict[str, str]]:
        """Answer prompts greedily; none for images, context parallel models, or if that would take long."""
        recipe, dataset = self._recipe, _rows_of(self._loader.dataset)
        model, tokenizer = recipe.model, getattr(recipe, "tokenizer", None)
        if text_decoder(model) is not model or recipe.dims.cp > 1 or not hasattr(tokenizer, "decode"):
            return []
        turns = [turn for index in _spread(len(dataset), _PROMPTS) if (turn := _first_turn(dataset[index]))]
        longest = min(_ANSWER, 8 + max((len(expected) for _, expected in turns), default=0), int(_SECONDS / max(seconds, 1e-6)))
        turns = [turn for turn in turns if len(turn[0]) + longest <= model.max_seq_len]
        if not turns or longest < 1:
            return []
        stop = list(tokenizer.stop_tokens)
        try:
            generated = generate_tokens(
                model, [prompt for prompt, _ in turns], max_new_tokens=longest, temperature=0.0, stop_tokens=stop
            )
        except GenerationError:  # an architecture without text generation
            return []
        answers = [[token for token in row.tolist() if token not in stop] for row in generated.tokens]
        texts = [map(tokenizer.decode, (prompt, expected)) for prompt, expected in turns]
        return [
            {"prompt": _shorten(prompt), "expected": _shorten(expected), "answer": tokenizer.decode(answer)}
            for (prompt, expected), answer in zip(texts, answers, strict=True)
        ]


def describe_data(loader: Any, tokenizer: Any) -> dict[str, Any]:
    """Return facts about a loader's data: number of rows, digest, lengths, and samples with their trained tokens."""
    dataset = loader.dataset
    if getattr(dataset, "is_stream", False):
        return {"rows": None, "samples": []}
    rows, fingerprint = _rows_of(dataset), getattr(dataset, "fingerprint", None)
    facts: dict[str, Any] = {"rows": len(rows), "samples": []}
    if hasattr(dataset, "packs"):
        facts["packs"] = len(dataset)
    if fingerprint is not None:
        facts["digest"] = hashlib.sha256(repr(fingerprint).encode()).hexdigest()[:16]
    if (lengths := row_lengths(rows)) is not None:
        counts, edges = np.histogram(lengths, bins=min(_BINS, max(int(lengths.max()) - int(lengths.min()), 1)))
        facts |= {"tokens": int(lengths.sum()), "lengths": {"counts": counts.tolist(), "edges": edges.tolist()}}
    with _undisturbed():
        for index in _spread(len(rows), _SAMPLES):
            for tokens, labels in _sides(rows[index]):
                kept = min(len(tokens), _TEXT)  # a token is at least a character
                pieces = decode_pieces(tokens[:kept], labels[:kept], tokenizer)
                trained = int((labels != CROSS_ENTROPY_IGNORE_IDX).sum())
                sample = {"row": index, "tokens": len(tokens), "trained": trained}
                facts["samples"].append(sample | {"pieces": [(_shorten(text), is_trained) for text, is_trained in pieces]})
    return facts


@contextmanager
def _undisturbed(model: torch.nn.Module | None = None) -> Iterator[None]:
    """Restore the random state after the block, in which ``model`` is evaluated as it is written."""
    state = RNGState().state_dict()
    try:
        if model is None:
            yield
            return
        was_training = model.training
        with torch.no_grad(), uncompiled(model):
            model.eval()
            yield
            model.train(was_training)
    finally:
        RNGState().load_state_dict(state)


def _spread(total: int, count: int) -> list[int]:
    """Return at most ``count`` indices of ``total``, evenly spaced from the first to the last."""
    return sorted({int(index) for index in np.linspace(0, total - 1, min(count, total))})


def _rows_of(dataset: Any) -> Any:
    return dataset.ds if hasattr(dataset, "packs") else dataset


def _sides(row: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (tokens, labels) of a row: of its first document in a pack, two of a pair, none without tokens."""
    row = row[0] if isinstance(row, list) else row
    names = [("tokens", "labels"), ("chosen_input_ids", "chosen_labels"), ("rejected_input_ids", "rejected_labels")]
    return [(np.asarray(row[ids]), np.asarray(row[labels])) for ids, labels in names if ids in row and labels in row]


def _first_turn(row: Any) -> tuple[list[int], list[int]] | None:
    """Split a row into the prompt and the tokens that are trained after it; a text of trained tokens in the middle."""
    sides = _sides(row)
    if not sides or (isinstance(row, Mapping) and "encoder_input" in row):
        return None
    tokens, is_label = sides[0][0], sides[0][1] != CROSS_ENTROPY_IGNORE_IDX
    if not is_label.any():
        return None
    first = int(is_label.argmax())
    end = first + int((~np.append(is_label[first:], False)).argmax())
    first = first if first else min(16, end // 2)
    return tokens[: first + 1].tolist(), tokens[first + 1 : end + 1].tolist()


def _digest(row: Any) -> str:
    """Return a name of a row by its tokens and labels; of a pack, by those of all documents."""
    found = hashlib.sha256()
    for document in row if isinstance(row, list) else [row]:
        for name in sorted(document):
            if name == "tokens" or name.endswith(("input_ids", "labels")):
                found.update(np.asarray(document[name], dtype=np.int64).tobytes())
    return found.hexdigest()[:12]


def _shorten(text: str) -> str:
    return text if len(text) <= _TEXT else f"{text[:_TEXT]} … ({len(text):,} characters)"
