"""Generate answers to rows and score them: rewards of this library or user functions."""

import hashlib
import inspect
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtune.config import InstantiationError, as_written, did_you_mean, locate
from torchtune.data import canonical_calls
from torchtune.evaluation._eval_rows import EvalRow, EvaluationError
from torchtune.generation import AnswerFile, Prompt, answer_prompts, model_digest
from torchtune.modules.transformer import TransformerDecoder
from torchtune.rlhf import RewardSum, RolloutError
from torchtune.rlhf.environments import CallError, detect_format, parameters_of, parse_calls
from torchtune.rlhf.reward_functions import (
    ExactMatch,
    FunctionReward,
    JSONFields,
    MathReward,
    NumberMatch,
    RegexMatch,
    Reward,
)
from torchtune.tokenizers import chat_template_text
from torchtune.training.parallel import broadcast_object, is_sharded
from torchtune.utils import get_world_size_and_rank

# Name -> constructor of the score from the pattern after the colon (``None`` without one).
_SCORES: dict[str, Callable[[str | None], Reward]] = {
    "exact": lambda pattern: ExactMatch(pattern=pattern, name="exact"),
    "json": lambda _: JSONFields(name="json"),
    "math": lambda _: MathReward(name="math"),
    "number": lambda _: NumberMatch(name="number"),
    "regex": lambda pattern: RegexMatch(pattern or "", name="regex"),
}
NAMED_SCORES = tuple(_SCORES)
_TAKE_PATTERN = ("exact", "regex")
# Scores without side effects that read one row and its answer: check_scores may call them early.
_SIDE_EFFECT_FREE = (ExactMatch, JSONFields, NumberMatch, RegexMatch)


def make_scores(names: Sequence[str]) -> list[Reward]:
    """Build scores that compare answers to the column ``answer``.

    Args:
        names: ``exact`` (``exact:PATTERN`` compares the last match of a regular expression), ``number`` (the last
            number), ``json`` (share of equal fields of a JSON object), ``regex:PATTERN`` (it matches), ``math``
            (extra ``math``), or the dotted path of a function ``(rows, texts) -> list of float or None`` or of a
            :class:`Reward <torchtune.rlhf.reward_functions.Reward>`.

    Raises:
        EvaluationError: there is no such score.

    Example:
        >>> exact, number = torchtune.evaluation.make_scores(["exact", "number"])
        >>> exact([{"answer": "4"}], ["It is 4."]), number([{"answer": "4"}], ["It is 4."])
        ([0.0], [1.0])
    """
    scores = [_make_score(name) for name in names]
    labels = [score.name for score in scores]
    for score, name in zip(scores, names, strict=True):
        if labels.count(score.name) > 1:  # with different patterns
            score.name = name
    labels = [score.name for score in scores]
    for label in labels:
        if labels.count(label) > 1:
            raise EvaluationError(f"score '{label}' is given twice: give each once.")
    return scores


def _make_score(text: str) -> Reward:
    """Build the score of a name with an optional pattern, or of a dotted path; see :func:`make_scores`."""
    name, colon, pattern = text.partition(":")
    if name in _SCORES:  # before paths: a pattern may contain dots
        if colon and name not in _TAKE_PATTERN:
            raise EvaluationError(f"score '{text}': {name} takes no pattern: write {name} alone.")
        if name == "regex" and not pattern:
            raise EvaluationError("score 'regex' lacks its pattern: write regex:PATTERN.")
        try:
            return _SCORES[name](pattern if colon else None)
        except ValueError as error:
            raise EvaluationError(f"score '{text}': {str(error).rstrip('.')}.") from error
    path = as_written(text)
    is_of_recipe = path != text  # a name in the recipe's file, which the check of the config has qualified
    if "." not in path and not is_of_recipe:
        hint = f": use {', '.join(_SCORES)}, or the dotted path of a function, as in my_module.{path}."
        raise EvaluationError(f"there is no score '{path}'{did_you_mean(path, _SCORES) or hint}")
    try:
        target = locate(text)
        if inspect.isclass(target) and issubclass(target, Reward):
            return target()
    except (InstantiationError, TypeError, ValueError) as error:
        raise EvaluationError(f"score '{path}': {str(error).rstrip('.')}.") from error
    if not callable(target):
        raise EvaluationError(f"score '{path}': it is a {type(target).__name__}, not a function of (rows, texts).")
    return FunctionReward(text)


