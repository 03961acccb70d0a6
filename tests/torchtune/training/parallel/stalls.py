"""Runs of a recipe in which a rank stalls before the loop or after it, and what went otherwise than it should."""

import os
import re
import time
from pathlib import Path

import torch

import torchtune.checkpoints._load as loading
from tests.recipes.runs import load_recipe, write_config
from tests.torchtune.training.parallel.standing import note_fault, run_all
from torchtune.config import load_and_check
from torchtune.supervision import HANG_EXIT_CODE

# Number of ranks: recipe.
KINDS = {1: "full_finetune_single_device", 2: "full_finetune_distributed"}
LIMITS = (6.0, 30.0)  # the longer one for runs that the machine was too slow for
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
        note_fault()
        sleep_forever()


def stall_while_reading() -> None:
    """Let the last rank stall after it has read a few tensors, as a file system that does not answer any more."""
    count = 0
    fill = loading.sign_of_life

    def read() -> None:
        nonlocal count
        count += 1
        if count == 5:
            stall_if_last()
        fill()

    loading.sign_of_life = read


def run(name: str, rank: int, limit: float, folder: Path) -> int:
    """One process of one run."""
    if name == "load":
        stall_while_reading()
    size, line = RUNS[name]
    changes = None
    if line is not None:
        indent = line[: len(line) - len(line.lstrip())]
        call = f"__import__('{__name__}', fromlist=['x']).stall_if_last()"
        changes = {line: f"{indent}{call}\n{line}"}
    rank_folder = folder / f"recipe_{rank}"
    rank_folder.mkdir()
    module = load_recipe(KINDS[size], rank_folder, changes)
    config = folder.parents[1] / f"{KINDS[size]}.yaml"
    settings = [f"output_dir={folder}", f"hang_timeout_minutes={limit / 60}", "log_level=INFO"]
    return module.recipe_main(load_and_check(config, settings, module.recipe_main))


SENTENCES = {
    "set-up": r"Rank 1 has not moved for \d+ s, set-up, at stalls\.py:\d+ in sleep_forever, while rank 0 waits \S.*: "
    r"its stack is in \S*set-up/logs/rank_1\.log\.",
    "load": r"Rank 1 has not moved for \d+ s, loading the checkpoint, at stalls\.py:\d+ in sleep_forever, while rank 0 "
    r"waits loading the checkpoint: its stack is in \S*rank_1\.log\.",
    "close": r"Rank 1 has not moved for \d+ s, closing after step 6, at stalls\.py:\d+ in sleep_forever.*",
    "alone": r"Rank 0 has not moved for \d+ s, set-up, at stalls\.py:\d+ in sleep_forever: its stack is in .*\.",
}


def look(name: str, folder: Path, codes: dict[int, int], limit: float) -> str:
    """What is not as it should be: the run ends, one sentence says why, and the log holds the stack."""
    last = RUNS[name][0] - 1
    screens = "".join(path.read_text() for path in sorted(folder.glob("screen_*")))
    if codes.get(last) != HANG_EXIT_CODE or (name != "close" and set(codes.values()) != {HANG_EXIT_CODE}):
        return f"exit codes are {codes}; screens:\n{screens}"
    sentences = [
        sentence[1] for line in screens.splitlines() if (sentence := re.search(r"(Ranks? \d.* moved .*)", line))
    ]
    if len(sentences) != 1 or not re.fullmatch(SENTENCES[name], sentences[0]):
        return f"{sentences} are not one that matches {SENTENCES[name]!r}"
    log = (folder / "logs" / f"rank_{last}.log").read_text()
    return "" if "in sleep_forever\n" in log else f"the log of rank {last} has no stack:\n{log}"


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for kind in KINDS.values():
        write_config(kind, folder, folder / "output").rename(folder / f"{kind}.yaml")
    run_all({name: size for name, (size, _) in RUNS.items()}, LIMITS, folder, run, look)
