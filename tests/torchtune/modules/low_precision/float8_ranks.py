"""What each of three ranks does: trains with products in float8, with and without float8 all-gathers, and alone."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchao.float8  # noqa: F401 - once, not in every rank
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.torchtune.training.parallel.traffic import Traffic
from torchtune import training
from torchtune.models.llama3_2 import llama3_2
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.low_precision import Float8Training
from torchtune.training import ParallelDims
from torchtune.training.parallel._shards import reshard

CPU, RANKS, STEPS = torch.device("cpu"), 3, 3
# Rows of most weights are no multiples of three, so that their shards differ in length.
SIZES = {"vocab_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "embed_dim": 32, "max_seq_len": 64}


def train(dims: ParallelDims, gathers_float8: bool, **options: Any) -> dict[str, Any]:
    """Losses in training and in evaluation, final weights, and the bytes that the first training step moves."""
    with torch.device("meta"):
        model = llama3_2(**SIZES, intermediate_dim=48)
    apply_conversions(model, [Float8Training(enable_fsdp_float8_all_gather=gathers_float8)])
    training.parallelize(model, dims, device=CPU, **options)
    model.to_empty(device=CPU)
    rng = torch.Generator().manual_seed(0)
    for module in model.modules():
        if hasattr(module, "rope_init"):
            module.rope_init()
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=rng) / 8
            if isinstance(parameter, DTensor):
                values = distribute_tensor(values, parameter.device_mesh, parameter.placements)
            parameter.copy_(values)
    training.set_activation_checkpointing(model, {TransformerSelfAttentionLayer})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, moved, tokens = [], {}, torch.randint(0, 64, (3, 21), generator=rng)
    with Traffic() as traffic:
        for _ in range(STEPS):
            loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            losses.append(loss.item())
            moved = moved or dict(traffic.moved)
            for parameter in model.parameters() if dims.mesh is None else ():
                parameter.grad *= RANKS  # ranks have the same rows, and gradients are sums
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                losses.append(float(model(tokens).square().mean()))
    reshard(model)
    weights = [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]
    return {"losses": losses, "weights": torch.cat([w.flatten() for w in weights]).tolist(), "moved": moved}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    alone = ParallelDims()
    found = {"alone": train(alone, True)}
    shards = ParallelDims.start(CPU, dp_shard=RANKS)
    found["as it was"] = train(shards, False)
    found["float8"] = train(shards, True)
    found["float8, kept"] = train(shards, True, reshard_after_forward=False)
    found["float8, copies"] = train(ParallelDims.start(CPU, dp_replicate=RANKS, dp_shard=1), True)
    if dist.get_rank() == 0:
        (folder / "float8.json").write_text(json.dumps(found))
