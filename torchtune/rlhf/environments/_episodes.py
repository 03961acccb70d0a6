"""Episodes: conversations of a model with environments, in one continuous batch."""

import asyncio
import concurrent.futures
import inspect
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from torchtune import config
from torchtune.data import Message
from torchtune.generation import Batch, Request, finite_steps, seeded_draws, stream_tokens
from torchtune.rlhf._experience import Prompt
from torchtune.rlhf._local_sampler import LocalSampler, is_tensor_parallel
from torchtune.rlhf._rollouts import INVALID_ENDS, Episode, RolloutError
from torchtune.rlhf.environments._bridge import Bridge
from torchtune.rlhf.environments._calls import FORMATS, CallError, ToolCall, detect_format, parse_calls
from torchtune.rlhf.environments._tools import check_call, parameters_of, reply_text, tools_of

# Steps of the batch between the end of a turn and the next turn of the episode. Its tools run meanwhile. A number of
# steps, and not the time that they need, decides when an episode goes on, so that a resumed run computes the same.
_STEPS_FOR_TOOLS = 8


@dataclass(eq=False)
class _Kind:
    """An environment: how to build it, its tools, and the tokens of their replies."""

    name: str
    build: Callable[[], Any]
    schemas: Mapping[str, Mapping[str, Any]]
    bridge: Bridge
    has_reward: bool


@dataclass(eq=False)
class _Conversation:
    """State of an episode.

    Attributes:
        number: index of the episode.
        prompt: its prompt.
        kind: its kind of environment.
        tokens: prompt, turns and replies.
        prompt_len: number of tokens of the prompt.
        turn_start: number of tokens before the current turn.
        limit: maximum number of tokens of the current turn.
        past: keys and values of the tokens, while tools run.
    """

    number: int
    prompt: Prompt
    kind: _Kind
    tokens: list[int]
    prompt_len: int = 0
    turn_start: int = 0
    limit: int = 1
    past: Any = None
    environment: Any = None
    mask: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    turns: int = 0
    calls: int = 0
    errors: int = 0
    end: str | None = None
    reward: float | None = None
    failure: str | None = None

    def append(self, tokens: list[int], log_probs: list[float], *, is_sampled: bool) -> None:
        """Append tokens; a turn starts after tokens that are not sampled."""
        self.tokens += tokens
        self.log_probs += log_probs
        self.mask += [is_sampled] * len(tokens)
        if not is_sampled:
            self.turn_start = len(self.tokens)

    def fail(self, end: str, failure: str) -> None:
        """End the episode as an invalid one."""
        self.end, self.failure, self.reward = end, failure, math.nan

    def episode(self) -> Episode:
        return Episode(
            torch.tensor(self.tokens),
            self.prompt_len,
            torch.tensor(self.log_probs, dtype=torch.float32),
            self.end == "completed",
            torch.tensor(self.mask, dtype=torch.bool),
            end=self.end,
            reward=self.reward,
            environment=self.kind.name,
            turns=self.turns,
            calls=self.calls,
            errors=self.errors,
            failure=self.failure,
        )


class _Task:
    """Call of a user's function in a thread of its own, with a time limit."""

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

    def result(self) -> tuple[Any, tuple[str, str] | None]:
        """Wait; return the result, or ``None`` and (end of the episode, message)."""
        concurrent.futures.wait([self._future], max(self._deadline - time.monotonic(), 0.0))
        if not self._future.done():
            return None, ("timeout", f"no result within {self._timeout:g} s")
        if (error := self._future.exception()) is not None:
            return None, ("environment_failed", f"{type(error).__name__}: {error}")
        return self._future.result(), None


