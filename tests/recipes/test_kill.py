"""Runs that are killed, for real, at any moment: nothing is lost, and the rest of the run is the same bits."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.recipes.runs import RECIPES, TRAINING, read_log, write_config

SETTINGS = {
    "epochs": 4,
    "batch_size": 2,
    "save_every_n_steps": 2,
    "dtype": "bf16",
    "checkpointer__keep_last_n_checkpoints": 2,
}
STEPS = 48


class Forker:
    """Talks to ``forker.py``."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.recipes.forker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=RECIPES.parent,
            env=environment,
        )
        assert self.process.stdout.readline() == "ready\n"

    def start(self, name: str, config: Path, *overrides: str) -> int:
        """Start a recipe; return its pid."""
        recipe, output = str(RECIPES / f"{name}.py"), str(config.with_suffix(".out"))
        job = {"recipe": recipe, "argv": ["--config", str(config), *overrides], "output": output}
        print(json.dumps(job), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def wait(self) -> int:
        """Exit code of the recipe started last; minus the signal that ended it."""
        return int(self.process.stdout.readline())

    def run(self, name: str, config: Path, *overrides: str, kill_when: Callable[[], bool] | None = None) -> int:
        """Run a recipe, killed with SIGKILL as soon as ``kill_when`` holds."""
        pid = self.start(name, config, *overrides)
        if kill_when is not None:
            deadline = time.monotonic() + 60
            while not kill_when() and time.monotonic() < deadline and Path(f"/proc/{pid}").exists():
                time.sleep(0.0005)
            os.kill(pid, signal.SIGKILL)
        return self.wait()


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    forker = Forker()
    yield forker
    forker.process.stdin.close()
    forker.process.wait(timeout=10)
    forker.process.stdout.close()


def steps_logged(output_dir: Path) -> int:
    log = output_dir / "logs" / "log.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def losses(output_dir: Path) -> dict[int, float]:
    """Step -> loss; a step that ran twice, before a kill and after a resume, must have given the same bits."""
    found: dict[int, float] = {}
    for record in read_log(output_dir):
        if "loss" in record:
            assert found.setdefault(record["step"], record["loss"]) == record["loss"], f"step {record['step']}"
    return found


def fail_with_output(config: Path) -> str:
    return config.with_suffix(".out").read_text()[-2000:]


@pytest.fixture(scope="module", params=TRAINING)
def whole(request: pytest.FixtureRequest, forker: Forker, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """An uninterrupted run: recipe, folder of its inputs, losses."""
    folder = tmp_path_factory.mktemp("whole")
    config = write_config(request.param, folder, folder / "whole", **SETTINGS)
    assert forker.run(request.param, config) == 0, fail_with_output(config)
    assert list(losses(folder / "whole")) == list(range(1, STEPS + 1))
    return request.param, folder, losses(folder / "whole")


def kill_and_resume(forker: Forker, whole: tuple, label: str, kill_when: list[Callable[[Path], bool]]) -> int:
    """Kill a run again and again, each time resumed; return how many kills hit before the end."""
    name, folder, expected = whole
    output_dir = folder / label
    config = write_config(name, folder, output_dir, **SETTINGS)
    hits = 0
    for condition in kill_when:
        code = forker.run(name, config, "resume_from_checkpoint=True", kill_when=lambda c=condition: c(output_dir))
        assert code in (0, -signal.SIGKILL), fail_with_output(config)
        if code == 0:
            break
        hits += 1
    else:
        assert forker.run(name, config, "resume_from_checkpoint=True") == 0, fail_with_output(config)
    assert losses(output_dir) == expected
    return hits


def test_killed_at_random_steps(forker: Forker, whole: tuple) -> None:
    rng = random.Random(0)

    def after_steps(extra: int) -> Callable[[Path], bool]:
        seen: list[int] = []

        def condition(output: Path) -> bool:
            seen.append(steps_logged(output))
            return seen[-1] >= seen[0] + extra

        return condition

    kills = [after_steps(rng.randint(2, 6)) for _ in range(10)]
    assert kill_and_resume(forker, whole, "random", kills) >= 10


def test_killed_during_saves(forker: Forker, whole: tuple) -> None:
    rng = random.Random(1)

    def during_save(delay: float, skip: int) -> Callable[[Path], bool]:
        seen: set[str] = set()

        def condition(output: Path) -> bool:
            seen.update(path.name for path in output.glob(".step_*.tmp"))
            if len(seen) <= skip:
                return False
            time.sleep(delay)
            return True

        return condition

    kills = [during_save(rng.uniform(0, 0.03), rng.randint(1, 2)) for _ in range(10)]
    assert kill_and_resume(forker, whole, "saves", kills) >= 8


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_saves_and_says_how_to_go_on(forker: Forker, whole: tuple, number: signal.Signals) -> None:
    name, folder, expected = whole
    output_dir = folder / f"stopped_{number.name}"
    config = write_config(name, folder, output_dir, **{**SETTINGS, "save_every_n_steps": 1000, "log_level": "WARNING"})
    pid = forker.start(name, config)
    while steps_logged(output_dir) < 5:
        time.sleep(0.001)
    os.kill(pid, number)
    assert forker.wait() == {signal.SIGTERM: 75, signal.SIGINT: 130}[number], fail_with_output(config)
    assert "resume_from_checkpoint=True" in fail_with_output(config)
    (saved,) = output_dir.glob("step_*")
    assert int(saved.name.split("_")[1]) == max(losses(output_dir)) < STEPS
    assert forker.run(name, config, "resume_from_checkpoint=True") == 0, fail_with_output(config)
    assert losses(output_dir) == expected
