"""Reward functions, called with dataset rows and answer texts."""

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Annotated, Any

from torchtune.config import ObjectPath, as_written, locate
from torchtune.rlhf._rollouts import RolloutError
from torchtune.rlhf._servers import NoReplyError, post_json
from torchtune.utils import require

Row = Mapping[str, Any]
# (rows, answer texts) -> one reward per answer; None if an answer cannot be scored.
RewardFunction = Callable[[Sequence[Row], Sequence[str]], Sequence[float | None]]


class Reward(ABC):
    """Base class of rewards, called with dataset rows and the texts of their answers.

    Args:
        weight: weight of this reward in the sum.
        name: name in logs; by default the class name.
    """

    def __init__(self, weight: float = 1.0, name: str | None = None) -> None:
        self.weight = weight
        self.name = name or type(self).__name__

    @abstractmethod
    def __call__(self, rows: Sequence[Row], texts: Sequence[str]) -> Sequence[float | None]:
        """Return a reward for every text; None for a text that cannot be scored, which drops the answer."""


class FunctionReward(Reward):
    """Reward that calls a user function ``(rows, texts) -> list[float | None]``.

    Args:
        function: the function, its dotted path, or its name in the recipe's file.
        weight: see :class:`Reward`.
        name: name in logs; by default the function's name.

    Raises:
        ValueError: ``function`` is not callable.

    Example:
        >>> def is_short(rows, texts):
        ...     return [float(len(text) < 10) for text in texts]
        >>> torchtune.rlhf.reward_functions.FunctionReward(is_short, weight=2.0)([{}], ["yes"])
        [1.0]
    """

    def __init__(
        self,
        function: Annotated[str, ObjectPath()] | RewardFunction,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        if isinstance(function, str):
            default_name = as_written(function).rpartition(".")[2]
            target = locate(function)
        else:
            default_name = getattr(function, "__name__", type(function).__name__)
            target = function
        super().__init__(weight, name or default_name)
        if not callable(target):
            kind = type(target).__name__
            raise ValueError(f"function: {function!r:.80} is a {kind}: name a function, as in my_rewards.polite.")
        self._function: RewardFunction = target

    def __call__(self, rows: Sequence[Row], texts: Sequence[str]) -> Sequence[float | None]:
        """Call the function."""
        return self._function(rows, texts)


class _RowReward(Reward):
    """Base class of rewards that score one answer at a time."""

    def __call__(self, rows: Sequence[Row], texts: Sequence[str]) -> list[float | None]:
        """Score every text, see :class:`Reward`."""
        rewards = []
        for row, text in zip(rows, texts, strict=True):
            rewards.append(self.score(row, text))
        return rewards

    @abstractmethod
    def score(self, row: Row, text: str) -> float | None:
        """Return the reward of one text."""


class _ColumnReward(_RowReward):
    """Base class of rewards that compare an answer with a column of its row.

    Args:
        column: column of the reference answer.
        weight: see :class:`Reward`.
        name: see :class:`Reward`.
    """

    def __init__(self, column: str = "answer", weight: float = 1.0, name: str | None = None) -> None:
        super().__init__(weight, name)
        self.column = column

    def reference(self, row: Row) -> Any:
        """Return the reference answer."""
        return _column(row, self.column)


def _column(row: Row, column: str) -> Any:
    """Return a column of a row. Raises :class:`RolloutError` if the row lacks it."""
    if column not in row:
        raise RolloutError(f"the row has no column '{column}', it has {', '.join(map(str, row)) or 'none'}")
    return row[column]


class ExactMatch(_ColumnReward):
    """Reward 1 if the stripped answer equals a column, otherwise 0.

    Args:
        column: column of the reference answer.
        pattern: regular expression; its last match in the answer is compared, the first group if there is one.
        weight: see :class:`Reward`.
        name: see :class:`Reward`.
    """

    def __init__(
        self,
        column: str = "answer",
        pattern: str | None = None,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(column, weight, name)
        self.pattern = None if pattern is None else _compile_pattern(pattern)

    def score(self, row: Row, text: str) -> float:
        """Return 1 or 0."""
        answer = _last_match(self.pattern, text.strip())
        expected = str(self.reference(row)).strip()
        return float(answer == expected)


_NUMBER = re.compile(r"(?:(?<!\d)-)?(?:\d[\d,]*)?\.?\d+(?:[eE][+-]?\d+)?")  # the last number of "3-5" is 5


class NumberMatch(_ColumnReward):
    """Reward 1 if the last numbers in the answer and in a column are equal (``1,200.0`` equals ``1.2e3``), otherwise 0.

    Args:
        column: column of the reference answer; its last number is compared (for example after ``####``).
        weight: see :class:`Reward`.
        name: see :class:`Reward`.
    """

    def score(self, row: Row, text: str) -> float:
        """Return 1 or 0."""
        expected = _last_number(str(self.reference(row)))
        if expected is None:
            raise RolloutError(f"column '{self.column}' holds no number")
        return float(_last_number(text) == expected)


def _last_number(text: str) -> float | None:
    """Return the last number in a text, None without one; commas group its digits."""
    numbers = _NUMBER.findall(text)
    if not numbers:
        return None
    return float(numbers[-1].replace(",", ""))


class RegexMatch(_RowReward):
    """Reward 1 if a regular expression matches the answer, otherwise 0.

    Args:
        pattern: the regular expression; ``.`` also matches line breaks.
        whole: whether the expression must match the whole stripped answer, which checks its format.
        weight: see :class:`Reward`.
        name: see :class:`Reward`.
    """

    def __init__(self, pattern: str, whole: bool = False, weight: float = 1.0, name: str | None = None) -> None:
        super().__init__(weight, name)
        self.pattern = _compile_pattern(pattern)
        self.whole = whole

    def score(self, row: Row, text: str) -> float:
        """Return 1 or 0."""
        if self.whole:
            match = self.pattern.fullmatch(text.strip())
        else:
            match = self.pattern.search(text)
        return float(match is not None)


class JSONFields(_ColumnReward):
    """Reward by the fraction of fields with equal values in the answer and the reference, both JSON objects.

    An answer that is not a JSON object gets 0; an extra field counts as a wrong field.

    Args:
        column: column of the reference answer, a JSON text or a mapping.
        weight: see :class:`Reward`.
        name: see :class:`Reward`.
    """

    def score(self, row: Row, text: str) -> float:
        """Return the fraction, from 0 to 1."""
        expected = self.reference(row)
        if not isinstance(expected, Mapping):
            expected = _parse_json_object(str(expected))
        if expected is None:
            raise RolloutError(f"column '{self.column}' is not a JSON object")
        answer = _parse_json_object(text)
        if answer is None:
            return 0.0
        fields = answer.keys() | expected.keys()
        if not fields:  # both are empty
            return 1.0
        num_equal = 0
        for field in answer.keys() & expected.keys():
            if _is_same_json(answer[field], expected[field]):
                num_equal += 1
        return num_equal / len(fields)


def _is_same_json(value: Any, other: Any) -> bool:
    """Return whether two JSON values are equal; True equals 1 in Python, but not in JSON."""
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return value.keys() == other.keys() and all(_is_same_json(value[key], other[key]) for key in value)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_is_same_json, value, other))
    return isinstance(value, bool) == isinstance(other, bool) and value == other


