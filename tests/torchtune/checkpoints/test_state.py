"""Training state in files without code: what comes back is, bit for bit, what went in."""

import copy
import itertools
import json
import math
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from tests.torchtune.checkpoints.small import build, same_bits, write_folder
from torchtune.checkpoints import CheckpointError, ResumePoint
from torchtune.data import BatchLoader
from torchtune.training import FullModelHFCheckpointer, RNGState, setup_optimizer


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("state") / "in", "llama_tied")


def start(source: Path, output: Path, dtype: torch.dtype = torch.float32) -> tuple[FullModelHFCheckpointer, nn.Module]:
    checkpointer = FullModelHFCheckpointer(str(source), output_dir=str(output))
    model = build(source, dtype=dtype)
    checkpointer.load_model(model)
    return checkpointer, model


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


def test_every_kind_of_value(source: Path, tmp_path: Path) -> None:
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
    checkpointer, model = start(source, tmp_path / "out")
    checkpointer.save("step_1", model, state={"progress": {"a/b": torch.tensor(7)}, "values": values})
    found: dict[str, Any] = {"progress": {}, "values": {}}
    checkpointer.resume(checkpointer.find_resume_point(), model, found)
    assert equal(found["values"], values)
    assert equal(found["progress"], {"a/b": torch.tensor(7)})


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", {(1, 2): 3}, torch.float32], ids=lambda v: str(type(v)))
def test_value_that_cannot_be_saved(source: Path, tmp_path: Path, value: Any) -> None:
    checkpointer, model = start(source, tmp_path / "out")
    checkpointer.save("step_1", model, state={"progress": {}})
    with pytest.raises(CheckpointError, match="cannot be saved"):
        checkpointer.save("step_2", model, state={"progress": {"where": {"it": value}}})
    assert checkpointer.find_resume_point().path.name == "step_1"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["step_1"]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "AdamW with a tensor as lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(1e-2)),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
}


def train(model: nn.Module, optimizer: Any, scheduler: Any, steps: range, in_backward: bool) -> None:
    for step in steps:
        tokens = torch.randint(3, 320, (2, 8), generator=torch.Generator().manual_seed(step))
        model(tokens).square().mean().backward()
        if not in_backward:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if scheduler is not None:
            scheduler.step()


PRECISIONS = ["stochastic_rounding", "fp32_master", "param_dtype", "fp32 weights"]
# Every optimizer with every precision, and in backward every optimizer and every precision.
TRAINED = [(name, precision, False) for name in OPTIMIZERS for precision in PRECISIONS]
TRAINED += [(name, precision, True) for name, precision in zip(OPTIMIZERS, itertools.cycle(PRECISIONS), strict=False)]


@pytest.mark.parametrize(("name", "precision", "in_backward"), TRAINED)
def test_training_continues_with_the_same_bits(
    name: str, precision: str, in_backward: bool, source: Path, tmp_path: Path
) -> None:
    full = precision == "fp32 weights"
    precision = "param_dtype" if full else precision
    runs = []
    for part in ("whole", "first", "second"):
        checkpointer, model = start(source, tmp_path / "out", torch.float32 if full else torch.bfloat16)
        torch.manual_seed(4)
        optimizer = setup_optimizer(OPTIMIZERS[name], model, precision=precision, in_backward=in_backward)
        scheduler = None if in_backward else LambdaLR(optimizer, lambda step: 1 / (1 + step))
        state = {"optimizer": optimizer, "rng": RNGState(), "progress": {"step": 3}}
        if scheduler is not None:
            state["lr_scheduler"] = scheduler
        if part == "second":
            checkpointer.resume(checkpointer.find_resume_point(), model, state)
        else:
            train(model, optimizer, scheduler, range(3), in_backward)
        if part == "first":
            checkpointer.save("step_3", model, state=state)
            continue
        train(model, optimizer, scheduler, range(3, 6), in_backward)
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
    checkpointer, model = start(source, tmp_path / "out")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, None, range(2), False)
    state = {"optimizer": optimizer, "loader": loader(10), "progress": {"step": 2}}
    return checkpointer, model, state, checkpointer.save("step_2", model, state=state)


def loader(length: int) -> BatchLoader:
    data = [{"tokens": [1, 2, 3], "labels": [2, 3, 4]}] * length
    return BatchLoader(data, batch_size=2, collate_fn=list, shuffle=True, seed=1)


def sentence(error: pytest.ExceptionInfo, *words: str) -> None:
    """One sentence that holds these words."""
    message = str(error.value)
    assert all(word in message for word in words), message
    assert message.endswith("."), message
    assert ". " not in message, message
    assert "\n" not in message, message


def test_other_run(saved: tuple) -> None:
    checkpointer, model, state, _ = saved
    point = checkpointer.find_resume_point()
    with pytest.raises(CheckpointError) as caught:
        checkpointer.resume(point, model, state | {"lr_scheduler": {}})
    sentence(caught, "step_2", "lr_scheduler", "torchtune_config.yaml")
    with pytest.raises(CheckpointError) as caught:
        checkpointer.resume(point, model, {key: state[key] for key in ("progress", "optimizer")})
    sentence(caught, "step_2", "loader")
    with pytest.raises(CheckpointError) as caught:
        checkpointer.resume(point, model, state | {"loader": loader(12)})
    sentence(caught, "step_2", "loader", "number of examples")
    some = [parameter for name, parameter in model.named_parameters() if "mlp" in name]
    with pytest.raises(CheckpointError) as caught:
        checkpointer.resume(point, model, state | {"optimizer": torch.optim.AdamW(some)})
    sentence(caught, "step_2", "optimizer")
    others = torch.optim.AdamW(list(model.parameters())[::-1])
    with pytest.raises(CheckpointError) as caught:
        checkpointer.resume(point, model, state | {"optimizer": others})
    sentence(caught, "step_2", "optimizer")


