"""What every rank does: trains the cells that need two of them, and writes what came of each."""

import json
from pathlib import Path

import torch
import torch.distributed as dist

from tests.devices import own_device
from tests.torchtune.training.matrix.cells import SIZES, Run, train
from torchtune.training import ParallelDims
from torchtune.utils import UserError


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    results: list[dict] = []
    for cell in json.loads((folder / "cells.json").read_text()):
        dims = ParallelDims.start(own_device(), **SIZES[cell["mesh"]])
        try:
            run: Run = train(folder / "model", cell, dims)
            results.append(vars(run))
        except UserError as error:
            results.append({"refused": str(error)})
        except Exception as error:  # noqa: BLE001 - whatever it is, the test of this cell must tell it
            results.append({"crashed": repr(error)})
    if dist.get_rank() == 0:
        torch.save(results, folder / "found.pt")
    dist.barrier()
    dist.destroy_process_group()
