"""Start recipes and kill them: what the tests of killed runs share, and by hand as many kills as one likes.

    python -m tests.recipes.killing full_finetune_distributed --kills 50

Every life of the run is killed at a random moment: after some steps, in the middle of a save, as the checkpoint is
about to be renamed; one rank first, or all at once; half of the saves are written behind training's back. Then the run
is resumed. In the end it must have lost nothing: each step has given the same bits in each life.
"""

import argparse
import atexit
import functools
import itertools
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.devices import DEVICE
from tests.recipes import forker
from tests.recipes.runs import RECIPES, Run, read_log, write_config
from torchtune._cli import tune
from torchtune._recipe_registry import current_name

Condition = Callable[[Path], bool]
SETTINGS: dict[str, Any] = {
    "epochs": 3,
    "batch_size": 2,
    "save_every_n_steps": 2,
    "dtype": "bf16",
    "checkpointer__keep_last_n_checkpoints": 2,
}
# When a life ends, in turns.
MOMENTS = ("steps", "save", "rename", "save")
# The longest that a rank may take to notice that its neighbor is dead.
PATIENCE = 300


@functools.cache
def import_aside() -> BaseContext:
    """Let children fork from a process that has imported what most need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.recipes.imported", "torchtune._cli._selfchecks"])
    forkserver.ensure_running()
    atexit.register(forkserver._forkserver._stop)  # waits for it: `time make test` counts its children
    return context


class Forker:
    """Talks to ``forker.py``."""

    def __init__(self) -> None:
        context = import_aside()
        self.jobs, child_end = context.Pipe()
        self.process = context.Process(target=forker.serve, args=(child_end,))
        self.process.start()
        child_end.close()

    def start(self, name: str | Path, config: Path, *overrides: str, ranks: int = 1, **environment: str) -> list[int]:
        """Start a recipe, given its name or its file; return the pids of its ranks."""
        recipe = name if isinstance(name, Path) else RECIPES / f"{current_name(name)}.py"
        argv = ["--config", str(config), *overrides]
        return self.start_script(recipe, argv, config.with_suffix(".out"), ranks, **environment)

    def start_script(self, path: Path, argv: list[str], output: Path, ranks: int, **environment: str) -> list[int]:
        """Start ``python path argv`` in the current folder; return the pids of its ranks."""
        if DEVICE == "cuda" and torch.cuda.device_count() < ranks:  # a rank alone would wait for the others
            pytest.skip(f"needs {ranks} CUDA devices")
        job = {"recipe": str(path), "argv": argv, "environment": environment, "output": str(output)}
        self.jobs.send({**job, "cwd": os.getcwd(), "ranks": ranks})
        return self.jobs.recv()

    def start_torchrun(
        self, options: list[str], recipe: str, config: Path, output: Path, *overrides: str, **environment: str
    ) -> int:
        """Start ``tune run`` with options of torchrun, whose workers are processes of their own; return its pid."""
        argv = ["run", *options, recipe, "--config", str(config), *overrides]
        paths = [str(RECIPES.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        (pid,) = self.start_script(Path(tune.__file__), argv, output, 1, **environment)
        return pid

    def run_module(self, module: str, ranks: int, folder: Path, **environment: str) -> None:
        """Call ``main(folder)`` of a module on several ranks, none of which may fail."""
        output = folder / "output_of_ranks"
        job = {"module": module, "folder": str(folder), "environment": environment, "output": str(output)}
        self.jobs.send({**job, "ranks": ranks})
        self.jobs.recv()
        assert not any(self.wait()), output.read_text()[-6000:]

    def wait(self) -> list[int]:
        """Exit codes of the ranks started last; minus the signal that ended one."""
        return self.jobs.recv()

    def run(self, name: str, config: Path, *overrides: str, kill_when: Callable[[], bool] | None = None) -> int:
        """Run a recipe on one rank, killed with SIGKILL as soon as ``kill_when`` holds."""
        pids = self.start(name, config, *overrides)
        if kill_when is not None and wait_for(kill_when, pids):
            os.kill(pids[0], signal.SIGKILL)
        (code,) = self.wait()
        return code

    def run_on_two(self, name: str, folder: Path, *, recipe: Path | None = None, **settings: Any) -> Run:
        """Run a recipe, or a changed one, on two ranks, neither of which may fail."""
        return self.run_on(2, name, folder, recipe=recipe, **settings)

    def run_on(self, ranks: int, name: str, folder: Path, *, recipe: Path | None = None, **settings: Any) -> Run:
        """Run a recipe, or a changed one, on several ranks, none of which may fail."""
        output_dir = Path(settings.pop("output_dir", folder / f"ranks_{len(list(folder.glob('ranks_*')))}"))
        config = write_config(name, folder, output_dir, **settings)
        self.start(recipe or name, config, ranks=ranks)
        codes = self.wait()
        text = config.with_suffix(".out").read_text()
        assert codes == [0] * ranks, text[-4000:]
        return Run(None, output_dir, text)

    def close(self) -> None:
        """End the parent of all ranks."""
        self.jobs.close()
        self.process.join(PATIENCE)


@functools.cache
def shared_forker() -> Forker:
    """Return the forker of this process, started at the first call."""
    forker = Forker()
    atexit.register(forker.close)
    return forker


def launch(module: str, ranks: int, folder: Path, **environment: str) -> None:
    """Call ``main(folder)`` of a module below ``tests.torchtune`` on several ranks."""
    shared_forker().run_module(f"tests.torchtune.{module}", ranks, folder, **environment)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may end while its file is read
        return False


def wait_for(condition: Callable[[], bool], pids: list[int]) -> bool:
    """Wait until ``condition`` holds, or one of the processes has ended; returns whether all of them still run."""
    deadline = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < deadline and all(map(alive, pids)):
        time.sleep(0.0005)
    return all(map(alive, pids))


def steps_logged(output_dir: Path) -> int:
    """How many steps were logged, those before a kill included."""
    log = output_dir / "logs" / "log.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def losses(output_dir: Path) -> dict[int, float]:
    """Step -> loss; a step that ran twice, before a kill and after a resume, must have given the same bits."""
    losses_of_steps: dict[int, float] = {}
    for record in read_log(output_dir):
        if "loss" in record:
            assert losses_of_steps.setdefault(record["step"], record["loss"]) == record["loss"], (
                f"step {record['step']}"
            )
    return losses_of_steps


def said(config: Path) -> str:
    """The end of what a run has printed."""
    return config.with_suffix(".out").read_text()[-2000:]


def after(extra: int, seen: list[int], output: Path) -> bool:
    """Whether so many steps more were logged than at the first call; waits a little if not."""
    seen.append(steps_logged(output))
    if seen[-1] >= seen[0] + extra:
        return True
    time.sleep(0.005)
    return False


def moment(kind: str, rng: random.Random) -> Condition:
    """A condition on the output folder that holds when a life is to end."""
    extra = rng.randint(2, 6)
    delay = rng.uniform(0, 0.03)
    seen = []

    def after_steps(output: Path) -> bool:
        return after(extra, seen, output)

    def in_a_save(output: Path) -> bool:
        if not after_steps(output) or not any(output.glob(".step_*.tmp")):
            return False
        time.sleep(delay)
        return True

    def before_the_rename(output: Path) -> bool:
        return after_steps(output) and any(output.glob(".step_*.tmp/.complete"))

    return {"steps": after_steps, "save": in_a_save, "rename": before_the_rename}[kind]


def kill(pids: list[int], rng: random.Random, *, all_at_once: bool) -> None:
    """Kill all ranks, or one: the others must notice, and end."""
    victims = pids if all_at_once else [rng.choice(pids)]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, "a rank goes on without the one that was killed"
        time.sleep(0.001)


def kill_and_resume(
    forker: Forker, name: str, folder: Path, expected: dict[int, float], *, kills: int, seed: int, **settings: Any
) -> Counter[str]:
    """Run and kill until ``kills`` lives on two ranks have ended so; each run that comes to its end must be whole.

    Returns:
        how many lives ended how.
    """
    rng = random.Random(seed)
    ended = Counter[str]()
    for run in itertools.count():
        output_dir = folder / f"killed_{seed}_{run}"
        config = write_config(name, folder, output_dir, **{**SETTINGS, **settings})
        while not (output_dir / f"step_{max(expected)}").exists():
            life = ended.total()
            before = steps_logged(output_dir)
            saved = [int(path.parent.name.split("_")[1]) for path in output_dir.glob("step_*/.complete")]
            kind = MOMENTS[life % len(MOMENTS)]
            behind = life // 2 % 2 == 1
            together = rng.random() < 0.5
            # Later lives go on by themselves, as the workers of an agent of torchrun that starts them again.
            environment = {"TORCHELASTIC_RESTART_COUNT": str(life)}
            pids = forker.start(name, config, f"enable_async_checkpointing={behind}", ranks=2, **environment)
            killed = life < kills and wait_for(partial(moment(kind, rng), output_dir), pids)
            if killed:
                kill(pids, rng, all_at_once=together)
                ended[f"{kind}, {'all ranks' if together else 'one rank'}{', async' if behind else ''}"] += 1
            codes = forker.wait()
            assert (-signal.SIGKILL in codes) if killed else codes == [0, 0], said(config)
            assert all(record["step"] > max(saved, default=0) for record in read_log(output_dir)[before:]), said(config)
        assert losses(output_dir) == expected
        if ended.total() >= kills:
            return ended


def uninterrupted(forker: Forker, name: str, folder: Path, ranks: int, **settings: Any) -> dict[int, float]:
    """Losses of a run that nobody kills."""
    config = write_config(name, folder, folder / "whole", **{**SETTINGS, **settings})
    forker.start(name, config, ranks=ranks)
    assert forker.wait() == [0] * ranks, said(config)
    return losses(folder / "whole")


def main() -> None:
    """Kill a recipe on two ranks and say what happened."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    forker = Forker()
    with tempfile.TemporaryDirectory() as folder:
        expected = uninterrupted(forker, args.recipe, Path(folder), ranks=2)
        ended = kill_and_resume(forker, args.recipe, Path(folder), expected, kills=args.kills, seed=args.seed)
    forker.close()
    print(f"{ended.total()} kills, {len(expected)} steps each bit for bit as in the uninterrupted run:")
    for kind, count in sorted(ended.items()):
        print(f"{count:5} {kind}")


if __name__ == "__main__":
    main()
