"""PPO (proximal policy optimization) without its loss: scores, values, advantages, and optimizer steps."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, Batch, Message, WrappedDataset, collate_documents
from torchtune.generation import evaluating
from torchtune.modules.loss import Projection, token_log_probs
from torchtune.rlhf._experience import Prompt, ScoredRollouts
from torchtune.rlhf._rollouts import Rollout, RolloutError, blank_batch, collate_rollouts, prompt_seed, texts_of
from torchtune.rlhf._teacher import check_same_tokenizer
from torchtune.rlhf.loss.ppo import PPOLoss
from torchtune.rlhf.loss.reward import pooled_scores
from torchtune.rlhf.rewards import estimate_advantages, get_rewards_ppo, whiten
from torchtune.training import ParallelDims
from torchtune.utils import get_logger


class NumberedPrompts(WrappedDataset):
    """Prompts of a dataset without rows, such as :func:`torchtune.datasets.text_completion_dataset`.

    Args:
        dataset: dataset of examples with ``tokens``.
        stop_tokens: ids of tokens that end an answer; a prompt must not end with one of them.

    Example:
        >>> data = torchtune.datasets.text_completion_dataset(tokenizer, source=[{"text": "the cat"}], add_eos=False)
        >>> torchtune.rlhf.NumberedPrompts(data, tokenizer.stop_tokens)[0]["number"]
        0
    """

    def __init__(self, dataset: Any, stop_tokens: Sequence[int]) -> None:
        super().__init__(dataset)
        self._stop = set(stop_tokens)
        _ = self[0]  # raises early if add_eos is set

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return an example in the format of :class:`torchtune.datasets.PromptDataset`."""
        tokens = [int(token) for token in self.dataset[index]["tokens"]]
        if tokens[-1] in self._stop:
            raise RolloutError(
                f"dataset: the prompt of row {index} ends with a token that ends answers: set dataset.add_eos=False."
            )
        return {"tokens": tokens, "labels": tokens, "row": {}, "number": index}


def numbered_prompts(dataset: Any, tokenizer: Any) -> Any:
    """Return a dataset of prompts unchanged; wrap other datasets in :class:`NumberedPrompts`."""
    return dataset if "number" in dataset[0] else NumberedPrompts(dataset, tokenizer.stop_tokens)


