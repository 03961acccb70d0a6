"""A rank that stalls before the loop or after it ends the run, and is named with what it was doing."""

import json

import pytest

from tests.recipes.killing import launch
from tests.torchtune.training.parallel.stalls import RUNS
from torchtune import supervision
from torchtune.utils import Activity, doing, sign_of_life, watch_activity


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stalls")
    launch("training.parallel.stalls", 1, folder, RES_OPTIONS="timeout:1 attempts:1")
    return json.loads((folder / "ended.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_stall_outside_the_loop_is_reported_and_ends_the_run(name, ended):
    assert not ended[name]["wrong"], f"{ended[name]['wrong']} ({ended[name]['slow'] or 'the machine was not slow'})"


def test_activity_is_named_and_the_outer_name_returns_after_a_block():
    sign_of_life()  # nobody watches: nothing happens
    with watch_activity(activity := Activity(None, "set-up")):
        moves = activity.moves
        with doing("loading the checkpoint"):
            assert str(activity) == "loading the checkpoint"
            sign_of_life()
        assert (activity.moves, activity.signs, str(activity)) == (moves + 2, 1, "set-up")
        assert supervision.Throughput(step=3).activity is activity
        assert str(activity) == "in step 4"
