"""Scores by name: rewards of this library or user functions."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path

from torchtune.config import InstantiationError, did_you_mean, locate
from torchtune.evaluation._evaluation_error import EvaluationError
from torchtune.evaluation._questions import EvalRow
from torchtune.rlhf import RewardSum, RolloutError
from torchtune.rlhf.reward_functions import (
    ExactMatch,
    FunctionReward,
    JSONFields,
    MathReward,
    NumberMatch,
    RegexMatch,
    Reward,
)

# Name -> constructor of the score from the pattern after the colon (``None`` without one).
_SCORES: dict[str, Callable[[str | None], Reward]] = {
    "exact": lambda pattern: ExactMatch(pattern=pattern, name="exact"),
    "json": lambda _: JSONFields(name="json"),
    "math": lambda _: MathReward(name="math"),
    "number": lambda _: NumberMatch(name="number"),
    "regex": lambda pattern: RegexMatch(pattern or "", name="regex"),
}
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
    found = [_make_score(name) for name in names]
    labels = [score.name for score in found]
    for score, name in zip(found, names, strict=True):
        if labels.count(score.name) > 1:  # with different patterns
            score.name = name
    labels = [score.name for score in found]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise EvaluationError(f"score '{twice}' is given twice: give each once.")
    return found


def _make_score(text: str) -> Reward:
    name, colon, pattern = text.partition(":")
    if name in _SCORES:
        if colon and name not in _TAKE_PATTERN:
            raise EvaluationError(f"score '{text}': {name} takes no pattern: write {name} alone.")
        if name == "regex" and not pattern:
            raise EvaluationError("score 'regex' lacks its pattern: write regex:PATTERN.")
        try:
            return _SCORES[name](pattern if colon else None)
        except ValueError as error:
            raise EvaluationError(f"score '{text}': {str(error).rstrip('.')}.") from error
    if "." not in text:
        hint = f": use {', '.join(_SCORES)}, or the dotted path of a function."
        raise EvaluationError(f"there is no score '{text}'{did_you_mean(text, _SCORES) or hint}")
    try:
        target = locate(text)
        if inspect.isclass(target) and issubclass(target, Reward):
            return target()
    except (InstantiationError, TypeError, ValueError) as error:
        raise EvaluationError(f"score '{text}': {str(error).rstrip('.')}.") from error
    if not callable(target):
        raise EvaluationError(f"score '{text}': it is a {type(target).__name__}, not a function of (rows, texts).")
    return FunctionReward(text)


def check_scores(scores: Sequence[Reward], rows: Sequence[EvalRow], source: str | Path) -> None:
    """Check before a model is loaded that every score can read its field of each row.

    Raises:
        EvaluationError: a field is missing or invalid; the message names the line.

    Example:
        >>> _ = (folder / "rows.jsonl").write_text('{"prompt": "2 + 2"}')
        >>> rows = torchtune.evaluation.read_eval_rows(folder / "rows.jsonl")
        >>> torchtune.evaluation.check_scores(torchtune.evaluation.make_scores(["exact"]), rows, "rows.jsonl")
        Traceback (most recent call last):
        torchtune.evaluation._evaluation_error.EvaluationError: rows.jsonl, line 1: score 'exact': ...
    """
    for score in scores:
        for row in rows if type(score) in _SIDE_EFFECT_FREE else ():
            try:
                score([row.row], [""])
            except RolloutError as error:
                raise EvaluationError(
                    f"{source}, line {row.line}: score '{score.name}': {error}: correct the row, or name the column "
                    "of the right answer with --answer."
                ) from error


def combine_scores(scores: Sequence[Reward]) -> RewardSum:
    """Combine the scores into one function; its errors name the score that failed."""
    return RewardSum(scores, setting="score")
