"""What tune run hands to torchrun, and how a run that torchrun started ends."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings

import pytest
from torch.distributed.run import get_args_parser

from torchtune._cli import tune
from torchtune._cli.run import parse_command
from torchtune._cli.torchrun import SHUTDOWN_TIMEOUT, count_processes, run_torchrun, torchrun_arguments
from torchtune.utils import AGENT_VARIABLE, MACHINES_VARIABLE, UserError

RECIPE = """
import os, sys, time
from dataclasses import dataclass
from pathlib import Path

import neighbour
from torchtune import config, supervision, training, utils


@dataclass
class Settings:
    # What to do.
    todo: str


@config.parse
def recipe_main(cfg: Settings) -> int:
    rank = os.environ["RANK"]
    if cfg.todo.isdigit():
        return int(cfg.todo)
    if cfg.todo.startswith("all"):
        Path(f"{rank} of {os.environ['WORLD_SIZE']}: {neighbour.WORD}").touch()
        while len(list(Path().glob("* of *"))) < 2:  # the first process that ends takes the other with it
            time.sleep(0.01)
        error = utils.UserError("every rank lacks it.")
        if cfg.todo == "all, rank 0 late":
            error.raised_on_all = True
            time.sleep(0 if rank == "1" else 300)  # torchrun ends this process
        raise error
    if cfg.todo == "mistake":
        import torch  # here: most of what is done needs none, and starts at once

        dims = training.ParallelDims.start(torch.device("cpu"), dp_shard=-1)
        if rank == "1":
            raise utils.UserError("rank 1 alone lacks its file.")
        dims.sum(1)  # waits for the other
    if cfg.todo == "again":
        import torch

        life = os.environ["TORCHELASTIC_RESTART_COUNT"]
        if rank == "0":
            time.sleep(int(life))  # the other may read what this rank wrote in the life before
        dims = training.ParallelDims.start(torch.device("cpu"), dp_shard=-1)
        if rank == "1":
            os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"  # as on a machine where nobody had died
        Path(f"{rank}_{life}_{training.is_restart()}_{dims.sum(1)}").touch()
        os._exit(life == "0" and rank == "1")
    with supervision.StopSignal() as stop:
        Path(f"started_{rank}").write_text(str(os.getpid()))
        while not stop.requested:
            time.sleep(0.01)
        time.sleep(0.5)  # in which the other signal comes
    Path(f"saved_{rank}").touch()
    return 75


if __name__ == "__main__":
    sys.exit(recipe_main())
"""
HAS_SHUTDOWN_TIMEOUT = hasattr(get_args_parser().parse_args(["own.py"]), "shutdown_timeout")
# Positional arguments, and what tune run decides: which program torchrun runs, and how.
DECIDED = {"help", "training_script", "training_script_args", "module", "no_python"}
# What prints and ends, and needs a package that torch does not bring.
PRINTS = {"print_completion"}


def options():
    return [action for action in get_args_parser()._actions if action.dest not in DECIDED | PRINTS]


def value_of(action):
    """A value of the option, not its default, that looks as much as possible like something else."""
    if action.nargs == 0:
        return []
    if action.choices:
        return [next(str(choice) for choice in action.choices if choice != action.default)]
    return ["7"] if action.type in (int, float) else ["a=b,c=d"]


def test_tested_options_are_those_of_torchrun():
    names = {action.dest for action in get_args_parser()._actions}
    assert names >= DECIDED
    assert len(options()) >= 20


def ways_to_say(action):
    """An option in all its spellings, with a value apart and joined."""
    ways = []
    for name in action.option_strings:
        value = value_of(action)
        ways.append([name, *value])
        if value:
            separator = "=" if name.startswith("--") else ""
            ways.append([f"{name}{separator}{value[0]}"])
    return ways


@pytest.mark.parametrize("action", [pytest.param(action, id=action.dest) for action in options()])
def test_every_option_reaches_torchrun(action, monkeypatch):
    """What torchrun's own parser has is asked of it here, so that an option of a later release is tried as well."""
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    for arguments in ways_to_say(action):
        reaches(action, arguments)


def reaches(action, given):
    for recipe in ("own.py", None):
        words = list(given)
        if recipe is not None:
            words.append(recipe)
        command = parse_command([*words, "--config", "own.yaml", "a=b", "~c"])
        assert command.torchrun == given
        assert command.recipe == recipe
        assert command.config == "own.yaml"
        assert command.overrides == ["a=b", "~c"]
    wanted = vars(get_args_parser().parse_args([*given, "own.py"]))[action.dest]
    passed = torchrun_arguments(command.torchrun, ["own.py", "--config", "own.yaml", "a=b"])
    assert vars(passed)[action.dest] == wanted
    assert wanted != action.default
    assert passed.training_script_args == ["--config", "own.yaml", "a=b"]


