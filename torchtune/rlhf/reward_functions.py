"""Rewards of answers: functions of rows and texts, and those that are built in."""

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torchtune.config import _locate
from torchtune.rlhf._http import NoAnswerError, post_json
from torchtune.rlhf._rollouts import RolloutError
from torchtune.utils import require

Row = Mapping[str, Any]
# (rows, texts of the answers) -> a reward each; None where an answer cannot be scored.
RewardFunction = Callable[[Sequence[Row], Sequence[str]], Sequence[float | None]]


class Reward(ABC):
    """A reward of answers, called with rows of the dataset and the texts of their answers.

    Args:
        weight: of this reward in the sum.
        name: in logs; by default that of the class.
    """

    def __init__(self, weight: float = 1.0, name: str | None = None) -> None:
        self.weight, self.name = weight, name or type(self).__name__

    @abstractmethod
    def __call__(self, rows: Sequence[Row], texts: Sequence[str]) -> Sequence[float | None]:
        """A reward for every text; None where it cannot be scored, which drops the answer."""


class FunctionReward(Reward):
    """A function of yours, ``(rows, texts) -> list[float | None]``.

    Args:
        function: the function, its dotted path, or its name where it stands in the recipe's file.
        weight: see :class:`Reward`.
        name: by default that of the function.

    Raises:
        ValueError: it is no function.

    Example:
        >>> def is_short(rows, texts):
        ...     return [float(len(text) < 10) for text in texts]
        >>> torchtune.rlhf.reward_functions.FunctionReward(is_short, weight=2.0)([{}], ["yes"])
        [1.0]
    """

    def __init__(self, function: str | RewardFunction, weight: float = 1.0, name: str | None = None) -> None:
        own = function.rpartition(".")[2] if isinstance(function, str) else getattr(function, "__name__", None)
        super().__init__(weight, name or own or type(function).__name__)
        found = _locate.locate(function, _locate.names_of_recipe) if isinstance(function, str) else function
        if not callable(found):
            kind = type(found).__name__
            raise ValueError(f"function: {function!r:.80} is a {kind}: name a function, as in my_rewards.polite.")
        self._function: RewardFunction = found

    def __call__(self, rows: Sequence[Row], texts: Sequence[str]) -> Sequence[float | None]:
        """What the function returns."""
        return self._function(rows, texts)


class _RowReward(Reward):
    """A reward of one answer at a time."""

    def __call__(self, rows: Sequence[Row], texts: Sequence[str]) -> list[float | None]:
        """See :class:`Reward`."""
        return [self.score(row, text) for row, text in zip(rows, texts, strict=True)]

    @abstractmethod
    def score(self, row: Row, text: str) -> float | None:
        """The reward of one text."""


def _column(row: Row, column: str) -> Any:
    if column not in row:
        raise RolloutError(f"the row has no column '{column}', it has {', '.join(map(str, row)) or 'none'}")
    return row[column]