class LengthReward(_RowReward):
    """Reward 1 for answers of up to ``target`` characters, decreasing linearly to 0 at ``limit``.

    Args:
        target: maximum length with reward 1, in characters.
        limit: minimum length with reward 0, in characters.
        weight: see :class:`Reward`.
        name: see :class:`Reward`.
    """

    def __init__(self, target: int, limit: int, weight: float = 1.0, name: str | None = None) -> None:
        super().__init__(weight, name)
        if not 0 <= target < limit:
            raise ValueError(f"target is {target} and limit {limit}: limit must be above target.")
        self.target = target
        self.limit = limit

    def score(self, row: Row, text: str) -> float:
        """Return the reward, from 0 to 1."""
        reward = (self.limit - len(text)) / (self.limit - self.target)
        return min(max(reward, 0.0), 1.0)


class MathReward(_ColumnReward):
    """Reward 1 if the answer's last mathematical expression equals the reference, otherwise 0 (extra ``math``).

    The answer is dropped if the reference cannot be parsed.

    Args:
        column: column of the reference answer.
        weight: see :class:`Reward`.
        name: see :class:`Reward`.
    """

    def __init__(self, column: str = "answer", weight: float = 1.0, name: str | None = None) -> None:
        super().__init__(column, weight, name)
        self._math = require("math_verify", extra="math", purpose="MathReward")

    def score(self, row: Row, text: str) -> float | None:
        """Return 1, 0 or ``None``."""
        expected = self._math.parse(str(self.reference(row)))
        if not expected:
            return None
        answer = self._math.parse(text)
        return float(self._math.verify(expected, answer))