@pytest.mark.parametrize("option", ["-m", "--module", "--no-python", "--no_python"])
def test_options_that_replace_the_recipe_are_refused(option):
    with pytest.raises(UserError, match="remove the option"):
        parse_command([option, "own", "--config", "x"])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--nproc-per-node 2", {"standalone": True, "rdzv_backend": "static", "shutdown_timeout": SHUTDOWN_TIMEOUT}),
        ("--nnodes 2 --rdzv-endpoint host:1", {"standalone": False, "rdzv_backend": "c10d", "node_rank": 0}),
        ("--nnodes 1:4 --rdzv-endpoint host:1", {"rdzv_backend": "c10d", "nnodes": "1:4"}),
        ("--nnodes 2 --rdzv-endpoint host:1 --node-rank 0", {"rdzv_backend": "static"}),
        ("--nnodes 2 --rdzv-endpoint host:1 --rdzv-backend static", {"rdzv_backend": "static"}),
        ("--nnodes 2 --node-rank 1 --master-addr host", {"rdzv_backend": "static", "node_rank": 1}),
        pytest.param(
            *("--shutdown-timeout 5", {"shutdown_timeout": 5}),
            marks=pytest.mark.skipif(not HAS_SHUTDOWN_TIMEOUT, reason="torchrun of this release has no such option"),
        ),
    ],
)
def test_defaults_follow_the_given_options(given, expected):
    passed = vars(torchrun_arguments(given.split(), ["own.py"]))
    defaults = get_args_parser().parse_args(["own.py"])
    assert {name: passed[name] for name in expected if hasattr(defaults, name)} == {
        name: value for name, value in expected.items() if hasattr(defaults, name)
    }


@pytest.mark.skipif(not HAS_SHUTDOWN_TIMEOUT, reason="torchrun of this release has no such option")
def test_workers_may_save_as_long_as_the_grace_period_lasts(monkeypatch):
    monkeypatch.setenv("TORCHTUNE_GRACE", "600.0")
    assert torchrun_arguments(["--nproc-per-node", "2"], ["own.py"]).shutdown_timeout == 600
    assert torchrun_arguments(["--shutdown-timeout", "5"], ["own.py"]).shutdown_timeout == 5


def test_options_in_the_environment_are_respected(monkeypatch):
    """Kubeflow's torch runtime sets PET_… for each of torchrun's options."""
    variables = {"NNODES": "2", "NPROC_PER_NODE": "4", "NODE_RANK": "0", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    for name, value in variables.items():
        monkeypatch.setenv(f"PET_{name}", value)
    args = torchrun_arguments(["--nproc-per-node", "4"], ["own.py"])
    assert (args.nnodes, args.node_rank, args.master_addr, args.standalone) == ("2", 0, "host", False)
    assert args.rdzv_backend == "static"
    assert count_processes(["--nproc-per-node", "4"]) == 8
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "host:29500")
    monkeypatch.delenv("PET_NODE_RANK")
    assert torchrun_arguments([], ["own.py"]).rdzv_backend == "c10d"


