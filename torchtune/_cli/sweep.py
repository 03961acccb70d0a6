"""``tune sweep``."""

import argparse
import logging
import math
import os
import platform
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from torchtune._cli._shorthands import expand_shorthands
from torchtune._cli.run import Command, parse_command, require_config
from torchtune._cli.subcommand import Subcommand
from torchtune._cli.torchrun import torchrun_arguments
from torchtune._recipe_registry import recipe_named_by, resolve_config, resolve_recipe
from torchtune.utils import EXIT_REQUEUE, FolderLock, UserError, first_line, read_json, require, write_json

_USAGE = (
    "tune sweep [TORCHRUN-OPTIONS] [<recipe>] --config <config> --trials 8 --output <folder> "
    "key=low:high[:log] key=a,b ... [key=value ...]"
)
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER}):({_NUMBER})(:log)?")
_INTEGER = re.compile(r"[-+]?\d+")
_STATE = "sweep.json"
_LOG = "output.txt"
_POLL_SECONDS = 0.5
_LAST_SHARE = 10  # the training loss of a trial is the mean over this share of its steps, one tenth
_FINALISTS = 2  # trials that are trained to the end, for a comparison on the same rows
_TASK_RETRIES = 3  # how often Ray starts the task of a trial anew on another node, where its run resumes


class SweepError(UserError):
    """A sweep that cannot start or that has no result."""


@dataclass(frozen=True)
class Dimension:
    """A setting that a sweep varies: numbers between two bounds, or a list of values.

    Attributes:
        key: the setting.
        values: the values of a list; empty for a range.
        low: lower bound of a range.
        high: upper bound of a range.
        is_log: whether the logarithm of the number is drawn evenly.
        is_integer: whether numbers are rounded.
    """

    key: str
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    is_integer: bool = False

    def value_at(self, position: float) -> str:
        """Return the value at a position from 0 (included) to 1 (excluded)."""
        if self.values:
            return self.values[int(position * len(self.values))]
        if self.is_log:
            number = self.low * (self.high / self.low) ** position
        else:
            number = self.low + (self.high - self.low) * position
        if self.is_integer:
            return str(round(number))
        return f"{number:.4g}"


def parse_dimension(override: str) -> Dimension | None:
    """Return the dimension of ``key=low:high[:log]`` or ``key=a,b``; None for a setting with one value.

    Raises:
        SweepError: the bounds are in the wrong order, or a logarithm is drawn of numbers that are not positive.
    """
    key, _, text = override.partition("=")
    bounds = _RANGE.fullmatch(text)
    if bounds is None:
        if "," not in text or text[0] in "[{\"'":  # one value, perhaps a list
            return None
        return Dimension(key, values=tuple(text.split(",")))
    low = float(bounds[1])
    high = float(bounds[2])
    if not low < high:
        raise SweepError(f"{override}: the first bound must be less than the second.")
    if bounds[3] and low <= 0:
        raise SweepError(f"{override}: the bounds of a logarithmic range must be above 0: leave out :log.")
    is_integer = all(_INTEGER.fullmatch(bounds[number]) for number in (1, 2))
    return Dimension(key, low=low, high=high, is_log=bool(bounds[3]), is_integer=is_integer)


def draw_trials(dimensions: Sequence[Dimension], count: int, seed: int) -> list[list[str]]:
    """Draw the settings of the trials as a Latin hypercube: each dimension is covered evenly.

    Returns:
        ``key=value`` of every dimension, for each of the trials; equal trials are left out.
    """
    generator = random.Random(seed)
    columns = []
    for dimension in dimensions:
        # One value from the middle of each of ``count`` equal intervals, in random order.
        order = list(range(count))
        generator.shuffle(order)
        column = []
        for interval in order:
            value = dimension.value_at((interval + 0.5) / count)
            column.append(f"{dimension.key}={value}")
        columns.append(column)
    trials = [list(settings) for settings in zip(*columns, strict=True)]
    return [trial for index, trial in enumerate(trials) if trial not in trials[:index]]


@dataclass(frozen=True)
class Rung:
    """A stage of a sweep.

    Attributes:
        num_trials: number of trials that reach it.
        num_halvings: how often the steps of a whole run are halved.
        every: number of steps between two measurements; the steps of the rung are a multiple, but for a whole run.
    """

    num_trials: int
    num_halvings: int
    every: int = 1

    def steps(self, total: int) -> int:
        """Return the steps of the rung, for a whole run of ``total`` steps."""
        if self.num_halvings == 0:
            return total
        steps = total >> self.num_halvings
        steps -= steps % self.every  # down to a measurement, and at least to the first one
        return min(total, max(self.every, steps))


