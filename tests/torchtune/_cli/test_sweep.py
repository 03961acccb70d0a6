"""``tune sweep``: its settings, its rungs, and a sweep of real runs that is stopped and continued."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.recipes.killing import shared_forker, wait_for
from tests.recipes.runs import write_config
from tests.tiny import read_lines
from torchtune._cli.sweep import Dimension, SweepError, draw_trials, parse_dimension, plan_rungs
from torchtune.utils import FolderLock

SWEEP = Path(__file__).with_name("sweep_of_forks.py")


@pytest.mark.parametrize(
    ("override", "dimension"),
    [
        ("optimizer.lr=1e-5:1e-3:log", Dimension("optimizer.lr", low=1e-5, high=1e-3, is_log=True)),
        ("optimizer.weight_decay=0:.5", Dimension("optimizer.weight_decay", low=0, high=0.5)),
        ("model.lora_rank=4:64:log", Dimension("model.lora_rank", low=4, high=64, is_log=True, is_integer=True)),
        ("batch_size=8,16", Dimension("batch_size", values=("8", "16"))),
        ("epochs=2", None),
        ("modules=[q_proj,v_proj]", None),
        ("prompt='a, b'", None),
        ("source=s3://bucket/file", None),
    ],
)
def test_ranges_and_lists_of_values_vary(override, dimension):
    assert parse_dimension(override) == dimension


@pytest.mark.parametrize(
    ("override", "words"),
    [("lr=1e-3:1e-5", "the first bound must be less"), ("decay=0:1:log", "must be above 0: leave out :log")],
)
def test_range_without_numbers_is_refused(override, words):
    with pytest.raises(SweepError, match=words):
        parse_dimension(override)


def test_trials_cover_each_setting_evenly():
    dimensions = [
        Dimension("lr", low=1e-5, high=1e-1, is_log=True),
        Dimension("rank", low=1, high=9, is_integer=True),
        Dimension("batch_size", values=("8", "16")),
    ]
    trials = draw_trials(dimensions, 4, seed=0)
    rates, ranks, sizes = (sorted(column) for column in zip(*trials, strict=True))
    # The middles of four parts: 10 ** (-5 + 4 * (0.125, 0.375, 0.625, 0.875)) and 1 + 8 * (…).
    rates = sorted(float(rate.removeprefix("lr=")) for rate in rates)
    assert rates == pytest.approx([3.162e-5, 3.162e-4, 3.162e-3, 3.162e-2])
    assert ranks == ["rank=2", "rank=4", "rank=6", "rank=8"]
    assert sizes == ["batch_size=16"] * 2 + ["batch_size=8"] * 2
    assert draw_trials(dimensions, 4, seed=0) == trials


def test_equal_trials_run_once():
    trials = draw_trials([Dimension("batch_size", values=("8", "16"))], 8, seed=0)
    assert sorted(trials) == [["batch_size=16"], ["batch_size=8"]]


@pytest.mark.parametrize(
    ("num_trials", "rungs"),
    [
        (2, [(2, 100)]),
        (3, [(3, 50), (2, 100)]),
        (8, [(8, 20), (4, 50), (2, 100)]),
        (9, [(9, 10), (8, 20), (4, 50), (2, 100)]),
    ],
)
def test_half_of_the_trials_goes_on_for_twice_as_many_steps(num_trials, rungs):
    planned = plan_rungs(num_trials, every=10)
    assert [(rung.num_trials, rung.steps(100)) for rung in planned] == rungs


def test_rung_of_a_short_run_has_a_step():
    assert [rung.steps(3) for rung in plan_rungs(16)] == [1, 1, 1, 3]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["optimizer.lr=1e-5:1e-3"], "--output is missing"),
        (["--output", "{folder}"], "no setting varies"),
        (
            ["--output", "{folder}", "--trials", "1", "epochs=1,2"],
            "--trials is 1: it must be a whole number of at least 2",
        ),
        (["--output", "{folder}", "optimizer.lr=a,b"], "optimizer.lr"),
        (["--output", "{folder}", "epochz=1,2"], "epochz"),
        (["--output", "{folder}", "epochs=1,2", "--metric", "val_loss"], "the trials do not validate"),
        (["--output", "{folder}", "epochs=1,2", "--metric", "best:loss"], "write NAME, or max:NAME"),
        (["--output", "{folder}", "epochs=1,2", "--ray", "--slurm"], "choose one of them"),
        (["--output", "{folder}", "epochs=1,2", "--ray"], "pip install 'torchtune[ray]'"),
        (["--nnodes", "2", "--output", "{folder}", "epochs=1,2", "--ray"], "each trial runs on one node"),
        (
            ["--nproc-per-node", "gpu", "--output", "{folder}", "epochs=1,2", "--ray"],
            "give a number, which Ray reserves",
        ),
    ],
)
def test_sweep_that_cannot_start_is_refused_before_training(tune, tmp_path, monkeypatch, arguments, words):
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    config = write_config("full_finetune_single_device", tmp_path, tmp_path / "run")
    arguments = [argument.format(folder=tmp_path / "sweep") for argument in arguments]
    refused = tune("sweep", "--config", config, *arguments)
    assert refused.code == 2
    assert words in refused.err
    assert not (tmp_path / "sweep").exists()


def test_slurm_script_has_a_whole_run_for_each_trial(tune, tmp_path):
    config = write_config("full_finetune_single_device", tmp_path, tmp_path / "run")
    options = ["--output", tmp_path / "sweep", "--trials=2", "--slurm"]
    script = tune("sweep", "--config", config, *options, "epochs=1,2").out
    (tmp_path / "trials.sh").write_text(script.replace("srun ", "echo "))
    assert "#SBATCH --array=0-1" in script
    epochs = []
    for task in ("0", "1"):
        environment = {"SLURM_ARRAY_TASK_ID": task, "PATH": "/usr/bin:/bin"}
        command = ["bash", tmp_path / "trials.sh"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        words = done.stdout.split()
        assert words[:3] == ["tune", "run", "full_finetune_single_device"]
        epochs += [word for word in words if word.startswith("epochs=")]
    assert sorted(epochs) == ["epochs=1", "epochs=2"]
    assert not (tmp_path / "sweep").exists()


HOLD = """
import sys
from pathlib import Path
from torchtune.utils import FolderLock
FolderLock(Path(sys.argv[1]), name=sys.argv[2]).acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("part", "lock"), [(".", ".sweep.lock"), ("trial_00", ".run.lock")])
def test_sweep_does_not_mix_with_one_that_still_runs(tune, tmp_path, monkeypatch, part, lock):
    """The run of a sweep that was killed trains on: its trial must not count as failed."""
    monkeypatch.setattr("torchtune.utils._folder_lock._PATIENCE", 0.1)
    config = write_config("full_finetune_single_device", tmp_path, tmp_path / "run")
    folder = tmp_path / "sweep" / part
    folder.mkdir(parents=True)
    command = [sys.executable, "-c", HOLD, str(folder), lock]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout.readline() == "held\n"
        refused = tune("sweep", "--config", config, "--output", tmp_path / "sweep", "epochs=1,2")
        owner.stdin.close()
    assert refused.code == 2
    assert "is in use by another run" in refused.err
    assert "failed" not in refused.out
    assert not (tmp_path / "sweep" / "trial_00" / "output.txt").exists()


