"""Saves and is killed, again and again: run as a program, prints what it found.

One process imports everything, and forks the children that save: a kill then costs milliseconds, not an import.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from tests.torchtune.training.checkpointing.small import build, load, stored
from torchtune.training import FullModelHFCheckpointer


def save_forever(store: FullModelHFCheckpointer, folder: Path) -> None:
    """Checkpoint N holds the number N in every tensor of weights and state."""
    model = load(folder)
    state = {"momentum": {"x": torch.zeros(200_000)}, "progress": {"step": 0}}
    point = store.find_resume_point()
    step = 0 if point is None else point.progress["step"]
    while True:
        step += 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
        state["momentum"]["x"].fill_(step)
        state["progress"]["step"] = step
        store.save(f"step_{step}", model, state=state)


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
    state = {"momentum": {}, "progress": {}}
    store.resume(point, model, state)
    assert all(bool((parameter == step).all()) for parameter in model.parameters())
    assert bool((state["momentum"]["x"] == step).all())
    assert not [path for path in store.output_dir.iterdir() if path.name.startswith(".")], "leftovers"
    return step


def main(folder: Path, output: Path, kills: int) -> None:
    """Print the step found after every kill, and whether the kill fell into a save."""
    rng = random.Random(0)
    store = FullModelHFCheckpointer(str(folder), output_dir=str(output), keep_last_n_checkpoints=2)
    for _ in range(kills):
        pid = os.fork()
        if pid == 0:
            save_forever(store, folder)
        deadline = time.monotonic() + 60
        before = {path.name for path in output.iterdir()}
        while {path.name for path in output.iterdir()} == before and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.1))
        os.kill(pid, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL, "the saving process ended by itself"
        hit = any(path.name.startswith(".step_") for path in output.iterdir())
        print(check(store, folder), int(hit), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