def plan_rungs(num_trials: int, every: int = 1) -> list[Rung]:
    """Return the rungs of a sweep: half of the trials go on for twice as many steps, until two finish."""
    # From the last rung, which is a whole run, back to the first one, which has all trials.
    rungs = [Rung(min(num_trials, _FINALISTS), 0, every)]
    while rungs[0].num_trials < num_trials:
        later = rungs[0]
        rungs.insert(0, Rung(min(num_trials, 2 * later.num_trials), later.num_halvings + 1, every))
    return rungs


@dataclass
class Trial:
    """A run of a sweep.

    Attributes:
        number: index of the trial.
        settings: ``key=value`` of the settings that vary.
        folder: ``output_dir`` of its run.
        error: why its run failed, or None.
        value: metric at the last rung that it reached.
        steps: steps of that rung.
    """

    number: int
    settings: list[str]
    folder: Path
    error: str | None = None
    value: float = math.nan
    steps: int = 0


@dataclass(frozen=True)
class Metric:
    """Metric by which trials are compared; lower is better unless ``is_maximized``."""

    name: str
    is_maximized: bool = False

    @classmethod
    def parse(cls, text: str) -> "Metric":
        """Read ``NAME`` or ``max:NAME``, as in the setting ``keep_best``."""
        prefix, separator, name = text.rpartition(":")
        if separator and prefix not in ("max", "min"):
            raise SweepError(f"--metric {text}: write NAME, or max:NAME if higher is better.")
        return cls(name, prefix == "max")

    def measure(self, folder: Path, steps: int) -> float:
        """Return the metric of a run after a number of steps: the last value, or the mean of the last losses."""
        from torchtune.reports import RunFolder

        values = [value for step, value in RunFolder(folder).curve(self.name) if step <= steps]
        if not values:
            return math.nan
        if self.name != "loss":
            return values[-1]
        last = values[-max(1, len(values) // _LAST_SHARE) :]
        return sum(last) / len(last)

    def sort(self, trials: Sequence[Trial]) -> list[Trial]:
        """Return the trials that have a finite value, the best first."""
        measured = [trial for trial in trials if trial.error is None and math.isfinite(trial.value)]
        return sorted(measured, key=lambda trial: trial.value, reverse=self.is_maximized)


class Sweep(Subcommand):
    """Subcommand that trains with several settings and keeps the best."""

    name = "sweep"
    usage = _USAGE
    help = "Train with several settings, and go on with the better half"
    description = (
        "Train trials with different settings by successive halving: all trials run for a few steps, the\n"
        "better half of them is resumed for twice as many, until two finish. Trials run one after the\n"
        "other, or side by side with --ray; the same command continues a sweep that was stopped."
    )
    epilog = """
        settings:
          key=low:high       numbers between two bounds, drawn evenly; whole numbers for whole bounds
          key=low:high:log   the same, drawn evenly on a logarithmic scale
          key=a,b,c          a list of values
          key=value          the same value in all trials

        options:
          --trials N         number of trials (8)
          --output FOLDER    folder of the trials and of the state of the sweep
          --metric NAME      metric to minimize, or max:NAME to maximize (val_loss if the config validates, else loss)
          --seed N           seed of the settings that are drawn, and of all trials (0)
          --ray              train trials side by side, as tasks of a Ray cluster or of this machine
          --slurm            print a Slurm array of whole runs instead of training

        examples:
          $ tune sweep --config smol/135M_lora_single_device --trials 8 --output /tmp/sweep \\
              optimizer.lr=1e-5:1e-3:log batch_size=2,4 device=cpu
    """
    takes_tokens = True

    def _run(self, args: argparse.Namespace) -> None:
        if not args.tokens or {"-h", "--help"} & set(args.tokens):
            self._parser.print_help()
            return
        options, tokens = _take_options(args.tokens)
        command = parse_command(tokens)
        sweep = _Sweep(command, options)
        if options.slurm:
            print(sweep.slurm_script())
        else:
            sweep.run()


@dataclass
class _Options:
    """Options of the sweep itself, as its help explains them."""

    output: Path = Path()
    trials: int = 8
    metric: str | None = None
    seed: int = 0
    slurm: bool = False
    ray: bool = False


def _take_options(tokens: Sequence[str]) -> tuple[_Options, list[str]]:
    """Read the options of the sweep, which may stand anywhere; return the other tokens as well.

    Raises:
        SweepError: an option lacks its value, or has a wrong one.
    """
    options = _Options()
    other_tokens: list[str] = []
    remaining = iter(tokens)
    for token in remaining:
        flag, has_value, value = token.partition("=")
        if token in ("--slurm", "--ray"):
            setattr(options, token[2:], True)
        elif flag in ("--trials", "--output", "--metric", "--seed"):
            if not has_value:  # it is the next word
                value = next(remaining, "")
            if not value:
                raise SweepError(f"{flag} needs a value.")
            if flag in ("--trials", "--seed"):
                least = 2 if flag == "--trials" else 0  # one trial leaves nothing to compare
                if not value.isdigit() or int(value) < least:
                    raise SweepError(f"{flag} is {value}: it must be a whole number of at least {least}.")
                setattr(options, flag[2:], int(value))
            elif flag == "--output":
                options.output = Path(value).expanduser()
            else:
                options.metric = value
        else:
            other_tokens.append(token)
    if options.output == Path():
        raise SweepError("--output is missing: name a folder for the trials.")
    if options.slurm and options.ray:
        raise SweepError("--slurm prints a script, --ray trains: choose one of them.")
    return options, other_tokens


class _Sweep:
    """A sweep: its trials, and their runs.

    Args:
        command: the parsed command line, without the sweep's own options.
        options: these options.

    Raises:
        SweepError: no setting varies, or a trial's settings are wrong.
    """

    def __init__(self, command: Command, options: _Options) -> None:
        from torchtune.config import load_and_check

        self._command = command
        self._folder = options.output
        config_name = require_config(command, "sweep", "--trials 8 --output FOLDER key=low:high")
        self._config = resolve_config(config_name, command.recipe)
        command.overrides = expand_shorthands(self._config, command.overrides, command.recipe)
        if command.recipe is None:
            self._recipe = recipe_named_by(self._config, command.overrides)
        else:
            self._recipe = resolve_recipe(command.recipe)
        dimensions = []
        self._fixed: list[str] = []
        for override in command.overrides:
            dimension = parse_dimension(override)
            if dimension is None:
                self._fixed.append(override)
            else:
                dimensions.append(dimension)
        if not dimensions:
            raise SweepError("no setting varies: give a range, such as optimizer.lr=1e-5:1e-3:log, or a list, a,b.")
        # One seed for all trials, so that trials differ only in the settings that vary.
        if not any(override.startswith("seed=") for override in self._fixed):
            self._fixed.append(f"seed={options.seed}")
        self._trials = []
        for number, settings in enumerate(draw_trials(dimensions, options.trials, options.seed)):
            self._trials.append(Trial(number, settings, self._folder / f"trial_{number:02}"))
        # The settings of every trial are checked before the first one starts.
        main = self._recipe.load_main()
        settings_of_trials = [load_and_check(self._config, self._overrides(trial), main) for trial in self._trials]
        self._settings = settings_of_trials[0]  # all trials have the same validation and device
        self._metric = self._choose_metric(options.metric)
        self._ray = None
        if options.ray:
            num_processes = _count_processes_of_a_trial(command.torchrun)
            self._ray = _RayTasks(num_processes, getattr(self._settings, "device", None))

    def _overrides(self, trial: Trial) -> list[str]:
        """Return the settings of a trial's run that the command line and the sweep decide."""
        return [*self._fixed, *trial.settings, f"output_dir={trial.folder}"]

    def _choose_metric(self, name: str | None) -> Metric:
        """Return the metric of ``--metric``, or the loss, and of validation if the trials validate."""
        every = getattr(self._settings, "run_val_every_n_steps", None)
        validates = getattr(self._settings, "dataset_val", None) is not None and every is not None
        default = "val_loss" if validates else "loss"
        metric = Metric.parse(name or default)
        if metric.name.startswith("val_") and not validates:
            raise SweepError(
                f"--metric {name}: the trials do not validate: set dataset_val and run_val_every_n_steps, or choose "
                "another metric."
            )
        if metric.name.startswith("val_") and not isinstance(every, int):
            raise SweepError(
                f"run_val_every_n_steps is {every}: a sweep stops trials right after a validation: set it to a "
                "number of steps, or choose another --metric."
            )
        return metric

    def command_of(self, trial: Trial, *overrides: str) -> list[str]:
        """Return the ``tune run`` command of a trial, as arguments."""
        recipe = str(self._recipe.path or self._recipe.module)
        if self._recipe.registered:
            recipe = self._recipe.name
        config = str(self._command.config)
        return ["run", *self._command.torchrun, recipe, "--config", config, *self._overrides(trial), *overrides]

    def slurm_script(self) -> str:
        """Return a script for ``sbatch`` with one whole run for each trial."""
        lines = [
            "#!/bin/bash",
            "#SBATCH --job-name=sweep",
            f"#SBATCH --array=0-{len(self._trials) - 1}",
            "",
            "trials=(",
        ]
        for trial in self._trials:
            lines.append("  " + shlex.quote(shlex.join(["tune", *self.command_of(trial)])))
        return "\n".join([*lines, ")", 'eval "srun ${trials[$SLURM_ARRAY_TASK_ID]}"'])

    def run(self) -> None:
        """Run the rungs, and print the table of trials and the comparison of those that finished.

        Raises:
            SweepError: the folder is of another sweep, or no trial has a result.
            UserError: another sweep, or the run of a sweep that was killed, uses the folder.
        """
        self._check_state()
        with FolderLock(self._folder, name=".sweep.lock", key="--output").held():
            if self._ray is None:
                self._run_rungs()
            else:
                with self._ray.connected():
                    self._run_rungs()

    def _run_rungs(self) -> None:
        """Run the trials of each rung, the better half of those of the rung before, and print the result."""
        every = 1  # a loss is logged at each step, other metrics at each validation
        if self._metric.name.startswith("val_"):
            every = self._settings.run_val_every_n_steps
        remaining = self._trials  # in the order of their results, after the first rung
        for rung in plan_rungs(len(self._trials), every):
            remaining = remaining[: rung.num_trials]
            print(f"{len(remaining)} trials, to 1/{2**rung.num_halvings} of the steps of a run", flush=True)
            self._run_to(rung, remaining)
            ranked = self._metric.sort(remaining)  # without those that have failed or diverged
            if not ranked:
                raise SweepError(self._explain_no_result(remaining))
            remaining = ranked
        self._print_result(remaining)

    def _check_state(self) -> None:
        """Record what the sweep is, so that the same command continues it and another one does not mix with it."""
        path = self._folder / _STATE
        state = {
            "metric": [self._metric.name, self._metric.is_maximized],
            "trials": [self.command_of(trial) for trial in self._trials],
        }
        if not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            write_json(path, state)
        elif read_json(path, SweepError) != state:
            raise SweepError(
                f"{path} is of a sweep with other settings: choose another --output, or remove the folder."
            )

    def _run_to(self, rung: Rung, trials: Sequence[Trial]) -> None:
        """Start or resume trials, stop each once it has made the steps of a rung, and measure it."""
        waiting = []
        for trial in trials:
            if _Progress.of(trial.folder).has_reached(rung):  # before the sweep was stopped
                self._measure(trial, rung)
            else:
                waiting.append(_Stage(trial, self.command_of(trial), rung))
        train = _train_in_turn if self._ray is None else self._ray.train
        for trial, error in train(waiting):
            trial.error = error
            self._measure(trial, rung)

    def _measure(self, trial: Trial, rung: Rung) -> None:
        """Measure a trial that has made the steps of a rung, and print the result, or the error of its run.

        A stopped run finishes its step and saves, so that it may be a few steps further.
        """
        progress = _Progress.of(trial.folder)
        if trial.error is None and self._ray is not None and progress.total_steps == 0:
            trial.error = f"{trial.folder} has no log: --output must be on storage that all nodes of the cluster share"
        if trial.error is None:
            trial.steps = rung.steps(progress.total_steps)
            trial.value = self._metric.measure(trial.folder, trial.steps)
        result = trial.error or f"{self._metric.name} {trial.value:.5g} after {trial.steps:,} steps"
        print(f"  trial {trial.number}: {' '.join(trial.settings)}: {result}", flush=True)

    def _explain_no_result(self, trials: Sequence[Trial]) -> str:
        """Return why none of the trials can go on."""
        errors = [trial.error for trial in trials if trial.error is not None]
        if errors:
            return f"no trial has a {self._metric.name}; the first failed with: {errors[0]}"
        return (
            f"no trial has a finite {self._metric.name}: all of them diverged, or the metric is not logged: lower the "
            "range of the learning rate, or choose another --metric."
        )

    def _print_result(self, finalists: Sequence[Trial]) -> None:
        """Print a table of all trials, the best first, and the comparison of those that finished."""
        from torchtune.reports import Comparison, RunFolder

        best_first = self._metric.sort(finalists)
        other_trials = [trial for trial in self._trials if trial not in best_first]
        other_trials.sort(key=lambda trial: -trial.steps)
        print(f"\n{'trial':<7}{'steps':>8}  {self._metric.name:<12}settings")
        for trial in [*best_first, *other_trials]:
            value = "failed"
            if trial.error is None:
                value = f"{trial.value:.5g}"
            print(f"{trial.number:<7}{trial.steps:>8,}  {value:<12}{' '.join(trial.settings)}")
        print(f"\nbest        {best_first[0].folder}: {' '.join(best_first[0].settings)}")
        if len(best_first) > 1:
            print("\n" + Comparison([RunFolder(trial.folder) for trial in best_first]).text())


@dataclass(frozen=True)
class _Progress:
    """Progress of a trial's run: completed steps, and steps of the whole run (0 before it has started)."""

    last_step: int = 0
    total_steps: int = 0

    @classmethod
    def of(cls, folder: Path) -> "_Progress":
        """Read the progress of the run in a folder, which may be going on."""
        from torchtune.reports import RunFolder

        try:
            run = RunFolder(folder)
        except UserError:  # it has not started
            return cls()
        return cls(run.newest_step, run.start.get("total_steps", 0))

    def has_reached(self, rung: Rung) -> bool:
        """Return whether the run has made the steps of a rung."""
        return self.total_steps > 0 and self.last_step >= rung.steps(self.total_steps)


@dataclass(frozen=True)
class _Stage:
    """The part of a trial's run that ends at a rung.

    Attributes:
        trial: the trial.
        command: its ``tune`` command, as arguments.
        rung: the rung.
    """

    trial: Trial
    command: list[str]
    rung: Rung


def _train(stage: _Stage, working_directory: str) -> str | None:
    """Run a stage in a process of its own; return why it failed, or None.

    Raises:
        UserError: another run uses the folder of the trial.
    """
    from torchtune.checkpoints import complete_directories

    folder = Path(working_directory, stage.trial.folder)
    if not os.path.isdir(working_directory):
        return f"{working_directory} is not on the node {platform.node()}: start the sweep in a folder that all share"
    folder.mkdir(parents=True, exist_ok=True)
    # The run of a sweep that was killed may still train: it must not count as a failure of the trial.
    with FolderLock(folder, key="--output").held():
        pass
    # The stage before, or this one before the sweep was stopped, has saved a checkpoint.
    overrides = ["resume_from_checkpoint=True"] if complete_directories(folder) else []
    arguments = [sys.executable, "-m", "torchtune._cli.tune", *stage.command, *overrides]
    was_stopped = False
    with (folder / _LOG).open("ab") as log, _child_process(arguments, log, working_directory) as process:
        while process.poll() is None:
            time.sleep(_POLL_SECONDS)
            progress = _Progress.of(folder)
            is_finished = progress.last_step == progress.total_steps  # the run ends by itself
            if not was_stopped and progress.has_reached(stage.rung) and not is_finished:
                process.send_signal(signal.SIGTERM)
                was_stopped = True
    # EXIT_REQUEUE: the run has saved after the signal.
    if process.returncode == 0 or (was_stopped and process.returncode == EXIT_REQUEUE):
        return None
    if was_stopped and process.returncode == -signal.SIGTERM and _Progress.of(folder).has_reached(stage.rung):
        return None  # the signal came when the run had just made its last step
    return _last_error(folder / _LOG)


def _train_in_turn(stages: Sequence[_Stage]) -> Iterator[tuple[Trial, str | None]]:
    """Run stages one after the other; yield each trial with its error, or None."""
    for stage in stages:
        yield stage.trial, _train(stage, os.getcwd())


class _RayTasks:
    """Tasks of Ray, which run stages of trials side by side.

    A task reserves a CPU for each process of the trial, and a GPU too if the trial trains on GPUs.

    Args:
        num_processes: processes of a trial.
        device: setting ``device`` of the trials; None: a GPU if the cluster has some.

    Raises:
        UserError: Ray is not installed.
    """

    def __init__(self, num_processes: int, device: str | None) -> None:
        self._ray = require("ray", extra="ray", purpose="tune sweep --ray")
        self._num_processes = num_processes
        self._device = device

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Connect to the cluster of ``RAY_ADDRESS`` or of this machine inside the block; start one if there is none.

        Raises:
            SweepError: the cluster does not answer.
        """
        try:
            self._ray.init(log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise SweepError(
                f"Ray cannot be reached ({first_line(error)}): start it with `ray start`, and set RAY_ADDRESS to its "
                "address, or unset RAY_ADDRESS to train on this machine."
            ) from error
        try:
            yield
        finally:
            self._ray.shutdown()

    def train(self, stages: Sequence[_Stage]) -> Iterator[tuple[Trial, str | None]]:
        """Run stages side by side; yield each trial with its error, or None, when it has ended.

        If the sweep is stopped, all runs are stopped and save, before this generator ends.
        """
        from torchtune.supervision import StopSignal

        resources = self._resources()
        task = self._ray.remote(**resources, max_retries=_TASK_RETRIES)(_train)
        trials = {task.remote(stage, os.getcwd()): stage.trial for stage in stages}
        running = list(trials)
        try:
            # Ray turns an exception of a signal handler into an error of its own, so the handler only takes a note.
            with StopSignal() as stop:
                while running and not stop.requested:
                    ended, running = self._ray.wait(running, timeout=_POLL_SECONDS)
                    for reference in ended:
                        yield trials[reference], self._error_of(reference)
            if stop.number == signal.SIGINT:
                raise KeyboardInterrupt
            if stop.requested:
                sys.exit(EXIT_REQUEUE)
        finally:
            for reference in running:
                self._ray.cancel(reference)  # KeyboardInterrupt in the task, which stops its run
            if running:
                self._ray.wait(running, num_returns=len(running))

    def _resources(self) -> dict[str, int]:
        """Return what a task reserves; warn if no node of the cluster has so much."""
        needed = {"CPU": self._num_processes}
        is_on_gpu = (self._device or "").startswith("cuda")
        if self._device is None:
            is_on_gpu = self._ray.cluster_resources().get("GPU", 0) > 0
        if is_on_gpu:
            needed["GPU"] = self._num_processes
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        for name, count in needed.items():
            nodes = [node for node in nodes if node.get(name, 0) >= count]
        if not nodes:
            text = " and ".join(f"{count} {name}" for name, count in needed.items())
            print(
                f"warning: each trial needs {text}, which no node of the Ray cluster has: trials wait for such a node; "
                "press Ctrl-C if none will come.",
                file=sys.stderr,
                flush=True,
            )
        return {f"num_{name.lower()}s": count for name, count in needed.items()}  # num_cpus, num_gpus of ray.remote

    def _error_of(self, reference: Any) -> str | None:
        """Return the result of a task: the error of a trial, or None.

        Raises:
            UserError: the run of an earlier sweep still trains the trial.
        """
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise error.cause from None
            return f"its task failed ({first_line(error.cause)})"
        except self._ray.exceptions.RayError as error:  # its node was lost again and again
            return f"its task failed ({first_line(error)})"


def _count_processes_of_a_trial(options: list[str]) -> int:
    """Return the number of processes that torchrun starts with these options, for which a task of Ray needs a node.

    Raises:
        SweepError: a trial would use several machines, or the number is unknown.
    """
    if not options:
        return 1
    args = torchrun_arguments(options, ["recipe.py"])
    if args.nnodes not in ("1", "1:1"):
        raise SweepError(f"--nnodes {args.nnodes}: with --ray, each trial runs on one node: leave out --nnodes.")
    if not str(args.nproc_per_node).isdigit():
        raise SweepError(f"--nproc-per-node {args.nproc_per_node}: with --ray, give a number, which Ray reserves.")
    return int(args.nproc_per_node)


@contextmanager
def _child_process(arguments: Sequence[str], log: BinaryIO, working_directory: str) -> Iterator[subprocess.Popen]:
    """Run a command inside the block; if the sweep is stopped, the command is stopped first, and saves."""
    process = subprocess.Popen(arguments, stdout=log, stderr=subprocess.STDOUT, cwd=working_directory)
    handler = signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        yield process
    finally:
        signal.signal(signal.SIGTERM, handler)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait()


def _raise_terminated(number: int, frame: Any) -> None:
    """Leave the sweep upon SIGTERM as a run does, with the exit code that lets a scheduler start it again."""
    sys.exit(EXIT_REQUEUE)


def _last_error(log: Path) -> str:
    """Return the error in a trial's output, or where to look for it."""
    lines = log.read_text("utf-8", "replace").splitlines()
    for line in reversed(lines):
        _, mark, message = line.rpartition("error: ")
        if mark:
            return message
    return f"it failed, see {log}"
