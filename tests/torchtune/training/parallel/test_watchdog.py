"""Runs that stand still are ended, and say who keeps the others waiting."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torchtune.training.parallel.hangs import RUNS, TIMEOUT
from torchtune import training
from torchtune.training.supervise._heartbeats import Beat, explain, list_ranks


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hangs")
    script = Path(__file__).with_name("hangs.py")
    # torch's store looks up the name of everybody who connects; where names are served badly, not for long here.
    environment = {**os.environ, "RES_OPTIONS": "timeout:1 attempts:1"}
    command = [sys.executable, str(script), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return folder


def said(folder: Path, name: str) -> str:
    """The one sentence that a run showed on all its screens."""
    screens = [path.read_text() for path in sorted((folder / name).glob("screen_*"))]
    (sentence,) = [
        line.removeprefix("ERROR:torchtune:")
        for screen in screens
        for line in screen.splitlines()
        if line.startswith("ERROR")
    ]
    assert "\n" not in sentence
    return sentence


SENTENCES = {
    "asleep": r"Rank 2 has not moved for \d+ s, loading data for step 3, at hangs\.py:\d+ in sleep_forever, while "
    r"ranks 0, 1 and 3 wait in step 3: its stack is in \S*asleep/logs/rank_2\.log\.",
    "asleep in the step": r"Rank 1 has not moved for \d+ s, in step 3, at hangs\.py:\d+ in sleep_forever, while rank 0 "
    r"waits in step 3: its stack is in .*rank_1\.log\.",
    "stopped": r"Rank 1 has given no sign of life for \d+ s, last seen .*step 3, while rank 0 waits in step 3: the "
    r"process is stopped or its machine is gone; see .*rank_1\.log for its last words\.",
    "rank 0 stopped": r"Rank 1 has not moved for \d+ s, in step 3, .*; the process at 127\.0\.0\.1:\d+ through which "
    r"ranks know of each other does not answer: .*",
    "deaf": r"Rank 1 has given no sign of life for \d+ s, last seen in step 3, while rank 0 waits in step 3: .*",
    "failed": r"Rank 1 has ended with ValueError \d+ s ago, in step 3, while rank 0 waits in step 3: see .*\.log\.",
    "alone": r"Rank 0 has not moved for \d+ s, loading data for step 3, at hangs\.py:\d+ in sleep_forever: its .*",
}


@pytest.mark.parametrize("name", SENTENCES)
def test_a_sentence_names_who_is_behind_and_where(name: str, ended: Path) -> None:
    assert re.fullmatch(SENTENCES[name], said(ended, name))


@pytest.mark.parametrize("name", RUNS)
def test_every_process_that_can_ends(name: str, ended: Path) -> None:
    codes = json.loads((ended / "codes.json").read_text())[name]
    if name == "slow save":  # longer than the time limit, but it moves
        assert codes == {"0": 0, "1": 0}
    else:
        assert set(codes.values()) == {training.HANG_EXIT_CODE}
        assert len(codes) == RUNS[name][0] - (name in ("stopped", "rank 0 stopped", "deaf", "failed"))


@pytest.mark.parametrize(
    ("name", "rank", "function"),
    [
        ("asleep", 0, "all_reduce"),
        ("asleep", 2, "fall_asleep"),
        ("asleep in the step", 1, "fall_asleep"),
        ("deaf", 1, "be_deaf"),
        ("alone", 0, "fall_asleep"),
    ],
)
def test_logs_hold_the_stacks(name: str, rank: int, function: str, ended: Path) -> None:
    log = (ended / name / "logs" / f"rank_{rank}.log").read_text()
    assert re.search(rf'File ".*", line \d+ in {function}\n', log)


def test_torch_gives_collectives_up_later(ended: Path) -> None:
    for rank in range(4):
        log = (ended / "asleep" / "logs" / f"rank_{rank}.log").read_text()
        assert f"Collectives wait [{2 * TIMEOUT + 60}] s." in log


def test_ranks_in_words() -> None:
    assert list_ranks([1]) == "rank 1"
    assert list_ranks({3, 0}) == "ranks 0 and 3"
    assert list_ranks([0, 1, 2, 5]) == "ranks 0-2 and 5"
    assert list_ranks(range(1000)) == "ranks 0-999"


def test_who_is_behind() -> None:
    ahead, behind = Beat(step=6, phase="training", moves=20, waits=True), Beat(step=5, phase="validation", moves=18)
    text = explain({0: ahead, 1: behind, 2: ahead}, set(), 100.0)
    assert text.startswith(
        "Rank 1 has not moved for 100 s, validation after step 5, while ranks 0 and 2 wait in step 7"
    )
    # A process that is silent is named whatever the others do, one that has finished is not.
    assert explain({0: behind, 1: ahead}, {1}, 0.0).startswith("Rank 1 has given no sign of life")
    finished = Beat(step=9, moves=30, left="finished")
    assert explain({0: finished, 1: behind}, set(), 0.0).startswith("Rank 1 has not moved")
    # All at the same place, as where a device does not answer: nobody is made up.
    assert explain({0: behind, 1: behind}, set(), 0.0).startswith("Ranks 0 and 1 have not moved")


def test_no_time_limit_watches_nothing() -> None:
    activity = training.Throughput().activity
    with training.Watchdog(activity, training.ParallelDims(), None):
        pass
    with pytest.raises(ValueError, match="above 0"):
        training.Watchdog(activity, training.ParallelDims(), 0)


def test_errors_pass_through() -> None:
    activity = training.Throughput().activity
    with pytest.raises(KeyError), training.Watchdog(activity, training.ParallelDims(), 60.0):
        raise KeyError("x")