def check_scores(
    scores: Sequence[Reward],
    rows: Sequence[EvalRow],
    source: str | Path,
    *,
    remedy: str = "correct the row, or name the column of the right answer with --answer",
) -> None:
    """Check before a model is loaded that every score can read its field of each row.

    Args:
        scores: from :func:`make_scores`.
        rows: rows to answer.
        source: origin of the rows, for messages.
        remedy: what to do about a row without the field, for messages.

    Raises:
        EvaluationError: a field is missing or invalid; the message names the line.

    Example:
        >>> _ = (folder / "rows.jsonl").write_text('{"prompt": "2 + 2"}')
        >>> rows = torchtune.evaluation.read_eval_rows(folder / "rows.jsonl")
        >>> torchtune.evaluation.check_scores(torchtune.evaluation.make_scores(["exact"]), rows, "rows.jsonl")
        Traceback (most recent call last):
        torchtune.evaluation._eval_rows.EvaluationError: rows.jsonl, line 1: score 'exact': ...
    """
    for score in scores:
        if type(score) not in _SIDE_EFFECT_FREE:
            continue
        for row in rows:
            try:
                score([row.row], [""])
            except RolloutError as error:
                location = f"{source}, line {row.line}"
                raise EvaluationError(f"{location}: score '{score.name}': {error}: {remedy}.") from error


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and standard error of the values that are not NaN; NaN if there are too few."""
    measured = [value for value in values if not math.isnan(value)]
    mean = math.nan
    error = math.nan
    if measured:
        mean = statistics.fmean(measured)
    if len(measured) > 1:
        error = statistics.stdev(measured) / math.sqrt(len(measured))
    return mean, error


@dataclass(frozen=True)
class AnswerReport:
    """Scores of a model's answers to rows.

    Attributes:
        path: JSONL file of the answers.
        scores: name -> one score per row, NaN if the row could not be scored.
        ends: reason why answers ended (``stop``, ``max_new_tokens``, ``context``) -> number of rows.

    Example:
        >>> report = torchtune.evaluation.AnswerReport(folder / "answers.jsonl", {"exact": [1.0, 0.0]}, {"stop": 2})
        >>> report.mean("exact")
        (0.5, 0.5)
    """

    path: Path
    scores: dict[str, list[float]]
    ends: dict[str, int]

    def mean(self, name: str) -> tuple[float, float]:
        """Return the mean and standard error of a score over the scored rows; NaN if there are too few rows."""
        return mean_and_error(self.scores[name])

    def unscored(self, name: str) -> int:
        """Return the number of rows that could not be scored."""
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
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> AnswerReport:
    """Generate and score an answer for each row.

    All ranks of a sharded model call it together; the first one writes the answers and calls the scores.

    Answers are appended to a file in ``folder`` as they end; the file name contains a digest of model, tokenizer,
    prompts and sampling settings. The same call resumes after an interruption; if all answers exist, it only scores
    them again.

    Where the right answer is a tool call, the call in the model's answer is scored, as the text
    ``{"arguments": {…}, "name": …}``; an answer without a call is scored as its text.

    Args:
        model: the decoder.
        tokenizer: the model's tokenizer.
        rows: from :func:`read_eval_rows`.
        scores: from :func:`make_scores`.
        source: origin of the rows, for file names and messages.
        folder: folder of the answers.
        label: name of the model, part of the file name.
        max_new_tokens: maximum length of an answer; longer ones are truncated and scored.
        temperature: 0 is greedy; otherwise see :func:`torchtune.generation.answer_prompts`.
        seed: seed of sampling.
        max_sequences: number of rows that are answered at the same time.
        top_k: see :func:`torchtune.generation.answer_prompts`.
        top_p: see :func:`torchtune.generation.answer_prompts`.
        min_p: see :func:`torchtune.generation.answer_prompts`.

    Raises:
        EvaluationError: a right answer is a tool call, but the format of calls is not known from the chat template.
        GenerationError: a prompt is at least as long as the model's context.
        RolloutError: a score raises or returns an invalid value; the message names the rows.

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
    truncation = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    # Greedy answers do not depend on the seed.
    sampling: list[Any] = [max_new_tokens, temperature, seed if temperature else None]
    # Only if given: without them, the file has the name that earlier releases gave it, and is continued.
    for name, value in truncation.items():
        if value is not None:
            sampling.append({name: value})
    prompts = [[row.line, row.given] for row in rows]
    settings_text = json.dumps([digest, sampling, prompts], default=str)
    settings_digest = hashlib.sha256(settings_text.encode()).hexdigest()[:8]
    file_label = re.sub(r"[^\w.-]+", "_", label) or "model"
    reward = RewardSum(scores, setting="score")  # its errors name the score that failed
    rows_by_line = {row.line: row for row in rows}
    tool_format = tool_format_of(tokenizer, rows, source)
    is_checked = False
    is_main = not is_sharded(model) or get_world_size_and_rank()[1] == 0

    def check_first(prompt: Prompt, text: str) -> None:
        nonlocal is_checked
        if not is_checked:  # fail before an hour of generation, not after it
            is_checked = True
            row = rows_by_line[prompt.line]
            reward([row.row], [scored_text(row, text, tool_format)], [row.line])

    answers = answer_prompts(
        model,
        tokenizer,
        rows,
        Path(folder) / f"{Path(source).stem}.{file_label}.{settings_digest}.jsonl",
        {},  # no further settings: the name of the file has the digest of all
        source=source,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        **truncation,
        seed=seed,
        max_sequences=max_sequences,
        digest=digest,
        on_answer=check_first if is_main else None,
    )
    ends = Counter(answers.done[row.line]["end"] for row in rows)
    values_by_score = None
    if is_main:
        values_by_score = _score_rows(rows, answers, reward, tool_format)
    if is_sharded(model):
        values_by_score = broadcast_object(values_by_score)
    return AnswerReport(answers.path, values_by_score, dict(ends))


