"""A rank that stalls before the loop or after it ends the run, and is named with what it was doing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torchtune.training.parallel.stalls import RUNS
from torchtune import training
from torchtune.utils import Activity, doing, sign_of_life, watch_activity

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stalls")
    environment = {**os.environ, "RES_OPTIONS": "timeout:1 attempts:1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("stalls.py")), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


SENTENCES = {
    "set-up": r"Rank 1 has not moved for \d+ s, set-up, at stalls\.py:\d+ in sleep_forever, while rank 0 waits \S.*: "
    r"its stack is in \S*set-up/logs/rank_1\.log\.",
    "load": r"Rank 1 has not moved for \d+ s, loading the checkpoint, at stalls\.py:\d+ in sleep_forever, while rank 0 "
    r"waits loading the checkpoint: its stack is in \S*rank_1\.log\.",
    "close": r"Rank 1 has not moved for \d+ s, closing after step 6, at stalls\.py:\d+ in sleep_forever.*",
    "alone": r"Rank 0 has not moved for \d+ s, set-up, at stalls\.py:\d+ in sleep_forever: its stack is in .*\.",
}


@pytest.mark.parametrize("name", RUNS)
def test_a_stall_outside_of_the_loop_is_told_and_ended(name: str, ended: Path) -> None:
    codes = json.loads((ended / "codes.json").read_text())[name]
    last = str(RUNS[name][0] - 1)
    screens = "".join(path.read_text() for path in sorted(ended.glob(f"{name}_*.screen")))
    assert codes[last] == training.HANG_EXIT_CODE, screens
    assert name == "close" or set(codes.values()) == {training.HANG_EXIT_CODE}, codes
    (sentence,) = [found[1] for line in screens.splitlines() if (found := re.search(r"(Ranks? \d.* moved .*)", line))]
    assert re.fullmatch(SENTENCES[name], sentence)
    assert "in sleep_forever\n" in (ended / name / "logs" / f"rank_{last}.log").read_text()


def test_what_is_done_has_a_name_and_comes_back() -> None:
    sign_of_life()  # nobody watches: nothing happens
    with watch_activity(activity := Activity(None, "set-up")):
        moves = activity.moves
        with doing("loading the checkpoint"):
            assert str(activity) == "loading the checkpoint"
            sign_of_life()
        assert (activity.moves, activity.stirs, str(activity)) == (moves + 2, 1, "set-up")
        assert training.Throughput(step=3).activity is activity
        assert str(activity) == "in step 4"
