"""Runs of a recipe in which a rank stalls before the loop or after it: starts all at once, writes how they ended."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import torchtune.training.checkpointing._load as loading
from tests.recipes.forker import environments
from tests.recipes.runs import load_recipe, write_config
from torchtune.config import load_and_check

NAME = "full_finetune_distributed"
MINUTES = 0.1
# name: (ranks, the line before which the last rank stalls)
RUNS = {
    "set-up": (2, "        self.loss_fn = setup_loss(config.instantiate(cfg.loss), self.model)\n"),
    "load": (2, None),
    "close": (2, "            self.metric_logger.close()\n"),
    "alone": (1, "        self.loss_fn = setup_loss(config.instantiate(cfg.loss), self.model)\n"),
}


def sleep_forever() -> None:
    while True:
        time.sleep(1000)


def stall_if_last() -> None:
    if int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1:
        sleep_forever()


def stall_while_reading() -> None:
    """Let the last rank stall after it has read a few tensors, as a file system that does not answer any more."""
    count, fill = 0, loading.sign_of_life

    def read() -> None:
        nonlocal count
        count += 1
        if count == 5:
            stall_if_last()
        fill()

    loading.sign_of_life = read


def run(name: str, module: Any, config: Path) -> int:
    """One process of one run."""
    if name == "load":
        stall_while_reading()
    settings = [f"output_dir={config.parent / name}", f"hang_timeout_minutes={MINUTES}", "log_level=INFO"]
    return module.recipe_main(load_and_check(config, settings, module.recipe_main))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    config = write_config(NAME, folder, folder / "output")
    waiting: dict[int, tuple[str, str]] = {}
    call = "__import__('tests.torchtune.training.parallel.stalls', fromlist=['x']).stall_if_last()"
    for name, (size, line) in RUNS.items():
        kind = NAME if size > 1 else "full_finetune_single_device"
        indent = "" if line is None else line[: len(line) - len(line.lstrip())]
        module = load_recipe(kind, folder, None if line is None else {line: f"{indent}{call}\n{line}"})
        if size == 1:
            config = write_config(kind, folder, folder / "output")
        for environment in environments(size):
            rank = environment.get("RANK", "0")
            pid = os.fork()
            if pid == 0:
                descriptor = os.open(folder / f"{name}_{rank}.screen", os.O_WRONLY | os.O_CREAT)
                os.dup2(descriptor, 1)
                os.dup2(descriptor, 2)
                os.environ.update(environment)
                os._exit(run(name, module, config))
            waiting[pid] = (name, rank)
    codes: dict[str, dict[str, int]] = {name: {} for name in RUNS}
    for _ in range(len(waiting)):
        pid, status = os.wait()
        name, rank = waiting[pid]
        codes[name][rank] = os.waitstatus_to_exitcode(status)
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
