"""Optimizer steps of PPO (proximal policy optimization), and checks of its loss, models and settings."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from torchtune.data import Batch
from torchtune.rlhf._ppo_advantages import AnswerTokens, TokenAdvantages
from torchtune.rlhf._rollouts import RolloutError, blank_batch, collate_rollouts, prompt_seed
from torchtune.rlhf._scored_rollouts import ScoredRollouts
from torchtune.rlhf._teacher import check_same_tokenizer
from torchtune.rlhf.loss.ppo import PPOLoss
from torchtune.training import ParallelDims


def ppo_updates(
    scored: ScoredRollouts,
    tokens: AnswerTokens,
    found: TokenAdvantages,
    epochs: int,
    batch_size: int | None,
    accumulation_steps: int,
    *,
    seeds: Sequence[int],
    device: torch.device | str,
    dims: ParallelDims,
) -> Iterator[tuple[list[Batch], int]]:
    """Yield, for each optimizer step of PPO, padding-free micro-batches and the number of labels over all ranks.

    Args:
        scored: the answers; empty answers and answers to blank prompts are left out.
        tokens: per-token quantities of the answers.
        found: advantages and returns of the answers.
        epochs: number of passes over all answers.
        batch_size: number of answers per optimizer step and rank; None uses all answers.
        accumulation_steps: number of micro-batches per optimizer step.
        seeds: seeds for the order of the answers, in addition to the epoch.
        device: device of the micro-batches.
        dims: parallel dims; all ranks yield the same number of steps and micro-batches.
    """
    answered = np.flatnonzero(tokens.mask.any(1).numpy())  # indices of the answers with tokens
    most_answers = dims.max(len(answered))  # of any rank: all ranks take the same number of steps
    if batch_size is None:
        batch_size = max(most_answers, 1)
    # The loss notes the policy's distance from its samples at the first step, before it changed.
    is_first_step = True
    for epoch in range(epochs):
        order = answered
        if batch_size < most_answers:  # one batch of all answers needs no order
            generator = np.random.Generator(np.random.Philox(key=prompt_seed(*seeds, epoch)))
            order = generator.permutation(answered)
        for start in range(0, most_answers, batch_size):
            batches = []
            for indices in np.array_split(order[start : start + batch_size], accumulation_steps):
                if len(indices):
                    batches.append(_collate_answers(indices, scored, tokens, found))
            # Forward and backward passes of sharded models are collectives, so no rank may have fewer of them.
            for _ in range(dims.max(len(batches)) - len(batches)):
                prompt_start = scored.rollouts[0].tokens[:1].tolist()
                batches.append(blank_batch(prompt_start, entries=("advantages", "returns", "values")))
            if is_first_step:
                for batch in batches:
                    batch.per_document["is_first"] = torch.ones(len(batch.per_document["label_counts"]))
                is_first_step = False
            (num_labels,) = dims.sum(sum(batch.num_labels for batch in batches))
            padded = [batch.pad_to_multiple(dims.min_seq_len_divisor) for batch in batches]
            yield [batch.to(device, non_blocking=True) for batch in padded], num_labels


def _collate_answers(
    indices: np.ndarray, scored: ScoredRollouts, tokens: AnswerTokens, advantages: TokenAdvantages
) -> Batch:
    """Build the micro-batch of some answers, with their advantages, returns and values per token."""
    rollouts = []
    per_token = {"advantages": [], "returns": [], "values": []}
    for index in indices:
        length = int(tokens.mask[index].sum())  # rows are padded to the longest answer
        rollouts.append(scored.rollouts[index])
        per_token["advantages"].append(advantages.advantages[index, :length])
        per_token["returns"].append(advantages.returns[index, :length])
        per_token["values"].append(tokens.values[index, :length])
    # The advantages per token replace the ones per rollout.
    return collate_rollouts(rollouts, [0.0] * len(rollouts), per_token=per_token)


def setup_ppo_loss(loss: Any, models: nn.ModuleDict) -> PPOLoss:
    """Check a loss and its models.

    Raises:
        RolloutError: the loss is not a PPO loss.
        LossError: a model does not fit the loss.
    """
    if not isinstance(loss, PPOLoss):
        raise RolloutError(
            f"loss: {type(loss).__name__} trains no values: give torchtune.rlhf.loss.PPOLoss, or run "
            "the recipe grpo with a loss of the GRPO family."
        )
    loss.check_model(models)
    return loss


# Setting that names the checkpoint of each model.
_SETTING = {
    "policy": "checkpointer",
    "value": "value_checkpointer",
    "reward": "reward_checkpointer",
    "reference": "ref_policy_checkpointer",
}


def check_ppo_models(models: Mapping[str, nn.Module], checkpointer: Any, tokenizer: Any) -> None:
    """Check that all models have the same tokenizer.

    Args:
        models: models by name, with ``policy``.
        checkpointer: checkpointer with a source for each model.
        tokenizer: tokenizer of the data.

    Raises:
        RolloutError: the vocabulary of a model differs.
        TeacherError: the tokenizer of a model differs.
    """
    policy_vocab_size = len(models["policy"].tok_embeddings.weight)
    policy_folder = Path(checkpointer.store.source("policy").checkpoint_dir)
    for name, model in models.items():
        vocab_size = len(model.tok_embeddings.weight)
        if vocab_size != policy_vocab_size or vocab_size < tokenizer.vocab_size:
            raise RolloutError(
                f"{_SETTING[name]}: the {name} model has a vocabulary of {vocab_size:,} tokens, the policy one of "
                f"{policy_vocab_size:,} and the tokenizer {tokenizer.vocab_size:,}: take models with the same "
                "tokenizer."
            )
        if name != "policy":
            folder = Path(checkpointer.store.source(name).checkpoint_dir)
            check_same_tokenizer(folder, policy_folder, _SETTING[name])


def check_ppo_settings(settings: Any) -> Iterator[tuple[str, str]]:
    """Yield (setting, error and remedy) for invalid settings of the PPO recipe."""
    batch_size = settings.batch_size
    ppo_batch_size = settings.ppo_batch_size or batch_size
    if ppo_batch_size > batch_size:
        yield "ppo_batch_size", f"is {ppo_batch_size}, but a step has batch_size={batch_size} answers: lower it"
    accumulation_steps = settings.gradient_accumulation_steps
    if ppo_batch_size % accumulation_steps:
        error = f"is {accumulation_steps}, which must divide ppo_batch_size={ppo_batch_size}"
        yield "gradient_accumulation_steps", error
    elif batch_size % accumulation_steps:
        error = f"is {accumulation_steps}, which must divide batch_size={batch_size}"
        yield "gradient_accumulation_steps", error
    if settings.min_response_length is not None and settings.min_response_length > settings.max_generated_tokens:
        yield "min_response_length", "is above max_generated_tokens, so that every answer is penalized: lower it"
    if settings.num_steps is None:
        return
    if settings.num_steps < batch_size:
        yield "num_steps", f"counts answers, and one step has batch_size={batch_size}: raise it"
    if settings.epochs > 1 or settings.max_steps_per_epoch is not None:
        yield "num_steps", "says how long the run is, and so do epochs and max_steps_per_epoch: set it to null"


def steps_per_epoch(num_answers: int | None, num_prompts: int, batch_size: int) -> int | None:
    """Return the number of steps per epoch that sample ``num_answers`` answers; None if ``num_answers`` is None.

    Raises:
        RolloutError: the dataset has fewer prompts than ``num_answers``.

    Example:
        >>> torchtune.rlhf.steps_per_epoch(None, num_prompts=2, batch_size=4) is None
        True
    """
    if num_answers is None:
        return None
    if num_answers > num_prompts:
        epochs = math.ceil(num_answers / num_prompts)
        raise RolloutError(
            f"num_steps: {num_answers:,} answers are asked for, and the dataset has {num_prompts:,} prompts: set it to "
            f"null and epochs={epochs}."
        )
    return num_answers // batch_size