class ReasoningGymReward(_RowReward):
    """Reward from 0 to 1 by the row's ``reasoning-gym`` environment (extra ``reasoning-gym``).

    The reward supports problems with several right answers. Many environments give partial credit to texts that merely
    contain the answer, which a model learns to exploit: extract the answer with ``pattern``.

    Args:
        pattern: regular expression; its last match in the answer is scored (its first group if it has groups). An
            answer without a match gets 0. By default the whole stripped answer is scored.
        weight: see :class:`Reward`.
        name: see :class:`Reward`.
    """

    def __init__(self, pattern: str | None = None, weight: float = 1.0, name: str | None = None) -> None:
        super().__init__(weight, name)
        self.pattern = None if pattern is None else _compile_pattern(pattern)
        self._gym = require("reasoning_gym", extra="reasoning-gym", purpose="ReasoningGymReward")

    def score(self, row: Row, text: str) -> float:
        """Return the score, from 0 to 1."""
        environment = (_column(row, "metadata") or {}).get("source_dataset")
        if environment is None:
            raise RolloutError("the row is of no environment: use torchtune.datasets.reasoning_gym_dataset")
        answer = _last_match(self.pattern, text.strip())
        if answer is None:
            return 0.0
        score_answer = self._gym.get_score_answer_fn(environment)
        return float(score_answer(answer, row))


def _last_match(pattern: re.Pattern[str] | None, text: str) -> str | None:
    """Return the last match of a pattern (its first group if it has groups); None without a match.

    Without a pattern, return the whole text.
    """
    if pattern is None:
        return text
    matches = list(pattern.finditer(text))
    if not matches:
        return None
    group = 1 if pattern.groups else 0  # group 0 is the whole match
    return matches[-1][group].strip()


