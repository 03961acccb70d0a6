"""Sampled answers and their training batches."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, MIN_SHARED, Batch, collate_documents, share_prefixes
from torchtune.training import ParallelDims
from torchtune.utils import UserError

# Reasons why an episode ends; the last two make it invalid.
ENDS = ("completed", "max_turns", "max_tokens", "context", "parse_error", "timeout", "environment_failed")
INVALID_ENDS = ENDS[-2:]
MOST_LOG_PROB = 1e-3  # maximum log-prob: 0 with a tolerance for rounding in float32


class RolloutError(UserError):
    """Raised if answers cannot be sampled, scored or trained on."""


@dataclass(frozen=True)
class Rollout:
    """Prompt with a sampled answer.

    Attributes:
        tokens: prompt and answer, int64 ``[s]``, on the host, including the answer's stop token.
        prompt_len: number of prompt tokens.
        log_probs: log-probs of the answer's tokens from sampling, float32 ``[s - prompt_len]``; None if the sampler
            does not return log-probs.
        finished: whether the answer ended before its maximum length.
        mask: bool ``[s - prompt_len]``, True at sampled tokens, which are trained on. Other tokens are replies of an
            environment and have the log-prob 0. None if all tokens are sampled.
        images: the ``encoder_input`` of the prompt's images; empty without images.

    Raises:
        RolloutError: a token is negative or not an integer, the number of log-probs differs from the number of answer
            tokens, or a log-prob is not finite or exceeds 0.001.

    Example:
        >>> rollout = torchtune.rlhf.Rollout(torch.tensor([5, 6, 7, 2]), prompt_len=2, log_probs=None, finished=True)
        >>> rollout.tokens[rollout.prompt_len :]
        tensor([7, 2])
    """

    tokens: Tensor
    prompt_len: int
    log_probs: Tensor | None
    finished: bool
    mask: Tensor | None = None
    images: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tokens = self.tokens
        if tokens.dim() != 1 or tokens.is_floating_point() or (tokens < 0).any():
            first_tokens = tokens.flatten()[:4].tolist()
            raise RolloutError(
                f"A sampler gave tokens that are not token ids, {first_tokens} … of shape {list(tokens.shape)} and "
                f"{tokens.dtype}: they must be int64 [s], from 0."
            )
        log_probs = self.log_probs
        if log_probs is None:
            return
        answer_len = len(tokens) - self.prompt_len
        if log_probs.shape != (answer_len,):
            raise RolloutError(
                f"A sampler gave an answer of {answer_len} tokens log-probs of shape {list(log_probs.shape)}."
            )
        is_log_prob = log_probs.isfinite() & (log_probs <= MOST_LOG_PROB)  # with a tolerance for rounding
        if not is_log_prob.all():
            raise RolloutError(
                f"A sampler gave the log-prob {log_probs[~is_log_prob][0].item():g} to a token, but a log-prob is a "
                "finite number up to 0: the weights that it samples from are not finite, or it gives something else."
            )

    @property
    def answer(self) -> list[int]:
        """Token ids of the answer."""
        return self.tokens[self.prompt_len :].tolist()

    @property
    def last_turn(self) -> list[int]:
        """Token ids of the answer after the last reply of an environment."""
        answer = self.answer
        if self.mask is None or self.mask.all():
            return answer
        last_reply_token = int((~self.mask).nonzero()[-1])
        return answer[last_reply_token + 1 :]

    @property
    def parts(self) -> list["Rollout"]:
        """Samples to train on, all with the same advantage: earlier samples of the episode, then this rollout."""
        return [self]

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        if self.mask is None:
            return len(self.tokens) - self.prompt_len
        return int(self.mask.sum())


@dataclass(frozen=True)
class Episode(Rollout):
    """Conversation of the policy with an environment: turns of the policy, and replies of the environment.

    Attributes:
        end: reason why the episode ended, one of :data:`ENDS`.
        reward: reward of the environment; None without ``get_reward``, NaN if the episode is invalid.
        environment: class name of the environment.
        turns: number of turns of the policy.
        calls: number of tool calls that ran.
        errors: number of turns with calls that could not run; the reply to the model names the reason.
        failure: message of the environment's error; None without an error.
        earlier: samples of earlier turns, if the chat template omits their reasoning in the prompt of later turns.

    Example:
        >>> mask = torch.tensor([True, False, True])
        >>> episode = torchtune.rlhf.environments.Episode(torch.arange(5), 2, None, True, mask, end="completed")
        >>> episode.last_turn, episode.num_sampled, episode.is_valid
        ([4], 2, True)
    """

    end: str = "completed"
    reward: float | None = None
    environment: str = ""
    turns: int = 1
    calls: int = 0
    errors: int = 0
    failure: str | None = None
    earlier: tuple[Rollout, ...] = ()

    @property
    def parts(self) -> list[Rollout]:
        return [*self.earlier, self]

    @property
    def is_valid(self) -> bool:
        """Whether the environment worked; invalid episodes are not trained on."""
        return self.end not in INVALID_ENDS


def prompt_seed(*words: int) -> int:
    """Combine numbers into a seed, for example the run's seed, the step and the row.

    Example:
        >>> seeds = [torchtune.rlhf.prompt_seed(7, 1, row) for row in (0, 0, 1)]
        >>> seeds[0] == seeds[1] != seeds[2]
        True
    """
    # SeedSequence takes no negative numbers: they become their two's complement in 64 bits.
    entropy = [word & 0xFFFFFFFFFFFFFFFF for word in words]
    low, high = np.random.SeedSequence(entropy).generate_state(2)
    return int(high) << 32 | int(low)


def collate_rollouts(
    rollouts: Sequence[Rollout],
    advantages: Sequence[float],
    count_documents: bool = False,
    per_token: Mapping[str, Sequence[Tensor]] | None = None,
    share_prefix: bool = False,
) -> Batch:
    """Concatenate rollouts, padding-free. The last token of a rollout is only a label, not an input.

    Args:
        rollouts: rollouts; each becomes a document.
        advantages: advantage of each rollout.
        count_documents: whether the loss is a mean over documents instead of tokens.
        per_token: additional entries by name: for each rollout, values of the answer's tokens ``[s - prompt_len]``; may
            override ``advantages``.
        share_prefix: whether answers to the same prompt share its tokens, except the last token, because its label
            differs among the answers.

    Returns:
        A batch, see :func:`torchtune.data.collate_documents`, with the answers' tokens as labels. ``per_token`` has, at
        the positions of the labels, ``advantages``, float ``[1, s]``, and ``sampled``, the log-probs from sampling, if
        all rollouts have log-probs. ``per_document`` has ``label_counts``.
    """
    documents = []
    token_advantages = []
    sampled_log_probs = []
    have_log_probs = all(rollout.log_probs is not None for rollout in rollouts)
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        # Labels are shifted: the last token of the prompt predicts the first of the answer.
        num_unlabeled = rollout.prompt_len - 1
        answer = rollout.tokens[rollout.prompt_len :]
        labels = answer
        if rollout.mask is not None:  # replies of an environment are not trained on
            labels = answer.masked_fill(~rollout.mask, CROSS_ENTROPY_IGNORE_IDX)
        labels = torch.cat([torch.full((num_unlabeled,), CROSS_ENTROPY_IGNORE_IDX), labels])  # [s - 1]
        documents.append({"tokens": rollout.tokens[:-1], "labels": labels, **rollout.images})
        answer_advantages = torch.full((len(answer),), float(advantage))
        token_advantages.append(_pad_left(answer_advantages, num_unlabeled))  # [s - 1]
        if have_log_probs:
            sampled_log_probs.append(_pad_left(rollout.log_probs.float(), num_unlabeled))

    entries = {"advantages": torch.cat(token_advantages)[None]}  # [1, s]
    if have_log_probs:
        entries["sampled"] = torch.cat(sampled_log_probs)[None]
    if per_token is not None:
        for name, answer_values in per_token.items():
            padded = []
            for rollout, values in zip(rollouts, answer_values, strict=True):
                padded.append(_pad_left(values.float(), rollout.prompt_len - 1))
            entries[name] = torch.cat(padded)[None]
    label_counts = torch.tensor([rollout.num_sampled for rollout in rollouts])  # replies have no labels
    batch = replace(
        collate_documents(documents),
        per_token=entries,
        per_document={"label_counts": label_counts},
        terms=len(rollouts) if count_documents else None,
    )
    if share_prefix:
        return share_prefixes(batch, _prompt_numbers(rollouts))
    return batch


def _pad_left(values: Tensor, num_zeros: int) -> Tensor:
    """Prepend zeros, the values of a prompt's positions."""
    return F.pad(values, (num_zeros, 0))


