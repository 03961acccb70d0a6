"""Conversations with environments, and calls of the environments' methods."""

import asyncio
import concurrent.futures
import inspect
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torchtune.data import Message, as_messages
from torchtune.rlhf._prompts import Prompt
from torchtune.rlhf._rollouts import Episode, Rollout, RolloutError
from torchtune.rlhf.environments._tools import ToolCall, reply_text
from torchtune.rlhf.environments._turn_tokens import Bridge, Turn
from torchtune.utils import check_surrogates


@dataclass(eq=False)
class Kind:
    """Kind of environment.

    Attributes:
        name: class name of the environment.
        build: builder of an environment.
        schemas: JSON schema of each tool's parameters, by tool name.
        bridge: renders prompts with the tools, and the replies of tools.
        has_reward: whether the environment has ``get_reward``.
    """

    name: str
    build: Callable[[], Any]
    schemas: Mapping[str, Mapping[str, Any]]
    bridge: Bridge
    has_reward: bool


@dataclass(eq=False)
class Conversation:
    """State of an episode.

    Attributes:
        index: index of the episode.
        prompt: prompt of the episode.
        kind: kind of environment.
        tokens: tokens of the prompt, the turns and the replies.
        prompt_len: number of prompt tokens.
        turn_start: number of tokens before the current turn.
        limit: maximum number of tokens in the current turn.
        past: cached keys and values of the tokens, while tools run.
        earlier: samples of turns from before the chat template omitted their reasoning.
        history: all turns of the episode.
        start: prompt tokens of the episode.
        images: the ``encoder_input`` of the prompt's images; empty without images.
        environment: the environment; None before its reset.
        mask: for all tokens after the prompt, True at sampled tokens.
        log_probs: for all tokens after the prompt, log-probs of sampled tokens and 0 for other tokens.
        calls: see :class:`Episode`, also for ``errors``, ``end``, ``reward`` and ``failure``.
    """

    index: int
    prompt: Prompt
    kind: Kind
    tokens: list[int]
    prompt_len: int = 0
    turn_start: int = 0
    limit: int = 1
    past: Any = None
    earlier: list[Rollout] = field(default_factory=list)
    history: list[Turn] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    images: Mapping[str, Any] = field(default_factory=dict)
    environment: Any = None
    mask: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    calls: int = 0
    errors: int = 0
    end: str | None = None
    reward: float | None = None
    failure: str | None = None

    def append(self, tokens: list[int], log_probs: list[float], *, is_sampled: bool) -> None:
        """Append tokens; after tokens that are not sampled, a new turn starts."""
        self.tokens += tokens
        self.log_probs += log_probs
        self.mask += [is_sampled] * len(tokens)
        if not is_sampled:
            self.turn_start = len(self.tokens)

    def restart(self, context: list[int]) -> None:
        """Store the turns as a sample, and continue from a context without the reasoning of earlier turns."""
        sample = Rollout(
            tokens=torch.tensor(self.tokens),
            prompt_len=self.prompt_len,
            log_probs=torch.tensor(self.log_probs, dtype=torch.float32),
            finished=True,
            mask=torch.tensor(self.mask),
            images=self.images,
        )
        self.earlier.append(sample)
        self.tokens = context
        self.log_probs = []
        self.mask = []
        self.past = None  # the cached keys and values are of other tokens
        self.prompt_len = len(context)
        self.turn_start = len(context)

    @property
    def turns(self) -> int:
        """Number of turns of the policy."""
        return len(self.history)

    def has_same_prompt(self, first: "Conversation") -> bool:
        """Return whether the first turn has the same input and limit as that of another conversation."""
        return (
            self.tokens == first.tokens
            and self.limit == first.limit
            and self.images.get("encoder_input") is first.images.get("encoder_input")
        )

    def fail(self, end: str, failure: str) -> None:
        """End the episode and mark it as invalid."""
        self.end = end
        self.failure = failure
        self.reward = math.nan

    def episode(self) -> Episode:
        """Return the episode after its end."""
        return Episode(
            tokens=torch.tensor(self.tokens),
            prompt_len=self.prompt_len,
            log_probs=torch.tensor(self.log_probs, dtype=torch.float32),
            finished=self.end == "completed",
            mask=torch.tensor(self.mask, dtype=torch.bool),
            images=self.images,
            end=self.end,
            reward=self.reward,
            environment=self.kind.name,
            turns=self.turns,
            calls=self.calls,
            errors=self.errors,
            failure=self.failure,
            earlier=tuple(self.earlier),
        )


