"""What every rank does: runs every case of ``cases_RANKS.json`` and writes how far it is from one process."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.devices import own_device
from tests.torchtune.training.parallel.compositions import run
from torchtune.training import ParallelDims


def differences(found: Any, wanted: Any) -> dict[str, float]:
    """Largest relative differences of losses, norms and gradients."""
    losses, gradients, norms = found
    losses_one, gradients_one, norms_one = wanted
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(losses, losses_one, strict=True)),
        "norm": max(abs(a - b) / abs(b) for a, b in zip(norms, norms_one, strict=True)),
        "gradient": max(
            float((gradients[name] - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))
            for name, wanted in gradients_one.items()
        ),
        "missing": len(gradients.keys() ^ gradients_one.keys()),
    }


def references(folder: Path, cases: dict[str, Any]) -> dict[str, Path]:
    """Where one process's results for every case lie; each rank computes its share of those that are not there."""
    todo_of_name: dict[str, tuple[Path, Path, dict[str, Any]]] = {}
    for name, (_, settings, _) in cases.items():
        checkpoint, settings = source(folder, settings)
        key = hashlib.sha256(f"{checkpoint} {settings}".encode()).hexdigest()[:16]
        todo_of_name[name] = (folder / f"alone_{key}.pt", checkpoint, settings)
    todo = {path: job for path, *job in todo_of_name.values()}
    for path in sorted(todo)[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]:
        if not path.exists():  # asked here: a rank that is late would count its share in a shorter list
            checkpoint, settings = todo[path]
            torch.save(run(checkpoint, ParallelDims(), **settings), path)
    return {name: path for name, (path, *_) in todo_of_name.items()}


def source(folder: Path, settings: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The checkpoint that a case starts from, and the settings of its run."""
    settings = dict(settings)
    return folder / settings.pop("source", f"tied_{settings.pop('tied', True)}"), settings


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    size = os.environ["WORLD_SIZE"]
    cases = json.loads((folder / f"cases_{size}.json").read_text())
    alone = references(folder, cases)  # before there are groups: these runs know of no other process
    outcomes = {}
    for name, (sizes, settings, options) in cases.items():
        checkpoint, settings = source(folder, settings)
        dims = ParallelDims.start(own_device(), **{"dp_shard": 1, **sizes})
        dist.barrier()  # all references are there
        outcome = run(checkpoint, dims, **settings, **options)
        if dist.get_rank() == 0:
            outcomes[name] = differences(outcome, torch.load(alone[name]))
    if dist.get_rank() == 0:
        (folder / f"outcomes_{size}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()