def _score_rows(
    rows: Sequence[EvalRow], answers: AnswerFile, reward: RewardSum, tool_format: str | None
) -> dict[str, list[float]]:
    """Return the scores of all rows, and write them into the file of answers."""
    texts = []
    for row in rows:
        answer = answers.done[row.line]["answer"]
        texts.append(scored_text(row, answer, tool_format))
    scores = reward([row.row for row in rows], texts, [row.line for row in rows])
    values_by_score = scores.parts
    notes = {}
    for index, row in enumerate(rows):
        row_scores: dict[str, float | None] = {}
        for name, values in values_by_score.items():
            row_scores[name] = values[index]
            if math.isnan(values[index]):  # JSON has no NaN
                row_scores[name] = None
        notes[row.line] = {"right": row.row.get("answer"), "scores": row_scores}
    answers.finish(notes)
    return values_by_score


def tool_format_of(tokenizer: Any, rows: Sequence[EvalRow], source: str | Path) -> str | None:
    """Return the format of tool calls of the chat template; None if no right answer is a call."""
    first = next((row for row in rows if row.expects_call), None)
    if first is None:
        return None
    tool_format = detect_format(chat_template_text(tokenizer))
    if tool_format is None:
        raise EvaluationError(
            f"{source}, line {first.line}: the right answer is a tool call, but the chat template shows no format of "
            "tool calls, by which the model's could be read: evaluate a checkpoint with such a template, or name a "
            "column of texts with --answer."
        )
    return tool_format


def scored_text(row: EvalRow, text: str, tool_format: str | None) -> str:
    """Return the text of an answer, or its tool calls if the right answer is a call."""
    if not row.expects_call or tool_format is None:
        return text
    try:
        calls = parse_calls(text, tool_format, parameters_of(row.tools or []))
    except CallError:
        return text
    if not calls:
        return text
    return canonical_calls([(call.name, call.arguments) for call in calls])