class Task:
    """Call of a user function in a separate thread, with a time limit.

    Attributes:
        seconds: duration of the call, after its end.
    """

    def __init__(self, timeout: float, function: Callable[..., Any], *arguments: Any) -> None:
        self._future: concurrent.futures.Future = concurrent.futures.Future()
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self.seconds = 0.0

        def run() -> None:
            started = time.monotonic()
            try:
                self._future.set_result(_call(function, *arguments))
            except BaseException as error:  # noqa: BLE001 - raised by a user's environment
                self._future.set_exception(error)
            self.seconds = time.monotonic() - started

        # Nothing can end a thread that hangs; as a daemon, it does not keep the process alive.
        threading.Thread(target=run, daemon=True).start()

    def result(self, *, wait: bool = True) -> tuple[Any, tuple[str, str] | None]:
        """Wait, and return (result, None), or (None, (end of the episode, error message)) for a failure."""
        remaining_seconds = 0.0
        if wait:
            remaining_seconds = max(self._deadline - time.monotonic(), 0.0)
        concurrent.futures.wait([self._future], remaining_seconds)
        if not self._future.done():
            return None, ("timeout", f"no result within {self._timeout:g} s")
        error = self._future.exception()
        if error is not None:
            return None, ("environment_failed", f"{type(error).__name__}: {error}")
        return self._future.result(), None


def _call(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """Call a function; if it returns a coroutine, run the coroutine."""
    result = function(*arguments, **named)
    if inspect.iscoroutine(result):
        return asyncio.run(result)
    return result


def reset(conversation: Conversation, seed: int) -> Any:
    """Build and reset an environment; return the observation."""
    environment = conversation.kind.build()
    conversation.environment = environment
    parameters = inspect.signature(environment.reset).parameters
    arguments = dict(conversation.prompt.row)
    if "seed" in parameters:
        arguments = {"seed": seed, **arguments}  # a column "seed" replaces it
    takes_all_columns = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not takes_all_columns:
        arguments = {name: value for name, value in arguments.items() if name in parameters}
    observation = _call(environment.reset, **arguments)
    if observation is None:
        return None
    if isinstance(observation, str):
        return reply_text(observation)  # unchanged; raises for lone surrogates
    if isinstance(observation, list):
        check_surrogates(observation)  # as reply_text does
        (message,) = as_messages([{"role": "user", "content": observation}])
        return message.content
    raise TypeError(f"reset returned a {type(observation).__name__}, not a text, a list of parts or None")


def run_tools(environment: Any, calls: list[ToolCall]) -> tuple[list[str], bool]:
    """Call tools sequentially; return their results as texts, and whether the episode is done."""
    replies = []
    for call in calls:
        result = _call(getattr(environment, call.name), **call.arguments)
        replies.append(reply_text(result))
    done = getattr(environment, "done", False)
    if callable(done):
        done = done()
    return replies, bool(done)


def score(environment: Any) -> float:
    """Return the reward of an environment; NaN if it is None."""
    reward = _call(environment.get_reward)
    if reward is None:
        return math.nan
    message = f"get_reward returned a {type(reward).__name__}, not a finite number or None"
    try:
        value = float(reward)
    except Exception as error:
        raise TypeError(f"{message}: {error}") from error
    if not math.isfinite(value):
        raise TypeError(f"{message}: it is not finite")
    return value


def close(environment: Any) -> Any:
    """Close an environment, if it has the method."""
    if callable(getattr(environment, "close", None)):
        return environment.close()
    return None


def with_observation(prompt: Prompt, observation: str | list[dict[str, Any]] | None) -> list[Message]:
    """Return the messages of a prompt with an observation appended to the last user message."""
    messages = list(prompt.messages)
    if not messages:
        raise RolloutError(
            f"dataset: row {prompt.number} has no messages, to which environments add: use "
            "torchtune.datasets.prompt_dataset."
        )
    if not observation:
        return messages
    observed = Message(role="user", content=observation)
    for index in reversed(range(len(messages))):
        message = messages[index]
        if message.role == "user":
            content = [*message.content, *observed.content]
            messages[index] = Message(role="user", content=content, extra=message.extra)
            return messages
    return [*messages, observed]  # there is no turn of the user