class Environments:
    """Sampler of episodes: the policy answers a prompt, its tool calls run, and it reads their results.

    Every episode has an environment of its own. ``reset(**row)`` begins it, with the columns of the row that it takes
    (and a ``seed``, the same in a group), and returns ``None`` or an observation, which is appended to the last message
    of the user. Public methods are the tools, see :func:`tools_of`. ``get_reward()`` is optional and returns the
    reward. ``done`` is optional and True after a call that ends the episode; ``close()`` is optional, too. Methods may
    be coroutines. An environment that raises, or exceeds the time limit, makes its episode invalid.

    All episodes share the slots of one continuous batch: tools of an episode run while others decode. Sampled tokens
    are never decoded and rendered again, see :class:`Bridge`.

    Args:
        factories: builder of an environment; or name -> builder, selected by the column ``environment``.
        sampler: sampler of the turns.
        tokenizer: the model's tokenizer.
        max_turns: maximum number of turns of the policy.
        timeout: seconds for ``reset``, for the calls of a turn, and for ``get_reward``.
        tool_format: format of tool calls; ``None`` detects it in the chat template.

    Attributes:
        give_rewards: whether every environment has ``get_reward``.
        seconds: seconds of the last call: ``generate``, ``tools``, ``idle`` (waiting for them) and ``score``.

    Raises:
        RolloutError: the sampler is not local, the format of calls is unknown, the chat template takes no replies, or
            an environment is incomplete.

    Example:
        >>> environments = torchtune.rlhf.environments.Environments(
        ...     Calculator, sampler, tokenizer, max_turns=4
        ... )  # doctest: +SKIP
        >>> episodes = environments(prompts, num_samples=8, seeds=[0, 1])  # doctest: +SKIP
    """

    def __init__(
        self,
        factories: Callable[[], Any] | Mapping[str, Callable[[], Any]],
        sampler: LocalSampler,
        tokenizer: Any,
        *,
        max_turns: int = 8,
        timeout: float = 60.0,
        tool_format: str | None = None,
    ) -> None:
        if not isinstance(sampler, LocalSampler) or is_tensor_parallel(sampler.model):
            raise RolloutError(
                "environment: tools run between the steps of this process's own sampling: take the sampler "
                "torchtune.rlhf.LocalSampler, and set tensor_parallel_dim to 1."
            )
        self._sampler, self._tokenizer = sampler, tokenizer
        self._max_turns, self._timeout = max_turns, timeout
        template = "".join(one.source for one in getattr(tokenizer, "chat_templates", {}).values())
        self._format = tool_format or detect_format(template)
        named = factories if isinstance(factories, Mapping) else {None: factories}
        self._kinds = {name: self._kind(build) for name, build in named.items()}
        self.give_rewards = all(kind.has_reward for kind in self._kinds.values())
        if self._format not in FORMATS and any(kind.schemas for kind in self._kinds.values()):
            raise RolloutError(
                f"tool_format is {self._format!r}, and the chat template shows no known one: set it to one of "
                f"{', '.join(FORMATS)}."
            )
        self.seconds = dict.fromkeys(("generate", "tools", "idle", "score"), 0.0)

    def _kind(self, build: Callable[[], Any]) -> _Kind:
        """Build an environment once, to read and check its tools."""
        try:
            sample = build()
        except Exception as error:
            raise RolloutError(f"environment: it cannot be built ({type(error).__name__}: {error}).") from error
        name = type(sample).__name__
        if not callable(getattr(sample, "reset", None)):
            raise RolloutError(f"environment: {name} has no method 'reset', which begins an episode: add one.")
        tools = tools_of(sample)
        if missing := [tool for tool in parameters_of(tools) if not callable(getattr(sample, tool, None))]:
            raise RolloutError(f"environment: {name} has no method '{missing[0]}', which its tools() describe.")
        has_reward = callable(getattr(sample, "get_reward", None))
        kind = _Kind(name, build, parameters_of(tools), Bridge(self._tokenizer, tools), has_reward)
        if tools:
            kind.bridge([ToolCall(next(iter(kind.schemas)))], ["Result"])
        _, failure = _Task(self._timeout, _close, sample).result()
        if failure is not None:
            raise RolloutError(f"environment: {name} cannot be closed ({failure[1]}).")
        return kind

    def figures(self) -> dict[str, tuple[float, int]]:
        """Return metrics of the last call: seconds of decoding, tools, waiting for them, and rewards."""
        return {f"seconds/{name}": (value, 1) for name, value in self.seconds.items()}

    def __call__(
        self, prompts: Sequence[Prompt], num_samples: int, seeds: Sequence[int] | None = None
    ) -> list[Episode]:
        """Sample ``num_samples`` episodes per prompt, sorted by prompt; without seeds decoding is greedy."""
        started = time.monotonic()
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        every = [prompt for prompt in prompts for _ in range(num_samples)]
        conversations = [self._conversation(number, prompt) for number, prompt in enumerate(every)]
        self._begin(conversations, [None] * len(prompts) if seeds is None else seeds, num_samples)
        begun = time.monotonic()
        self._converse(conversations, seeds, num_samples)
        self.seconds["generate"] = time.monotonic() - begun - self.seconds["idle"]
        self.seconds["idle"] += begun - started
        begun = time.monotonic()
        self._score(conversations)
        self.seconds["score"] = time.monotonic() - begun
        return [conversation.episode() for conversation in conversations]

    def _conversation(self, number: int, prompt: Prompt) -> _Conversation:
        name = prompt.row.get("environment") if None not in self._kinds else None
        if prompt.is_blank:
            name = next(iter(self._kinds))
        if name not in self._kinds:
            raise RolloutError(
                f"dataset: row {prompt.number} names the environment {name!r}: the column 'environment' must be one of "
                f"{', '.join(map(str, self._kinds))}."
            )
        return _Conversation(number, prompt, self._kinds[name], list(prompt.tokens))

    def _begin(self, conversations: list[_Conversation], seeds: Sequence[int | None], num_samples: int) -> None:
        """Reset an environment for each conversation, at the same time, and render the prompts."""
        tasks = []
        for place, one in enumerate(conversations):
            if one.prompt.is_blank:
                one.end = "completed"
            else:
                seed = seeds[place // num_samples]
                tasks.append((one, _Task(self._timeout, _reset, one, seed or 0)))
        rendered: dict[Any, list[int]] = {}
        for one, task in tasks:
            observation = self._wait(one, task)
            if one.end is None and not isinstance(observation, str | None):
                one.fail("environment_failed", f"reset returned a {type(observation).__name__}, not a text or None")
            if one.end is None:
                key = (id(one.prompt), observation)
                if key not in rendered:
                    rendered[key] = one.kind.bridge.prompt(_with_observation(one.prompt, observation))
                one.tokens = list(rendered[key])
                self._limit(one)
        for one in conversations:
            one.prompt_len = one.turn_start = len(one.tokens)

    def _limit(self, conversation: _Conversation, num_more: int = 0) -> None:
        """Set the maximum length of a turn after ``num_more`` more tokens; without room, the episode ends."""
        room = self._sampler.model.max_seq_len + 1 - len(conversation.tokens) - num_more
        conversation.limit = min(self._sampler.max_new_tokens, room)
        if room < 1:
            conversation.end, conversation.limit = "context", 1

    def _wait(self, conversation: _Conversation, task: _Task) -> Any:
        """Return the result of a task; a failure ends the episode."""
        found, failure = task.result()
        self.seconds["tools"] += task.seconds
        if failure is not None:
            conversation.fail(*failure)
        return found

    def _converse(self, conversations: list[_Conversation], seeds: Sequence[int] | None, num_samples: int) -> None:
        """Sample all turns, and run the tools between them."""
        sampler, count = self._sampler, len(conversations)
        device = sampler.model.tok_embeddings.weight.device
        draws = None
        if seeds is not None:
            # The first turn draws the numbers of a single answer.
            keys = [
                (seed, (turn << 32) + j)
                for turn in range(self._max_turns)
                for seed in seeds
                for j in range(num_samples)
            ]
            draws = seeded_draws(keys, sampler.max_new_tokens, device)
        stop = set(sampler.stop_tokens)
        pending: deque[tuple[int, _Conversation, Callable[[], list[int] | None]]] = deque()
        step = 0

        def more(batch: Batch) -> list[Request]:
            """Return the next turns of episodes whose tools have had their steps, or of the first, if all wait."""
            nonlocal step
            for due, one, _ in pending:
                if due == step + _STEPS_FOR_TOOLS:
                    one.past = batch.past((one.turns - 1) * count + one.number)
            step += 1
            found: list[Request] = []
            started = time.monotonic()
            while pending and (pending[0][0] <= step or not (batch.is_unfinished or found)):
                _, one, reply = pending.popleft()
                tokens, past, one.past = reply(), one.past, None
                if tokens is not None:
                    one.append(tokens, [0.0] * len(tokens), is_sampled=False)
                    found.append(Request(one.turns * count + one.number, list(one.tokens), one.limit, past=past))
            self.seconds["idle"] += time.monotonic() - started
            return found

        groups = [conversations[start : start + num_samples] for start in range(0, count, num_samples)]
        are_equal = all(
            one.tokens == group[0].tokens and one.limit == group[0].limit for group in groups for one in group
        )
        first = conversations[::num_samples] if are_equal else conversations
        steps = stream_tokens(
            sampler.model,
            [torch.tensor(one.tokens[-sampler.model.max_seq_len :], device=device) for one in first],
            max_new_tokens=[one.limit for one in first],
            num_samples=num_samples if are_equal else 1,
            temperature=0.0 if draws is None else sampler.temperature,
            stop_tokens=sampler.stop_tokens,
            draws=draws,
            max_sequences=sampler.max_sequences,
            more=more,
        )
        for found in finite_steps(steps, sampler.model):
            rows = zip(found.rows.tolist(), found.tokens.tolist(), found.log_probs.tolist(), strict=True)
            for row, token, log_prob in rows:
                one = conversations[row % count]
                if one.end is not None:  # it ended before its first turn, and has a slot for one token
                    continue
                one.append([token], [log_prob], is_sampled=True)
                if token in stop or len(one.tokens) - one.turn_start == one.limit:
                    reply = self._end_turn(one, token in stop)
                    if reply is not None:
                        pending.append((step + _STEPS_FOR_TOOLS, one, reply))

    def _end_turn(self, one: _Conversation, is_stopped: bool) -> Callable[[], list[int] | None] | None:
        """Start the tools that a turn calls.

        Returns:
            a function that waits for the results and returns the tokens before the next turn, or ``None`` if there is
            no next turn; ``None`` if the episode has ended.
        """
        one.turns += 1
        turn = one.tokens[one.turn_start :]
        if not is_stopped:
            one.end = "max_tokens" if len(turn) == self._sampler.max_new_tokens else "context"
            return None
        text = self._tokenizer.decode(turn, skip_special_tokens=False)
        calls: list[ToolCall] = []
        try:
            calls = parse_calls(text, self._format, one.kind.schemas) if one.kind.schemas else []
            mistake = next(filter(None, (check_call(call, one.kind.schemas) for call in calls)), None)
        except CallError as error:
            mistake = str(error)
        if mistake is not None:
            one.errors += 1
            if one.turns == self._max_turns:
                one.end = "parse_error"
                return None
            replies = [f"Error: {mistake}."] * max(len(calls), 1)
            return partial(self._next_turn, one, calls, lambda: (replies, False))
        if not calls:
            one.end = "completed"
            return None
        one.calls += len(calls)
        task = _Task(self._timeout, _run_tools, one.environment, calls)
        return partial(self._next_turn, one, calls, partial(self._wait, one, task))

    def _next_turn(
        self, one: _Conversation, calls: list[ToolCall], results: Callable[[], tuple[list[str], bool]]
    ) -> list[int] | None:
        """Return the tokens before the next turn, or ``None`` if the episode has ended."""
        found = results()
        if one.end is not None:
            return None
        replies, is_done = found
        if is_done or one.turns == self._max_turns:
            one.end = "completed" if is_done else "max_turns"
            return None
        tokens = one.kind.bridge(calls, replies)
        self._limit(one, len(tokens))
        return tokens if one.end is None else None

    def _score(self, conversations: list[_Conversation]) -> None:
        """Ask the environments for rewards, at the same time, and close them."""
        tasks = []
        for one in conversations:
            if one.end not in INVALID_ENDS and callable(getattr(one.environment, "get_reward", None)):
                tasks.append((one, _Task(self._timeout, one.environment.get_reward)))
        for one, task in tasks:
            reward = self._wait(one, task)
            if one.end in INVALID_ENDS:
                continue
            try:
                one.reward = math.nan if reward is None else float(reward)
                if reward is not None and not math.isfinite(one.reward):
                    raise ValueError
            except (TypeError, ValueError):
                one.fail("environment_failed", f"get_reward returned {reward!r:.80}, not a finite number or None")
        for one in conversations:
            if one.environment is not None:
                _Task(self._timeout, _close, one.environment)
                one.environment = None


def _call(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """Call a function; run a coroutine to its end."""
    found = function(*arguments, **named)
    return asyncio.run(found) if inspect.iscoroutine(found) else found


def _reset(conversation: _Conversation, seed: int) -> Any:
    """Build and reset an environment; return its observation."""
    environment = conversation.kind.build()
    conversation.environment = environment
    known = inspect.signature(environment.reset).parameters
    values = {"seed": seed, **conversation.prompt.row} if "seed" in known else dict(conversation.prompt.row)
    if not any(one.kind is one.VAR_KEYWORD for one in known.values()):
        values = {name: value for name, value in values.items() if name in known}
    return environment.reset(**values)


def _run_tools(environment: Any, calls: list[ToolCall]) -> tuple[list[str], bool]:
    """Call tools one after another; return their results as texts, and whether the episode is done."""
    replies = [reply_text(_call(getattr(environment, call.name), **call.arguments)) for call in calls]
    done = getattr(environment, "done", False)
    return replies, bool(done() if callable(done) else done)


def _close(environment: Any) -> Any:
    return environment.close() if callable(getattr(environment, "close", None)) else None


def _with_observation(prompt: Prompt, observation: str | None) -> list[Message]:
    """Append an observation to the last message of the user."""
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
    last = messages[place]
    messages[place] = Message(role="user", content=last.text_content + observation, extra=last.extra)
    return messages


def setup_environments(
    component: Any, sampler: Any, tokenizer: Any, rewards: Sequence[Any], **settings: Any
) -> Environments | None:
    """Build the environments of a config; ``None`` without a component.

    Args:
        component: a component, or name -> component.
        sampler: the recipe's sampler.
        tokenizer: the model's tokenizer.
        rewards: the recipe's rewards.
        **settings: see :class:`Environments`.

    Raises:
        RolloutError: see :class:`Environments`; or there is no reward.
    """
    if component is None:
        return None
    is_one = "_component_" in component
    factories = {
        name: partial(config.instantiate, one) for name, one in ({None: component} if is_one else component).items()
    }
    found = Environments(factories, sampler, tokenizer, **settings)
    if not rewards and not found.give_rewards:
        raise RolloutError("rewards is empty, and the environment has no get_reward: name what scores an episode.")
    return found
