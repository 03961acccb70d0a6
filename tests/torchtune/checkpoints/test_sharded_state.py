"""Training state of sharded runs: it comes back on any number of ranks and any mesh, bit for bit."""

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn

from tests.devices import DEVICE, own_device
from tests.torchtune.checkpoints import ranks
from tests.torchtune.checkpoints.small import build, same_bits, some_tokens, stored, write_folder
from torchtune.checkpoints import CheckpointError, FullModelHFCheckpointer
from torchtune.training import MuonWithAdamW, RNGState, setup_optimizer
from torchtune.training.optim import _low_precision_optimizer

ADAMW = {"lr": 1e-2, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded_state")
    write_folder(folder / "source", "llama", vocab_size=321, num_hidden_layers=1)
    return folder


def adamw_8bit(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    _low_precision_optimizer.MIN_LOW_BIT_ELEMENTS = 256  # else no parameter of the model would be quantized
    return AdamW8bit(parameters, **ADAMW)


OTHERS = {"low bit": adamw_8bit, "muon": lambda parameters: MuonWithAdamW(parameters, **ADAMW)}


def start(folder: Path, how: str, kind: str) -> tuple[FullModelHFCheckpointer, nn.Module, dict[str, Any]]:
    """A run of a kind (a key of ``KINDS``), before its first step."""
    low = kind in ("stochastic_rounding", "fp32_master")
    dtype = torch.bfloat16 if low else torch.float32
    model = ranks.shard(build(folder / "source", dtype=dtype), how, own_device())
    store = FullModelHFCheckpointer(folder / "source", output_dir=folder / kind)
    store.load_model(model, device=own_device())
    fused = {"fused": True} if kind == "fused" else {"foreach": True}
    optimizer = setup_optimizer(
        OTHERS.get(kind, lambda parameters: torch.optim.AdamW(parameters, **ADAMW, **fused)),
        model,
        precision="fp32_master" if kind in OTHERS else kind if low else "param_dtype",
        in_backward=kind == "in backward",
    )
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(rank)
    return store, model, {"optimizer": optimizer, "rng": RNGState(), "progress": {"step": 0}}


def train(model: nn.Module, state: dict[str, Any], steps: int) -> None:
    for _ in range(steps):
        model(some_tokens().to(DEVICE)).square().mean().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["progress"]["step"] += 1


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: ranks.whole(parameter) for name, parameter in model.named_parameters()}


def moments(saved: Path) -> dict[str, torch.Tensor]:
    """What a checkpoint keeps of the optimizer: the parts in the files of all ranks, put together."""
    index = json.dumps(json.loads((saved / "state" / "state.json").read_text()))
    nodes = re.findall(r'\{"tensor": "(optimizer/[^"]*)", "shape": (\[[\d, ]*\]), "dtype": "(\w+)"', index)
    tensors = {name: torch.zeros(json.loads(shape), dtype=getattr(torch, dtype)) for name, shape, dtype in nodes}
    filled = dict.fromkeys(tensors, 0)
    for path in (saved / "state").glob("rank_*.safetensors"):
        with safe_open(path, "pt") as file:
            for name, start in json.loads(file.metadata()["starts"]).items():
                if name in tensors:
                    part = file.get_tensor(name)
                    tensors[name][tuple(slice(a, a + n) for a, n in zip(start, part.shape, strict=True))] = part
                    filled[name] += part.numel()
    assert filled == {name: tensor.numel() for name, tensor in tensors.items()}
    return tensors


def save_and_go_on(how: str, kind: str, **options: Any) -> Callable[[Path], None]:
    """Two steps, a save, two more; what one has then is written down."""

    def case(folder: Path) -> None:
        store, model, state = start(folder, how, kind)
        train(model, state, 2)
        store.save("step_2", model, state=state, **options)
        at_save = weights(model)
        drawn = torch.rand(3)
        train(model, state, 2)
        after = weights(model)
        store.close()
        torch.save((drawn, at_save, after), folder / f"{kind} {dist.get_rank()}.pt")

    return case


def resume(how: str, kind: str, *, same: bool = False) -> Callable[[Path], None]:
    """What the files hold is what the run has; on the mesh that it was saved on it goes on with the same bits."""

    def case(folder: Path) -> None:
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        location = f"{kind}, {how} on rank {rank} of {size}"
        store, model, state = start(folder, how, kind)
        torch.rand(7)
        store.resume(store.find_resume_point(), model, state)
        assert state["progress"] == {"step": 2}
        drawn, at_save, after = torch.load(folder / f"{kind} {min(rank, 1)}.pt")
        resumed_weights = weights(model)
        assert at_save.keys() == resumed_weights.keys()
        for name, tensor in at_save.items():
            assert torch.equal(resumed_weights[name], tensor), f"{location}: {name}"
        assert torch.equal(torch.rand(3), drawn) == (rank < 2), location
        (folder / f"{kind} {how} {rank} of {size}").write_text(str(torch.initial_seed()))
        store.output_dir = folder / location.replace(f"on rank {rank} ", "")
        again = moments(store.save("step_2", model, state=state))
        expected = moments(folder / kind / "step_2")
        assert len(expected) >= (1.5 if kind == "muon" else 2) * len(at_save), location
        assert same_bits(again, expected), location
        if "tp" in how:
            return  # torch's optimizers step no mixture of sharded and plain parameters
        train(model, state, 2)
        assert all(torch.isfinite(tensor).all() for tensor in weights(model).values())
        if same:
            for name, tensor in weights(model).items():
                assert torch.equal(after[name], tensor), f"{location}: {name}"

    return case


KINDS = {
    "fused": {},
    "foreach": {"async_save": True},
    "in backward": {"async_save": True},
    "stochastic_rounding": {"async_save": True},
    "fp32_master": {},
    "muon": {},
} | ({"low bit": {}} if importlib.util.find_spec("torchao") else {})


def steps_of_one_process(kind: str) -> Callable[[Path], None]:
    """The weights after two steps of two ranks, before their save, are those of one process."""

    def case(folder: Path) -> None:
        _, model, state = start(folder, "whole", kind)
        train(model, state, 2)
        _, at_save, _ = torch.load(folder / f"{kind} 0.pt")
        for name, tensor in weights(model).items():
            # Muon's iteration is in bfloat16, where the layout of a gradient shows: 5 % of an update of 0.2 lr
            assert (tensor - at_save[name]).abs().mean() <= (1e-4 if kind == "muon" else 0), name

    return case


def check_files(folder: Path) -> None:
    """A file of plain tensors of each rank, which together are whole."""
    saved = folder / "fused" / "step_2"
    assert sorted(path.name for path in (saved / "state").iterdir()) == [
        "rank_0.safetensors",
        "rank_1.safetensors",
        "state.json",
    ]
    tensors = moments(saved)
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items() if re.search("exp_avg$", name)}
    model = build(folder / "source")
    assert list(shapes.values()) == [list(parameter.shape) for parameter in model.parameters()]
    assert stored(saved).keys() == stored(folder / "source").keys()
    assert {path.suffix for path in saved.rglob("*") if path.is_file()} == {".json", ".safetensors", ""}


