"""PPO (proximal policy optimization): values, advantages, optimizer steps, and checks of the loss and the settings."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, Batch
from torchtune.generation import evaluating
from torchtune.modules.loss import Projection, token_log_probs
from torchtune.rlhf._rollouts import RolloutError, blank_batch, collate_rollouts, equal_chunks, prompt_seed
from torchtune.rlhf._scored_rollouts import ScoredRollouts
from torchtune.rlhf._teacher import check_new_tokens, check_same_tokenizer
from torchtune.rlhf.loss.ppo import PPOLoss
from torchtune.rlhf.rewards import estimate_advantages, get_rewards_ppo, whiten
from torchtune.training import ParallelDims


def token_values(hidden: Tensor, batch: Batch, projection: Projection) -> Tensor:
    """Compute the values of the states before the labeled tokens.

    Args:
        hidden: hidden states of the value model ``[b, s, d]``.
        batch: the batch; only labeled positions are projected.
        projection: ``[..., d]`` -> ``[..., 1]``.

    Returns:
        ``[b, s]``, float32 or wider; 0 at positions without a label.
    """
    positions = batch.find_labels()  # [n], indices into the flattened batch
    labeled = hidden.flatten(0, 1).index_select(0, positions)  # [n, d]
    values = projection(labeled).squeeze(-1)  # [n]
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    all_values = values.new_zeros(batch.labels.numel()).index_copy(0, positions, values)
    return all_values.view(batch.labels.shape)


class AnswerTokens(NamedTuple):
    """Per-token quantities of ``n`` answers, float64 ``[n, r]``, on the host, right-padded with 0.

    Attributes:
        mask: bool, True at tokens, False at padding.
        log_probs: log-probs of the policy at sampling.
        reference: log-probs of the reference.
        values: values of the states before the tokens, from the value model.

    Example:
        >>> zeros = torch.zeros(1, 3, dtype=torch.float64)
        >>> torchtune.rlhf.AnswerTokens(torch.ones(1, 3, dtype=torch.bool), zeros, zeros, zeros).mask.sum()
        tensor(3)
    """

    mask: Tensor
    log_probs: Tensor
    reference: Tensor
    values: Tensor


@torch.no_grad()
def evaluate_rollouts(
    scored: ScoredRollouts,
    reference: nn.Module,
    value: nn.Module,
    temperature: float,
    batch_size: int | None = None,
    *,
    dims: ParallelDims,
) -> AnswerTokens:
    """Run the reference and the value model on answers, in evaluation mode, without dropout.

    Args:
        scored: ``n`` answers with log-probs; answers to blank prompts are masked.
        reference: the frozen reference.
        value: the trained value model.
        temperature: sampling temperature; log-probs of the reference are at the same one, as log-ratios require.
        batch_size: number of answers per forward pass; None runs all answers in one pass.
        dims: parallel dims of the sharded models; all ranks must call this function.
    """
    rollouts = scored.rollouts
    device = value.tok_embeddings.weight.device
    reference_log_probs = []  # one tensor per answer
    values = []
    with evaluating(reference), evaluating(value):
        for chunk in equal_chunks(rollouts, batch_size, dims):
            batch = collate_rollouts(chunk, advantages=[0.0] * len(chunk)).to(device)  # advantages are not read
            labeled = batch.labels != CROSS_ENTROPY_IGNORE_IDX  # [1, s]
            lengths = [len(rollout.tokens) - rollout.prompt_len for rollout in chunk]
            hidden = reference(**batch.model_inputs(), output="hidden")  # [1, s, d]
            log_probs = token_log_probs(hidden, batch.labels, reference.output, temperature)
            reference_log_probs.extend(log_probs[labeled].double().cpu().split(lengths))
            hidden = value(**batch.model_inputs(), output="hidden")
            chunk_values = token_values(hidden, batch, value.output)
            values.extend(chunk_values[labeled].double().cpu().split(lengths))

    answer_lengths = []
    for prompt, rollout in zip(scored.prompts, rollouts, strict=True):
        length = len(rollout.answer)
        if prompt.is_blank:  # masked altogether
            length = 0
        answer_lengths.append(length)
    # Values after the last rollout are of filler chunks, which ranks with fewer rollouts than others run.
    padded_values = pad_sequence(values[: len(rollouts)], batch_first=True)  # [n, r]
    positions = torch.arange(padded_values.shape[1])
    return AnswerTokens(
        mask=positions < torch.tensor(answer_lengths)[:, None],
        log_probs=pad_sequence([rollout.log_probs.double() for rollout in rollouts], batch_first=True),
        reference=pad_sequence(reference_log_probs[: len(rollouts)], batch_first=True),
        values=padded_values,
    )


class TokenAdvantages(NamedTuple):
    """Per-token advantages and returns of ``n`` answers, float64 ``[n, r]``, and metrics.

    Attributes:
        advantages: whitened over all tokens of all answers.
        returns: targets of the value model.
        figures: name -> (sum, count).

    Example:
        >>> ones = torch.ones(1, 2, dtype=torch.float64)
        >>> torchtune.rlhf.TokenAdvantages(ones, ones, {"return": (2.0, 2.0)}).figures["return"]
        (2.0, 2.0)
    """

    advantages: Tensor
    returns: Tensor
    figures: dict[str, tuple[float, float]]


def ppo_advantages(
    tokens: AnswerTokens,
    scored: ScoredRollouts,
    kl_coeff: float,
    gamma: float,
    lmbda: float,
    whiten_rewards: bool,
    *,
    dims: ParallelDims,
) -> TokenAdvantages:
    """Compute generalized advantage estimates (GAE) per token.

    The reward of a token is −``kl_coeff`` (log π − log π_ref). The last token of an answer also gets the score.

    Args:
        tokens: per-token quantities of the answers.
        scored: the answers with their scores.
        kl_coeff: weight of the log-ratio to the reference.
        gamma: discount factor.
        lmbda: GAE λ, from one-step returns (0) to full returns (1).
        whiten_rewards: whether to divide the rewards by their standard deviation; the mean does not change.
        dims: parallel dims; all ranks must call this function, which computes means and variances over all ranks.
    """
    # Whitening and the metrics are over the answers of all ranks: [n, r] now has the rows of every rank.
    local_rows = {**tokens._asdict(), "scores": scored.rewards[:, 0]}  # one answer per prompt
    rows, start = _gather_rows(local_rows, dims)
    mask = rows["mask"]
    values = rows["values"]
    scores = rows["scores"]
    lengths = mask.sum(1)  # [n]
    last_token = (lengths - 1).clamp(min=0)  # the score's position; an empty answer is masked altogether
    rewards, log_ratios, kl_rewards = get_rewards_ppo(
        scores, rows["log_probs"], rows["reference"], kl_coeff, last_token
    )
    total_rewards = rewards.sum(1)  # before whitening, for the metrics
    if whiten_rewards:
        rewards = whiten(rewards, mask)
    rewards = rewards.masked_fill(~mask, 0.0)
    # Advantages are centered, as a policy gradient requires; `whiten` above keeps the mean of the rewards.
    advantages, returns = estimate_advantages(values, rewards, gamma, lmbda, mask, shift_mean=False)
    returns = returns.masked_fill(~mask, 0.0)

    # Sums and counts over this rank's answers; empty answers and answers to blank prompts do not count.
    stop = start + len(scored.rollouts)
    answered = [row for row in range(start, stop) if lengths[row]]
    num_stops = sum(scored.rollouts[row - start].finished for row in answered)
    quantities = {
        "scores": scores,
        "rlhf_reward": total_rewards,
        "kl": log_ratios,
        "kl_reward": kl_rewards,
        "response_lengths": lengths,
    }
    metrics = {}
    for name, quantity in quantities.items():
        metrics[name] = (float(quantity[answered].sum()), len(answered))
    # The counts of all ranks add up to 1, so this is a sum over the step, not a mean.
    metrics["num_stop_tokens"] = (float(num_stops), 1 / dims.data_size)
    # Over the answers of all ranks, so every rank logs the same value with the count 1. Without variance, it is
    # undefined.
    variance = returns[mask].var(correction=0)
    if variance > 0:
        unexplained = (returns - values)[mask].var(correction=0) / variance
        metrics["value/explained_variance"] = (1.0 - unexplained.item(), 1)

    longest = tokens.mask.shape[1]  # of this rank; other ranks may have longer answers
    return TokenAdvantages(advantages[start:stop, :longest], returns[start:stop, :longest], metrics)


def _gather_rows(local_rows: dict[str, Tensor], dims: ParallelDims) -> tuple[dict[str, Tensor], int]:
    """All-gather rows over the data ranks, zero-padded to one length.

    Args:
        local_rows: name -> rows of this rank, ``[n]`` or ``[n, r]``, with ``mask``.
        dims: parallel dims; all ranks must call this function.

    Returns:
        The rows of all ranks, in the order of the data ranks; index of this rank's first row.
    """
    # By data rank: tensor-parallel ranks have the same answers, of which one is kept.
    gathered = dict(dims.gather((dims.data_rank, local_rows)))
    rank_rows = [gathered[rank] for rank in range(dims.data_size)]
    longest = max(rows["mask"].shape[1] for rows in rank_rows)
    all_rows = {}
    for name in local_rows:
        tensors = []
        for rows in rank_rows:
            tensor = rows[name]
            if tensor.dim() == 2:
                tensor = F.pad(tensor, (0, longest - tensor.shape[1]))
            tensors.append(tensor)
        all_rows[name] = torch.cat(tensors)
    start = sum(len(rows["mask"]) for rows in rank_rows[: dims.data_rank])
    return all_rows, start


def ppo_updates(
    scored: ScoredRollouts,
    tokens: AnswerTokens,
    advantages: TokenAdvantages,
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
        advantages: advantages and returns of the answers.
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
        batch_size = max(most_answers, 1)  # the step of `range` must not be 0
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
                    batches.append(_collate_answers(indices, scored, tokens, advantages))
            # Forward and backward passes of sharded models are collectives, so no rank may have fewer of them.
            for _ in range(dims.max(len(batches)) - len(batches)):
                prompt_start = scored.rollouts[0].tokens[:1].tolist()  # any token: a filler has no labels
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
            f"loss: {type(loss).__name__} does not train a value model: give torchtune.rlhf.loss.PPOLoss, or run "
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
        TeacherError: the tokenizer of a model differs, or the value or reward model does not know a new token.
    """
    policy_vocab_size = len(models["policy"].tok_embeddings.weight)
    policy_folder = Path(checkpointer.source("policy").checkpoint_dir)
    for name, model in models.items():
        # Only the policy and the reference get rows for tokens that the config adds: the others must know them.
        if name in ("value", "reward"):
            folder = Path(checkpointer.source(name).checkpoint_dir)
            check_new_tokens(tokenizer, folder, _SETTING[name], f"{name} model")
        vocab_size = len(model.tok_embeddings.weight)
        if vocab_size != policy_vocab_size or vocab_size < tokenizer.vocab_size:
            raise RolloutError(
                f"{_SETTING[name]}: the {name} model has a vocabulary of {vocab_size:,} tokens, the policy one of "
                f"{policy_vocab_size:,} and the tokenizer {tokenizer.vocab_size:,}: take models with the same "
                "tokenizer."
            )
        if name != "policy":
            folder = Path(checkpointer.source(name).checkpoint_dir)
            check_same_tokenizer(folder, policy_folder, _SETTING[name])


