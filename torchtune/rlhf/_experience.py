"""Prompts, scored answers, and the log of answers."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, Batch, DataError, Message, as_example_dataset, collate_documents
from torchtune.rlhf._advantages import GroupAdvantages, has_variance
from torchtune.rlhf._rollouts import ENDS, Episode, Rollout, RolloutError, rollout_batches, texts_of
from torchtune.rlhf.loss._base import setup_loss
from torchtune.rlhf.loss.grpo import GRPOLoss
from torchtune.rlhf.reward_functions import RewardSum
from torchtune.training import ParallelDims
from torchtune.utils import AppendedFile, get_logger

# Number of consecutive steps without a learning signal after which a run ends.
MOST_STALE_STEPS = 300


@dataclass(frozen=True)
class Prompt:
    """Prompt to sample answers for.

    Attributes:
        tokens: token ids.
        row: columns of the dataset's row.
        number: index of the row.
        is_blank: whether the prompt is a filler, for a rank with fewer prompts than others; its answers are ignored.
        messages: the conversation, to which environments add tools and observations.
        images: the ``encoder_input`` of the prompt's images; empty without images.

    Example:
        >>> torchtune.rlhf.Prompt(tokens=[5, 6], row={"answer": "7"}, number=0).row["answer"]
        '7'
    """

    tokens: list[int]
    row: Mapping[str, Any]
    number: int
    is_blank: bool = False
    messages: Sequence[Message] = ()
    images: Mapping[str, Any] = field(default_factory=dict)


def images_of(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return the keyword argument ``images`` of samplers; empty if no prompt has an image.

    Example:
        >>> torchtune.rlhf.images_of([torchtune.rlhf.Prompt([5, 6], {}, number=0)])
        {}
    """
    return {"images": [one.images for one in prompts]} if any(one.images for one in prompts) else {}


@dataclass(eq=False)
class PromptBatch(Batch):
    """Batch of prompts.

    Attributes:
        prompts: one prompt per document.

    Example:
        >>> prompt = torchtune.rlhf.Prompt(tokens=[5, 6], row={}, number=0)
        >>> torchtune.rlhf.PromptBatch(tokens=torch.tensor([5, 6]), prompts=[prompt]).prompts[0].number
        0
    """

    prompts: list[Prompt] = field(default_factory=list)


def collate_prompts(batch: Sequence[Mapping[str, Any]]) -> Batch:
    """Concatenate prompts, padding-free, into a :class:`PromptBatch`.

    Args:
        batch: examples of :func:`torchtune.datasets.prompt_dataset`.

    Raises:
        DataError: an example lacks a key of a prompt.
    """
    for example in batch:
        if missing := {"tokens", "labels", "row", "number"} - example.keys():
            raise DataError(
                f"dataset: an example has no '{min(missing)}', it is no prompt: use torchtune.datasets.prompt_dataset."
            )
    ignored = [[CROSS_ENTROPY_IGNORE_IDX] * len(example["tokens"]) for example in batch]
    out = collate_documents([{"tokens": one["tokens"], "labels": row} for one, row in zip(batch, ignored, strict=True)])
    labels = torch.cat([torch.as_tensor(example["labels"]) for example in batch])[None]  # ignored for blank prompts
    prompts = [
        Prompt(
            list(example["tokens"]),
            example["row"],
            example["number"],
            is_blank=bool((torch.as_tensor(example["labels"]) == CROSS_ENTROPY_IGNORE_IDX).all()),
            messages=example.get("messages", ()),
            images={"encoder_input": example["encoder_input"]} if "encoder_input" in example else {},
        )
        for example in batch
    ]
    return PromptBatch(out.tokens, labels, out.input_pos, out.documents, prompts=prompts)