@pytest.mark.slow
def test_state_resumes_on_other_ranks_and_meshes(folder):
    ranks.run(
        2,
        [
            *(save_and_go_on("fsdp", kind, **options) for kind, options in KINDS.items()),
            *(resume("fsdp", kind, same=True) for kind in KINDS),
            *(resume(how, "fused") for how in ("tp", "whole")),
        ],
        folder,
    )
    for kind in KINDS:
        if kind in OTHERS:
            steps_of_one_process(kind)(folder)
        if kind != "low bit":
            resume("whole", kind)(folder)
            continue
        with pytest.raises(CheckpointError, match="low-bit states of 2 shards and this run has 1: resume with as many"):
            resume("whole", kind)(folder)
    meshes = {
        "fsdp": ["fused"],
        "hsdp": ["stochastic_rounding", *KINDS.keys() & {"low bit"}],
        "tp": ["fused"],
        "fsdp_tp": ["fp32_master"],
    }
    resumes = []
    for mesh, kinds in meshes.items():
        resumes += [resume(mesh, kind) for kind in kinds]
    ranks.run(4, resumes, folder)
    new = [(folder / f"fused fsdp {rank} of 4").read_text() for rank in (2, 3)]
    assert new[0] != new[1], "ranks that are new draw the same numbers"
    assert new == [(folder / f"fused tp {rank} of 4").read_text() for rank in (2, 3)]
    check_files(folder)
