"""Training state in files without code: what comes back is, bit for bit, what went in."""

import itertools
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.torchtune.checkpoints.small import refusal, resume, same_bits, started, write_folder
from torchtune.checkpoints import CheckpointError, FullModelHFCheckpointer
from torchtune.checkpoints._state import load_state
from torchtune.data import BatchLoader
from torchtune.training import (
    GroupedOptimizer,
    MuonWithAdamW,
    RNGState,
    get_cosine_schedule_with_warmup,
    setup_optimizer,
)
from torchtune.training.optim import _low_precision_optimizer


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("state") / "in", "llama_tied")


def equal(first: Any, second: Any) -> bool:
    """Same structure, types and bits."""
    if isinstance(first, torch.Tensor):
        return (
            isinstance(second, torch.Tensor)
            and first.dtype == second.dtype
            and first.shape == second.shape
            and torch.equal(
                first.contiguous().view(-1).view(torch.uint8), second.contiguous().view(-1).view(torch.uint8)
            )
        )
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(equal, first, second))
    if isinstance(first, float):
        return struct.pack("<d", first) == struct.pack("<d", second)
    return first == second


def test_every_kind_of_value_is_restored(source, tmp_path):
    shared = torch.arange(6.0)
    values = {
        "text": "äöü\n\0",
        "numbers": [0, -1, 2**70, True, None, 0.1, -0.0, 1e-310, math.inf, -math.inf, math.nan],
        "nested": {1: {"a": (1, (2.0, [None, {}])), 2: []}, -3: (), "1": "text one", "a/b": torch.ones(1)},
        "a": {"b": torch.zeros(1)},
        "tensors": {
            0: torch.tensor(3),
            1: torch.tensor([math.nan, math.inf, -0.0], dtype=torch.bfloat16),
            2: torch.empty(0),
            3: torch.empty(3, 0, dtype=torch.int32),
            4: shared,
            5: shared,
            6: shared[2:5],
            7: torch.arange(12).view(3, 4).t(),
            8: torch.tensor([True, False, True]),
            9: torch.arange(5, dtype=torch.uint8),
            10: torch.randn(3, dtype=torch.float64),
            11: torch.randn(3, requires_grad=True),
            12: torch.randn(3).half(),
        },
        "tuple": (torch.ones(2), "x"),
        "paths": {1: torch.tensor(1.0), "1": torch.tensor(2.0)},
    }
    checkpointer, model = started(source, output=tmp_path / "out")
    state = {"progress": {"a/b": torch.tensor(7)}, "values": values}
    checkpointer.save("step_1", model, state=state)
    assert equal(resume(checkpointer, model, values={}), state)


def test_new_ranks_draw_numbers_of_their_own_from_the_generators_of_rank_0(source, tmp_path):
    checkpointer, model = started(source, output=tmp_path / "out")
    torch.manual_seed(3)
    saved = checkpointer.save("step_1", model, state={"progress": {}, "rng": RNGState()})
    expected = torch.rand(4).tolist()

    def numbers_of(rank: int) -> list[float]:
        load_state({"progress": {}, "rng": RNGState()}, dict(model.named_parameters()), saved, rank)
        return torch.rand(4).tolist()

    assert numbers_of(0) == expected
    assert numbers_of(1) == numbers_of(1)
    assert len({tuple(numbers_of(rank)) for rank in range(3)}) == 3


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", {(1, 2): 3}, torch.float32], ids=lambda v: str(type(v)))
def test_value_that_cannot_be_saved_is_named(source, tmp_path, value):
    checkpointer, model = started(source, output=tmp_path / "out")
    checkpointer.save("step_1", model, state={"progress": {}})
    with pytest.raises(CheckpointError, match="cannot be saved"):
        checkpointer.save("step_2", model, state={"progress": {"where": {"it": value}}})
    assert checkpointer.find_resume_point().path.name == "step_1"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["step_1"]


def low_bit(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    def make(parameters: Any) -> torch.optim.Optimizer:
        torchao = pytest.importorskip("torchao.optim", reason="the extra quantization is not installed")
        return getattr(torchao, name)(parameters, lr=1e-2)

    return make


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "AdamW with a tensor as lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(1e-2)),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "8 bits": low_bit("AdamW8bit"),
    "4 bits": low_bit("AdamW4bit"),
    "Muon": lambda params: MuonWithAdamW(params, lr=1e-2),
    "groups": lambda params: GroupedOptimizer(params, [{"pattern": "norm", "lr": 0.0}], lr=1e-2),
}


def train(model: nn.Module, optimizer: Any, scheduler: Any, steps: range) -> None:
    for step in steps:
        tokens = torch.randint(3, 320, (2, 8), generator=torch.Generator().manual_seed(step))
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if scheduler is not None:
            scheduler.step()