class JudgeReward(_RowReward):
    """Reward by a judge: a language model on a server with an OpenAI-compatible API.

    Args:
        url: URL of the server, ending with ``/v1``.
        model: name of the model on the server.
        prompt: prompt of the judge; ``{text}`` stands for the answer, and ``{column}`` for a column of the row.
        pattern: regular expression; its first group is the score. Answers without a match are dropped.
        scale: divides the score.
        timeout: maximum seconds to score one answer.
        weight: see :class:`Reward`.
        name: see :class:`Reward`.
    """

    def __init__(
        self,
        url: str,
        model: str,
        prompt: str,
        pattern: str = r"(-?\d+(?:\.\d+)?)",
        scale: float = 1.0,
        timeout: float = 60.0,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(weight, name)
        self.url = url.rstrip("/")
        self.model = model
        self.prompt = prompt
        self.scale = scale
        self.timeout = timeout
        self.pattern = _compile_pattern(pattern)
        if not self.pattern.groups:
            raise ValueError(f"pattern {pattern!r} has no group: put the number in round brackets.")

    def score(self, row: Row, text: str) -> float | None:
        """Return the score, or None if the judge's answer does not match ``pattern``."""
        try:
            prompt = self.prompt.format_map({**row, "text": text})
        except KeyError as error:
            raise RolloutError(f"the prompt names {error}, which is not a column of the row") from error
        messages = [{"role": "user", "content": prompt}]
        body = {"model": self.model, "messages": messages, "temperature": 0.0}
        reply = post_json(f"{self.url}/chat/completions", body, timeout=self.timeout)
        try:
            verdict = reply["choices"][0]["message"]["content"] or ""  # null, for example, after a refusal
        except (KeyError, IndexError, TypeError) as error:
            raise RolloutError(f"{self.url} replies without choices[0].message.content") from error
        if not isinstance(verdict, str):
            raise RolloutError(f"{self.url} replies with a {type(verdict).__name__} instead of a text")
        match = self.pattern.search(verdict)
        if match is None:
            return None
        return float(match[1]) / self.scale


@dataclass(frozen=True)
class Scores:
    """Rewards of answers.

    Attributes:
        total: weighted sum of rewards for every answer; NaN if the answer could not be scored.
        parts: unweighted rewards of every answer, by name of the reward; NaN if the answer could not be scored.
    """

    total: list[float]
    parts: dict[str, list[float]]


class RewardSum:
    """Weighted sum of rewards.

    Args:
        rewards: list of :class:`Reward` instances and functions ``(rows, texts) -> list[float | None]``.
        setting: name of the setting, for error messages.

    Example:
        >>> def is_short(rows, texts):
        ...     return [float(len(text) < 10) for text in texts]
        >>> rewards = torchtune.rlhf.RewardSum([is_short])
    """

    def __init__(self, rewards: Sequence[RewardFunction], setting: str = "rewards") -> None:
        self._rewards: dict[str, RewardFunction] = {}
        self._setting = setting
        for reward in rewards:
            name = getattr(reward, "name", None) or getattr(reward, "__name__", type(reward).__name__)
            if name in self._rewards:
                raise RolloutError(f"{setting}: there are two of the name '{name}': give one of them another 'name'.")
            self._rewards[name] = reward
        if rewards and not any(_weight(reward) for reward in rewards):
            raise RolloutError(f"{setting}: every weight is 0, so nothing would be learned: raise one.")

    def __call__(self, rows: Sequence[Row], texts: Sequence[str], numbers: Sequence[int] | None = None) -> Scores:
        """Score every text.

        Args:
            rows: dataset rows, one per text.
            texts: the answers.
            numbers: row numbers, for error messages.

        Raises:
            RolloutError: a reward raises, or returns a wrong number of values or a value that is neither a finite
                number nor ``None``; the message names the rows.
        """
        if numbers is None:
            numbers = list(range(len(rows)))
        totals = [0.0] * len(texts)
        parts = {}
        for name, reward in self._rewards.items():
            values = _call_reward(f"{self._setting}: '{name}'", reward, rows, texts, numbers)
            parts[name] = values
            weight = _weight(reward)
            for index, value in enumerate(values):
                totals[index] += weight * value
        return Scores(totals, parts)


def _weight(reward: RewardFunction) -> float:
    """Return the weight of a reward; a function without the attribute has weight 1."""
    return getattr(reward, "weight", 1.0)


def _call_reward(
    name: str, reward: RewardFunction, rows: Sequence[Row], texts: Sequence[str], numbers: Sequence[int]
) -> list[float]:
    """Call a reward and check its values; NaN stands for an answer that cannot be scored.

    Args:
        name: the setting and the name of the reward, for error messages.
        reward: the reward.
        rows: dataset rows, one per text.
        texts: the answers.
        numbers: row numbers, for error messages.
    """
    if not texts:  # this rank has no prompts
        return []
    try:
        values = reward([dict(row) for row in rows], texts)  # copies: the function may modify them
        if isinstance(values, Mapping | Set):  # `list` would take its keys, or an arbitrary order
            raise RolloutError(f"it returned a {type(values).__name__}, and it must return a list")
        values = list(values)
    except NoReplyError as error:  # do not retry row by row: every row could take a timeout
        raise NoReplyError(f"{name} fails for {_format_rows(numbers)}: {error}") from error
    except (Exception, SystemExit) as error:  # a user function may raise anything, or call sys.exit
        # Call the reward row by row: the message names the rows that fail.
        failing = []
        for number, row, text in zip(numbers, rows, texts, strict=True):
            try:
                reward([dict(row)], [text])
            except (Exception, SystemExit):  # noqa: BLE001 - raised by a user function
                failing.append(number)
        failing_rows = _format_rows(failing or numbers)  # all rows, if each alone succeeds
        reason = str(error)
        if not isinstance(error, RolloutError):  # whose message says all
            reason = f"{type(error).__name__}: {error}"
        raise RolloutError(
            f"{name} fails for {failing_rows}: {reason.rstrip('.')}; correct the reward or the rows."
        ) from error
    if len(values) != len(texts):
        raise RolloutError(
            f"{name} returned {len(values)} values for {len(texts)} answers ({_format_rows(numbers)}): it must "
            "return one for each."
        )
    scores = []
    invalid_values = []
    invalid_numbers = []
    for number, value in zip(numbers, values, strict=True):
        if value is None:
            scores.append(math.nan)
        elif _is_finite(value):
            scores.append(float(value))
        else:
            invalid_values.append(value)
            invalid_numbers.append(number)
    if invalid_values:
        raise RolloutError(
            f"{name} returned {invalid_values[0]!r} for {_format_rows(invalid_numbers)}: it must return finite "
            "numbers, or None for an answer that cannot be scored."
        )
    return scores


def _format_rows(numbers: Sequence[int]) -> str:
    """Format up to ten row numbers for messages."""
    unique = sorted(set(numbers))
    if len(unique) == 1:
        return f"row {unique[0]}"
    text = ", ".join(map(str, unique[:10]))
    if len(unique) > 10:
        text += ", …"
    return f"rows {text}"


def _is_finite(value: Any) -> bool:
    """Return whether a value of a user function is a finite number."""
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False


def _compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a regular expression in which ``.`` matches line breaks, too. Raises ``ValueError``."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is not a regular expression: {error}.") from error


def _parse_json_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object of a text; None if the text is something else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    return value
