"""Answers with their rewards: metrics, group advantages, training batches, and the record of a run's answers."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, Batch
from torchtune.rlhf._prompts import Prompt
from torchtune.rlhf._rollouts import ENDS, Episode, Rollout, RolloutError, rollout_batches, texts_of
from torchtune.rlhf.loss._base import setup_loss
from torchtune.rlhf.loss.grpo import GRPOLoss
from torchtune.rlhf.reward_functions import RewardSum
from torchtune.training import ParallelDims
from torchtune.utils import AppendedFile, get_logger


@dataclass(frozen=True)
class ScoredRollouts:
    """Groups of answers with their rewards.

    Attributes:
        prompts: one prompt per group.
        rollouts: ``g`` answers per prompt, sorted by group.
        texts: texts of the answers.
        rewards: ``[n, g]``, float64; NaN for dropped answers.
        parts: reward name -> reward of every answer.

    Example:
        >>> rollout = torchtune.rlhf.Rollout(torch.tensor([5, 6, 7]), prompt_len=2, log_probs=None, finished=True)
        >>> prompt = torchtune.rlhf.Prompt(tokens=[5, 6], row={}, number=0)
        >>> rewards, parts = torch.tensor([[1.0]]), {"exact": [1.0]}
        >>> scored = torchtune.rlhf.ScoredRollouts([prompt], [rollout], ["the"], rewards, parts)
        >>> scored.parts["exact"]
        [1.0]
    """

    prompts: list[Prompt]
    rollouts: list[Rollout]
    texts: list[str]
    rewards: Tensor
    parts: dict[str, list[float]]

    def figures(self) -> dict[str, tuple[float, int]]:
        """Return metrics: name -> (sum, count)."""
        num_samples = len(self.rollouts) // max(len(self.prompts), 1)  # answers per prompt
        answered = []  # indices of the answers to prompts that are not blank
        for i in range(len(self.rollouts)):
            if not self.prompts[i // num_samples].is_blank:
                answered.append(i)
        answers = [self.rollouts[i] for i in answered]
        totals = self.rewards.flatten().tolist()  # [n * g], as the rollouts are sorted
        metrics = {"rewards/total": _sum_and_count([totals[i] for i in answered])}
        for name, values in self.parts.items():
            metrics[f"rewards/{name}"] = _sum_and_count([values[i] for i in answered])
        num_scored = metrics["rewards/total"][1]  # answers whose reward is not NaN

        if num_samples > 1:  # a single answer, as in PPO, is not compared
            groups = [i for i, prompt in enumerate(self.prompts) if not prompt.is_blank]
            without_variance = ~has_variance(self.rewards)[groups]
            metrics["groups/without_variance"] = (float(without_variance.sum()), len(groups))

        episodes = [answer for answer in answers if isinstance(answer, Episode)]
        if episodes:
            for end in ENDS:
                num_ended = sum(episode.end == end for episode in episodes)
                metrics[f"ends/{end}"] = (float(num_ended), len(episodes))
            for name in ("turns", "calls", "errors"):
                count = sum(getattr(episode, name) for episode in episodes)
                metrics[f"tools/{name}"] = (float(count), len(episodes))

        num_tokens = sum(num_sampled_tokens(answer) for answer in answers)
        num_unfinished = sum(not answer.finished for answer in answers)
        metrics["answers/tokens"] = (float(num_tokens), len(answers))
        metrics["answers/unfinished"] = (float(num_unfinished), len(answers))
        metrics["answers/dropped"] = (float(len(answers) - num_scored), len(answers))
        return metrics

    def batches(
        self,
        advantages: Tensor,
        loss: GRPOLoss,
        dims: ParallelDims,
        tokens_per_batch: int,
        drop_unfinished: bool = False,
        share_prefix: bool = False,
    ) -> tuple[list[Batch], int, int]:
        """Build micro-batches of the answers with an advantage; leave out groups with equal rewards.

        Args:
            advantages: ``[n, g]``.
            loss: determines whether rewards are used, and the normalization.
            dims: parallel dims; all ranks must call this method.
            tokens_per_batch: maximum tokens per micro-batch; a longer answer is a micro-batch by itself.
            drop_unfinished: leave out unfinished answers.
            share_prefix: see :func:`collate_rollouts`.

        Returns:
            The micro-batches, the same number on every rank and none without a learning signal; the number of terms and
            the number of labels, summed over all ranks.
        """
        has_reward = ~self.rewards.isnan()  # [n, g]
        is_trained = has_reward
        if loss.needs_rewards:  # equal rewards have the advantage 0, so that their group has no gradient
            is_trained = has_reward & has_variance(self.rewards)[:, None]
        flat_advantages = advantages.flatten()
        samples = []
        sample_advantages = []
        for index in is_trained.flatten().nonzero().flatten().tolist():
            rollout = self.rollouts[index]
            if drop_unfinished and not rollout.finished:
                continue
            # An episode has several samples if the template omits the reasoning of earlier turns.
            for sample in rollout.parts:
                samples.append(sample)
                sample_advantages.append(flat_advantages[index].item())
        batches, terms, labels = rollout_batches(
            samples,
            sample_advantages,
            tokens_per_batch=tokens_per_batch,
            dims=dims,
            blank=self.prompts[0].tokens,  # any prompt: a filler has no labels
            count_documents=loss.normalize != "tokens",
            share_prefix=share_prefix,
        )
        if loss.ce_coeff:
            # Good answers have a positive advantage. The loss divides its sum by the number of terms of all ranks: with
            # these weights, its cross-entropy is the mean over the tokens of good answers instead.
            masks = []
            for batch in batches:
                is_good = batch.per_token["advantages"] > 0
                is_label = batch.labels != CROSS_ENTROPY_IGNORE_IDX
                masks.append(is_good & is_label)
            (num_good_tokens,) = dims.sum(sum(int(mask.sum()) for mask in masks))
            weight = terms / max(num_good_tokens, 1)
            for batch, mask in zip(batches, masks, strict=True):
                batch["ce"] = mask * weight  # [1, s]
        return batches, terms, labels


def num_sampled_tokens(rollout: Rollout) -> int:
    """Return the number of sampled tokens, of an episode over all of its samples."""
    return sum(sample.num_sampled for sample in rollout.parts)


def _sum_and_count(values: Sequence[float]) -> tuple[float, int]:
    """Return the sum and the number of the values that are not NaN."""
    scored = [value for value in values if not math.isnan(value)]
    return sum(scored), len(scored)


def score_rollouts(
    prompts: Sequence[Prompt], rollouts: Sequence[Rollout], rewards: RewardSum, tokenizer: Any
) -> ScoredRollouts:
    """Score answers by reward functions, and add the rewards of environments.

    Empty answers, answers to blank prompts and invalid episodes get no reward.
    """
    num_samples = len(rollouts) // max(len(prompts), 1)  # answers per prompt, 0 without prompts
    texts = texts_of(rollouts, tokenizer)
    scored = []  # indices of the answers that get a reward
    for i, rollout in enumerate(rollouts):
        is_invalid = isinstance(rollout, Episode) and not rollout.is_valid
        if rollout.answer and not is_invalid and not prompts[i // num_samples].is_blank:
            scored.append(i)

    scored_prompts = [prompts[i // num_samples] for i in scored]
    # Also without answers to score: all ranks must log the same names.
    scores = rewards(
        [prompt.row for prompt in scored_prompts],
        [texts[i] for i in scored],
        [prompt.number for prompt in scored_prompts],
    )
    # NaN stands for no reward.
    totals = torch.full((len(rollouts),), math.nan, dtype=torch.float64)  # [n * g]
    totals[scored] = torch.tensor(scores.total, dtype=torch.float64)
    parts = {}
    for name, values in scores.parts.items():
        parts[name] = [math.nan] * len(rollouts)
        for i, value in zip(scored, values, strict=True):
            parts[name][i] = value

    # The reward of an episode's environment is a part by the name of the environment, with weight 1.
    for i in scored:
        episode = rollouts[i]
        if not isinstance(episode, Episode) or episode.reward is None:
            continue
        if episode.environment not in parts:
            parts[episode.environment] = [math.nan] * len(rollouts)
        parts[episode.environment][i] = episode.reward
        totals[i] += episode.reward
    return ScoredRollouts(
        prompts=list(prompts),
        rollouts=list(rollouts),
        texts=texts,
        rewards=totals.view(len(prompts), num_samples),  # [n, g]
        parts=parts,
    )


class GroupAdvantages:
    """Advantages of answers to the same prompt: the reward minus the group's mean.

    Args:
        leave_one_out: subtract the mean of the *other* answers, which scales the advantage by g / (g − 1) (RLOO).
        scale: divide by the standard deviation of the ``group`` (original GRPO; favors prompts that are nearly always
            or nearly never solved), or of all rewards in the step (``batch``). None does not divide.

    Example:
        >>> torchtune.rlhf.GroupAdvantages(leave_one_out=True).leave_one_out
        True
    """

    def __init__(self, leave_one_out: bool = False, scale: Literal["group", "batch"] | None = None) -> None:
        if scale not in ("group", "batch", None):
            raise ValueError(f"scale is {scale!r}: it must be group, batch or null.")
        self.leave_one_out = leave_one_out
        self.scale = scale

    def __call__(self, rewards: Tensor, dims: ParallelDims | None = None) -> Tensor:
        """Compute advantages.

        Args:
            rewards: ``[n, g]``, n prompts with g answers each; NaN rewards are ignored.
            dims: parallel dims; ``scale: batch`` uses the standard deviation over all ranks, a collective. None: one
                process.

        Returns:
            ``[n, g]`` in the dtype of the rewards; 0 in groups without variance, NaN for NaN rewards.
        """
        has_reward = ~rewards.isnan()  # [n, g]
        counts = has_reward.sum(1, keepdim=True)  # [n, 1]
        num_others = (counts - 1).clamp(min=1)  # [n, 1], also the divisor of an unbiased variance
        centered = rewards - rewards.nansum(1, keepdim=True) / counts.clamp(min=1)
        advantages = centered
        if self.leave_one_out:
            advantages = centered * counts / num_others
        # The constant keeps groups whose rewards hardly differ from dominating the step.
        if self.scale == "group":
            variance = centered.square().nansum(1, keepdim=True) / num_others
            advantages = advantages / (variance.sqrt() + 1e-4)
        elif self.scale == "batch":
            # The standard deviation of all rewards of the step, from sums over all ranks.
            scored = rewards[has_reward]
            sums = [scored.sum().item(), scored.square().sum().item(), float(len(scored))]
            if dims is not None:
                sums, _ = dims.exchange(sums)
            total, total_of_squares, count = sums
            mean = total / max(count, 1)
            # Rounding can make the sum of squared deviations negative.
            squared_deviations = max(total_of_squares - count * mean * mean, 0.0)
            deviation = squared_deviations**0.5 / max(count - 1, 1) ** 0.5
            advantages = advantages / (deviation + 1e-4)
        # Rounding of the mean leaves tiny advantages where all rewards are equal, which a scale would enlarge.
        return torch.where(has_reward & ~has_variance(rewards)[:, None], 0.0, advantages)


def has_variance(rewards: Tensor) -> Tensor:
    """Return whether the rewards of each group differ, bool ``[n]``; see :class:`GroupAdvantages`.

    Example:
        >>> torchtune.rlhf.has_variance(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
        tensor([ True, False])
    """
    lowest = rewards.nan_to_num(nan=float("inf")).amin(1)
    highest = rewards.nan_to_num(nan=float("-inf")).amax(1)
    return highest > lowest


def make_advantages(component: GroupAdvantages | None) -> GroupAdvantages:
    """Check and return the advantages component of a config, by default :class:`GroupAdvantages`.

    Raises:
        RolloutError: a test call fails or returns a wrong shape.
    """
    if component is None:
        return GroupAdvantages()
    name = type(component).__name__
    expected = "it is called with rewards [prompts, answers] and the processes, as torchtune.rlhf.GroupAdvantages is."
    rewards = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    try:
        advantages = component(rewards, ParallelDims())
    except Exception as error:  # noqa: BLE001 - raised by a user's component
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        raise RolloutError(f"advantages: {name} fails: {reason}; {expected}") from None
    if getattr(advantages, "shape", None) != rewards.shape:
        raise RolloutError(f"advantages: {name} returns no advantage for each reward; {expected}")
    return component


# Number of consecutive steps without a learning signal after which a run ends.
MOST_STALE_STEPS = 300


class RolloutRecord:
    """Writer of answers and rewards to ``rollouts.jsonl``, which also logs tables of answers.

    Ranks other than 0 add their rank to the file name. A resumed run first deletes the records of steps that it
    repeats. :meth:`write` raises an error after ``MOST_STALE_STEPS`` consecutive steps without a learning signal.

    Args:
        output_dir: output folder of the run.
        tokenizer: decodes the prompts.
        dims: parallel dims; only the first rank of a tensor-parallel group writes.
        show_every: steps between tables of answers in the log; ``None`` logs none.

    Example:
        >>> record = torchtune.rlhf.RolloutRecord(str(folder), tokenizer, torchtune.training.ParallelDims())
    """

    def __init__(self, output_dir: str, tokenizer: Any, dims: ParallelDims, show_every: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._dims = dims
        self._show_every = show_every
        file_name = "rollouts.jsonl"
        if dims.data_rank > 0:
            file_name = f"rollouts_rank{dims.data_rank}.jsonl"
        self._path = Path(output_dir) / file_name
        # Tensor-parallel ranks have the same answers.
        self._is_writer = dims.tp == 1 or dims.mesh["tp"].get_local_rank() == 0
        self._file: AppendedFile | None = None
        self._steps_without_signal = 0

    def write(
        self, step: int, scored: ScoredRollouts, advantages: Tensor, num_terms: int, metric_logger: Any = None
    ) -> None:
        """Write the answers of a step.

        Args:
            step: number of the step, from 1.
            scored: the answers.
            advantages: ``[n, g]``.
            num_terms: number of terms of the loss over all ranks; 0 without a learning signal.
            metric_logger: logger that receives the answers at every step with a table of answers.

        Raises:
            RolloutError: too many consecutive steps had no learning signal.
        """
        if self._is_writer:
            if self._file is None:
                # Only now is the first step of this run known: a resumed run writes it and later ones again.
                self._truncate_records(step)
                self._file = AppendedFile(self._path)
            for line in self._lines(step, scored, advantages):
                self._file.write_line(json.dumps(line, ensure_ascii=False))
        shows_answers = self._show_every and step % self._show_every == 0
        if shows_answers and self._dims.is_main:
            lines = list(self._lines(step, scored, advantages))
            get_logger().info(_format_table(step, lines))
            if hasattr(metric_logger, "log_answers"):  # custom loggers may lack this method
                metric_logger.log_answers(lines, step)
        self._count_steps_without_signal(step, scored, num_terms)

    def _truncate_records(self, step: int) -> None:
        """Delete the records of ``step`` and later steps: of this rank, and of ranks that only an earlier run had."""
        _truncate_record(self._path, step)
        if not self._dims.is_main:
            return
        for path in self._path.parent.glob("rollouts_rank*.jsonl"):
            rank = path.stem.removeprefix("rollouts_rank")
            # The files of present ranks are truncated by these ranks.
            if rank.isdigit() and int(rank) >= self._dims.data_size:
                _truncate_record(path, step)

    def _count_steps_without_signal(self, step: int, scored: ScoredRollouts, num_terms: int) -> None:
        """Warn of consecutive steps without a learning signal, and raise an error after too many."""
        if num_terms:
            self._steps_without_signal = 0
            return
        self._steps_without_signal += 1
        if self._steps_without_signal in (1, 10, 100) and self._dims.is_main:
            message = f"Step {step} teaches nothing: {_describe_signal(scored)}"
            if self._steps_without_signal > 1:
                message += f"; {self._steps_without_signal} steps in a row now"
            get_logger().warning(message + ".")
        if self._steps_without_signal >= MOST_STALE_STEPS:
            raise RolloutError(
                f"{MOST_STALE_STEPS} steps in a row taught nothing; in the last one {_describe_signal(scored)}: look "
                f"at {self._path}, then make the reward finer, take other prompts, or let answers grow longer."
            )

    def _lines(self, step: int, scored: ScoredRollouts, advantages: Tensor) -> Iterator[dict[str, Any]]:
        """Yield the record of every answer, in the order of the prompts."""
        num_samples = advantages.shape[1]
        for i, rollout in enumerate(scored.rollouts):
            group, answer_number = divmod(i, num_samples)
            prompt = scored.prompts[group]
            if prompt.is_blank:  # fills the batch of a rank with fewer prompts
                continue
            # Later parts of an episode have earlier turns in their prompt.
            first_part = rollout.parts[0]
            prompt_tokens = first_part.tokens[: first_part.prompt_len].tolist()
            rewards = {}
            for name, values in scored.parts.items():
                rewards[name] = _json_number(values[i])
            line = {
                "step": step,
                "row": prompt.number,
                "sample": answer_number,
                "prompt": self._tokenizer.decode(prompt_tokens),
                "answer": scored.texts[i],
                "reward": _json_number(scored.rewards[group, answer_number].item()),
                "rewards": rewards,
                "advantage": _json_number(advantages[group, answer_number].item()),
                "tokens": num_sampled_tokens(rollout),
                "finished": rollout.finished,
            }
            if isinstance(rollout, Episode):
                line.update(self._describe_episode(rollout))
            yield line

    def _describe_episode(self, episode: Episode) -> dict[str, Any]:
        """Return the entries that only an episode has; its texts show special tokens, which separate the turns."""
        entries = {
            "end": episode.end,
            "turns": episode.turns,
            "calls": episode.calls,
            "errors": episode.errors,
            "failure": episode.failure,
            "episode": self._tokenizer.decode(episode.answer, skip_special_tokens=False),
        }
        if episode.earlier:
            earlier = []
            for sample in episode.earlier:
                earlier.append(self._tokenizer.decode(sample.tokens.tolist(), skip_special_tokens=False))
            entries["earlier"] = earlier
        return entries


def _describe_signal(scored: ScoredRollouts) -> str:
    """Describe why the answers have a learning signal, or why they have none."""
    metrics = scored.figures()
    without_variance, groups = metrics.get("groups/without_variance", (0, 0))
    dropped, answers = metrics["answers/dropped"]
    unfinished, _ = metrics["answers/unfinished"]
    return (
        f"rewards differ in {groups - int(without_variance)} of {groups} groups, and of {answers} answers "
        f"{answers - int(dropped)} have a reward and {answers - int(unfinished)} have ended"
    )


def _json_number(value: float) -> float | None:
    """Round a number for JSON, which has no NaN: null stands for it."""
    if math.isnan(value):
        return None
    return round(value, 6)


def _truncate_record(path: Path, step: int) -> None:
    """Remove the lines of ``step`` and later steps, and an incomplete last line, from a file."""
    if not path.exists():
        return
    num_bytes = 0  # of the lines before ``step``
    with path.open("rb+") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):  # a run that was killed may leave half a line
                break
            try:
                is_repeated = json.loads(line)["step"] >= step
            except (ValueError, KeyError, TypeError) as error:
                raise RolloutError(
                    f"{path}: line {number} is not an answer of a step: the run would append to this file, so move it "
                    "away."
                ) from error
            if is_repeated:  # and so are all later lines, which are in the order of the steps
                break
            num_bytes += len(line)
        file.truncate(num_bytes)


def _format_table(step: int, lines: list[dict[str, Any]], most: int = 4) -> str:
    """Format up to ``most`` answers of a step: the best and the worst."""

    def rank(line: dict[str, Any]) -> float:
        """Return a number that is lower for better answers; those without a reward lead."""
        if line["reward"] is None:
            return -math.inf
        return -line["reward"]

    # The sort is stable, so answers with equal rewards stay in the order of the prompts.
    ordered = sorted(lines, key=rank)
    if len(ordered) > most:
        ordered = [*ordered[: most // 2], *ordered[-(most // 2) :]]
    table = [f"{'reward':>8}  {'advantage':>9}  {'tokens':>6}  answer (row)"]
    for line in ordered:
        text = _printable(line["answer"])
        if len(text) > 100:  # a row of the table stays about one line of the terminal
            text = text[:97] + "…"
        reward = _format_number(line["reward"])
        advantage = _format_number(line["advantage"])
        table.append(f"{reward:>8}  {advantage:>9}  {line['tokens']:>6}  {text} ({line['row']})")
    return f"Answers of step {step}:\n" + "\n".join(table)


def _format_number(value: float | None) -> str:
    """Format a number with three decimals, and None as a dash."""
    if value is None:
        return "—"
    return f"{value:.3f}"


def _printable(text: str) -> str:
    """Replace control characters, which could change the state of the terminal."""
    characters = []
    for character in text:
        if character == "\n":
            characters.append("⏎")
        elif character.isprintable():
            characters.append(character)
        else:
            characters.append("·")
    return "".join(characters)


def setup_policy_loss(loss: Any, model: nn.Module, sampler: Any) -> GRPOLoss:
    """Prepare a GRPO loss for a model and for the temperature of a sampler.

    Raises:
        RolloutError: the loss is not a GRPO loss, or needs log-probs that the sampler does not return.
        LossError: the model's output does not fit the loss.
    """
    if not isinstance(loss, GRPOLoss):
        raise RolloutError(
            f"loss: {type(loss).__name__} does not train on sampled answers: give one of the GRPO family, for example "
            "torchtune.rlhf.loss.GRPOLoss."
        )
    if loss.importance_cap is not None and not getattr(sampler, "gives_log_probs", True):
        raise RolloutError(
            f"loss.importance_cap is {loss.importance_cap:g}, and the sampler gives no log-probs to weigh tokens by: "
            "leave it out, or sample from a server that gives them."
        )
    setup_loss(loss, model)
    loss.temperature = sampler.temperature
    return loss


def check_rollout_settings(settings: Any) -> Iterator[tuple[str, str]]:
    """Yield (setting, error and remedy) for invalid settings of a recipe that samples."""
    distills = "Distillation" in str(settings.loss.get("_component_"))
    if getattr(settings, "context_parallel_dim", 1) > 1:
        yield "context_parallel_dim", "is above 1, but parts of a sequence cannot generate: set it to 1"
    if distills and settings.ref_checkpointer is None:
        yield "ref_checkpointer", "is null, so the model would be its own teacher: name the teacher's checkpoint"
    if settings.ref_model is not None and settings.ref_checkpointer is None:
        yield "ref_model", "needs the checkpoint of that model: set ref_checkpointer"
    if not settings.rewards and not distills and settings.environment is None:
        yield "rewards", "is empty: name what scores an answer, for example torchtune.rlhf.reward_functions.ExactMatch"
    if settings.num_samples < 2 and not distills:
        yield "num_samples", "is 1: answers are compared with the others to their prompt, so set it to 2 or more"
