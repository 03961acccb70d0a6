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
from torchtune.rlhf.environments._tool_call_parsers import ToolCall
from torchtune.rlhf.environments._tools import reply_text
from torchtune.rlhf.environments._turn_tokens import Bridge, Turn


@dataclass(eq=False)
class Kind:
    """Kind of environment: its builder, its tools, and the bridge that renders tool replies."""

    name: str
    build: Callable[[], Any]
    schemas: Mapping[str, Mapping[str, Any]]
    bridge: Bridge
    has_reward: bool


@dataclass(eq=False)
class Conversation:
    """State of an episode.

    Attributes:
        number: index of the episode.
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
    """

    number: int
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
        self.earlier.append(Rollout(*self._sampled(), True, torch.tensor(self.mask), self.images))
        self.tokens, self.log_probs, self.mask, self.past = context, [], [], None
        self.prompt_len = self.turn_start = len(context)

    def _sampled(self) -> tuple[torch.Tensor, int, torch.Tensor]:
        return torch.tensor(self.tokens), self.prompt_len, torch.tensor(self.log_probs, dtype=torch.float32)

    @property
    def turns(self) -> int:
        return len(self.history)

    def shares_images(self, other: "Conversation") -> bool:
        return self.images.get("encoder_input") is other.images.get("encoder_input")

    def fail(self, end: str, failure: str) -> None:
        """End the episode and mark it as invalid."""
        self.end, self.failure, self.reward = end, failure, math.nan

    def episode(self) -> Episode:
        return Episode(
            *self._sampled(),
            self.end == "completed",
            torch.tensor(self.mask, dtype=torch.bool),
            self.images,
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
    """Call of a user function in a separate thread, with a time limit."""

    def __init__(self, timeout: float, function: Callable[..., Any], *arguments: Any) -> None:
        self._future: concurrent.futures.Future = concurrent.futures.Future()
        self._deadline, self._timeout = time.monotonic() + timeout, timeout
        self.seconds = 0.0

        def run() -> None:
            started = time.monotonic()
            try:
                self._future.set_result(_call(function, *arguments))
            except BaseException as error:  # noqa: BLE001 - raised by a user's environment
                self._future.set_exception(error)
            self.seconds = time.monotonic() - started

        threading.Thread(target=run, daemon=True).start()

    def result(self, *, wait: bool = True) -> tuple[Any, tuple[str, str] | None]:
        """Wait, and return (result, None), or (None, (end of the episode, error message)) for a failure."""
        concurrent.futures.wait([self._future], wait * max(self._deadline - time.monotonic(), 0.0))
        if not self._future.done():
            return None, ("timeout", f"no result within {self._timeout:g} s")
        if (error := self._future.exception()) is not None:
            return None, ("environment_failed", f"{type(error).__name__}: {error}")
        return self._future.result(), None


def _call(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """Call a function; if it returns a coroutine, run the coroutine."""
    found = function(*arguments, **named)
    return asyncio.run(found) if inspect.iscoroutine(found) else found


def reset(conversation: Conversation, seed: int) -> Any:
    """Build and reset an environment; return the observation."""
    environment = conversation.kind.build()
    conversation.environment = environment
    known = inspect.signature(environment.reset).parameters
    values = {"seed": seed, **conversation.prompt.row} if "seed" in known else dict(conversation.prompt.row)
    if not any(one.kind is one.VAR_KEYWORD for one in known.values()):
        values = {name: value for name, value in values.items() if name in known}
    observation = _call(environment.reset, **values)
    if isinstance(observation, list):
        return as_messages([{"role": "user", "content": observation}])[0].content
    if not isinstance(observation, str | None):
        raise TypeError(f"reset returned a {type(observation).__name__}, not a text, a list of parts or None")
    return observation if observation is None else reply_text(observation)


def run_tools(environment: Any, calls: list[ToolCall]) -> tuple[list[str], bool]:
    """Call tools sequentially; return their results as texts, and whether the episode is done."""
    replies = [reply_text(_call(getattr(environment, call.name), **call.arguments)) for call in calls]
    done = getattr(environment, "done", False)
    return replies, bool(done() if callable(done) else done)


def score(environment: Any) -> float:
    """Return the reward of an environment; NaN if it is None."""
    reward = _call(environment.get_reward)
    if reward is None:
        return math.nan
    try:
        if not math.isfinite(found := float(reward)):
            raise ValueError("it is not finite")
    except Exception as error:
        raise TypeError(
            f"get_reward returned a {type(reward).__name__}, not a finite number or None: {error}"
        ) from error
    return found


def close(environment: Any) -> Any:
    return environment.close() if callable(getattr(environment, "close", None)) else None


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
    place = next((i for i in reversed(range(len(messages))) if messages[i].role == "user"), None)
    if place is None:
        return [*messages, Message(role="user", content=observation)]
    last, seen = messages[place], Message(role="user", content=observation)
    messages[place] = Message(role="user", content=[*last.content, *seen.content], extra=last.extra)
    return messages
