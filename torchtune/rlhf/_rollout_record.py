"""Record of answers and rewards: the file ``rollouts.jsonl`` and tables in the log."""

import json
import math
from pathlib import Path
from typing import Any

from torch import Tensor

from torchtune.rlhf._rollouts import Episode, RolloutError
from torchtune.rlhf._scored_rollouts import ScoredRollouts, num_sampled_tokens
from torchtune.training import ParallelDims
from torchtune.utils import AppendedFile, get_logger

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
                "tokens": num_sampled_tokens(rollout),
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
