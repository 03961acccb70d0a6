"""Runs that stand still are ended, and say who keeps the others waiting."""

import json
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.recipes.killing import launch
from tests.torchtune.training.parallel.hangs import RUNS
from torchtune import supervision, training
from torchtune.supervision._heartbeats import Beat, describe_stall, list_ranks, lost_rank_error
from torchtune.utils import Activity


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hangs")
    # torch's store looks up the name of everybody who connects; where names are served badly, not for long here.
    launch("training.parallel.hangs", 1, folder, RES_OPTIONS="timeout:1 attempts:1")
    return json.loads((folder / "ended.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_every_process_exits_and_names_the_stalled_rank(name, ended):
    assert not ended[name]["wrong"], f"{ended[name]['wrong']} ({ended[name]['slow'] or 'the machine was not slow'})"


def test_ranks_are_listed_in_words():
    assert list_ranks([1]) == "rank 1"
    assert list_ranks({3, 0}) == "ranks 0 and 3"
    assert list_ranks([0, 1, 2, 5]) == "ranks 0-2 and 5"
    assert list_ranks(range(1000)) == "ranks 0-999"


def test_slowest_ranks_are_reported():
    ahead, behind = Beat(step=6, phase="training", moves=20, waits=True), Beat(step=5, phase="validation", moves=18)
    text = describe_stall({0: ahead, 1: behind, 2: ahead}, set(), 100.0)
    assert text.startswith(
        "Rank 1 has not moved for 100 s, validation after step 5, while ranks 0 and 2 wait in step 7"
    )
    # A process that is silent is named whatever the others do, one that has finished is not.
    silent = describe_stall({0: behind, 1: ahead}, {1}, 0.0)
    assert silent.startswith("Rank 1 has given no sign of life for 0 s, last seen in step 7, while rank 0 waits ")
    finished = Beat(step=9, moves=30, end="finished")
    beside_finished = describe_stall({0: finished, 1: behind}, set(), 0.0)
    assert beside_finished.startswith("Rank 1 has not moved")
    assert ", while rank 0 has finished: " in beside_finished
    # All at the same place, as where a device does not answer: nobody is made up.
    assert describe_stall({0: behind, 1: behind}, set(), 0.0).startswith("Ranks 0 and 1 have not moved")


def test_a_rank_that_has_ended_does_not_wait():
    waiting, failed = Beat(step=6, phase="training", waits=True), Beat(step=6, end="DataError")
    finished, lost = replace(failed, end="finished"), replace(failed, end="lost a peer")
    beats = {0: failed, 1: waiting, 2: waiting, 3: finished, 4: lost}
    text = describe_stall(beats, {2}, 0.0)
    assert ", while rank 1 waits in step 7 and rank 3 has finished and rank 0 ended with DataError: " in text
    assert ", while rank 0 ended with DataError: " in describe_stall({0: failed, 1: waiting}, {1}, 0.0)


def test_lost_rank_is_reported_with_a_remedy(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS", raising=False)
    beat = Beat(step=6, phase="training", machine="machine 1 (b)")
    lost_ranks = lost_rank_error({3: beat, 2: beat}, "a:1")
    assert str(lost_ranks).startswith("Ranks 2 and 3 on machine 1 (b) are gone, last seen in step 7: ")
    assert (lost_ranks.exit_code, "resume_from_checkpoint=True" in str(lost_ranks)) == (75, True)
    mistake = replace(beat, end="DataError", error="x.jsonl has shrunk: put it back.")
    failed = lost_rank_error({2: mistake}, "a:1")
    assert str(failed) == "Rank 2 on machine 1 (b) ended with DataError, in step 7: x.jsonl has shrunk: put it back."
    assert (failed.exit_code, failed.is_reported) == (2, False)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    lost_store = lost_rank_error(None, "a:1")
    assert str(lost_store).startswith("Machine 0, which serves the store of all ranks at a:1, does not answer: ")
    assert "torchrun starts all ranks again" in str(lost_store)


def test_watchdog_needs_no_timeout_but_refuses_zero():
    activity = supervision.Throughput().activity
    with supervision.Watchdog(activity, training.ParallelDims(), None):
        pass
    with pytest.raises(ValueError, match="above 0"):
        supervision.Watchdog(activity, training.ParallelDims(), 0)


def test_huge_time_limit_is_accepted():
    assert supervision.watched(lambda cfg: "done")(SimpleNamespace(hang_timeout_minutes=1e300)) == "done"


def test_errors_pass_through_the_watchdog():
    activity = supervision.Throughput().activity
    with pytest.raises(KeyError), supervision.Watchdog(activity, training.ParallelDims(), 60.0):
        raise KeyError("x")


def test_outside_the_loop_writing_counts_as_progress_and_waiting_does_not():
    activity = Activity(3, "saving")
    beats = []

    def look(*, written):
        time.sleep(0.6)  # the first look may find the CPU time of what was before
        signs = activity.signs
        activity.written += written
        time.sleep(1.0)
        beats.append(activity.signs - signs)

    def look_while_this_thread_sleeps(written):
        other_thread = threading.Thread(target=look, kwargs={"written": written})
        other_thread.start()
        other_thread.join()  # to wake up for a look would take CPU time, too
        return beats[-1]

    with supervision.Watchdog(activity, training.ParallelDims(), 4.0):
        assert look_while_this_thread_sleeps(written=0) == 0
        assert look_while_this_thread_sleeps(written=1) == 1
        activity.move("training")
        assert look_while_this_thread_sleeps(written=1) == 0
