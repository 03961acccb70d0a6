"""Optimizer steps of PPO (proximal policy optimization), and checks of its loss, models and settings."""

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
    rollouts = scored.rollouts
    lengths = tokens.mask.sum(1).tolist()
    entries = {"advantages": found.advantages, "returns": found.returns, "values": tokens.values}
    real = np.flatnonzero(lengths)
    most = dims.max(len(real))
    size, is_first = batch_size or max(most, 1), True
    for epoch in range(epochs):
        order = real
        if size < most:
            order = np.random.Generator(np.random.Philox(key=prompt_seed(*seeds, epoch))).permutation(real)
        for start in range(0, most, size):
            batches = []
            for part in np.array_split(order[start : start + size], accumulation_steps):
                if not len(part):
                    continue
                per_token = {name: [rows[i, : lengths[i]] for i in part] for name, rows in entries.items()}
                batches.append(collate_rollouts([rollouts[i] for i in part], [0.0] * len(part), per_token=per_token))
            for _ in range(dims.max(len(batches)) - len(batches)):
                batches.append(blank_batch(rollouts[0].tokens[:1].tolist(), entries=entries))
            if is_first:
                for batch in batches:
                    batch.per_document["is_first"] = torch.ones(len(batch.per_document["label_counts"]))
            is_first = False
            num_labels = dims.sum(sum(batch.num_labels for batch in batches))[0]
            ready = [batch.pad_to_multiple(dims.min_seq_len_divisor) for batch in batches]
            yield [batch.to(device, non_blocking=True) for batch in ready], num_labels


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
    mine, needed = len(models["policy"].tok_embeddings.weight), tokenizer.vocab_size
    folders = {name: Path(checkpointer.store.source(name).checkpoint_dir) for name in models}
    for name, model in models.items():
        theirs = len(model.tok_embeddings.weight)
        if theirs != mine or theirs < needed:
            raise RolloutError(
                f"{_SETTING[name]}: the {name} model has a vocabulary of {theirs:,} tokens, the policy one of {mine:,} "
                f"and the tokenizer {needed:,}: take models with the same tokenizer."
            )
        if name != "policy":
            check_same_tokenizer(folders[name], folders["policy"], _SETTING[name])


def check_ppo_settings(settings: Any) -> Iterator[tuple[str, str]]:
    """Yield (setting, error and remedy) for invalid settings of the PPO recipe."""
    size = settings.ppo_batch_size or settings.batch_size
    if size > settings.batch_size:
        yield "ppo_batch_size", f"is {size}, but a step has batch_size={settings.batch_size} answers: lower it"
    count = settings.gradient_accumulation_steps
    for name, number in {"ppo_batch_size": size, "batch_size": settings.batch_size}.items():
        if number % count:
            yield "gradient_accumulation_steps", f"is {count}, which must divide {name}={number}"
            break
    if settings.min_response_length is not None and settings.min_response_length > settings.max_generated_tokens:
        yield "min_response_length", "is above max_generated_tokens, so that every answer is penalized: lower it"
    if settings.num_steps is None:
        return
    if settings.num_steps < settings.batch_size:
        yield "num_steps", f"counts answers, and one step has batch_size={settings.batch_size}: raise it"
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
        epochs = -(-num_answers // num_prompts)
        raise RolloutError(
            f"num_steps: {num_answers:,} answers are asked for, and the dataset has {num_prompts:,} prompts: set it to "
            f"null and epochs={epochs}."
        )
    return num_answers // batch_size
