"""Sampler of episodes: conversations of a model with environments, in one continuous batch."""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from torchtune.rlhf.environments._tools import (
    FORMATS,
    CallError,
    ToolCall,
    check_call,
    detect_format,
    parameters_of,
    parse_calls,
    tools_of,
)
from torchtune.rlhf.environments._turn_tokens import Bridge, Turn
from torchtune.tokenizers import chat_template_text
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
        self._closing: list[Task] = []  # of the environments of the last call
        self._num_unclosed = 0

    def _inspect(self, build: Callable[[], Any]) -> Kind:
        """Build an environment once, and return what it is: its tools, their schemas, and whether it has rewards."""
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
        _, failure = Task(self._timeout, close, environment).result()
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
        self.seconds["idle"] += begun - started
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
            if seeds is not None:
                seed = seeds[conversation.index // num_samples]
            tasks.append((conversation, Task(self._timeout, reset, conversation, seed)))
        # By prompt and observation: the episodes of a group share their images, which are read once.
        rendered: dict[tuple[int, str], tuple[list[int], Mapping[str, Any], str]] = {}
        for conversation, task in tasks:
            observation = self._wait(conversation, task)
            if conversation.end is not None:
                continue
            key = (id(conversation.prompt), repr(observation))
            if key not in rendered:
                rendered[key] = self._render(conversation, with_observation(conversation.prompt, observation))
            tokens, images, failure = rendered[key]
            conversation.tokens = list(tokens)
            conversation.images = images
            self._limit_or_end(conversation, conversation.tokens)
            if failure:
                conversation.fail("environment_failed", failure)
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

        # The prompt of a group is prefilled once if the observations of its environments are equal.
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
                conversation = conversations[row % len(conversations)]
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
                conversation.past = batch.past(pending.row(conversation, conversation.turns - 1))
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
            conversation.past = None
        self.seconds["idle"] += time.monotonic() - started
        return requests

    def _end_turn(self, conversation: Conversation, is_stopped: bool, due_step: int) -> "_PendingTurn | None":
        """Start the tools that a turn calls; return None if the episode has ended."""
        tokens = conversation.tokens[conversation.turn_start :]
        conversation.history.append(Turn(tokens, [], []))
        if not is_stopped:
            is_longest = len(tokens) == self._sampler.max_new_tokens
            conversation.end = "max_tokens" if is_longest else "context"
            return None
        schemas = conversation.kind.schemas
        calls: list[ToolCall] = []
        mistake = None  # in the first wrong call
        if schemas:
            text = self._tokenizer.decode(tokens, skip_special_tokens=False)
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
            replies = [f"Error: {mistake}."] * max(len(calls), 1)
            return _PendingTurn(due_step, conversation, calls, Task(self._timeout, lambda: (replies, False)))
        if not calls:
            conversation.end = "completed"
            return None
        conversation.calls += len(calls)
        task = Task(self._timeout, run_tools, conversation.environment, calls)
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
                tasks.append((conversation, Task(self._timeout, score, conversation.environment)))
        for conversation, task in tasks:
            reward = self._wait(conversation, task)
            if conversation.end not in INVALID_ENDS:
                conversation.reward = reward
        self._closing = []
        for conversation in conversations:
            if conversation.environment is not None:
                self._closing.append(Task(self._timeout, close, conversation.environment))


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
