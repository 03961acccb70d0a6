"""Sampler of episodes: conversations of a model with environments, in one continuous batch."""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from torchtune import config
from torchtune.data import DataError, Message
from torchtune.generation import Batch, Request, seeded_draws, stream_tokens
from torchtune.rlhf._prompts import Prompt
from torchtune.rlhf._rollouts import INVALID_ENDS, Episode, RolloutError
from torchtune.rlhf._samplers import LocalSampler, is_tensor_parallel
from torchtune.rlhf.environments._conversation import (
    Conversation,
    Kind,
    Task,
    close,
    reset,
    run_tools,
    score,
    with_observation,
)
from torchtune.rlhf.environments._tool_call_parsers import FORMATS, CallError, ToolCall, detect_format, parse_calls
from torchtune.rlhf.environments._tools import check_call, parameters_of, tools_of
from torchtune.rlhf.environments._turn_tokens import Bridge, Turn
from torchtune.utils import get_logger, log_once

# Number of decoding steps between two turns of an episode, while tools run. An episode continues after a fixed number
# of steps, not after the time that its tools need, so that a resumed run computes the same results.
_STEPS_FOR_TOOLS = 8


class Environments:
    """Sampler of episodes: the policy answers a prompt, its tool calls run, and it reads the results.

    Every episode has its own environment. ``reset(**row)`` begins the episode; it receives the columns of the row that
    it has parameters for, and a ``seed``, the same for all episodes of a group. It returns None or an observation: a
    text, or a list of content parts such as ``{"type": "image", "image": "a.png"}``, which is appended to the last user
    message. Public methods are the tools, see :func:`tools_of`. Optional members are ``get_reward()``, which returns
    the reward; ``done``, which is True after a call that ends the episode; and ``close()``. Methods may be coroutines.
    If an environment raises an error or exceeds the time limit, its episode is invalid.

    All episodes share the slots of one continuous batch: the tools of an episode run while other episodes decode.
    Sampled tokens are never decoded and rendered again, see :class:`Bridge`.

    Args:
        factories: builder of an environment; or builders by name, selected by the column ``environment``.
        sampler: sampler of the turns.
        tokenizer: the model's tokenizer.
        max_turns: maximum number of policy turns per episode.
        timeout: maximum seconds for ``reset``, for the tool calls of a turn, and for ``get_reward``.
        tool_format: format of tool calls; None detects the format in the chat template.

    Attributes:
        give_rewards: whether every environment has ``get_reward``.
        seconds: seconds in the last call, for ``generate``, ``tools``, ``idle`` (waiting for tools) and ``score``.

    Raises:
        RolloutError: the sampler is not local, the format of tool calls is unknown, the chat template does not write
            replies, or an environment lacks a required method.

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
        has_tools = any(kind.schemas for kind in self._kinds.values())
        if self._format not in FORMATS and has_tools:
            raise RolloutError(
                f"tool_format is {self._format!r}, and the chat template shows no known one: set "
                "tokenizer.chat_template to a template for tools, or, if the messages describe the tools, tool_format "
                f"to one of {', '.join(FORMATS)}."
            )
        if has_tools and template and "tools" not in template:
            get_logger().warning(
                "The chat template omits the definitions of tools, so that the model reads of them what the messages "
                "say: set tokenizer.chat_template to a template for tools."
            )
        self.seconds = dict.fromkeys(("generate", "tools", "idle", "score"), 0.0)
        self._closing: list[Task] = []
        self._num_unclosed = 0

    def _kind(self, build: Callable[[], Any]) -> Kind:
        """Build an environment once to read and check its tools."""
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
        kind = Kind(name, build, parameters_of(tools), Bridge(self._tokenizer, tools), has_reward)
        if tools:
            kind.bridge([ToolCall(next(iter(kind.schemas)))], ["Result"])
        _, failure = Task(self._timeout, close, sample).result()
        if failure is not None:
            raise RolloutError(f"environment: {name} cannot be closed ({failure[1]}).")
        return kind

    def figures(self) -> dict[str, tuple[float, int]]:
        """Return metrics of the last call: the attribute ``seconds``, and ``tools/unclosed``.

        ``tools/unclosed`` is the number of environments of the previous call for which ``close()`` failed or has not
        ended.
        """
        seconds = {f"seconds/{name}": (value, 1) for name, value in self.seconds.items()}
        return {**seconds, "tools/unclosed": (self._num_unclosed, 1)}

    def __call__(
        self, prompts: Sequence[Prompt], num_samples: int, seeds: Sequence[int] | None = None
    ) -> list[Episode]:
        """Sample ``num_samples`` episodes per prompt, sorted by prompt; without seeds, decoding is greedy."""
        started = time.monotonic()
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        failures = [failure[1] for _, failure in (task.result(wait=False) for task in self._closing) if failure]
        self._num_unclosed = len(failures)
        if failures:
            log_once(get_logger(), f"environment: close() failed: {failures[0]}.", logging.WARNING)
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

    def _conversation(self, number: int, prompt: Prompt) -> Conversation:
        name = prompt.row.get("environment") if None not in self._kinds else None
        if prompt.is_blank:
            name = next(iter(self._kinds))
        if name not in self._kinds:
            raise RolloutError(
                f"dataset: row {prompt.number} names the environment {name!r}: the column 'environment' must be one of "
                f"{', '.join(map(str, self._kinds))}."
            )
        if prompt.row.get("tools") or prompt.row.get("functions"):
            log_once(
                get_logger(),
                "The tools in the rows are not used, because an environment defines the tools that can be called.",
                level=logging.WARNING,
            )
        return Conversation(number, prompt, self._kinds[name], list(prompt.tokens))

    def _begin(self, conversations: list[Conversation], seeds: Sequence[int | None], num_samples: int) -> None:
        """Reset the environments of all conversations concurrently, and render the prompts."""
        tasks = []
        for one in conversations:
            if one.prompt.is_blank:
                one.end = "completed"
            else:
                tasks.append((one, Task(self._timeout, reset, one, seeds[one.number // num_samples] or 0)))
        # By prompt and observation: the rows of a group share their images.
        rendered: dict[Any, tuple[list[int], Mapping[str, Any], str]] = {}
        for one, task in tasks:
            observation = self._wait(one, task)
            if one.end is None:
                key = (id(one.prompt), repr(observation))
                if key not in rendered:
                    rendered[key] = self._render(one, with_observation(one.prompt, observation))
                tokens, one.images, failure = rendered[key]
                one.tokens = list(tokens)
                self._limit(one, one.tokens)
                if failure:
                    one.fail("environment_failed", failure)
        for one in conversations:
            one.start = list(one.tokens)
            one.prompt_len = one.turn_start = len(one.tokens)

    def _render(self, one: Conversation, messages: list[Message]) -> tuple[list[int], Mapping[str, Any], str]:
        """Return the tokens of a prompt, its images, and an error message if an observed image cannot be read."""
        if not getattr(self._tokenizer, "gives_patches", False):
            return one.kind.bridge.prompt(messages), {}, ""
        try:
            tokens = one.kind.bridge.prompt(messages)
            return tokens, self._tokenizer.encode_images(messages, tokens), ""
        except DataError as error:
            return one.prompt.tokens, {}, str(error)

    def _limit(self, conversation: Conversation, context: list[int]) -> None:
        """Set the maximum length of the turn after ``context``; if no token fits, end the episode."""
        room = self._sampler.model.max_seq_len + 1 - len(context)
        conversation.limit = min(self._sampler.max_new_tokens, room)
        if room < 1:
            conversation.end, conversation.limit = "context", 1

    def _wait(self, conversation: Conversation, task: Task) -> Any:
        """Return the result of a task; end the episode if the task fails."""
        found, failure = task.result()
        self.seconds["tools"] += task.seconds
        if failure is not None:
            conversation.fail(*failure)
        return found

    def _converse(self, conversations: list[Conversation], seeds: Sequence[int] | None, num_samples: int) -> None:
        """Sample all turns, and run the tools between them."""
        sampler, count = self._sampler, len(conversations)
        device = sampler.model.tok_embeddings.weight.device
        draws = None
        if seeds is not None:
            # The first turn uses the same random numbers as an answer without an environment.
            keys = [
                (seed, (turn << 32) + j)
                for turn in range(self._max_turns)
                for seed in seeds
                for j in range(num_samples)
            ]
            draws = seeded_draws(keys, sampler.max_new_tokens, device)
        stop = set(sampler.stop_tokens)
        pending: deque[tuple[int, Conversation, list[ToolCall], Task]] = deque()
        step = 0

        def more(batch: Batch) -> list[Request]:
            """Return requests for the episodes that are due; if no episode decodes, skip to the next due step."""
            nonlocal step
            for due, one, *_ in pending:
                if due == step + _STEPS_FOR_TOOLS:
                    one.past = batch.past((one.turns - 1) * count + one.number)
            step += 1
            found: list[Request] = []
            started = time.monotonic()
            while pending and (pending[0][0] <= step or not (batch.is_unfinished or found)):
                due, one, calls, task = pending.popleft()
                step = max(step, due)
                if self._next_turn(one, calls, task):
                    index = one.turns * count + one.number
                    request = Request(index, list(one.tokens), one.limit, images=one.images, past=one.past)
                    found.append(request)
                one.past = None
            self.seconds["idle"] += time.monotonic() - started
            return found

        groups = [conversations[start : start + num_samples] for start in range(0, count, num_samples)]
        are_equal = all(
            one.tokens == group[0].tokens and one.limit == group[0].limit and one.shares_images(group[0])
            for group in groups
            for one in group
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
            images=[one.images for one in first],
        )
        for found in steps:
            rows = zip(found.rows.tolist(), found.tokens.tolist(), found.log_probs.tolist(), strict=True)
            for row, token, log_prob in rows:
                one = conversations[row % count]
                if one.end is not None:  # the episode ended before its first turn, but has a slot for one token
                    continue
                one.append([token], [log_prob], is_sampled=True)
                is_at_end = token in stop or len(one.tokens) - one.turn_start == one.limit
                if is_at_end and (started := self._end_turn(one, token in stop)) is not None:
                    pending.append((step + _STEPS_FOR_TOOLS, one, *started))

    def _end_turn(self, one: Conversation, is_stopped: bool) -> tuple[list[ToolCall], Task] | None:
        """Start the tools that a turn calls.

        Returns:
            The calls, and the task that runs them; None if the episode has ended.
        """
        turn = one.tokens[one.turn_start :]
        one.history.append(Turn(turn, [], []))
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
            return calls, Task(self._timeout, lambda: (replies, False))
        if not calls:
            one.end = "completed"
            return None
        one.calls += len(calls)
        return calls, Task(self._timeout, run_tools, one.environment, calls)

    def _next_turn(self, one: Conversation, calls: list[ToolCall], task: Task) -> bool:
        """Wait for tool results, and append the tokens before the next turn; return False if the episode has ended."""
        found = self._wait(one, task)
        if one.end is not None:
            return False
        replies, is_done = found
        if is_done or one.turns == self._max_turns:
            one.end = "completed" if is_done else "max_turns"
            return False
        one.history[-1] = Turn(one.history[-1].tokens, calls, replies)
        context = one.kind.bridge.context(one.start, one.history)
        is_restart = context is not None and context[: len(one.tokens)] != one.tokens
        new = [] if is_restart else one.kind.bridge(calls, replies)
        self._limit(one, context if is_restart else one.tokens + new)
        if one.end is not None:
            return False
        if is_restart:
            one.restart(context)
        else:
            one.append(new, [0.0] * len(new), is_sampled=False)
        return True

    def _score(self, conversations: list[Conversation]) -> None:
        """Get the rewards of all environments concurrently, and close the environments."""
        tasks = []
        for one in conversations:
            if one.end not in INVALID_ENDS and callable(getattr(one.environment, "get_reward", None)):
                tasks.append((one, Task(self._timeout, score, one.environment)))
        for one, task in tasks:
            reward = self._wait(one, task)
            if one.end not in INVALID_ENDS:
                one.reward = reward
        begun = [one.environment for one in conversations if one.environment is not None]
        self._closing = [Task(self._timeout, close, environment) for environment in begun]


def setup_environments(
    component: Any, sampler: Any, tokenizer: Any, rewards: Sequence[Any], **settings: Any
) -> Environments | None:
    """Build the environments of a config; return None without a component.

    Args:
        component: an environment component, or components by name.
        sampler: the recipe's sampler.
        tokenizer: the model's tokenizer.
        rewards: the recipe's rewards.
        **settings: see :class:`Environments`.

    Raises:
        RolloutError: there is no reward; further cases in :class:`Environments`.
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