def test_other_optimizer(saved: tuple) -> None:
    """Its own numbers would be missing, at the first step or, worse, never noticed."""
    checkpointer, model, state, _ = saved
    for other in (
        torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
        torch.optim.Adafactor(model.parameters(), lr=1e-2),
        setup_optimizer(OPTIMIZERS["SGD"], model, precision="stochastic_rounding"),
    ):
        with pytest.raises(CheckpointError) as caught:
            checkpointer.resume(checkpointer.find_resume_point(), model, state | {"optimizer": other})
        sentence(caught, "step_2", "optimizer")


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "3", '{"progress": 1}', '{"progress": {"dict": [[1]]}}', '{"optimizer": {}}', "\udcff", "null"],
)
def test_corrupt_structure(saved: tuple, content: str) -> None:
    checkpointer, model, state, folder = saved
    point = checkpointer.find_resume_point()  # who looks for it later finds that it was changed
    (folder / "state" / "state.json").write_text(content, errors="surrogateescape")
    with pytest.raises(CheckpointError) as caught:
        checkpointer.resume(point, model, state)
    sentence(caught, "step_2", "resume")
    with pytest.raises(CheckpointError) as caught:
        _ = point.progress
    sentence(caught, "state.json", "resume")


def test_structure_without_its_tensor(saved: tuple) -> None:
    checkpointer, model, state, folder = saved
    point = checkpointer.find_resume_point()
    path = folder / "state" / "state.json"
    text = path.read_text()
    assert "exp_avg_sq" in json.dumps(json.loads(text))
    path.write_text(text.replace('{"tensor": "optimizer/state/0/exp_avg"', '{"tensor": "gone"'))
    assert path.read_text() != text
    with pytest.raises(CheckpointError) as caught:
        checkpointer.resume(point, model, state)
    sentence(caught, "state", "resume")


def every_place(node: Any, path: tuple = ()) -> Iterator[tuple]:
    """The path of every value in a JSON document."""
    yield path
    for key, item in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from every_place(item, (*path, key))


WRONG = [None, "text", -1, 2**70, 1.5, [], {}, [[]], {"tensor": 3}, {"dict": 1}, {"value": {}}, True]


def test_values_of_wrong_types(saved: tuple) -> None:
    """Wherever another kind of value is put into the index, it is one sentence or does no harm."""
    checkpointer, model, state, folder = saved
    point, path = checkpointer.find_resume_point(), folder / "state" / "state.json"
    whole = path.read_text()
    places = list(every_place(json.loads(whole)))
    rng = random.Random(0)
    refused = []
    for place in [place for place in places if len(place) <= 3] + rng.sample(places, 200):
        document = json.loads(whole)
        holder = document
        for key in place[:-1]:
            holder = holder[key]
        wrong = rng.choice(
            [None, "text", -1, 2**70, 1.5, [], {}, [[]], {"tensor": 3}, {"dict": 1}, {"value": {}}, True]
        )
        if place:
            holder[place[-1]] = wrong
        path.write_text(json.dumps(document if place else wrong))
        try:
            ResumePoint(point.path).progress["seed"]
            checkpointer.resume(point, model, state)
        except CheckpointError as error:
            refused.append((str(error), place, wrong))
    assert len(refused) > 50
    assert all("\n" not in text and text.endswith(".") for text, _, _ in refused), refused


def test_cut_tensors(saved: tuple) -> None:
    checkpointer, model, state, folder = saved
    point = checkpointer.find_resume_point()
    path = folder / "state" / "rank_0.safetensors"
    whole = path.read_bytes()
    for cut in [0, 4, 8, 100, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:cut])
        for find in (checkpointer.find_resume_point, lambda: point):
            with pytest.raises(CheckpointError) as caught:
                checkpointer.resume(find(), model, state)
            sentence(caught, "rank_0.safetensors")
        with pytest.raises(CheckpointError) as caught:
            checkpointer.find_resume_point()
        sentence(caught, f"{cut:,} bytes")
    path.unlink()
    with pytest.raises(CheckpointError, match=r"rank_0\.safetensors is missing"):
        checkpointer.find_resume_point()


def test_a_checkpoint_of_an_earlier_release(saved: tuple) -> None:
    """One file of whole tensors, random generators of all ranks in it, no checksums."""
    checkpointer, model, state, _ = saved
    state["rng"] = RNGState()
    folder = checkpointer.save("step_3", model, state=state)
    before = copy.deepcopy(state["optimizer"].state_dict()), torch.rand(3)
    with safe_open(folder / "state" / "rank_0.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        values = json.loads(file.metadata()["values"])
    (folder / "state" / "rank_0.safetensors").unlink()
    path = folder / "state" / "state.json"
    index = json.loads(path.read_text(), object_hook=lambda n: {"tensor": n["tensor"]} if "tensor" in n else n)
    del index["files of ranks"]
    index["rng"] = {"dict": [["ranks", {"list": [values["rng"]]}]]}
    path.write_text(json.dumps(index))
    save_file(tensors, folder / "state" / "state.safetensors")
    marker = json.loads((folder / ".complete").read_text())
    del marker["crc32"]
    marker["files"] = {
        name: (folder / name).stat().st_size for name in ("model.safetensors", "state/state.safetensors")
    }
    (folder / ".complete").write_text(json.dumps(marker))
    for parameter in state["optimizer"].state.values():
        parameter["exp_avg"].zero_()
    torch.rand(5)
    checkpointer.resume(checkpointer.find_resume_point(), model, state)
    assert equal((state["optimizer"].state_dict(), torch.rand(3)), before)
