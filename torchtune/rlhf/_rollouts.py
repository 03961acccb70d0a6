"""Answers that a model sampled: what a sampler returns, and the batches that are trained on."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, Batch, collate_documents, share_prefixes
from torchtune.data._sharing import MIN_SHARED
from torchtune.training import ParallelDims
from torchtune.utils import UserError

MOST_LOG_PROB = 1e-3  # 0, with a tolerance for rounding in float32


class RolloutError(UserError):
    """Answers cannot be sampled, scored or trained on."""


@dataclass(frozen=True)
class Rollout:
    """A prompt and an answer that was sampled.

    Attributes:
        tokens: prompt and answer, int64 ``[s]``, on the host; the token that ends the answer is one of them.
        prompt_len: tokens of the prompt.
        log_probs: of the answer's tokens, as they were sampled, float32 ``[s - prompt_len]``; None where the sampler
            does not know them.
        finished: whether the answer has ended, rather than grown too long.

    Raises:
        RolloutError: tokens are not whole numbers from 0, or log-probs not as many finite numbers as the answer has
            tokens, none above 0 by more than 0.001.

    Example:
        >>> rollout = torchtune.rlhf.Rollout(torch.tensor([5, 6, 7, 2]), prompt_len=2, log_probs=None, finished=True)
        >>> rollout.tokens[rollout.prompt_len :]
        tensor([7, 2])
    """

    tokens: Tensor
    prompt_len: int
    log_probs: Tensor | None
    finished: bool

    def __post_init__(self) -> None:
        tokens, log_probs = self.tokens, self.log_probs
        if tokens.dim() != 1 or tokens.is_floating_point() or (tokens < 0).any():
            raise RolloutError(
                f"A sampler gave tokens that are no ids, {_few(tokens)}: they must be int64 [s], from 0."
            )
        if log_probs is None:
            return
        new = len(tokens) - self.prompt_len
        if log_probs.shape != (new,):
            raise RolloutError(f"A sampler gave an answer of {new} tokens log-probs of shape {list(log_probs.shape)}.")
        wrong = log_probs[~(log_probs.isfinite() & (log_probs <= MOST_LOG_PROB))]
        if len(wrong):
            raise RolloutError(
                f"A sampler gave the log-prob {wrong[0].item():g} to a token, and one is a finite number up to 0: the "
                "weights that it samples from are not finite, or it gives something else."
            )

    @property
    def answer(self) -> list[int]:
        """Tokens of the answer."""
        return self.tokens[self.prompt_len :].tolist()


def _few(values: Tensor) -> str:
    """A tensor for messages."""
    return f"{values.flatten()[:4].tolist()} … of shape {list(values.shape)} and {values.dtype}"


class Sampler(Protocol):
    """What answers prompts while a model is trained.

    Attributes:
        temperature: of the distribution that tokens are drawn from, untruncated.
        gives_log_probs: whether answers come with the log-probs of their tokens; without the attribute they do.
    """

    temperature: float

    def __call__(
        self, prompts: Sequence[Sequence[int]], num_samples: int, seeds: Sequence[int] | None = None
    ) -> list[Rollout]:
        """Answer every prompt ``num_samples`` times; answer j of prompt i is item ``i * num_samples + j``.

        Args:
            prompts: tokens of each prompt.
            num_samples: answers per prompt.
            seeds: one per prompt; the same seed and prompt give the same answers.
        """


def prompt_seed(*words: int) -> int:
    """A seed made from numbers, for example the run's seed, the step and the row.

    Example:
        >>> seeds = [torchtune.rlhf.prompt_seed(7, 1, row) for row in (0, 0, 1)]
        >>> seeds[0] == seeds[1] != seeds[2]
        True
    """
    low, high = np.random.SeedSequence([word & 0xFFFFFFFFFFFFFFFF for word in words]).generate_state(2)
    return int(high) << 32 | int(low)


def collate_rollouts(
    rollouts: Sequence[Rollout],
    advantages: Sequence[float],
    count_documents: bool = False,
    per_token: Mapping[str, Sequence[Tensor]] | None = None,
    share_prefix: bool = False,
) -> Batch:
    """Concatenate rollouts, padding-free. The last token of each is a label and no input.

    Args:
        rollouts: one document each.
        advantages: of each.
        count_documents: the loss is a mean over documents, not over tokens.
        per_token: further entries: name -> a value for every token of each answer ``[s - prompt_len]``; they may give
            the ``advantages``.
        share_prefix: answers to the same prompt share its tokens but the last, which has a label in each of them.

    Returns:
        the batch of :func:`torchtune.data.collate_documents`: labels are the answers' tokens. Entries per token, float
        ``[1, s]``, at the positions of their labels: ``advantages`` and, where all are known, ``sampled`` (log-probs).
        Entry per document: ``label_counts``.
    """
    documents, values, sampled = [], [], []
    known = all(rollout.log_probs is not None for rollout in rollouts)
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        before, new = rollout.prompt_len - 1, len(rollout.tokens) - rollout.prompt_len
        labels = torch.cat([torch.full((before,), CROSS_ENTROPY_IGNORE_IDX), rollout.tokens[rollout.prompt_len :]])
        documents.append({"tokens": rollout.tokens[:-1], "labels": labels})
        values.append(torch.cat([torch.zeros(before), torch.full((new,), float(advantage))]))
        if known:
            sampled.append(torch.cat([torch.zeros(before), rollout.log_probs.float()]))
    counts = [len(rollout.tokens) - rollout.prompt_len for rollout in rollouts]
    entries = {"advantages": torch.cat(values)[None]}
    if known:
        entries["sampled"] = torch.cat(sampled)[None]
    for name, answers in (per_token or {}).items():
        parts = zip(rollouts, answers, strict=True)
        entries[name] = torch.cat([F.pad(value.float(), (one.prompt_len - 1, 0)) for one, value in parts])[None]
    batch = replace(
        collate_documents(documents),
        per_token=entries,
        per_document={"label_counts": torch.tensor(counts)},
        terms=len(rollouts) if count_documents else None,
    )
    return share_prefixes(batch, _numbers(rollouts)) if share_prefix else batch


def _numbers(rollouts: Sequence[Rollout]) -> list[int]:
    """A number for each rollout, the same for the same prompt."""
    known: dict[tuple[int, ...], int] = {}
    prompts = (tuple(rollout.tokens[: rollout.prompt_len].tolist()) for rollout in rollouts)
    return [known.setdefault(prompt, len(known)) for prompt in prompts]


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
    """Micro-batches of whole rollouts, as many on every process; all processes call it together.

    Args:
        rollouts: of this process; there may be none.
        advantages: of each.
        tokens_per_batch: most tokens of a micro-batch; a longer rollout has one for itself.
        dims: the processes.
        blank: tokens that a process that has too few gets instead, without labels.
        count_documents: see :func:`collate_rollouts`.
        share_prefix: likewise.

    Returns:
        the micro-batches, on the host, and their terms and labels, summed over all processes.
    """
    parts: list[list[int]] = []
    room, prompts = 0, set()  # the prompts of the last part
    for index, (rollout, prompt) in enumerate(zip(rollouts, _numbers(rollouts), strict=True)):
        length = len(rollout.tokens) - 1
        before = rollout.prompt_len - 1 if share_prefix and rollout.prompt_len > MIN_SHARED else 0
        if not parts or length - before * (prompt in prompts) > room:
            parts.append([])
            room, prompts = tokens_per_batch, set()
        parts[-1].append(index)
        room -= length - before * (prompt in prompts)
        prompts.add(prompt)
    how = {"count_documents": count_documents, "share_prefix": share_prefix}
    batches = [collate_rollouts([rollouts[i] for i in part], [advantages[i] for i in part], **how) for part in parts]
    terms, labels, unknown = dims.sum(
        sum(batch.num_terms for batch in batches),
        sum(batch.num_labels for batch in batches),
        sum("sampled" not in batch.per_token for batch in batches),
    )
    for _ in range(dims.max(len(batches)) - len(batches)):
        batches.append(blank_batch(blank, known=not unknown))
    batches = [batch.pad_to_multiple(dims.min_seq_len_divisor) for batch in batches]
    return batches, terms, labels


def blank_batch(tokens: Sequence[int], *, known: bool = True, entries: Iterable[str] = ()) -> Batch:
    """A batch of one document without labels, for a process that has fewer batches than others.

    Args:
        tokens: of the document.
        known: whether it has log-probs, as other batches do.
        entries: names of further entries per token that other batches have.
    """
    log_probs = torch.zeros(1) if known else None
    rollout = Rollout(torch.tensor([*tokens, tokens[0]]), len(tokens), log_probs, True)
    batch = collate_rollouts([rollout], [0.0], per_token={name: [torch.zeros(1)] for name in entries})
    labels = torch.full_like(batch.labels, CROSS_ENTROPY_IGNORE_IDX)
    return replace(batch, labels=labels, per_document={"label_counts": torch.zeros(1, dtype=torch.int64)}, terms=0)


def texts_of(rollouts: Sequence[Rollout], tokenizer: Any) -> list[str]:
    """Text of every answer, without the token that ends it.

    Example:
        >>> tokens = torch.tensor(tokenizer.encode("the cat", add_bos=False))
        >>> rollout = torchtune.rlhf.Rollout(tokens, prompt_len=0, log_probs=None, finished=True)
        >>> torchtune.rlhf.texts_of([rollout], tokenizer)
        ['the cat']
    """
    stop = set(tokenizer.stop_tokens)
    answers = [rollout.answer for rollout in rollouts]
    return [tokenizer.decode(answer[:-1] if answer and answer[-1] in stop else answer) for answer in answers]