class Launched:
    """``tune run --nproc-per-node 2`` with more options in a fork of this process, which has imported torch."""

    def __init__(self, folder, *options):
        self._errors = folder / "stderr"
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                status = self._become(folder, ["tune", "run", "--nproc-per-node", "2", *options])
            except BaseException:  # noqa: BLE001 - whatever it is, the child must end here and say so
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)

    def _become(self, folder, argv):
        """What ``python -m torchtune._cli.tune`` does; returns its exit code."""
        os.chdir(folder)
        file = os.open(self._errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
        sys.stdout, sys.stderr = (open(descriptor, "w", buffering=1) for descriptor in (1, 2))  # noqa: SIM115
        logging.root.handlers.clear()  # those of pytest
        warnings.resetwarnings()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.alarm(300)  # by which it is killed if it hangs
        sys.argv = argv
        try:
            tune.main()
        except SystemExit as stop:
            if isinstance(stop.code, int):
                return stop.code
            return int(stop.code is not None)  # 1 for a text
        return 0

    def is_over(self):
        """Whether it has ended before it was waited for."""
        return os.waitpid(self.pid, os.WNOHANG)[0] != 0

    def wait(self):
        """Its exit code, and what it and its workers said."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return code, self._errors.read_text()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "own.py").write_text(RECIPE)
    (tmp_path / "neighbour.py").write_text('WORD = "hello"\n')
    (tmp_path / "own.yaml").write_text("todo: wait\n")
    return tmp_path


OWN = ("own.py", "--config", "own.yaml")


@pytest.mark.parametrize("how", ["to all of them", "Ctrl-C"])
def test_signal_makes_workers_save_once(folder, how):
    """Slurm tells every process of a step, and torchrun tells its workers again."""
    launched = Launched(folder, *OWN)
    pids = [folder / f"started_{rank}" for rank in range(2)]
    deadline = time.monotonic() + 300
    while not all(path.exists() and path.read_text() for path in pids):
        assert not launched.is_over()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if how == "Ctrl-C":
        os.kill(launched.pid, signal.SIGINT)
        expected_code = 130
    else:
        for path in pids:
            os.kill(int(path.read_text()), signal.SIGTERM)
        os.kill(launched.pid, signal.SIGTERM)
        expected_code = 75  # what the workers end with
    code, errors = launched.wait()
    assert code == expected_code, errors
    assert (folder / "saved_0").exists()
    assert (folder / "saved_1").exists()
    assert errors.count("the run saves and stops after this step") == 2
    assert "Traceback" not in errors


def test_unknown_exit_code_is_1(folder):
    code, errors = Launched(folder, *OWN, "todo='3'").wait()
    assert code == 1, errors


def test_user_error_of_one_process_ends_all(folder):
    code, errors = Launched(folder, *OWN, "todo=mistake").wait()
    assert code == 2, errors
    assert errors.count("error: rank 1 alone lacks its file.") == 1
    # A process that waits for the others may end later, and gloo then says so itself.
    messages = [line for line in errors.splitlines() if "/gloo/transport/" not in line]
    assert messages[-1].startswith("error: ")


@pytest.mark.parametrize("todo", ["all", "all, rank 0 late"])
def test_processes_import_from_the_folder_and_a_mistake_that_all_find_is_said_once_and_last(folder, todo):
    """In a process of its own: nothing else is printed, from its start to its end."""
    command = [sys.executable, "-m", "torchtune._cli.tune", "run", "--nproc-per-node", "2", *OWN, f"todo='{todo}'"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stdout == "Running with torchrun...\n"
    assert done.stderr.splitlines() == ["error: every rank lacks it."]
    assert {path.name for path in folder.glob("* of *")} == {"0 of 2: hello", "1 of 2: hello"}


def unused_address():
    """An address at which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def test_missing_machine_is_reported(folder):
    address = unused_address()
    options = ["--nnodes", "2", "--rdzv-endpoint", address, "--rdzv-conf", "join_timeout=2"]
    code, errors = Launched(folder, *options, *OWN).wait()
    assert code == 75, errors
    assert errors.splitlines()[-1].startswith(f"error: fewer machines than --nnodes 2 connected to {address} in time: ")
    assert "Traceback" not in errors


# What Kubernetes tells each of two pods, with its number; nobody assigns numbers then.
PODS = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1"}


def test_first_machine_reports_a_missing_one_of_a_static_rendezvous(folder, monkeypatch):
    for name, value in {**PODS, "PET_NODE_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    address = unused_address()
    code, errors = Launched(folder, f"--rdzv_endpoint={address}", "--rdzv-conf", "timeout=1", *OWN).wait()
    assert code == 75, errors
    sentence = errors.splitlines()[-1]
    assert sentence.startswith(f"error: fewer machines than --nnodes 2 connected to {address} in time: ")
    assert sentence.endswith("--rdzv-conf timeout=SECONDS waits longer.")


def test_wrong_port_is_reported_in_one_sentence(folder):
    """In a process of its own, because torch reads what it may print when it is imported."""
    address = unused_address()
    command = [sys.executable, "-m", "torchtune._cli.tune", "run", f"--rdzv_endpoint={address}"]
    command += ["--rdzv-conf", "timeout=1", *OWN]
    environment = {**os.environ, **PODS, "PET_NODE_RANK": "1"}
    environment.pop("TORCH_CPP_LOG_LEVEL", None)
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2, done.stderr
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith(f"error: {address} cannot be reached (The client socket has timed out")


@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_restarted_worker_knows_of_its_restart(folder, rendezvous):
    options = ["--max-restarts", "1"]
    if rendezvous == "static":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            options += ["--master-port", str(free.getsockname()[1])]
    code, errors = Launched(folder, *options, *OWN, "todo=again").wait()
    assert code == 0, errors
    notes = {path.name for path in folder.glob("[01]_*")}  # rank, life, whether it is a restart, [world size]
    assert notes == {"0_0_False_[2]", "0_1_True_[2]", "1_0_False_[2]", "1_1_True_[2]"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nnodes", "x"], "--nnodes x: give the number of machines"),
        (["--nnodes", "0"], "--nnodes 0: give the number of machines"),
        (["--nnodes", "3:2"], "--nnodes 3:2: give the number of machines"),
        (["--nnodes", "1:2:3"], "--nnodes 1:2:3: give the number of machines"),
        (["--nproc-per-node", "x"], "Unsupported nproc_per_node value: x: see torchrun --help"),
        (["--nnodes", "2", "--rdzv-endpoint", "host:port"], "'host:port' must be an integer between 0 and 65536"),
        (["--nnodes", "2", "--rdzv-endpoint", "host:1", "--rdzv-conf", "a"], "'a' must have a value"),
        (["--nnodes", "2", "--rdzv-endpoint", "host:1", "--rdzv-backend", "b"], "backend 'b' is not registered"),
    ],
)
def test_wrong_value_of_an_option_is_one_sentence(monkeypatch, options, words):
    for name in ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", AGENT_VARIABLE, MACHINES_VARIABLE):
        monkeypatch.setenv(name, "")  # set again after the test
    with pytest.raises(UserError) as caught:
        run_torchrun(torchrun_arguments(options, ["recipe.py"]))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