def _prompt_numbers(rollouts: Sequence[Rollout]) -> list[int]:
    """Return a number for each rollout, equal for equal prompts."""
    number_of_prompt: dict[tuple[int, ...], int] = {}
    numbers = []
    for rollout in rollouts:
        prompt = tuple(rollout.tokens[: rollout.prompt_len].tolist())
        numbers.append(number_of_prompt.setdefault(prompt, len(number_of_prompt)))
    return numbers


def rollout_batches(
    rollouts: Sequence[Rollout],
    advantages: Sequence[float],
    *,
    tokens_per_batch: int,
    dims: ParallelDims,
    blank: Sequence[int],
    count_documents: bool = False,
    share_prefix: bool = False,
) -> tuple[list[Batch], int, int]:
    """Build micro-batches of whole rollouts, the same number on every rank. All ranks must call this function.

    Args:
        rollouts: rollouts of this rank, possibly none.
        advantages: advantage of each rollout.
        tokens_per_batch: maximum tokens per micro-batch; a longer rollout is a micro-batch by itself.
        dims: parallel dims.
        blank: tokens of the unlabeled filler batches of a rank with fewer micro-batches.
        count_documents: see :func:`collate_rollouts`.
        share_prefix: see :func:`collate_rollouts`.

    Returns:
        The micro-batches, on the host; the number of terms and the number of labels, summed over all ranks.
    """
    batches = []
    for indices in _plan_batches(rollouts, tokens_per_batch, share_prefix):
        batch = collate_rollouts(
            [rollouts[i] for i in indices],
            [advantages[i] for i in indices],
            count_documents=count_documents,
            share_prefix=share_prefix,
        )
        batches.append(batch)
    terms, labels, num_without_log_probs = dims.sum(
        sum(batch.num_terms for batch in batches),
        sum(batch.num_labels for batch in batches),
        sum("sampled" not in batch.per_token for batch in batches),
    )
    # Forward and backward passes of sharded models are collectives, so no rank may have fewer of them. A filler has
    # log-probs only if all batches have: the loss would log a metric of them that no other rank sums.
    for _ in range(dims.max(len(batches)) - len(batches)):
        batches.append(blank_batch(blank, with_log_probs=num_without_log_probs == 0))
    batches = [batch.pad_to_multiple(dims.min_seq_len_divisor) for batch in batches]
    return batches, terms, labels


