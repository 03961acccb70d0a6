"""Saves and is killed, again and again, and writes down what it found.

The children that save are forked: a kill then costs milliseconds, not an import.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from tests.torchtune.checkpoints.ranks import shard
from tests.torchtune.checkpoints.small import build, stored
from torchtune.training import FullModelHFCheckpointer

KILLS = {1: 6, 2: 8}  # by the number of ranks


class Fill(torch.optim.SGD):
    """Sets every weight and every momentum to a number."""

    number = 0

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.fill_(self.number)
            self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter)).fill_(self.number)


def save_forever(store: FullModelHFCheckpointer, folder: Path, size: int, behind: bool) -> None:
    """Checkpoint N holds the number N in every tensor of weights and state."""
    model = build(folder) if size == 1 else shard(build(folder), "fsdp")
    store.load_model(model)
    optimizer = Fill(model.parameters(), lr=0.1, momentum=0.9)
    state = {"momentum": {"x": torch.zeros(200_000)}, "optimizer": optimizer, "progress": {"step": 0}}
    point = store.find_resume_point()
    step = 0 if point is None else point.progress["step"]
    while True:
        step += 1
        optimizer.number = step
        optimizer.step()
        state["momentum"]["x"].fill_(step)
        state["progress"]["step"] = step
        store.save(f"step_{step}", model, state=state, async_save=behind)


def start(store: FullModelHFCheckpointer, folder: Path, size: int, behind: bool, life: int) -> list[int]:
    """Fork the processes that save; returns their ids."""
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - a rank whose neighbor was killed says so at length
            if size > 1:
                dist.init_process_group("gloo", f"file://{folder}/store_{life}", rank=rank, world_size=size)
            save_forever(store, folder, size, behind)
        pids.append(pid)
    return pids


def check(store: FullModelHFCheckpointer, folder: Path) -> int:
    """The step of the checkpoint to resume from, seen to be whole; 0 if there is none."""
    point = store.find_resume_point()
    if point is None:
        return 0
    step = point.progress["step"]
    assert point.path.name == f"step_{step}"
    assert all(bool((tensor == step).all()) for tensor in stored(point.path).values()), "torn weights"
    model = build(folder)
    store.load_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = {"momentum": {}, "optimizer": optimizer, "progress": {}}
    store.resume(point, model, state)
    assert all(bool((kept["momentum_buffer"] == step).all()) for kept in optimizer.state.values())
    assert all(bool((parameter == step).all()) for parameter in model.parameters())
    assert bool((state["momentum"]["x"] == step).all())
    assert not [path for path in store.output_dir.iterdir() if path.name.startswith(".")], "leftovers"
    return step


def is_saving(output: Path) -> bool:
    """Whether a checkpoint is incomplete."""
    return any(path.name.startswith(".step_") for path in output.iterdir())


def lives(folder: Path, output: Path, kills: int, size: int) -> Iterator[tuple[int, bool]]:
    """Yield the step found after every kill, and whether the kill fell into a save.

    Where a kill falls is the machine's mood: lives go on past ``kills`` until a quarter of that many fell into a save,
    and those more are killed as soon as a save is seen.
    """
    rng = random.Random(size)
    output.mkdir()
    hits = life = 0
    while life < kills or (hits < kills // 4 and life < 2 * kills):
        store = FullModelHFCheckpointer(folder, output_dir=output, keep_last_n_checkpoints=2)
        before = {path.name for path in output.iterdir()}
        pids = start(store, folder, size, behind=size > 1 and life % 2 == 1, life=life)
        deadline = time.monotonic() + 300
        while {path.name for path in output.iterdir()} == before and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.1 * size))
        while life >= kills and not is_saving(output) and time.monotonic() < deadline:
            time.sleep(0.0001)
        # One rank, and the others a little later, as a launcher does it; or all at once.
        for pid in rng.sample(pids, size):
            os.kill(pid, signal.SIGKILL)
            if rng.random() < 0.5:
                time.sleep(rng.uniform(0, 0.2))
        found = [os.waitpid(pid, 0)[1] for pid in pids]
        assert signal.SIGKILL in map(os.WTERMSIG, found), "the saving processes ended by themselves"
        hit = is_saving(output)
        yield check(store, folder), hit
        hits, life = hits + hit, life + 1


def main(folder: Path) -> None:
    """Live and be killed with one rank, and with two."""
    for size, kills in KILLS.items():
        found = list(lives(folder / "source", folder / f"output_{size}", kills, size))
        (folder / f"lives_{size}.json").write_text(json.dumps(found))