def setup_policy_loss(loss: Any, model: nn.Module, sampler: Any) -> GRPOLoss:
    """Prepare a GRPO loss for a model and for the temperature of a sampler.

    Raises:
        RolloutError: the loss is not a GRPO loss, or needs log-probs that the sampler does not return.
        LossError: the model's output does not fit the loss.
    """
    if not isinstance(loss, GRPOLoss):
        raise RolloutError(
            f"loss: {type(loss).__name__} takes no sampled answers: give one of the GRPO family, for example "
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


def check_prompts(dataset: Any, sampler: Any, model: nn.Module, closing: int = 0) -> None:
    """Check that the longest prompt and answer fit the model's context. Raises :class:`RolloutError`.

    Args:
        dataset: dataset of prompts; not checked if their lengths are unknown.
        sampler: sampler with ``max_new_tokens``.
        model: the trained model. Its input is all tokens except the last.
        closing: number of tokens appended to the answer.
    """
    dataset = as_example_dataset(dataset)
    if dataset.num_images and not getattr(sampler, "takes_images", False):
        raise RolloutError(
            f"dataset: its prompts have images, but a {type(sampler).__name__} takes text only: set sampler to "
            "torchtune.rlhf.LocalSampler."
        )
    lengths = dataset.known_lengths
    if lengths is None:
        return
    at, new = int(lengths.argmax()), getattr(sampler, "max_new_tokens", 1)
    if lengths[at] + new - 1 + closing > model.max_seq_len:
        raise RolloutError(
            f"dataset: the prompt of row {at} has {lengths[at]} tokens, and with {new} new ones "
            f"(max_new_tokens) that is more than the model's {model.max_seq_len}: leave it out with filter_fn, "
            "or ask for fewer."
        )


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
        size = len(self.rollouts) // max(len(self.prompts), 1)
        real = [i for i in range(len(self.rollouts)) if not self.prompts[i // size].is_blank]
        values = self.rewards.flatten().tolist()
        found = {"rewards/total": [values[i] for i in real]}
        found |= {f"rewards/{name}": [part[i] for i in real] for name, part in self.parts.items()}
        sums = {name: (sum(v for v in part if not math.isnan(v)), _count_finite(part)) for name, part in found.items()}
        answers = [self.rollouts[i] for i in real]
        episodes = [one for one in answers if isinstance(one, Episode)]
        if size > 1:
            groups = [i for i, prompt in enumerate(self.prompts) if not prompt.is_blank]
            flat = ~has_variance(self.rewards)[groups]
            sums["groups/without_variance"] = (float(flat.sum()), len(groups))
        if episodes:
            counts = {f"ends/{end}": sum(one.end == end for one in episodes) for end in ENDS}
            counts |= {
                f"tools/{name}": sum(getattr(one, name) for one in episodes) for name in ("turns", "calls", "errors")
            }
            sums |= {name: (float(count), len(episodes)) for name, count in counts.items()}
        return sums | {
            "answers/tokens": (float(sum(_num_sampled(one) for one in answers)), len(answers)),
            "answers/unfinished": (float(sum(not one.finished for one in answers)), len(answers)),
            "answers/dropped": (float(len(real) - _count_finite(found["rewards/total"])), len(answers)),
        }

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
        counts = ~self.rewards.isnan()
        if loss.needs_rewards:
            counts = counts & has_variance(self.rewards)[:, None]
        found = counts.flatten().nonzero().flatten().tolist()
        kept = [i for i in found if self.rollouts[i].finished or not drop_unfinished]
        parts = [(part, advantages.flatten()[i].item()) for i in kept for part in self.rollouts[i].parts]
        batches, terms, labels = rollout_batches(
            [part for part, _ in parts],
            [advantage for _, advantage in parts],
            tokens_per_batch=tokens_per_batch,
            dims=dims,
            blank=self.prompts[0].tokens,
            count_documents=loss.normalize != "tokens",
            share_prefix=share_prefix,
        )
        if loss.ce_coeff:  # weights that turn the mean over all terms into a mean over the tokens of good answers
            good = [
                (batch.per_token["advantages"] > 0) & (batch.labels != CROSS_ENTROPY_IGNORE_IDX) for batch in batches
            ]
            (count,) = dims.sum(sum(int(one.sum()) for one in good))
            for batch, one in zip(batches, good, strict=True):
                batch["ce"] = one * (terms / max(count, 1))
        return batches, terms, labels


def _num_sampled(rollout: Rollout) -> int:
    return sum(part.num_sampled for part in rollout.parts)


def _count_finite(values: Sequence[float]) -> int:
    return sum(not math.isnan(value) for value in values)


def score_rollouts(
    prompts: Sequence[Prompt], rollouts: Sequence[Rollout], rewards: RewardSum, tokenizer: Any
) -> ScoredRollouts:
    """Score answers by reward functions, and add the rewards of environments.

    Empty answers, answers to blank prompts and invalid episodes get no reward.
    """
    size = len(rollouts) // max(len(prompts), 1)
    texts = texts_of(rollouts, tokenizer)
    answered = [i for i, rollout in enumerate(rollouts) if rollout.answer and not prompts[i // size].is_blank]
    real = [i for i in answered if getattr(rollouts[i], "is_valid", True)]
    of = [prompts[i // size] for i in real]
    scores = rewards([one.row for one in of], [texts[i] for i in real], [one.number for one in of])
    total = torch.full((len(rollouts),), math.nan, dtype=torch.float64)
    total[real] = torch.tensor(scores.total, dtype=torch.float64)
    parts = {name: [math.nan] * len(rollouts) for name in scores.parts}
    for name, values in scores.parts.items():
        for i, value in zip(real, values, strict=True):
            parts[name][i] = value
    for i in real:
        if isinstance(rollouts[i], Episode) and rollouts[i].reward is not None:
            parts.setdefault(rollouts[i].environment, [math.nan] * len(rollouts))[i] = rollouts[i].reward
            total[i] += rollouts[i].reward
    return ScoredRollouts(list(prompts), list(rollouts), texts, total.view(len(prompts), size), parts)


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
        self._tokenizer, self._dims, self._show_every = tokenizer, dims, show_every
        rank = dims.data_rank
        self._path = Path(output_dir) / ("rollouts.jsonl" if rank == 0 else f"rollouts_rank{rank}.jsonl")
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
                _truncate_record(self._path, step)
                if self._dims.is_main:  # the resumed run may have had more ranks
                    for path in self._path.parent.glob("rollouts_rank*.jsonl"):
                        number = path.stem.removeprefix("rollouts_rank")
                        if number.isdigit() and int(number) >= self._dims.data_size:
                            _truncate_record(path, step)
                self._file = AppendedFile(self._path)
            for line in self._lines(step, scored, advantages):
                self._file.write_line(json.dumps(line, ensure_ascii=False))
        if self._show_every and step % self._show_every == 0 and self._dims.is_main:
            answers = list(self._lines(step, scored, advantages))
            get_logger().info(_format_table(step, answers))
            if hasattr(metric_logger, "log_answers"):  # custom loggers may lack this method
                metric_logger.log_answers(answers, step)
        self._steps_without_signal = 0 if num_terms else self._steps_without_signal + 1
        if self._steps_without_signal in (1, 10, 100) and self._dims.is_main:
            get_logger().warning(
                f"Step {step} teaches nothing: {_describe_signal(scored)}"
                + ("." if self._steps_without_signal == 1 else f"; {self._steps_without_signal} steps in a row now.")
            )
        if self._steps_without_signal >= MOST_STALE_STEPS:
            raise RolloutError(
                f"{MOST_STALE_STEPS} steps in a row taught nothing; in the last one {_describe_signal(scored)}: look "
                f"at {self._path}, then make the reward finer, take other prompts, or let answers grow longer."
            )

    def _lines(self, step: int, scored: ScoredRollouts, advantages: Tensor) -> Any:
        size = advantages.shape[1]
        for i, rollout in enumerate(scored.rollouts):
            group, sample = divmod(i, size)
            if scored.prompts[group].is_blank:
                continue
            first = rollout.parts[0]
            yield {
                "step": step,
                "row": scored.prompts[group].number,
                "sample": sample,
                "prompt": self._tokenizer.decode(first.tokens[: first.prompt_len].tolist()),
                "answer": scored.texts[i],
                "reward": _json_number(scored.rewards[group, sample].item()),
                "rewards": {name: _json_number(part[i]) for name, part in scored.parts.items()},
                "advantage": _json_number(advantages[group, sample].item()),
                "tokens": _num_sampled(rollout),
                "finished": rollout.finished,
                **(self._of_episode(rollout) if isinstance(rollout, Episode) else {}),
            }

    def _of_episode(self, episode: Episode) -> dict[str, Any]:
        found = {name: getattr(episode, name) for name in ("end", "turns", "calls", "errors", "failure")}
        found["episode"] = self._tokenizer.decode(episode.answer, skip_special_tokens=False)
        if episode.earlier:
            parts = [
                self._tokenizer.decode(part.tokens.tolist(), skip_special_tokens=False) for part in episode.earlier
            ]
            found["earlier"] = parts
        return found


def _describe_signal(scored: ScoredRollouts) -> str:
    """Describe why the answers have a learning signal, or why they have none."""
    figures = scored.figures()
    flat, groups = (int(number) for number in figures.get("groups/without_variance", (0, 0)))
    dropped, answers = (int(number) for number in figures["answers/dropped"])
    ended = answers - int(figures["answers/unfinished"][0])
    return (
        f"rewards differ in {groups - flat} of {groups} groups, and of {answers} answers {answers - dropped} have a "
        f"reward and {ended} have ended"
    )


def _json_number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 6)


def _truncate_record(path: Path, step: int) -> None:
    """Remove the lines of ``step`` and later steps, and an incomplete last line, from a file."""
    if not path.exists():
        return
    kept = 0
    with path.open("rb+") as file:
        for number, line in enumerate(file, 1):
            try:
                if not line.endswith(b"\n") or json.loads(line)["step"] >= step:
                    break
            except (ValueError, KeyError, TypeError) as error:
                raise RolloutError(
                    f"{path}: line {number} is no answer of a step: the run would append to this file, so move it away."
                ) from error
            kept += len(line)
        file.truncate(kept)


def _format_table(step: int, lines: list[dict[str, Any]], most: int = 4) -> str:
    """Format up to ``most`` answers of a step: the best and the worst."""
    ordered = sorted(lines, key=lambda line: -math.inf if line["reward"] is None else -line["reward"])
    shown = ordered if len(ordered) <= most else [*ordered[: most // 2], *ordered[-(most // 2) :]]
    rows = [f"{'reward':>8}  {'advantage':>9}  {'tokens':>6}  answer (row)"]
    for line in shown:
        # Escape control characters, which could change the state of the terminal.
        text = "".join(c if c.isprintable() else "⏎" if c == "\n" else "·" for c in line["answer"])
        text = text if len(text) <= 100 else text[:97] + "…"
        reward, advantage = ("—" if line[key] is None else f"{line[key]:.3f}" for key in ("reward", "advantage"))
        rows.append(f"{reward:>8}  {advantage:>9}  {line['tokens']:>6}  {text} ({line['row']})")
    return f"Answers of step {step}:\n" + "\n".join(rows)


def make_advantages(component: GroupAdvantages | None) -> GroupAdvantages:
    """Check and return the advantages component of a config, by default :class:`GroupAdvantages`.

    Raises:
        RolloutError: a test call fails or returns a wrong shape.
    """
    if component is None:
        return GroupAdvantages()
    try:
        found, wrong = component(torch.tensor([[0.0, 1.0]], dtype=torch.float64), ParallelDims()), None
    except Exception as error:  # noqa: BLE001 - raised by a user's component
        found, wrong = None, f"fails: {type(error).__name__}: {error}".rstrip(".")
    if getattr(found, "shape", None) != (1, 2):
        raise RolloutError(
            f"advantages: {type(component).__name__} {wrong or 'returns no advantage for each reward'}; it is called "
            "with rewards [prompts, answers] and the processes, as torchtune.rlhf.GroupAdvantages is."
        )
    return component


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