def test_sweep_that_is_stopped_goes_on_and_finds_the_best(tmp_path):
    forker = shared_forker()
    config = write_config("full_finetune_single_device", tmp_path, tmp_path / "run", epochs=2)
    folder = tmp_path / "sweep"

    def start(screen, *overrides):
        # One of the learning rates is too small to learn anything.
        settings = ["optimizer.lr=1e-9,1e-2,3e-2", "--trials", "3", "--output", str(folder), *overrides]
        (pid,) = forker.start_script(SWEEP, ["sweep", "--config", str(config), *settings], screen, 1)
        return pid

    first_screen = tmp_path / "first"
    sweep = start(first_screen)
    second_log = folder / "trial_01" / "logs" / "log.jsonl"
    wait_for(second_log.exists, [sweep])
    os.kill(sweep, signal.SIGTERM)
    assert forker.wait() == [75], first_screen.read_text()

    second_screen = tmp_path / "second"
    start(second_screen)
    code = forker.wait()
    output = second_screen.read_text()
    assert code == [0], output
    table = output[output.index("\ntrial ") :].splitlines()
    last = next(line for line in table if line.endswith("optimizer.lr=1e-9"))
    assert table.index(last) == 4
    assert "on the same rows" in output
    steps_of_trials = []
    for log in folder.glob("trial_*/logs/log.jsonl"):
        steps_of_trials.append(max(record["step"] for record in read_lines(log)))
    assert sorted(steps_of_trials)[1:] == [24, 24]

    third_screen = tmp_path / "third"
    start(third_screen, "epochs=3")
    assert forker.wait() == [2]
    assert "is of a sweep with other settings" in third_screen.read_text()


@pytest.mark.slow
def test_trials_run_side_by_side_on_ray_with_the_results_of_one_after_the_other(tmp_path):
    pytest.importorskip("ray", reason="pip install 'torchtune[ray]'")
    config = write_config("full_finetune_single_device", tmp_path, tmp_path / "run", epochs=40)
    settings = ["optimizer.lr=1e-9,1e-2,3e-2", "--trials", "3", "--output", "sweep"]
    command = [sys.executable, "-m", "torchtune._cli.tune", "sweep", "--config", str(config), *settings]
    folders = [tmp_path / name for name in ("in_turn", "on_ray")]
    for folder in folders:
        folder.mkdir()
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    options = {"cwd": folders[1], "env": environment, "text": True}
    sweep = subprocess.Popen([*command, "--ray"], stderr=subprocess.PIPE, **options)
    logs = [folders[1] / "sweep" / f"trial_0{number}" / "logs" / "log.jsonl" for number in range(2)]
    while not any(log.exists() for log in logs) and sweep.poll() is None:
        time.sleep(0.1)
    sweep.send_signal(signal.SIGTERM)
    _, errors = sweep.communicate(timeout=300)
    assert sweep.returncode == 75, errors
    for folder in folders[1].glob("sweep/trial_*"):
        FolderLock(folder).check_unused()  # nothing trains on
    on_ray = subprocess.run([*command, "--ray"], capture_output=True, check=False, **options)
    assert on_ray.returncode == 0, on_ray.stderr
    in_turn = subprocess.run(command, capture_output=True, text=True, cwd=folders[0], check=True)
    tables = []
    for done in (in_turn, on_ray):
        table = done.stdout[done.stdout.index("\ntrial ") : done.stdout.index("\nbest ")]
        tables.append(table)
    assert tables[0] == tables[1]
    assert tables[0].count("480") == 2
