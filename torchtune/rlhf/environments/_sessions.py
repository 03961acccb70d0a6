"""Conversations of clients that send messages, stored as sampled tokens for training."""

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch

from torchtune.data import DataError, Message, as_messages
from torchtune.rlhf._rollouts import Episode, RolloutError
from torchtune.rlhf.environments._tools import ToolCall
from torchtune.rlhf.environments._turn_tokens import Bridge


@dataclass(eq=False)
class Sample:
    """Prompt and assistant turns of a conversation, as tokens.

    Attributes:
        model: name of the model.
        tokens: tokens of the prompt, the sampled turns, and the messages between turns.
        prompt_len: number of prompt tokens.
        mask: for all tokens after the prompt, True at sampled tokens.
        log_probs: for all tokens after the prompt, log-probs of sampled tokens and 0 for other tokens.
        sampling: ``temperature`` and ``top_k`` of each turn, and ``top_p``, ``min_p`` and ``response_format`` if the
            request had them.
        finished: whether the last turn ended with a stop token.

    Example:
        >>> torchtune.rlhf.environments.Sample("tiny", [5, 6, 7, 2], prompt_len=2, mask=[True, True]).finished
        False
    """

    model: str
    tokens: list[int]
    prompt_len: int
    mask: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    sampling: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False


@dataclass(eq=False)
class _Turn:
    """Assistant turn in a sample.

    Attributes:
        sample: sample that contains the turn.
        length: number of tokens in the sample up to the end of the turn.
        finished: whether the turn ended with a stop token.
        calls: tool calls by id.
    """

    sample: Sample
    length: int
    finished: bool
    calls: Mapping[str, ToolCall]


@dataclass(eq=False)
class _Session:
    """Samples of a session, and turns by the hash of the conversation up to the end of the turn."""

    samples: list[Sample] = field(default_factory=list)
    turns: dict[bytes, _Turn] = field(default_factory=dict)


@dataclass(eq=False)
class Continuation:
    """Conversation up to the turn to sample, from :meth:`Sessions.begin`.

    Attributes:
        tokens: tokens of the conversation.
        between: tokens after the last sampled turn.
        model: name of the model.
        hash: hash of the model, the tools and the messages, to be updated with the turn.
        after: last sampled turn; None if the conversation begins a sample.

    Example:
        >>> sessions = torchtune.rlhf.environments.Sessions(tokenizer)
        >>> begun = sessions.begin(None, "tiny", [{"role": "user", "content": "the cat"}])
        >>> begun.between, begun.after
        ([], None)
    """

    tokens: list[int]
    between: list[int]
    model: str
    hash: Any
    after: _Turn | None