PRECISIONS = ["stochastic_rounding", "fp32_master", "param_dtype", "fp32 weights"]
# AdamW with every precision, and the others with both of bfloat16, each once in the backward pass.
TRAINED = list(itertools.product(["AdamW"], PRECISIONS, [False, True]))
for half, precision in enumerate(PRECISIONS[:2]):
    for number, name in enumerate(OPTIMIZERS):
        if name != "AdamW":
            TRAINED.append((name, precision, (number + half) % 2 == 1))


@pytest.mark.parametrize(("name", "precision", "in_backward"), TRAINED)
def test_training_continues_with_the_same_bits(name, precision, in_backward, source, tmp_path, monkeypatch):
    monkeypatch.setattr(_low_precision_optimizer, "MIN_LOW_BIT_ELEMENTS", 256)  # else no state would have few bits
    full = precision == "fp32 weights"
    precision = "param_dtype" if full else precision
    runs = []
    for part in ("whole", "first", "second"):
        checkpointer, model = started(source, output=tmp_path / "out", dtype=torch.float32 if full else torch.bfloat16)
        torch.manual_seed(5 if part == "second" else 4)
        optimizer = setup_optimizer(OPTIMIZERS[name], model, precision=precision, in_backward=in_backward)
        scheduler = get_cosine_schedule_with_warmup(optimizer, 2, 8)
        state = {"optimizer": optimizer, "rng": RNGState(), "lr_scheduler": scheduler, "progress": {"step": 3}}
        if part == "second":
            resume(checkpointer, model, **state)
        else:
            train(model, optimizer, scheduler, range(3))
        if part == "first":
            checkpointer.save("step_3", model, state=state)
            continue
        train(model, optimizer, scheduler, range(3, 6))
        runs.append((model.state_dict(), optimizer.state_dict(), torch.rand(3)))
    assert same_bits(dict(runs[0][0]), dict(runs[1][0]))
    assert equal(runs[0][1], runs[1][1])
    assert torch.equal(runs[0][2], runs[1][2])
    # Nothing in the directory can hold code: safetensors, JSON and text alone.
    suffixes = {path.suffix for path in (tmp_path / "out").rglob("*") if path.is_file() and path.name != ".complete"}
    assert suffixes == {".safetensors", ".json"}


@pytest.fixture
def saved(source: Path, tmp_path: Path) -> tuple[FullModelHFCheckpointer, nn.Module, dict[str, Any], Path]:
    """A checkpoint after two steps of AdamW, and what it was made from."""
    checkpointer, model = started(source, output=tmp_path / "out")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, None, range(2))
    state = {"optimizer": optimizer, "loader": loader(10), "progress": {"step": 2}}
    return checkpointer, model, state, checkpointer.save("step_2", model, state=state)


def loader(length: int) -> BatchLoader:
    data = [{"tokens": [1, 2, 3], "labels": [2, 3, 4]}] * length
    return BatchLoader(data, batch_size=2, collate_fn=list, shuffle=True, seed=1)


def test_state_of_another_run_is_refused(saved):
    """The numbers of another optimizer would be missing, at the first step or, worse, never noticed."""
    checkpointer, model, state, _ = saved
    point = checkpointer.find_resume_point()

    def refused_with(other: dict[str, Any], *words: str) -> None:
        text = refusal(checkpointer.resume, point, model, other)
        assert all(word in text for word in ("step_2", *words)), text

    refused_with(state | {"lr_scheduler": {}}, "this run has 'lr_scheduler'", "torchtune_config.yaml")
    refused_with({key: state[key] for key in ("progress", "optimizer")}, "the checkpoint has 'loader'")
    refused_with(state | {"loader": loader(12)}, "loader", "number of examples")
    for optimizer in (
        torch.optim.AdamW([parameter for name, parameter in model.named_parameters() if "mlp" in name]),
        torch.optim.AdamW(list(model.parameters())[::-1]),
        torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
        torch.optim.Adafactor(model.parameters(), lr=1e-2),
        setup_optimizer(OPTIMIZERS["SGD"], model, precision="stochastic_rounding"),
    ):
        refused_with(state | {"optimizer": optimizer}, "optimizer")


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"progress": 1}', '{"optimizer": {}}'],
)
def test_corrupt_structure_of_the_state_is_refused(saved, content):
    checkpointer, model, state, folder = saved
    point = checkpointer.find_resume_point()  # who looks for it later finds that it was changed
    (folder / "state" / "state.json").write_text(content)
    text = refusal(checkpointer.resume, point, model, state)
    assert "step_2" in text
    assert "resume" in text
    assert "state.json" in refusal(lambda: point.progress)