class RewardModel:
    """Frozen reward model that scores answers, trained with :class:`torchtune.rlhf.loss.RewardLoss`.

    The score is read at the last token of the conversation, as in training. Chat templates may add tokens after the
    stop token of an answer, such as a line break. Such tokens are not sampled, so this class appends them.

    Args:
        model: model with one output.
        tokenizer: the policy's tokenizer.
        batch_size: number of answers per forward pass; None scores all answers in one pass.
        penalty: replaces the score of a penalized answer.
        penalise_no_eos: whether to penalize unfinished answers.
        min_response_length: minimum number of tokens in an answer; shorter answers are penalized.
        dims: parallel dims of a sharded model, in which all ranks must score answers together. None: one process.

    Attributes:
        closing: tokens appended to a finished answer.

    Raises:
        RolloutError: the model does not have exactly one output.

    Example:
        >>> scorer = torchtune.rlhf.RewardModel(judge, tokenizer, penalise_no_eos=True)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        batch_size: int | None = None,
        penalty: float = -3.0,
        penalise_no_eos: bool = False,
        min_response_length: int | None = None,
        *,
        dims: ParallelDims | None = None,
    ) -> None:
        self._dims = ParallelDims() if dims is None else dims
        rows = model.output.weight.shape[0]
        if rows != 1:
            raise RolloutError(
                f"reward_and_value_model: a reward is one number, but the model ends in {rows:,} outputs: set "
                "_component_ to torchtune.modules.classifier_model with num_classes=1 and base_model_path the builder."
            )
        self.model, self._batch_size = model.requires_grad_(False).eval(), batch_size
        self._stop, self.closing = set(tokenizer.stop_tokens), _closing_tokens(tokenizer)
        self._penalty, self._requires_eos, self._min_length = penalty, penalise_no_eos, min_response_length or 0
        self._num_penalized = 0  # number of consecutive calls in which every answer was penalized

    @torch.no_grad()
    def __call__(self, rollouts: Sequence[Rollout]) -> Tensor:
        """Score prompts with their answers; returns float64 ``[n]`` on the host."""
        device, found = self.model.tok_embeddings.weight.device, []
        for part in _equal_chunks(rollouts, self._batch_size, self._dims):
            documents = []
            for rollout in part:
                closing = self.closing if int(rollout.tokens[-1]) in self._stop else []
                tokens = torch.cat([rollout.tokens, torch.tensor(closing, dtype=torch.int64)])
                documents.append({"tokens": tokens, "labels": torch.full_like(tokens, CROSS_ENTROPY_IGNORE_IDX)})
            batch = collate_documents(documents).to(device)
            hidden = self.model(**batch.model_inputs(), output="hidden")
            found.append(pooled_scores(hidden, batch, self.model.output).double().cpu())
        return torch.cat(found)[: len(rollouts)]

    def apply_penalty(self, rollouts: Sequence[Rollout], scores: Tensor) -> Tensor:
        """Return the scores ``[n]``; the penalty replaces the scores of penalized answers."""
        faulty = [(self._requires_eos and not one.finished) or len(one.answer) < self._min_length for one in rollouts]
        self._num_penalized = self._num_penalized + 1 if all(faulty) else 0
        if self._num_penalized in (1, 10, 100):
            get_logger().warning(
                f"All {len(faulty)} answers get reward_penalty ({self._num_penalized} times in a row now), of which "
                f"{sum(not one.finished for one in rollouts)} have not ended: no score counts, so raise "
                "max_generated_tokens, or set penalise_no_eos=False."
            )
        return scores.masked_fill(torch.tensor(faulty), self._penalty)


def _closing_tokens(tokenizer: Any) -> list[int]:
    """Return the tokens that the chat template adds after the stop token of the last answer."""
    messages = [Message(role="user", content="a"), Message(role="assistant", content="b")]
    tokens = [int(token) for token in tokenizer({"messages": messages})["tokens"]]
    ends = [place for place, token in enumerate(tokens) if token in set(tokenizer.stop_tokens)]
    return tokens[ends[-1] + 1 :] if ends else []


def _equal_chunks(rollouts: Sequence[Rollout], size: int | None, dims: ParallelDims) -> Iterator[Sequence[Rollout]]:
    """Yield chunks of up to ``size`` rollouts, the same number of chunks on every rank; fillers repeat a rollout."""
    size = max(len(rollouts) if size is None else size, 1)
    parts = [rollouts[start : start + size] for start in range(0, len(rollouts), size)]
    yield from parts
    yield from [rollouts[:1]] * (dims.max(len(parts)) - len(parts))


def judge_rollouts(
    prompts: Sequence[Prompt], rollouts: Sequence[Rollout], reward_model: RewardModel, tokenizer: Any
) -> ScoredRollouts:
    """Score one answer to each prompt.

    Args:
        prompts: ``n`` prompts.
        rollouts: ``n`` answers.
        reward_model: the reward model.
        tokenizer: the policy's tokenizer.

    Returns:
        Rewards ``[n, 1]``, with penalties, and the reward model's scores as ``parts["score"]``.

    Raises:
        RolloutError: a score is not finite.
    """
    scores = reward_model(rollouts)
    if not scores.isfinite().all():
        at = int((~scores.isfinite()).nonzero()[0])
        raise RolloutError(
            f"reward_checkpointer: the score of the answer to row {prompts[at].number} is {scores[at]}: the reward "
            "model is damaged, or needs dtype=fp32."
        )
    rewards, texts = reward_model.apply_penalty(rollouts, scores), texts_of(rollouts, tokenizer)
    return ScoredRollouts(list(prompts), list(rollouts), texts, rewards[:, None], {"score": scores.tolist()})


def token_values(hidden: Tensor, batch: Batch, projection: Projection) -> Tensor:
    """Compute the values of the states before the labeled tokens.

    Args:
        hidden: hidden states of the value model ``[b, s, d]``.
        batch: the batch; only labeled positions are projected.
        projection: ``[..., d]`` -> ``[..., 1]``.

    Returns:
        ``[b, s]``, float32 or wider; 0 at positions without a label.
    """
    index = batch.find_labels()
    values = projection(hidden.flatten(0, 1).index_select(0, index)).squeeze(-1)
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return values.new_zeros(batch.labels.numel()).index_copy(0, index, values).view(batch.labels.shape)


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
    """Run the reference and the value model on answers, in evaluation mode.

    Args:
        scored: ``n`` answers with log-probs; answers to blank prompts are masked.
        reference: the frozen reference.
        value: the trained value model.
        temperature: sampling temperature.
        batch_size: number of answers per forward pass; None runs all answers in one pass.
        dims: parallel dims of the sharded models; all ranks must call this function.
    """
    rollouts = scored.rollouts
    device = value.tok_embeddings.weight.device
    found: dict[str, list[Tensor]] = {"reference": [], "values": []}
    with ExitStack() as stack:
        for model in (reference, value):
            stack.enter_context(evaluating(model))
        for part in _equal_chunks(rollouts, batch_size, dims):
            batch = collate_rollouts(part, [0.0] * len(part)).to(device)
            lengths = [len(rollout.tokens) - rollout.prompt_len for rollout in part]
            labelled = batch.labels != CROSS_ENTROPY_IGNORE_IDX
            hidden = reference(**batch.model_inputs(), output="hidden")
            log_probs = token_log_probs(hidden, batch.labels, reference.output, temperature)
            found["reference"] += log_probs[labelled].double().cpu().split(lengths)
            hidden = value(**batch.model_inputs(), output="hidden")
            values = token_values(hidden, batch, value.output)
            found["values"] += values[labelled].double().cpu().split(lengths)
    found["log_probs"] = [rollout.log_probs.double() for rollout in rollouts]
    rows = {name: pad_sequence(parts[: len(rollouts)], batch_first=True) for name, parts in found.items()}
    answers = zip(scored.prompts, rollouts, strict=True)
    lengths = torch.tensor([0 if prompt.is_blank else len(one.answer) for prompt, one in answers])
    return AnswerTokens(torch.arange(rows["values"].shape[1]) < lengths[:, None], **rows)


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
    every, place = _gather_rows({**tokens._asdict(), "scores": scored.rewards[:, 0]}, dims)
    mask, values, scores = every["mask"], every["values"], every["scores"]
    lengths = mask.sum(1)
    last = (lengths - 1).clamp(min=0)
    rewards, ratios, of_kl = get_rewards_ppo(scores, every["log_probs"], every["reference"], kl_coeff, last)
    totals = rewards.sum(1)
    if whiten_rewards:
        rewards = whiten(rewards, mask)
    rewards = rewards.masked_fill(~mask, 0.0)
    advantages, returns = estimate_advantages(values, rewards, gamma, lmbda, mask, shift_mean=False)
    returns = returns.masked_fill(~mask, 0.0)
    own = slice(place, place + len(scored.rollouts))
    real = [i for i in range(own.start, own.stop) if lengths[i]]
    num_stops = sum(scored.rollouts[i - place].finished for i in real)
    sums = {"scores": scores, "rlhf_reward": totals, "kl": ratios, "kl_reward": of_kl, "response_lengths": lengths}
    figures = {name: (float(rows[real].sum()), len(real)) for name, rows in sums.items()}
    figures["num_stop_tokens"] = (float(num_stops), 1 / dims.data_size)  # a sum over the step, not a mean
    spread = returns[mask].var(correction=0)
    if spread > 0:
        unexplained = (returns - values)[mask].var(correction=0) / spread
        figures["value/explained_variance"] = (1.0 - unexplained.item(), 1)
    longest = tokens.mask.shape[1]
    return TokenAdvantages(advantages[own, :longest], returns[own, :longest], figures)


def _gather_rows(mine: dict[str, Tensor], dims: ParallelDims) -> tuple[dict[str, Tensor], int]:
    """All-gather rows over the data ranks, zero-padded to one length; also return this rank's first row index."""
    found = dict(sorted(dims.gather((dims.data_rank, mine))))  # tensor-parallel ranks have the same answers
    longest = max(rows["mask"].shape[1] for rows in found.values())

    def padded(rows: Tensor) -> Tensor:
        return rows if rows.dim() == 1 else F.pad(rows, (0, longest - rows.shape[1]))

    every = {name: torch.cat([padded(rows[name]) for rows in found.values()]) for name in mine}
    return every, sum(len(found[rank]["mask"]) for rank in range(dims.data_rank))


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


_SETTING = {
    "policy": "checkpointer",
    "value": "value_checkpointer",
    "reward": "reward_checkpointer",
    "reference": "ref_policy_checkpointer",
}


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
