"""Short runs on a mesh, and the same on one process, inside processes that were started once for all of them."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.devices import own_device
from tests.torchtune.checkpoints.small import randomize_adapter
from torchtune import training
from torchtune.checkpoints import FullModelHFCheckpointer
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, BatchLoader, collate_documents
from torchtune.models import from_hf_config
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.loss import LinearCrossEntropyLoss
from torchtune.modules.low_precision.quantizers import FakeQuantize
from torchtune.modules.peft import LoRA
from torchtune.training import ParallelDims
from torchtune.training.quantization import Int4WeightOnlyQuantizer

STEPS = 5
GLOBAL_BATCH = 4


class Conversations:
    """18 documents of 3 to 40 tokens, some without a label: the last step of an epoch leaves ranks without work.

    Those of one length cost a compiler one graph instead of two, of which the second, with a symbolic length, takes
    three times as long.
    """

    def __init__(self, packed: bool = False, one_length: bool = False) -> None:
        rng = torch.Generator().manual_seed(3)
        self._documents = []
        for index in range(18):
            length = 24 if one_length else int(torch.randint(3, 41, (1,), generator=rng))
            tokens = torch.randint(0, 256, (length,), generator=rng)
            labels = tokens.roll(-1)
            labels[: 0 if index % 3 else length // 2] = CROSS_ENTROPY_IGNORE_IDX
            labels[-1] = CROSS_ENTROPY_IGNORE_IDX
            if index % 7 == 0:
                labels[:] = CROSS_ENTROPY_IGNORE_IDX
            self._documents.append({"tokens": tokens, "labels": labels})
        self._packs = [self._documents[i : i + 3] for i in range(0, 18, 3)] if packed else self._documents

    def __len__(self) -> int:
        return len(self._packs)

    def __getitem__(self, index: int) -> Any:
        return self._packs[index]


def run(
    checkpoint: Path,
    dims: ParallelDims,
    *,
    adapter: str | None = None,
    packed: bool = False,
    accumulation: int = 1,
    checkpointing: bool = False,
    steps: int = STEPS,
    **options: Any,
) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    """Train for some steps; returns losses, gradients of the first step, and norms."""
    device = own_device()
    torch.manual_seed(0)
    with torch.device("meta"):
        model = from_hf_config(checkpoint)
        if adapter == "qat":
            apply_conversions(model, [FakeQuantize(Int4WeightOnlyQuantizer(groupsize=32).base_config)])
        elif adapter:
            apply_conversions(model, [LoRA(rank=4, alpha=8, apply_to_mlp=True, use_dora=adapter == "dora")])
    training.parallelize(model, dims, device=device, **options)
    FullModelHFCheckpointer(checkpoint).load_model(model, device=device)
    randomize_adapter(model)  # else A has no gradient in the first step
    if checkpointing:
        training.set_activation_checkpointing(model, {TransformerSelfAttentionLayer})
    loss_fn = LinearCrossEntropyLoss()
    loss_fn.set_model_output(model)
    loader = BatchLoader(
        Conversations(packed),
        batch_size=GLOBAL_BATCH // accumulation // dims.data_size,
        collate_fn=dims.collate(collate_documents),
        shuffle=True,
        seed=1,
        accumulation_steps=accumulation,
        rank=dims.data_rank,
        world_size=dims.data_size,
    )
    losses = []
    norms = []
    gradients = {}
    while len(losses) < steps:
        for batches in loader:
            batches = [batch.to(device) for batch in batches]
            loss, gradients = _step(model, loss_fn, batches, dims, gradients)
            losses.append(loss)
            norms.append(float(training.clip_grad_norm_(model.parameters(), 1.0)))
            if len(losses) == steps:
                break
            _descend(model)
    return losses, gradients, norms


@torch.no_grad()
def _descend(model: nn.Module) -> None:
    """Step of SGD on each rank's own elements: for each operation and shape, a DTensor would derive placements anew."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            value = parameter
            gradient = parameter.grad
            if isinstance(parameter, DTensor):
                value = parameter.to_local()
                gradient = gradient.to_local()
            value.sub_(gradient, alpha=0.1)
            parameter.grad = None


def _step(
    model: nn.Module, loss_fn: Any, batches: list[dict[str, Any]], dims: ParallelDims, first: dict[str, torch.Tensor]
) -> tuple[float, dict[str, torch.Tensor]]:
    counts = [int((batch["labels"] != CROSS_ENTROPY_IGNORE_IDX).sum()) for batch in batches]
    (num_labels,) = dims.sum(sum(counts))
    total = 0.0
    for batch, count in zip(batches, counts, strict=True):
        labels = batch.pop("labels")
        loss = loss_fn(model(**batch), labels) * (count / max(num_labels, 1))
        loss.backward()
        total += loss.item()
    if not first:
        first = {name: whole(p.grad).cpu().clone() for name, p in model.named_parameters() if p.grad is not None}
    return dims.sum(total)[0], first


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
