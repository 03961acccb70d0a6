"""Every pair of settings trains as the plainest run of the same arithmetic does, or is refused in one sentence."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from tests.tiny import write_checkpoint
from tests.torchtune.training.matrix.cells import STEPS, Run, train
from tests.torchtune.training.parallel.test_compositions import launch
from tools.composition_table import (
    DIMENSIONS,
    Cell,
    Refusal,
    all_pairs,
    plain,
    refusals,
    refused_cells,
    table,
)
from torchtune.training import ParallelDims
from torchtune.utils import UserError

ROOT = Path(__file__).parents[4]
COMPILED = ("compile", "on")
# A compiler takes ten seconds for weights with other storage, and twice that for parts of them: the two are apart.
CELLS = all_pairs(seldom=dict([COMPILED]), alone={"base": ("nf4", "int8", "float8"), "mesh": ("fsdp", "tp")})
REFUSED = list(refused_cells())
# What is rounded: the sum of two ranks, or of a compiled graph, may round to the neighbour, and Adam takes a full step
# in the direction of any gradient. States of few bits have blocks of their own in every shard.
ROUNDED = {("dtype", "bf16"), ("base", "fake_quant"), ("base", "float8_training")}
ROUNDED |= {("optimizer", name) for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")}
# Least cosine between the update and that of AdamW in float32 from the same weights.
ALIKE = {
    ("optimizer", "AdamW8bit"): 0.95,  # steps of states with 8 bits
    ("optimizer", "AdamW4bit"): 0.8,
    ("optimizer", "AdamWFp8"): 0.95,
    ("optimizer", "MuonWithAdamW"): 0.3,  # another direction: orthogonal, not by sign
    ("optimizer", "lora_plus"): 0.7,  # B takes larger steps than A
    ("base", "nf4"): 0.5,  # under DoRA: see below
    ("base", "int8"): 0.8,
    ("base", "float8"): 0.8,
    ("base", "fake_quant"): 0.5,  # 4 bits in groups of 16
    ("base", "float8_training"): 0.5,
    ("dtype", "bf16"): 0.6,
}


def label(cell: Cell) -> str:
    return " ".join(f"{name}={value}" for name, value in cell.items() if value != DIMENSIONS[name][0]) or "plain"


def parameters(cells: list[Cell]) -> list:
    """Compiled cells take seconds each."""
    slow = pytest.mark.slow
    return [pytest.param(cell, id=label(cell), marks=slow if COMPILED in cell.items() else ()) for cell in cells]


class Runs:
    """Runs by cell, each once: those of one device when they are asked for, those of two ranks in one launch."""

    def __init__(self, folder: Path, cells: list[Cell]) -> None:
        self.folder, self._alone, self._split = folder, {}, {}
        cells = [cell for cell in cells if cell["mesh"] != "one"]
        (folder / "cells.json").write_text(json.dumps(cells))
        launch("training.matrix.ranks", 2, folder)
        for cell, found in zip(cells, torch.load(folder / "found.pt"), strict=True):
            self._split[label(cell)] = found

    def get(self, cell: Cell, rounded_like: str | None = None, start: Run | None = None) -> Run:
        """What came of a cell.

        Raises:
            UserError: it was refused.
        """
        if cell["mesh"] != "one":
            found = self._split[label(cell)]
            assert "crashed" not in found, found
            if "refused" in found:
                raise UserError(found["refused"])
            return Run(**found)
        key = (label(cell), rounded_like, id(start))
        if key not in self._alone:
            before = None if start is None else start.before
            self._alone[key] = train(
                self.folder / "model", cell, ParallelDims(), rounded_like=rounded_like, start=before
            )
        return self._alone[key]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest):
    folder = tmp_path_factory.mktemp("matrix")
    write_checkpoint(folder / "model")
    items = [item for item in request.session.items if item.path == Path(__file__) and hasattr(item, "callspec")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")
        yield Runs(folder, [item.callspec.params["cell"] for item in items])
    torch._dynamo.reset()


def test_cells_have_every_pair_of_values_that_is_not_refused():
    seen = {pair for cell in CELLS for pair in itertools.combinations(cell.items(), 2)}
    assert not [cell for cell in CELLS if refusals(cell)]
    for first, second in itertools.combinations(DIMENSIONS, 2):
        for pair in itertools.product(
            ((first, v) for v in DIMENSIONS[first]), ((second, v) for v in DIMENSIONS[second])
        ):
            if pair not in seen:  # whatever the adapter is, it is refused
                assert all(refusals({"adapter": adapter, **dict(pair)}) for adapter in DIMENSIONS["adapter"]), pair


@pytest.mark.parametrize("cell", parameters(CELLS))
def test_trains_as_the_plainest_run_does(runs: Runs, cell: Cell):
    found, wanted = runs.get(cell), runs.get(plain(cell))
    assert len(found.losses) == STEPS
    assert not found.moved, "frozen weights were trained"
    still = [name for name, before in found.before.items() if torch.equal(before, found.after[name])]
    assert not still, "nothing was learned there"
    assert found.before.keys() == wanted.before.keys()
    assert all(torch.equal(before, wanted.before[name]) for name, before in found.before.items())
    if cell["mesh"] == "one" and cell["compile"] == "off":
        assert found.losses == wanted.losses
        assert all(torch.equal(after, wanted.after[name]) for name, after in found.after.items())
    elif cell.items() & ROUNDED:
        assert found.losses == pytest.approx(wanted.losses, rel=1e-2)
        assert alike(found, wanted) > 0.9
    else:
        assert found.losses == pytest.approx(wanted.losses, rel=1e-4 if cell["optimizer"] == "MuonWithAdamW" else 1e-6)
        assert alike(found, wanted) > 0.999  # Muon iterates in bf16


@pytest.mark.parametrize("cell", parameters(CELLS))
def test_learns_what_adamw_does_in_full_precision(runs: Runs, cell: Cell):
    """Quantised bases exactly what it learns from the rounded weights; others something like it."""
    cell, base = plain(cell), cell["base"]
    found = runs.get(cell)
    # DoRA's magnitudes start as the lengths of the stored rows, which are not those of a weight rounded afterwards
    rounded_like = base if base in ("nf4", "int8", "float8") and cell["adapter"] != "dora" else None
    if rounded_like and cell["dtype"] == "fp32":
        exact = runs.get(cell | {"base": "plain"}, rounded_like)
        assert found.losses == exact.losses
        assert torch.equal(found.update(), exact.update())
    plainest = {name: values[0] for name, values in DIMENSIONS.items()} | {"adapter": cell["adapter"]}
    # Adapters are drawn in the dtype of the model, from which releases of torch draw other numbers.
    reference = runs.get(plainest, rounded_like, found if cell["dtype"] == "bf16" else None)
    assert found.losses == pytest.approx(reference.losses, rel=0.05)
    least = [bound for pair, bound in ALIKE.items() if pair in cell.items()]
    assert alike(found, reference) > min(least, default=0.9)


def alike(one: Run, other: Run) -> float:
    """Cosine between two updates."""
    return float(torch.cosine_similarity(one.update(), other.update(), dim=0))


@pytest.mark.parametrize(("cell", "refusal"), REFUSED, ids=[label(cell) for cell, _ in REFUSED])
def test_is_refused_in_one_sentence(runs: Runs, cell: Cell, refusal: Refusal):
    with pytest.raises(UserError) as raised:
        runs.get(cell)
    assert refusal.message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_table_of_the_docs_is_made_of_the_same_lines():
    assert (ROOT / "docs" / "tables" / "compositions.rst").read_text() == table(), "run `make configs`"