class Sessions:
    """Samples for training, from each session of a server.

    A request continues a sample if its messages repeat a conversation of the session, including the unchanged assistant
    turns. The sampled tokens are kept, and only the new messages are rendered, see :class:`Bridge`. Every other request
    begins a new sample, for example after the client has summarized the conversation. A second request that continues
    the same turn also begins a new sample, with the earlier turns as its prompt.

    Args:
        tokenizer: the model's tokenizer.
        max_tokens: maximum total number of tokens in all sessions; beyond it, the least recently used sessions are
            deleted. A token takes about 100 bytes.

    Attributes:
        num_forgotten: number of sessions that were deleted because of ``max_tokens``.

    Example:
        >>> sessions = torchtune.rlhf.environments.Sessions(tokenizer)
        >>> begun = sessions.begin("episode 1", "tiny", [{"role": "user", "content": "the cat"}])
        >>> answer = {"role": "assistant", "content": "sees"}
        >>> sessions.end("episode 1", begun, answer, tokens=[5, 2], log_probs=[-0.5, -0.1], finished=True)
        >>> sessions.samples("episode 1")[0].mask
        [True, True]
    """

    def __init__(self, tokenizer: Any, max_tokens: int = 2**23) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}  # ordered from least to most recently used
        self.num_forgotten = 0

    def begin(
        self,
        session: str | None,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Continuation:
        """Return the tokens of a conversation, up to the next assistant turn.

        Args:
            session: name of the session; None renders all messages.
            model: name of the model.
            messages: the conversation, in the format of chat APIs.
            tools: tool definitions.

        Raises:
            DataError: a message is invalid or has an image, or the chat template rejects the messages.
            RolloutError: the chat template does not write replies of tools.
        """
        bridge = Bridge(self._tokenizer, tools)
        conversation = as_messages(messages)
        if any(message.contains_media for message in conversation):
            raise DataError("a message has an image, and only text is read")
        sampled_turns = self._sessions.get(session, _Session()).turns  # none of an unknown session, or of None
        conversation_hash = hashlib.sha256(json.dumps([model, list(tools)]).encode())
        # The last turn of the conversation that was sampled in this session, and the messages after it.
        last_turn = None
        new_messages: list[Message] = []  # none without such a turn
        for number, message in enumerate(conversation, 1):
            digest = _update_hash(conversation_hash, message)
            if digest in sampled_turns:
                last_turn = sampled_turns[digest]
                new_messages = conversation[number:]

        replies = {}  # by the id of the tool call
        other_messages = []
        has_other_turns = False  # that were not sampled in this session
        for message in new_messages:
            if message.role == "tool":
                replies[message.extra.get("tool_call_id")] = message.text_content
            else:
                other_messages.append(Message(message.role, message.content, masked=True))
            has_other_turns = has_other_turns or message.role == "assistant"
        # Only a sampled turn whose calls all have replies can be continued; without new messages, it would be repeated.
        continues_turn = bool(new_messages) and not has_other_turns and replies.keys() == last_turn.calls.keys()
        if not continues_turn:
            tokens = bridge.prompt([*conversation, Message(role="assistant", content="")])
            return Continuation(tokens, [], model, conversation_hash, None)
        calls = list(last_turn.calls.values())
        texts = [replies[call_id] for call_id in last_turn.calls]
        between = bridge(calls, texts, other_messages, closes=not last_turn.finished)
        tokens = last_turn.sample.tokens[: last_turn.length] + between
        return Continuation(tokens, between, model, conversation_hash, last_turn)

    def end(
        self,
        session: str,
        begun: Continuation,
        answer: Mapping[str, Any],
        *,
        tokens: Sequence[int],
        log_probs: Sequence[float],
        finished: bool,
        calls: Mapping[str, ToolCall] | None = None,
        **sampling: Any,
    ) -> None:
        """Record a sampled turn.

        Args:
            session: name of the session.
            begun: conversation from :meth:`begin`.
            answer: the message to the client.
            tokens: sampled tokens, including the stop token.
            log_probs: log-probs of the sampled tokens.
            finished: whether the turn ended with a stop token.
            calls: tool calls of the turn, by id.
            **sampling: settings to record.
        """
        with self._lock:
            # Popped and inserted: the session is now the most recently used.
            recorded = self._sessions.pop(session, _Session())
            self._sessions[session] = recorded

            last_turn = begun.after
            if last_turn is not None and len(last_turn.sample.tokens) == last_turn.length:
                sample = last_turn.sample
                between = begun.between
            else:  # a new conversation, or another turn already continues the sample
                sample = Sample(begun.model, list(begun.tokens), len(begun.tokens))
                between = []
            if sample not in recorded.samples:  # a new sample, or a sample of a session that was deleted meanwhile
                recorded.samples.append(sample)
            sample.tokens += [*between, *tokens]
            sample.mask += [False] * len(between) + [True] * len(tokens)
            sample.log_probs += [0.0] * len(between) + list(log_probs)
            sample.sampling.append(sampling)
            sample.finished = finished

            digest = _update_hash(begun.hash, as_messages([answer])[0])
            turn = _Turn(sample, len(sample.tokens), finished, calls or {})
            recorded.turns.setdefault(digest, turn)  # the first of several equal conversations is continued
            while len(self._sessions) > 1 and self._num_tokens() > self._max_tokens:  # this session stays
                least_recently_used = next(iter(self._sessions))
                del self._sessions[least_recently_used]
                self.num_forgotten += 1

    def samples(self, session: str, *, forget: bool = False) -> list[Sample]:
        """Return the samples of a session, oldest first; empty for an unknown session."""
        with self._lock:
            recorded = self._sessions.get(session, _Session())
            if forget:
                self._sessions.pop(session, None)
            return deepcopy(recorded.samples)

    def _num_tokens(self) -> int:
        """Return the number of tokens in all sessions."""
        count = 0
        for session in self._sessions.values():
            for sample in session.samples:
                count += len(sample.tokens)
        return count


def _update_hash(conversation_hash: Any, message: Message) -> bytes:
    """Update the hash of a conversation with the identifying fields of a message, and return the digest."""
    calls = []
    for call in message.extra.get("tool_calls") or ():
        function = call["function"]
        calls.append((function["name"], function["arguments"]))
    # Stripped: clients repeat the text of a turn without the white space around it.
    text = message.text_content.strip()
    fields = [message.role, text, message.extra.get("tool_call_id"), calls]
    conversation_hash.update(json.dumps(fields, sort_keys=True).encode())
    return conversation_hash.digest()


def episodes_of(samples: Sequence[Mapping[str, Any]]) -> list[Episode]:
    """Convert the samples of a session, in the format of the server's reply, to episodes for training.

    Args:
        samples: ``samples`` of the reply to ``GET /v1/sessions/NAME``.

    Raises:
        RolloutError: a turn was sampled with ``top_k``, ``top_p``, ``min_p``, ``response_format`` or temperature 0, or
            turns have different temperatures; the log-probs are then not from the sampling distribution.

    Example:
        >>> sample = {"tokens": [5, 6, 7], "prompt_len": 1, "mask": [True, True], "log_probs": [-0.1, -0.2]}
        >>> sample |= {"sampling": [{"temperature": 1.0, "top_k": None}], "finished": True}
        >>> torchtune.rlhf.environments.episodes_of([sample])[0].num_sampled
        2
    """
    temperatures = set()
    truncations = {}  # settings that change the sampling distribution
    for sample in samples:
        for turn in sample["sampling"]:
            for name, value in turn.items():
                if name == "temperature":
                    temperatures.add(value)
                elif value and not (name == "top_p" and value >= 1):  # None, 0 and a top_p of 1 do not truncate
                    truncations[name] = value
    if truncations or len(temperatures) > 1 or 0 in temperatures:
        settings = [f"temperature {', '.join(map(str, sorted(temperatures)))}"]
        settings += [f"{name} {value}" for name, value in truncations.items()]
        raise RolloutError(
            f"The samples have {' and '.join(settings)}: ratios of policies need one temperature above 0, and the "
            "whole distribution."
        )
    episodes = []
    for sample in samples:
        episode = Episode(
            tokens=torch.tensor(sample["tokens"]),
            prompt_len=sample["prompt_len"],
            log_probs=torch.tensor(sample["log_probs"], dtype=torch.float32),
            finished=sample["finished"],
            mask=torch.tensor(sample["mask"], dtype=torch.bool),
            turns=len(sample["sampling"]),
        )
        episodes.append(episode)
    return episodes