class ExactMatch(_RowReward):
    """1 where the answer, without space around it, is what stands in a column, else 0.

    Args:
        column: of the right answer.
        ignore_case: whether upper and lower case are the same.
        pattern: regular expression; what is compared is its first group (or all of it) at its last match.
        weight: see :class:`Reward`.
        name: see :class:`Reward`.
    """

    def __init__(
        self,
        column: str = "answer",
        ignore_case: bool = False,
        pattern: str | None = None,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(weight, name)
        self.column, self.ignore_case = column, ignore_case
        self.pattern = None if pattern is None else _compiled(pattern)

    def score(self, row: Row, text: str) -> float:
        """1 or 0."""
        given, right = _matched(self.pattern, text.strip()), str(_column(row, self.column)).strip()
        if given is None:
            return 0.0
        return float(given.casefold() == right.casefold() if self.ignore_case else given == right)


_NUMBER = re.compile(r"(?:(?<!\d)-)?(?:\d[\d,]*)?\.?\d+(?:[eE][+-]?\d+)?")  # 3-5 ends in 5


class NumberMatch(_RowReward):
    """1 where the last number of the answer equals the last one in a column, else 0; ``1,200.0`` is ``1.2e3``.

    Args:
        column: of the right answer, whose last number counts too (for example behind ``####``).
        weight: see :class:`Reward`.
        name: see :class:`Reward`.
    """

    def __init__(self, column: str = "answer", weight: float = 1.0, name: str | None = None) -> None:
        super().__init__(weight, name)
        self.column = column

    def score(self, row: Row, text: str) -> float:
        """1 or 0."""
        right, given = _last_number(str(_column(row, self.column))), _last_number(text)
        if right is None:
            raise RolloutError(f"column '{self.column}' holds no number")
        return float(given == right)


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


class RegexMatch(_RowReward):
    """1 where a regular expression matches, else 0.

    Args:
        pattern: the regular expression; ``.`` matches line breaks too.
        whole: it has to match the whole answer, without space around it: a format.
        weight: see :class:`Reward`.
        name: see :class:`Reward`.
    """

    def __init__(self, pattern: str, whole: bool = False, weight: float = 1.0, name: str | None = None) -> None:
        super().__init__(weight, name)
        self.pattern, self.whole = _compiled(pattern), whole

    def score(self, row: Row, text: str) -> float:
        """1 or 0."""
        return float(bool(self.pattern.fullmatch(text.strip()) if self.whole else self.pattern.search(text)))


class JSONFields(_RowReward):
    """Share of the fields of the right JSON object that the answer, a JSON object, has with the same value.

    An answer that is no JSON object gets 0; a field that should not be there counts as one that is wrong.

    Args:
        column: of the right answer, a JSON text or a mapping.
        weight: see :class:`Reward`.
        name: see :class:`Reward`.
    """

    def __init__(self, column: str = "answer", weight: float = 1.0, name: str | None = None) -> None:
        super().__init__(weight, name)
        self.column = column

    def score(self, row: Row, text: str) -> float:
        """From 0 to 1."""
        right = _column(row, self.column)
        right = right if isinstance(right, Mapping) else _json_object(str(right))
        if right is None:
            raise RolloutError(f"column '{self.column}' is no JSON object")
        given = _json_object(text)
        fields = {*right, *(given or {})}
        if given is None or not fields:
            return float(given is not None)
        same = [key in given and key in right and _same(given[key], right[key]) for key in fields]
        return sum(same) / len(fields)


class LengthReward(_RowReward):
    """1 for answers up to a number of characters, decreasing to 0 at the limit.

    Args:
        target: longest answer that gets 1, in characters.
        limit: answers of this length get 0.
        weight: see :class:`Reward`.
        name: see :class:`Reward`.
    """

    def __init__(self, target: int, limit: int, weight: float = 1.0, name: str | None = None) -> None:
        super().__init__(weight, name)
        if not 0 <= target < limit:
            raise ValueError(f"target is {target} and limit {limit}: limit must be above target.")
        self.target, self.limit = target, limit

    def score(self, row: Row, text: str) -> float:
        """From 0 to 1."""
        return min(1.0, max(0.0, (self.limit - len(text)) / (self.limit - self.target)))


class MathReward(_RowReward):
    """1 where the answer's last mathematical expression equals the right one (extra ``math``), else 0.

    None, which drops the answer, where the right one cannot be read.

    Args:
        column: of the right answer.
        weight: see :class:`Reward`.
        name: see :class:`Reward`.
    """

    def __init__(self, column: str = "answer", weight: float = 1.0, name: str | None = None) -> None:
        super().__init__(weight, name)
        self.column = column
        self._math = require("math_verify", extra="math", purpose="MathReward")

    def score(self, row: Row, text: str) -> float | None:
        """1, 0 or None."""
        right = self._math.parse(str(_column(row, self.column)))
        return float(self._math.verify(right, self._math.parse(text))) if right else None


class ReasoningGymReward(_RowReward):
    """The score that the row's environment of ``reasoning-gym`` gives (extra of the same name), from 0 to 1.

    For problems with several right answers. Many environments give a part of it to texts that only contain the
    answer, which is what a model learns then: name what is the answer by ``pattern``.

    Args:
        pattern: regular expression; what is scored is its first group (or all of it) at its last match, and an answer
            without a match gets 0. By default all of the answer, without space around it.
        weight: see :class:`Reward`.
        name: see :class:`Reward`.
    """

    def __init__(self, pattern: str | None = None, weight: float = 1.0, name: str | None = None) -> None:
        super().__init__(weight, name)
        self.pattern = None if pattern is None else _compiled(pattern)
        self._gym = require("reasoning_gym", extra="reasoning-gym", purpose="ReasoningGymReward")

    def score(self, row: Row, text: str) -> float:
        """From 0 to 1."""
        environment = (_column(row, "metadata") or {}).get("source_dataset")
        if environment is None:
            raise RolloutError("the row is of no environment: use torchtune.datasets.reasoning_gym_dataset")
        given = _matched(self.pattern, text.strip())
        return 0.0 if given is None else float(self._gym.get_score_answer_fn(environment)(given, row))


def _matched(pattern: re.Pattern[str] | None, text: str) -> str | None:
    """What a pattern finds last in a text, its first group if it has one; None where it finds nothing."""
    if pattern is None:
        return text
    found = list(pattern.finditer(text))
    return found[-1][1 if pattern.groups else 0].strip() if found else None


class JudgeReward(_RowReward):
    """What a language model behind an OpenAI-compatible endpoint says of an answer: a number.

    Args:
        url: of the server, up to and with ``/v1``.
        model: name of the model there.
        prompt: what it is asked; ``{text}`` stands for the answer, and ``{column}`` for a column of the row.
        pattern: regular expression; its first group is the number. Answers without a match are dropped.
        scale: the number is divided by it.
        timeout: seconds for one answer.
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
        self.url, self.model, self.prompt, self.scale, self.timeout = url.rstrip("/"), model, prompt, scale, timeout
        self.pattern = _compiled(pattern)
        if not self.pattern.groups:
            raise ValueError(f"pattern {pattern!r} has no group: put the number in round brackets.")

    def score(self, row: Row, text: str) -> float | None:
        """The number, or None."""
        try:
            asked = self.prompt.format_map({**row, "text": text})
        except KeyError as error:
            raise RolloutError(f"the prompt names {error}, which is no column of the row") from error
        body = {"model": self.model, "messages": [{"role": "user", "content": asked}], "temperature": 0.0}
        reply = post_json(f"{self.url}/chat/completions", body, timeout=self.timeout)
        try:
            said = reply["choices"][0]["message"]["content"] or ""
        except (KeyError, IndexError, TypeError) as error:
            raise RolloutError(f"{self.url} replies without choices[0].message.content") from error
        if not isinstance(said, str):
            raise RolloutError(f"{self.url} replies with no text but a {type(said).__name__}")
        found = self.pattern.search(said)
        return None if found is None else float(found[1]) / self.scale


@dataclass(frozen=True)
class Scores:
    """Rewards of some answers.

    Attributes:
        total: weighted sum of every answer, NaN where it could not be scored.
        parts: name of a reward -> its value for every answer, without its weight; NaN where there was none.
    """

    total: list[float]
    parts: dict[str, list[float]]


class RewardSum:
    """The weighted sum of rewards.

    Args:
        rewards: each a :class:`Reward`, or a function ``(rows, texts) -> list[float | None]``.
        setting: what they are called in messages.

    Example:
        >>> def is_short(rows, answers, **others):
        ...     return [float(len(answer) < 10) for answer in answers]
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
        if rewards and not any(getattr(reward, "weight", 1.0) for reward in rewards):
            raise RolloutError(f"{setting}: every weight is 0, so nothing would be learned: raise one.")

    def __call__(self, rows: Sequence[Row], texts: Sequence[str], numbers: Sequence[int] | None = None) -> Scores:
        """Score every text.

        Args:
            rows: of the dataset, one per text.
            texts: the answers.
            numbers: of the rows, for messages.

        Raises:
            RolloutError: a reward raises, returns another number of values than there are texts, or a value that is
                neither a finite number nor None; the message names the rows.
        """
        numbers = list(range(len(rows))) if numbers is None else numbers
        total, parts = [0.0] * len(texts), {}
        for name, reward in self._rewards.items():
            values = _called(f"{self._setting}: '{name}'", reward, rows, texts, numbers)
            parts[name] = values
            weight = getattr(reward, "weight", 1.0)
            total = [before + weight * value for before, value in zip(total, values, strict=True)]
        return Scores(total, parts)


def _called(
    name: str, reward: RewardFunction, rows: Sequence[Row], texts: Sequence[str], numbers: Sequence[int]
) -> list[float]:
    if not texts:  # of a process without prompts of its own
        return []
    try:
        values = reward([dict(row) for row in rows], texts)  # copies: it may change them, and others read them too
        if isinstance(values, Mapping | Set):
            raise RolloutError(f"it returned a {type(values).__name__}, and it must return a list")
        values = list(values)
    except NoAnswerError as error:  # asked again for each row, it would take as many timeouts
        raise NoAnswerError(f"{name} fails for {_named(numbers)}: {error}") from error
    except (Exception, SystemExit) as error:  # of somebody else's function, whatever it may be
        where = [number for number, row, text in zip(numbers, rows, texts, strict=True) if _raises(reward, row, text)]
        what = str(error) if isinstance(error, RolloutError) else f"{type(error).__name__}: {error}"
        raise RolloutError(
            f"{name} fails for {_named(where or numbers)}: {what.rstrip('.')}; correct the reward or the rows."
        ) from error
    if len(values) != len(texts):
        raise RolloutError(
            f"{name} returned {len(values)} values for {len(texts)} answers ({_named(numbers)}): it must "
            "return one for each."
        )
    bad = [at for at, value in enumerate(values) if value is not None and not _is_finite(value)]
    if bad:
        raise RolloutError(
            f"{name} returned {values[bad[0]]!r} for {_named([numbers[at] for at in bad])}: it must return "
            "finite numbers, or None for an answer that cannot be scored."
        )
    return [math.nan if value is None else float(value) for value in values]


def _raises(reward: RewardFunction, row: Row, text: str) -> bool:
    try:
        reward([dict(row)], [text])
    except (Exception, SystemExit):  # noqa: BLE001 - of somebody else's function
        return True
    return False


def _named(numbers: Sequence[int]) -> str:
    found = sorted(set(numbers))
    shown = ", ".join(map(str, found[:10])) + (", …" if len(found) > 10 else "")
    return f"row{'s' if len(found) > 1 else ''} {shown}"


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression: {error}.") from error


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _same(one: Any, other: Any) -> bool:
    """Equal, and not only because True is 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)
