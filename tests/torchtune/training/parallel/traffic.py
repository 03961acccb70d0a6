"""What every rank does: counts the bytes that a step of every composition moves, and writes them beside formulas."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from torchtune import training
from torchtune.models import from_hf_config
from torchtune.modules.loss import LinearCrossEntropyLoss
from torchtune.training import ParallelDims

CPU = torch.device("cpu")
RANKS = 4
ROWS, LENGTH = 1, 64
# Each collective's least traffic per rank, relative to what it leaves or takes on one rank, times (p - 1) / p.
FACTORS = {"_allgather_base_": (0, 1), "_reduce_scatter_base_": (1, 1), "allreduce_": (0, 2), "alltoall_base_": (0, 1)}


class Traffic(TorchDispatchMode):
    """Adds up the least bytes that the collectives of a block move to each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func._schema.name.split("::")
        if namespace == "c10d":
            position, factor = FACTORS[name]
            tensors = args[position] if isinstance(args[position], list | tuple) else [args[position]]
            group = dist.ProcessGroup.unbox(args[1 if name == "allreduce_" else 2])
            share = (group.size() - 1) / group.size()
            size = sum(t.numel() * t.element_size() for t in tensors)
            self.moved[name] = self.moved.get(name, 0) + factor * share * size
        return func(*args, **(kwargs or {}))


def measured(checkpoint: Path, dims: ParallelDims) -> dict[str, float]:
    """Bytes by kind of collective, of forward and backward."""
    with torch.device("meta"):
        model = from_hf_config(checkpoint)
    training.parallelize(model, dims, device=CPU)
    model.to_empty(device=CPU)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    loss_fn = LinearCrossEntropyLoss()
    loss_fn.set_model_output(model)
    tokens = torch.arange(LENGTH)[None]

    def step() -> None:
        batch = dims.collate(lambda _: {"tokens": tokens, "labels": tokens.roll(-1)})([])
        labels = batch.pop("labels")
        loss_fn(model(**batch), labels).backward()

    step()
    with Traffic() as traffic:
        step()
    return traffic.moved


def formulas(checkpoint: Path) -> dict[str, dict[str, float]]:
    """What docs/distributed.rst says, for four ranks in the dimension (two for copies and their shards)."""
    with torch.device("meta"):
        model = from_hf_config(checkpoint)
    d = model.description
    whole = 4 * sum(p.numel() for p in model.parameters())
    layers = 4 * sum(p.numel() for p in model.layers.parameters())
    f, hidden = (RANKS - 1) / RANKS, 4 * ROWS * LENGTH * d.embed_dim
    heads = (d.q_dim + max(d.kv_dim, RANKS * d.head_dim)) / d.embed_dim
    return {
        "fsdp": {"_allgather_base_": f * (whole + layers), "_reduce_scatter_base_": f * whole},
        "hsdp": {
            "_allgather_base_": (whole + layers) / 2,
            "_reduce_scatter_base_": whole / 2,
            "allreduce_": whole / 2,
        },
        "cp": {
            "_allgather_base_": f * (whole + layers),
            "_reduce_scatter_base_": f * whole,
            "alltoall_base_": 4 * f * hidden * d.num_layers * heads / RANKS,
        },
        "tp": {
            "_allgather_base_": 0.5 * hidden * (4 * d.num_layers + 2),
            "_reduce_scatter_base_": 0.5 * hidden * (4 * d.num_layers + 2),
        },
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    checkpoint = folder / "tied_True"
    sizes = {"fsdp": {"dp_shard": 4}, "hsdp": {"dp_replicate": 2, "dp_shard": 2}, "cp": {"cp": 4}}
    found = {
        name: measured(checkpoint, ParallelDims.start(CPU, **{"dp_shard": 1, **size})) for name, size in sizes.items()
    }
    # with two copies, whose gradients are summed too: four ranks are more than this model has key heads
    found["tp"] = measured(checkpoint, ParallelDims.start(CPU, dp_replicate=2, dp_shard=1, tp=2))
    if dist.get_rank() == 0:
        (folder / "traffic.json").write_text(json.dumps([found, formulas(checkpoint)]))
    dist.destroy_process_group()