def _plan_batches(rollouts: Sequence[Rollout], tokens_per_batch: int, share_prefix: bool) -> list[list[int]]:
    """Distribute rollouts over micro-batches in their order; return the indices of each micro-batch."""
    plan: list[list[int]] = []
    num_free = 0  # tokens that the last micro-batch can still take
    prompts: set[int] = set()  # prompts in the last micro-batch
    prompt_numbers = _prompt_numbers(rollouts)
    for index, rollout in enumerate(rollouts):
        prompt = prompt_numbers[index]
        length = len(rollout.tokens) - 1  # the last token is only a label
        num_shared = 0  # tokens that a batch with the same prompt already has, as `share_prefixes` counts them
        if share_prefix and rollout.prompt_len > MIN_SHARED:
            num_shared = rollout.prompt_len - 1  # the last token of a prompt has the label of its answer
        num_added = length
        if prompt in prompts:
            num_added = length - num_shared
        if not plan or num_added > num_free:
            plan.append([])
            num_free = tokens_per_batch
            prompts = set()
            num_added = length  # a new micro-batch has no prompt to share
        plan[-1].append(index)
        num_free -= num_added
        prompts.add(prompt)
    return plan


def blank_batch(tokens: Sequence[int], *, with_log_probs: bool = True, entries: Iterable[str] = ()) -> Batch:
    """Build a batch of one document without labels, for a rank with fewer batches than others.

    Args:
        tokens: tokens of the document.
        with_log_probs: whether to add log-probs of the sampler, as in the other batches.
        entries: names of additional per-token entries, as in the other batches.
    """
    # A rollout has at least one token of an answer; its label is ignored below.
    rollout = Rollout(
        tokens=torch.tensor([*tokens, tokens[0]]),
        prompt_len=len(tokens),
        log_probs=torch.zeros(1) if with_log_probs else None,
        finished=True,
    )
    per_token = {name: [torch.zeros(1)] for name in entries}
    batch = collate_rollouts([rollout], advantages=[0.0], per_token=per_token)
    return replace(
        batch,
        labels=torch.full_like(batch.labels, CROSS_ENTROPY_IGNORE_IDX),
        per_document={"label_counts": torch.zeros(1, dtype=torch.int64)},
        terms=0,
    )


def equal_chunks(rollouts: Sequence[Rollout], size: int | None, dims: ParallelDims) -> Iterator[Sequence[Rollout]]:
    """Yield chunks of up to ``size`` rollouts, the same number of chunks on every rank; fillers repeat a rollout."""
    if size is None:
        size = len(rollouts)
    size = max(size, 1)
    chunks = [rollouts[start : start + size] for start in range(0, len(rollouts), size)]
    yield from chunks
    # Forward passes of sharded models are collectives, so no rank may have fewer of them.
    for _ in range(dims.max(len(chunks)) - len(chunks)):
        yield rollouts[:1]


def texts_of(rollouts: Sequence[Rollout], tokenizer: Any) -> list[str]:
    """Decode every answer (of an episode with several turns, the last turn), without its stop token.

    Example:
        >>> tokens = torch.tensor(tokenizer.encode("the cat", add_bos=False))
        >>> rollout = torchtune.rlhf.Rollout(tokens, prompt_len=0, log_probs=None, finished=True)
        >>> torchtune.rlhf.texts_of([rollout], tokenizer)
        ['the cat']
    """
    stop_tokens = set(tokenizer.stop_tokens)
    texts = []
    for rollout in rollouts:
        answer = rollout.last_turn
        if answer and answer[-1] in stop_tokens:
            answer = answer[:-1]
        texts.append(tokenizer.decode(answer))
    return texts