def check_ppo_settings(settings: Any) -> Iterator[tuple[str, str]]:
    """Yield (setting, error and remedy) for invalid settings of the PPO recipe."""
    batch_size = settings.batch_size
    ppo_batch_size = settings.ppo_batch_size or batch_size
    if ppo_batch_size > batch_size:
        yield "ppo_batch_size", f"is {ppo_batch_size}, but a step has batch_size={batch_size} answers: lower it"
    # Micro-batches have equally many answers, in an optimizer step and in the step's plan, see `StepPlan.of`.
    accumulation_steps = settings.gradient_accumulation_steps
    if ppo_batch_size % accumulation_steps:
        error = f"is {accumulation_steps}, which must divide ppo_batch_size={ppo_batch_size}"
        yield "gradient_accumulation_steps", error
    elif batch_size % accumulation_steps:
        error = f"is {accumulation_steps}, which must divide batch_size={batch_size}"
        yield "gradient_accumulation_steps", error
    if settings.min_response_length is not None and settings.min_response_length > settings.max_generated_tokens:
        yield "min_response_length", "is above max_generated_tokens, so that every answer is penalized: lower it"
    if settings.num_steps is None:  # epochs or max_steps say how long the run is
        return
    if settings.num_steps < batch_size:
        yield "num_steps", f"counts answers, and one step has batch_size={batch_size}: raise it"
    if settings.epochs > 1 or settings.max_steps_per_epoch is not None or settings.max_steps is not None:
        yield (
            "num_steps",
            "says how long the run is, and so do epochs, max_steps and max_steps_per_epoch: set it to null",
        )


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
            f"num_steps: {num_answers:,} answers are requested, but the dataset has {num_prompts:,} prompts: set it to "
            f"null and epochs={epochs}."
        )
    return num_answers // batch_size
