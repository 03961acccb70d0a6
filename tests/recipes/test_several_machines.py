"""Two machines, each an agent of torchrun on this one: either is lost, and the other ends, says so, and can resume."""

import os
import re
import signal
import socket
import subprocess
import time

import pytest

from tests.recipes.killing import Forker, alive, losses, said, steps_logged
from tests.recipes.runs import RECIPES, after_each_step, write_config

NAME = "full_finetune_distributed"
STEPS = 24
SETTINGS = {"epochs": 4, "batch_size": 2, "save_every_n_steps": 5, "checkpointer__keep_last_n_checkpoints": 2}
# Long enough for a machine that is busy with other tests; what is waited for takes seconds.
PATIENCE = 400


class Machines:
    """Agents in folders of their own; the first one has rank 0.

    Args:
        folder: holds a folder of each machine.
        count: number of machines.
        ranks: number of ranks on each.
    """

    def __init__(self, folder, count=2, ranks=1):
        self.folder = folder
        self.count = count
        self.ranks = ranks
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        self.forkers: list[Forker] = []
        self.agents: list[int] = []
        self.workers: list[int] = []

    def start(self, recipe, config, *overrides):
        """Start the command of one more machine."""
        folder = self.folder / f"machine_{len(self.agents)}"
        folder.mkdir(exist_ok=True)
        options = ["--nnodes", str(self.count), "--nproc-per-node", str(self.ranks), "--rdzv-endpoint", self.endpoint]
        options += ["--local-addr", "127.0.0.1"]
        self.forkers.append(Forker())
        environment = {"RES_OPTIONS": "timeout:1 attempts:1"}
        agent = self.forkers[-1].start_torchrun(options, recipe, config, folder / "screen", *overrides, **environment)
        self.agents.append(agent)
        if len(self.agents) == 1:  # it serves the rendezvous, even if its start takes longer than the second one's
            self.until(self._is_served)

    def _is_served(self):
        """Whether something listens at the endpoint."""
        host, port = self.endpoint.split(":")
        with socket.socket() as client:
            return client.connect_ex((host, int(port))) == 0

    def screen(self, number):
        """Everything that a machine has shown."""
        return (self.folder / f"machine_{number}" / "screen").read_text()

    def until(self, condition, *, running=True):
        """Wait for a condition, while all machines run."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, self.screens()
            assert not running or all(map(alive, self.agents)), self.screens()
            time.sleep(0.05)

    def find_workers(self):
        """The worker of each machine, the last one if there are several."""
        workers_of = self.find_all_workers()
        self.workers = [workers_of[agent][-1] for agent in self.agents]
        return self.workers

    def find_all_workers(self):
        """Agent -> its workers."""
        processes = subprocess.run(
            ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
        )
        rows = [line.split(None, 2) for line in processes.stdout.splitlines()]
        workers_of = {agent: [] for agent in self.agents}
        for pid, parent, args in rows:
            if "--config" in args and int(parent) in workers_of:
                workers_of[int(parent)].append(int(pid))
        return workers_of

    def screens(self):
        """All of them, for messages."""
        return "\n".join(self.screen(number)[-4000:] for number in range(len(self.agents)))

    def close(self):
        """End what is left."""
        for pid in [*filter(alive, self.agents), *self.workers]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for forker in self.forkers:
            forker.close()


@pytest.fixture
def machines(tmp_path):
    started = Machines(tmp_path)
    yield started
    started.close()


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "with_worker"), [(1, False), (0, True)], ids=["the agent", "the first machine"])
def test_the_other_machine_ends_and_the_run_resumes(machines, forker, tmp_path, lost, with_worker):
    output_dir = tmp_path / "output"
    recipe = tmp_path / "mine.py"
    waits = "import time; time.sleep(2 * (self.global_step >= 7 and self.resume_point is None))"
    ((line, waiting),) = after_each_step(waits).items()
    source = (RECIPES / f"{NAME}.py").read_text()
    assert source.count(line) == 1
    recipe.write_text(source.replace(line, waiting))
    config = write_config(NAME, tmp_path, output_dir, **SETTINGS)
    for _ in range(2):
        machines.start(str(recipe), config)
    machines.until(lambda: steps_logged(output_dir) >= 7)
    worker = machines.find_workers()[lost]
    survivor = machines.agents[1 - lost]
    os.kill(machines.agents[lost], signal.SIGKILL)
    if with_worker:
        os.kill(worker, signal.SIGKILL)
    machines.until(lambda: not alive(worker), running=False)
    machines.until(lambda: not alive(survivor), running=False)
    screen = machines.screen(1 - lost)
    assert machines.forkers[1 - lost].wait() == [75], screen
    # Said by the command where a collective fails, as those of gloo do, and else by the watchdog.
    errors = re.findall(r"^(?:error: |ERROR:torchtune:)(.*)", screen, re.MULTILINE)
    assert errors, screen
    assert all(
        re.match(rf"(Ranks? {lost} on machine {lost} \(|Machine 0, |{machines.endpoint} has stopped)", error)
        for error in errors
    ), screen
    assert all("resume_from_checkpoint=True" in error for error in errors), screen
    assert "Traceback" not in screen
    assert "frame #" not in screen
    assert len(losses(output_dir)) < STEPS
    if not with_worker:
        assert f"process {machines.agents[lost]}, which started it, has died" in machines.screen(lost)
    forker.start(recipe, config, "resume_from_checkpoint=True", ranks=2)
    assert forker.wait() == [0, 0], said(config)
    assert list(losses(output_dir)) == list(range(1, STEPS + 1))
