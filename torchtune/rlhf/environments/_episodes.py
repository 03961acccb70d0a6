"""Episodes: conversations of a model with environments, sampled in one continuous batch."""

import asyncio
import concurrent.futures
import inspect
import logging
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
from torchtune.data import DataError, Message, as_messages
from torchtune.generation import Batch, Request, seeded_draws, stream_tokens
from torchtune.rlhf._prompts import Prompt
from torchtune.rlhf._rollouts import INVALID_ENDS, Episode, Rollout, RolloutError
from torchtune.rlhf._samplers import LocalSampler, is_tensor_parallel
from torchtune.rlhf.environments._tools import (
    FORMATS,
    CallError,
    ToolCall,
    check_call,
    detect_format,
    parameters_of,
    parse_calls,
    reply_text,
    tools_of,
)
from torchtune.rlhf.environments._turn_tokens import Bridge, Turn
from torchtune.tokenizers import chat_template_text
from torchtune.utils import check_surrogates, get_logger, log_once

# Number of decoding steps between two turns of an episode, while tools run. An episode continues after a fixed number
# of steps, not after the time that its tools need, so that a resumed run computes the same results.
_STEPS_FOR_TOOLS = 8


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
            mask=torch.tensor(self.mask, dtype=torch.bool),  # of an episode without a turn, an empty list
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
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._max_turns = max_turns
        self._timeout = timeout
        template_text = chat_template_text(tokenizer)
        self._format = tool_format or detect_format(template_text)
        if not isinstance(factories, Mapping):
            factories = {None: factories}  # the only kind has no name
        self._kinds: dict[str | None, Kind] = {}
        for name, build in factories.items():
            self._kinds[name] = self._inspect(build)
        self.give_rewards = all(kind.has_reward for kind in self._kinds.values())
        has_tools = any(kind.schemas for kind in self._kinds.values())
        if self._format not in FORMATS and has_tools:
            raise RolloutError(
                f"tool_format is {self._format!r}, and the chat template shows no known one: set "
                "tokenizer.chat_template to a template for tools, or, if the messages describe the tools, tool_format "
                f"to one of {', '.join(FORMATS)}."
            )
        if has_tools and template_text and "tools" not in template_text:
            get_logger().warning(
                "The chat template omits the definitions of tools, so that the model reads of them what the messages "
                "say: set tokenizer.chat_template to a template for tools."
            )
        self.seconds = dict.fromkeys(("generate", "tools", "idle", "score"), 0.0)
        self._closing: list[Task] = []  # of the environments of the last call, which close while the model trains
        self._num_unclosed = 0

    def _inspect(self, build: Callable[[], Any]) -> Kind:
        """Build an environment once, and return what it is: its tools, their schemas, and whether it has rewards.

        A wrong environment raises here, before the run begins; the one that was built is closed.
        """
        try:
            environment = build()
        except Exception as error:
            raise RolloutError(f"environment: it cannot be built ({type(error).__name__}: {error}).") from error
        name = type(environment).__name__
        if not callable(getattr(environment, "reset", None)):
            raise RolloutError(f"environment: {name} has no method 'reset', which begins an episode: add one.")
        tools = tools_of(environment)
        schemas = parameters_of(tools)
        for tool in schemas:
            if not callable(getattr(environment, tool, None)):
                raise RolloutError(f"environment: {name} has no method '{tool}', which its tools() describe.")
        kind = Kind(
            name=name,
            build=build,
            schemas=schemas,
            bridge=Bridge(self._tokenizer, tools),
            has_reward=callable(getattr(environment, "get_reward", None)),
        )
        if schemas:  # raises if the chat template does not write replies
            first_tool = next(iter(schemas))
            kind.bridge([ToolCall(first_tool)], ["Result"])
        _, failure = Task(self._timeout, _close_environment, environment).result()
        if failure is not None:
            _, message = failure
            raise RolloutError(f"environment: {name} cannot be closed ({message}).")
        return kind

    def figures(self) -> dict[str, tuple[float, int]]:
        """Return metrics of the last call: the attribute ``seconds``, and ``tools/unclosed``.

        ``tools/unclosed`` is the number of environments of the previous call for which ``close()`` failed or has not
        ended.
        """
        metrics = {f"seconds/{name}": (value, 1) for name, value in self.seconds.items()}
        metrics["tools/unclosed"] = (self._num_unclosed, 1)
        return metrics

    def __call__(
        self, prompts: Sequence[Prompt], num_samples: int, seeds: Sequence[int] | None = None
    ) -> list[Episode]:
        """Sample ``num_samples`` episodes per prompt, sorted by prompt; without seeds, decoding is greedy."""
        started = time.monotonic()
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        # The environments of the last call have had until now to close.
        close_failures = []
        for task in self._closing:
            _, failure = task.result(wait=False)
            if failure is not None:
                _, message = failure
                close_failures.append(message)
        self._num_unclosed = len(close_failures)
        if close_failures:
            log_once(get_logger(), f"environment: close() failed: {close_failures[0]}.", logging.WARNING)
        conversations = []
        for prompt in prompts:
            for _ in range(num_samples):
                conversations.append(self._make_conversation(len(conversations), prompt))
        self._reset_all(conversations, seeds, num_samples)
        begun = time.monotonic()
        self._converse(conversations, seeds, num_samples)
        # `_converse` adds the time in which it waits for tools to "idle".
        self.seconds["generate"] = time.monotonic() - begun - self.seconds["idle"]
        self.seconds["idle"] += begun - started  # nothing is sampled while environments are reset, either
        ended = time.monotonic()
        self._score(conversations)
        self.seconds["score"] = time.monotonic() - ended
        return [conversation.episode() for conversation in conversations]

    def _make_conversation(self, index: int, prompt: Prompt) -> Conversation:
        """Return the conversation of a prompt, without an environment yet."""
        name = None  # of the only kind
        if prompt.is_blank:
            name = next(iter(self._kinds))  # any kind: the episode ends before it begins
        elif None not in self._kinds:
            name = prompt.row.get("environment")
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
        return Conversation(index, prompt, self._kinds[name], list(prompt.tokens))

    def _reset_all(self, conversations: list[Conversation], seeds: Sequence[int] | None, num_samples: int) -> None:
        """Reset the environments of all conversations concurrently, and render the prompts."""
        tasks = []
        for conversation in conversations:
            if conversation.prompt.is_blank:
                conversation.end = "completed"
                continue
            seed = 0  # of greedy decoding, which has no seeds
            if seeds is not None:  # one per prompt, the same for all episodes of its group
                seed = seeds[conversation.index // num_samples]
            tasks.append((conversation, Task(self._timeout, _reset_environment, conversation, seed)))
        # By prompt and observation: the episodes of a group share their images, which are read once.
        rendered: dict[tuple[int, str], tuple[list[int], Mapping[str, Any], str]] = {}
        for conversation, task in tasks:
            observation = self._wait(conversation, task)
            if conversation.end is not None:
                continue
            key = (id(conversation.prompt), repr(observation))
            if key not in rendered:
                rendered[key] = self._render(conversation, _with_observation(conversation.prompt, observation))
            tokens, images, failure = rendered[key]
            conversation.tokens = list(tokens)
            conversation.images = images
            self._limit_or_end(conversation, conversation.tokens)
            if failure:
                conversation.fail("environment_failed", failure)
        # Also of episodes that have ended: each has a slot in the batch, for its first token.
        for conversation in conversations:
            conversation.start = list(conversation.tokens)
            conversation.prompt_len = len(conversation.tokens)
            conversation.turn_start = len(conversation.tokens)

    def _render(self, conversation: Conversation, messages: list[Message]) -> tuple[list[int], Mapping[str, Any], str]:
        """Return the tokens of a prompt, its images, and an error message if an observed image cannot be read."""
        bridge = conversation.kind.bridge
        if not getattr(self._tokenizer, "gives_patches", False):
            return bridge.prompt(messages), {}, ""
        try:
            tokens = bridge.prompt(messages)
            return tokens, self._tokenizer.encode_images(messages, tokens), ""
        except DataError as error:
            return conversation.prompt.tokens, {}, str(error)

    def _limit_or_end(self, conversation: Conversation, context: list[int]) -> None:
        """Set the maximum length of the turn after ``context``; if no token fits, end the episode instead."""
        # The last token of a turn is only a label, so the model's input is one token shorter.
        num_free = self._sampler.model.max_seq_len + 1 - len(context)
        conversation.limit = min(self._sampler.max_new_tokens, num_free)
        if num_free < 1:
            conversation.end = "context"
            conversation.limit = 1  # `stream_tokens` takes no limit below 1

    def _wait(self, conversation: Conversation, task: Task) -> Any:
        """Return the result of a task; end the episode if the task fails."""
        result, failure = task.result()
        self.seconds["tools"] += task.seconds
        if failure is not None:
            end, message = failure
            conversation.fail(end, message)
        return result

    def _converse(self, conversations: list[Conversation], seeds: Sequence[int] | None, num_samples: int) -> None:
        """Sample all turns, and run the tools between them."""
        sampler = self._sampler
        device = sampler.model.tok_embeddings.weight.device
        draws = None
        temperature = 0.0  # greedy
        if seeds is not None:
            draws = self._draws(seeds, num_samples, device)
            temperature = sampler.temperature
        pending = _PendingTurns(len(conversations))

        # The prompt of a group is prefilled once if the observations of its environments are equal, in all groups: the
        # number of samples per prompt holds for the whole batch. Rows have the same order either way.
        are_equal = True
        for conversation in conversations:
            group = conversation.index // num_samples
            first_of_group = conversations[group * num_samples]
            are_equal = are_equal and conversation.has_same_prompt(first_of_group)
        first_turns = conversations
        if are_equal:
            first_turns = conversations[::num_samples]
        prompts = []
        for conversation in first_turns:
            # Longer prompts belong to episodes that have ended, whose token is not used.
            prompt = conversation.tokens[-sampler.model.max_seq_len :]
            prompts.append(torch.tensor(prompt, device=device))
        steps = stream_tokens(
            sampler.model,
            prompts,
            max_new_tokens=[conversation.limit for conversation in first_turns],
            num_samples=num_samples if are_equal else 1,
            temperature=temperature,
            stop_tokens=sampler.stop_tokens,
            draws=draws,
            max_sequences=sampler.max_sequences,
            more=partial(self._advance_and_take_requests, pending),
            images=[conversation.images for conversation in first_turns],
        )
        stop_tokens = set(sampler.stop_tokens)
        for sampled in steps:
            rows = sampled.rows.tolist()
            tokens = sampled.tokens.tolist()
            log_probs = sampled.log_probs.tolist()
            for row, token, log_prob in zip(rows, tokens, log_probs, strict=True):
                conversation = conversations[row % len(conversations)]  # see `_PendingTurns.row`
                if conversation.end is not None:  # it ended before its first turn, but has a slot for one token
                    continue
                conversation.append([token], [log_prob], is_sampled=True)
                is_stopped = token in stop_tokens
                is_at_limit = len(conversation.tokens) - conversation.turn_start == conversation.limit
                if is_stopped or is_at_limit:
                    turn = self._end_turn(conversation, is_stopped, due_step=pending.step + _STEPS_FOR_TOOLS)
                    if turn is not None:
                        pending.turns.append(turn)

    def _draws(self, seeds: Sequence[int], num_samples: int, device: torch.device) -> torch.Tensor:
        """Return the random numbers of all turns, by their row in the batch, see :meth:`_PendingTurns.row`."""
        keys = []
        for turn_number in range(self._max_turns):
            for seed in seeds:
                for sample in range(num_samples):
                    # The first turn uses the same random numbers as an answer without an environment.
                    keys.append((seed, (turn_number << 32) + sample))
        return seeded_draws(keys, self._sampler.max_new_tokens, device)

    def _advance_and_take_requests(self, pending: "_PendingTurns", batch: Batch) -> list[Request]:
        """Count a decoding step, and return requests for the turns of the episodes that are due.

        An episode is due a fixed number of steps after its last turn, see ``_STEPS_FOR_TOOLS``. If no episode decodes,
        the count skips to the next due step.
        """
        for turn in pending.turns:
            if turn.due_step == pending.step + _STEPS_FOR_TOOLS:  # it ended in this step: keep its keys and values
                conversation = turn.conversation
                conversation.past = batch.past(pending.row(conversation, conversation.turns - 1))  # of the last turn
        pending.step += 1
        requests: list[Request] = []
        started = time.monotonic()
        while pending.turns:
            is_decoding = batch.is_unfinished or requests
            if pending.turns[0].due_step > pending.step and is_decoding:
                break
            turn = pending.turns.popleft()
            pending.step = max(pending.step, turn.due_step)
            conversation = turn.conversation
            if self._begin_next_turn(conversation, turn.calls, turn.task):
                request = Request(
                    pending.row(conversation, conversation.turns),
                    list(conversation.tokens),
                    conversation.limit,
                    images=conversation.images,
                    past=conversation.past,
                )
                requests.append(request)
            conversation.past = None  # frees the keys and values: a request has taken them, or the episode has ended
        self.seconds["idle"] += time.monotonic() - started
        return requests

    def _end_turn(self, conversation: Conversation, is_stopped: bool, due_step: int) -> "_PendingTurn | None":
        """Start the tools that a turn calls; return None if the episode has ended."""
        tokens = conversation.tokens[conversation.turn_start :]
        conversation.history.append(Turn(tokens, [], []))  # `_begin_next_turn` adds the calls and the replies
        if not is_stopped:
            is_longest = len(tokens) == self._sampler.max_new_tokens  # else the limit was the rest of the context
            conversation.end = "max_tokens" if is_longest else "context"
            return None
        schemas = conversation.kind.schemas
        calls: list[ToolCall] = []
        mistake = None  # in the first wrong call
        if schemas:
            text = self._tokenizer.decode(tokens, skip_special_tokens=False)  # which mark calls in some formats
            try:
                calls = parse_calls(text, self._format, schemas)
            except CallError as error:
                mistake = str(error)
            for call in calls:
                if mistake is None:
                    mistake = check_call(call, schemas)
        if mistake is not None:
            conversation.errors += 1
            if conversation.turns == self._max_turns:
                conversation.end = "parse_error"
                return None
            # No call runs: each gets the error as its reply, or the turn does if it could not be parsed. The task only
            # returns them, so that the episode continues after as many steps as after tools.
            replies = [f"Error: {mistake}."] * max(len(calls), 1)
            return _PendingTurn(due_step, conversation, calls, Task(self._timeout, lambda: (replies, False)))
        if not calls:  # the turn is the answer
            conversation.end = "completed"
            return None
        conversation.calls += len(calls)
        task = Task(self._timeout, _run_tools, conversation.environment, calls)
        return _PendingTurn(due_step, conversation, calls, task)

    def _begin_next_turn(self, conversation: Conversation, calls: list[ToolCall], task: Task) -> bool:
        """Wait for tool results, and append the tokens before the next turn; return False if the episode has ended."""
        result = self._wait(conversation, task)
        if conversation.end is not None:
            return False
        replies, is_done = result  # a task without a result has ended the episode
        if is_done:
            conversation.end = "completed"
            return False
        if conversation.turns == self._max_turns:
            conversation.end = "max_turns"
            return False
        conversation.history[-1] = Turn(conversation.history[-1].tokens, calls, replies)
        # The bridge renders the tokens between two turns, for the tools of this kind of environment.
        bridge = conversation.kind.bridge
        context = bridge.context(conversation.start, conversation.history)
        # The template may now omit reasoning of earlier turns, which the sampled tokens have. It omits none without a
        # context.
        if context is not None and context[: len(conversation.tokens)] != conversation.tokens:
            self._limit_or_end(conversation, context)
            if conversation.end is None:
                conversation.restart(context)
        else:
            reply_tokens = bridge(calls, replies)
            self._limit_or_end(conversation, conversation.tokens + reply_tokens)
            if conversation.end is None:
                conversation.append(reply_tokens, [0.0] * len(reply_tokens), is_sampled=False)
        return conversation.end is None

    def _score(self, conversations: list[Conversation]) -> None:
        """Get the rewards of all environments concurrently, and close the environments."""
        tasks = []
        for conversation in conversations:
            has_reward = callable(getattr(conversation.environment, "get_reward", None))
            if has_reward and conversation.end not in INVALID_ENDS:
                tasks.append((conversation, Task(self._timeout, _environment_reward, conversation.environment)))
        for conversation, task in tasks:
            reward = self._wait(conversation, task)
            if conversation.end not in INVALID_ENDS:
                conversation.reward = reward
        self._closing = []
        for conversation in conversations:
            if conversation.environment is not None:
                self._closing.append(Task(self._timeout, _close_environment, conversation.environment))


@dataclass(eq=False)
class _PendingTurn:
    """Turn whose tools run.

    Attributes:
        due_step: decoding step at which the episode continues.
        conversation: the episode.
        calls: tool calls of the turn.
        task: task that runs the calls.
    """

    due_step: int
    conversation: Conversation
    calls: list[ToolCall]
    task: Task


class _PendingTurns:
    """Turns whose tools run, and the count of decoding steps.

    Attributes:
        turns: ascending by their due step.
        step: number of decoding steps so far, those included that were skipped because no episode decoded.

    Args:
        num_conversations: number of episodes in the batch.
    """

    def __init__(self, num_conversations: int) -> None:
        self.turns: deque[_PendingTurn] = deque()
        self.step = 0
        self._num_conversations = num_conversations

    def row(self, conversation: Conversation, turn_number: int) -> int:
        """Return the row of a turn in the batch: the first turns of all episodes come before all second ones."""
        return turn_number * self._num_conversations + conversation.index


def _call(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """Call a function; if it returns a coroutine, run the coroutine."""
    result = function(*arguments, **named)
    if inspect.iscoroutine(result):
        return asyncio.run(result)
    return result


def _reset_environment(conversation: Conversation, seed: int) -> Any:
    """Build and reset an environment; return the observation: None, a text, or content parts of a message.

    Raises:
        TypeError: the environment returned something else.
    """
    environment = conversation.kind.build()
    conversation.environment = environment  # before `reset`, so that it is closed if `reset` fails
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
        (message,) = as_messages([{"role": "user", "content": observation}])  # raises for invalid parts
        return message.content
    raise TypeError(f"reset returned a {type(observation).__name__}, not a text, a list of parts or None")


def _run_tools(environment: Any, calls: list[ToolCall]) -> tuple[list[str], bool]:
    """Call tools sequentially; return their results as texts, and whether the episode is done."""
    replies = []
    for call in calls:
        result = _call(getattr(environment, call.name), **call.arguments)
        replies.append(reply_text(result))
    done = getattr(environment, "done", False)
    if callable(done):
        done = done()
    return replies, bool(done)


def _environment_reward(environment: Any) -> float:
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


def _close_environment(environment: Any) -> Any:
    """Close an environment, if it has the method."""
    if callable(getattr(environment, "close", None)):
        return environment.close()
    return None


def _with_observation(prompt: Prompt, observation: str | list[dict[str, Any]] | None) -> list[Message]:
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
    if "_component_" in component:
        factories = partial(config.instantiate, component)
    else:
        factories = {name: partial(config.instantiate, named) for name, named in component.items()}
    environments = Environments(factories, sampler, tokenizer, **settings)
    if not rewards and not environments.give_rewards:
        raise RolloutError("rewards is empty, and the environment has no get_reward: name what scores an episode.")
    return environments
