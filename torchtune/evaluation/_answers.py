"""Scores of the answers that a model generates to rows."""

import hashlib
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtune.evaluation._rows import EvalRow
from torchtune.evaluation._scores import sum_of
from torchtune.generation import Prompt, answer_prompts, model_digest
from torchtune.modules.transformer import TransformerDecoder
from torchtune.rlhf.reward_functions import Reward


@dataclass(frozen=True)
class AnswerReport:
    """What came of the answers to some rows.

    Attributes:
        path: JSONL file of the answers.
        scores: name -> the score of every row, NaN where it could not be scored.
        ends: how answers ended (``stop``, ``max_new_tokens``, ``context``) -> rows.

    Example:
        >>> report = torchtune.evaluation.AnswerReport(folder / "answers.jsonl", {"exact": [1.0, 0.0]}, {"stop": 2})
        >>> report.mean("exact")
        (0.5, 0.5)
    """

    path: Path
    scores: dict[str, list[float]]
    ends: dict[str, int]

    def mean(self, name: str) -> tuple[float, float]:
        """The mean of a score over the rows that have one, and its standard error; NaN where they are unknown."""
        values = [value for value in self.scores[name] if not math.isnan(value)]
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return (statistics.fmean(values) if values else math.nan), error

    def unscored(self, name: str) -> int:
        """Rows that could not be scored."""
        return sum(map(math.isnan, self.scores[name]))


def evaluate_answers(
    model: TransformerDecoder,
    tokenizer: Any,
    rows: Sequence[EvalRow],
    scores: Sequence[Reward],
    *,
    source: str | Path,
    folder: str | Path = "eval",
    label: str = "model",
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    max_sequences: int = 16,
) -> AnswerReport:
    """Answer rows and score the answers.

    The answers are written as they end to a file in ``folder`` whose name has a digest of model, tokenizer, prompts and
    sampling. The same call after an interruption goes on there, and one that is complete is only scored again.

    Args:
        model: the decoder.
        tokenizer: of the model.
        rows: of :func:`read_eval_rows`.
        scores: of :func:`make_scores`.
        source: where the rows are from, for names and messages.
        folder: of the answers.
        label: of the model, in the file's name.
        max_new_tokens: longest answer; longer ones are cut and scored as they are.
        temperature: 0 takes the most likely token; otherwise see :func:`torchtune.generation.answer_prompts`.
        seed: of sampling.
        max_sequences: rows that are answered at a time.

    Raises:
        GenerationError: a prompt is as long as the model's context.
        RolloutError: a score raises, or returns something that is none, for the rows that the message names.

    Example:
        >>> _ = (folder / "rows.jsonl").write_text('{"prompt": "the cat", "answer": "sees"}')
        >>> rows = torchtune.evaluation.read_eval_rows(folder / "rows.jsonl")
        >>> report = torchtune.evaluation.evaluate_answers(
        ...     model, tokenizer, rows, torchtune.evaluation.make_scores(["exact"]),
        ...     source="rows.jsonl", folder=folder, max_new_tokens=4,
        ... )
        >>> report.mean("exact")[0]
        0.0
    """
    digest = model_digest(model, tokenizer)
    sampling = [max_new_tokens, temperature, seed if temperature else None]
    what = json.dumps([digest, sampling, [[row.line, row.given] for row in rows]], default=str)
    short = hashlib.sha256(what.encode()).hexdigest()[:8]
    safe = re.sub(r"[^\w.-]+", "_", label) or "model"
    total, by_line = sum_of(scores), {row.line: row for row in rows}
    checked: list[bool] = []

    def check_first(prompt: Prompt, text: str) -> None:
        if not checked:  # a function that raises does so before an hour of answers, not after
            checked.append(True)
            total([by_line[prompt.line].row], [text], [prompt.line])

    answers = answer_prompts(
        model,
        tokenizer,
        rows,
        Path(folder) / f"{Path(source).stem}.{safe}.{short}.jsonl",
        {},
        source=source,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        max_sequences=max_sequences,
        digest=digest,
        on_answer=check_first,
    )
    texts = [answers.done[row.line]["answer"] for row in rows]
    parts = total([row.row for row in rows], texts, [row.line for row in rows]).parts
    notes = {}
    for at, row in enumerate(rows):
        values = {name: None if math.isnan(part[at]) else part[at] for name, part in parts.items()}
        notes[row.line] = {"right": row.row.get("answer"), "scores": values}
    answers.finish(notes)
    return AnswerReport(answers.path, parts, dict(Counter(answers.done[row.line]["end"] for row in rows)))
