"""Two steps of a composition, set up in the order in which recipes do it, and what they left."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torchao.optim

from tests.devices import DEVICE, own_device
from tests.torchtune.checkpoints.small import build
from tests.torchtune.training.parallel.compositions import GLOBAL_BATCH, Conversations, whole
from tools.composition_table import Cell
from torchtune import estimate, training
from torchtune.checkpoints import FullModelHFCheckpointer
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, BatchLoader, collate_documents
from torchtune.modules.conversion import Conversion, run_post_optimizer_hooks, run_pre_optimizer_hooks
from torchtune.modules.loss import LinearCrossEntropyLoss, setup_loss
from torchtune.modules.low_precision import Float8Training, QuantizeBase
from torchtune.modules.low_precision.quantizers import FakeQuantize
from torchtune.modules.peft import LoRA, require_adapters
from torchtune.training import ParallelDims
from torchtune.training.optim import _low_precision_optimizer
from torchtune.training.quantization import Int8DynActInt4WeightQuantizer
from torchtune.utils import UserError

STEPS = 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIZES: dict[str, dict[str, int]] = {"one": {}, "fsdp": {"dp_shard": 2}, "tp": {"dp_shard": 1, "tp": 2}}
CHECKPOINTING: dict[str, tuple[bool, str | None, int | str | None]] = {
    "none": (False, None, None),
    "full": (True, None, None),
    "every_2nd": (False, "selective", 2),
    "op": (False, "selective", "op"),
}


@dataclass
class Run:
    """What the steps left.

    Attributes:
        losses: means over the labels of each step.
        before: trained parameters before the first step, whole, in float32.
        after: the same after the last one.
        moved: frozen parameters that are not what they were.
    """

    losses: list[float]
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    moved: list[str]

    def update(self) -> torch.Tensor:
        """All that was learned, in one row."""
        return torch.cat([(self.after[name] - self.before[name]).flatten() for name in sorted(self.before)])


def quantized_base(dtype: str) -> QuantizeBase:
    return QuantizeBase(dtype, **({"block_size": 16} if dtype == "nf4" else {}))


def conversions(cell: Cell) -> list[Conversion]:
    chosen: list[Conversion] = []
    if cell["base"] in ("nf4", "int8", "float8"):
        chosen.append(quantized_base(cell["base"]))
    if cell["adapter"] != "none":
        init = {"init": "pissa"} if cell["adapter"] == "pissa" else {}
        # Not all of the layers' products have an adapter: what "op" keeps depends on their number
        targets = ["q_proj", "v_proj", "mlp.w*"]
        chosen.append(LoRA(rank=4, alpha=8, target_modules=targets, use_dora=cell["adapter"] == "dora", **init))
    if cell["base"] == "fake_quant":
        chosen.append(FakeQuantize(Int8DynActInt4WeightQuantizer(groupsize=16).base_config))
    if cell["base"] == "float8_training":
        chosen.append(Float8Training())
    return chosen


def optimizer(name: str, parameters: list[torch.nn.Parameter]) -> Any:
    if name == "lora_plus":
        return training.GroupedOptimizer(parameters, [{"pattern": "lora_b", "lr_ratio": 4}], lr=1e-2)
    if hasattr(torchao.optim, name):
        # Few bits round a small second moment to 0, and eps alone then bounds the update: with the default of 1e-8, one
        # element moved by 700 times the learning rate, on one processor and not on another.
        return getattr(torchao.optim, name)(parameters, lr=1e-2, eps=1e-5)
    for module in (training, torch.optim):
        if hasattr(module, name):
            return getattr(module, name)(parameters, lr=1e-2)
    raise AssertionError(name)


def settings(cell: Cell) -> dict[str, Any]:
    """What the rules between settings read."""
    every_layer, mode, option = CHECKPOINTING[cell["checkpointing"]]
    chosen_settings = {
        "device": DEVICE,
        "optimizer_in_bwd": cell["in_backward"] == "on",
        "enable_activation_checkpointing": every_layer,
        "ac_mode": mode,
        "ac_option": option,
        "enable_activation_offloading": cell["offload"] == "activations",
    }
    return {name: value for name, value in chosen_settings.items() if value is not None}


@patch.object(
    _low_precision_optimizer, "MIN_LOW_BIT_ELEMENTS", 64
)  # so that states of small matrices have few bits, too
def train(
    checkpoint: Path,
    cell: Cell,
    dims: ParallelDims,
    *,
    rounded_like: str | None = None,
    start: dict[str, torch.Tensor] | None = None,
) -> Run:
    """Train a cell for some steps.

    Args:
        checkpoint: folder of the model.
        cell: see ``tools/composition_table.py``.
        dims: its mesh.
        rounded_like: a quantized base: the base weights are rounded to what it stores before training.
        start: initial values of the trained parameters, by name; by default, adapters are drawn at random.
    """
    for name, problem in estimate.check_settings(settings(cell)):
        raise UserError(f"{name}: {problem}.")
    torch.manual_seed(0)
    model = build(checkpoint, *conversions(cell), dtype=DTYPES[cell["dtype"]])
    store = FullModelHFCheckpointer(checkpoint)
    if cell["adapter"] != "none":
        require_adapters(model)
    store.check_contents(model, contents="model" if cell["adapter"] == "none" else "adapter")
    device = own_device()
    offloads = cell["offload"] == "parameters"
    training.parallelize(model, dims, device=device, cpu_offload=offloads)
    store.load_model(model, device="cpu" if offloads else device)
    if rounded_like is not None:
        round_base(model, checkpoint, rounded_like)
    if start is not None:
        model.load_state_dict(start, strict=False)
    training.checkpoint_activations(model, *CHECKPOINTING[cell["checkpointing"]])
    if cell["compile"] == "on":
        training.compile_model(model)
    loss_fn = setup_loss(LinearCrossEntropyLoss(), model)
    if cell["compile"] == "on":
        training.compile_loss(loss_fn)
    make = partial(optimizer, cell["optimizer"])
    in_backward = cell["in_backward"] == "on"
    stepped = training.setup_optimizer(make, model, precision=cell["precision"], in_backward=in_backward)
    offloading = training.get_act_offloading_ctx_manager(model, cell["offload"] == "activations")
    return _steps(model.train(), loss_fn, stepped, dims, device, offloading)


@torch.no_grad()
def round_base(model: torch.nn.Module, checkpoint: Path, dtype: str) -> None:
    """Give every weight that a quantized base would store the value that it stores."""
    built_again = build(checkpoint)
    conversion = quantized_base(dtype)
    conversion.convert(built_again)
    parameters = dict(model.named_parameters())
    for name in conversion.stored_weights(built_again):
        weight = parameters[name]
        weight.copy_(conversion.to_full(name, conversion.from_full(name, weight)))


def _steps(
    model: torch.nn.Module, loss_fn: Any, stepped: Any, dims: ParallelDims, device: torch.device, offloading: Any
) -> Run:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    run = Run([], _values(trained), {}, [])
    frozen_values = _values(frozen)
    loader = BatchLoader(
        Conversations(one_length=True),
        batch_size=GLOBAL_BATCH // dims.data_size,
        collate_fn=dims.collate(collate_documents),
        shuffle=True,
        seed=1,
        rank=dims.data_rank,
        world_size=dims.data_size,
    )
    for _, (batch,) in zip(range(STEPS), loader, strict=False):
        batch = batch.to(device)
        count = dims.sum(int((batch.labels != CROSS_ENTROPY_IGNORE_IDX).sum()))[0]
        with offloading:
            hidden = model(**batch.model_inputs(), output="hidden")
            loss = loss_fn.sum_and_count(hidden, batch.labels, model.output)[0] / count
        loss.backward()
        run.losses.append(dims.sum(loss.item())[0])
        run_pre_optimizer_hooks(model)
        stepped.step()
        run_post_optimizer_hooks(model)
        stepped.zero_grad(set_to_none=True)
    run.after = _values(trained)
    run.moved = [name for name, value in _values(frozen).items() if not torch.equal(value, frozen_values[name])]
    return run


def _values(parameters: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    return {name: whole(p.detach()).float().cpu().clone() for name, p in parameters.items()}
