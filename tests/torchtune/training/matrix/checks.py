"""Cells that train, each once, and what each of them must have in common with the plainest."""

import json
from pathlib import Path

import pytest
import torch

from tests.devices import DEVICE
from tests.recipes.killing import launch
from tests.torchtune.training.matrix.cells import STEPS, Run, train
from tools.composition_table import DIMENSIONS, Cell, Refusal, all_pairs, plain, refused_cells
from torchtune.training import ParallelDims
from torchtune.utils import UserError

COMPILED = ("compile", "on")
# A compiler takes ten seconds for weights with other storage, and twice that for parts of them: the two are apart.
CELLS = all_pairs(seldom=dict([COMPILED]), alone={"base": ("nf4", "int8", "float8"), "mesh": ("fsdp", "tp")})
REFUSED = list(refused_cells())
# What is rounded: the sum of two ranks, or of a compiled graph, may round to the neighbor, and Adam takes a full step
# in the direction of any gradient. States of few bits have blocks of their own in every shard.
ROUNDED = {("dtype", "bf16"), ("base", "fake_quant"), ("base", "float8_training")}
ROUNDED |= {("optimizer", name) for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")}


def label(cell: Cell) -> str:
    return " ".join(f"{name}={value}" for name, value in cell.items() if value != DIMENSIONS[name][0]) or "plain"


def parameters(cells: list[Cell]) -> list:
    """Compiled cells take seconds each."""
    marked_cells = []
    for cell in cells:
        marks = [pytest.mark.slow] if COMPILED in cell.items() else []
        marked_cells.append(pytest.param(cell, id=label(cell), marks=marks))
    return marked_cells


class Runs:
    """Runs by cell, each once: those of one device when they are asked for, those of two ranks in one launch."""

    def __init__(self, folder: Path, cells: list[Cell]) -> None:
        self.folder = folder
        self._alone = {}
        self._split = {}
        cells = [cell for cell in cells if cell["mesh"] != "one"]
        if not cells:
            return
        (folder / "cells.json").write_text(json.dumps(cells))
        launch("training.matrix.ranks", 2, folder, TORCH_COMPILE_BACKEND="aot_eager")
        for cell, outcome in zip(cells, torch.load(folder / "found.pt"), strict=True):
            self._split[label(cell)] = outcome

    def get(self, cell: Cell, rounded_like: str | None = None, start: Run | None = None) -> Run:
        """What came of a cell.

        Raises:
            UserError: it was refused.
        """
        if cell["mesh"] != "one":
            outcome = self._split[label(cell)]
            assert "crashed" not in outcome, outcome
            if "refused" in outcome:
                raise UserError(outcome["refused"])
            return Run(**outcome)
        key = (label(cell), rounded_like, id(start))
        if key not in self._alone:
            before = None if start is None else start.before
            self._alone[key] = train(
                self.folder / "model", cell, ParallelDims(), rounded_like=rounded_like, start=before
            )
        return self._alone[key]


def check_run(runs: Runs, cell: Cell) -> None:
    """It trains as the plainest run of the same arithmetic does."""
    outcome, expected = runs.get(cell), runs.get(plain(cell))
    assert len(outcome.losses) == STEPS
    assert not outcome.moved, "frozen weights were trained"
    still = [name for name, before in outcome.before.items() if torch.equal(before, outcome.after[name])]
    assert not still, "nothing was learned there"
    assert outcome.before.keys() == expected.before.keys()
    assert all(torch.equal(before, expected.before[name]) for name, before in outcome.before.items())
    if cell["mesh"] == "one" and cell["compile"] == "off":
        assert outcome.losses == expected.losses
        assert all(torch.equal(after, expected.after[name]) for name, after in outcome.after.items())
    elif cell.items() & ROUNDED:
        assert outcome.losses == pytest.approx(expected.losses, rel=1e-2)
        assert alike(outcome, expected) > 0.9, alike(outcome, expected)
    else:
        assert outcome.losses == pytest.approx(
            expected.losses, rel=1e-4 if cell["optimizer"] == "MuonWithAdamW" else 1e-6
        )
        assert alike(outcome, expected) > 0.999  # Muon iterates in bf16


def check_refusal(runs: Runs, cell: Cell, refusal: Refusal) -> None:
    """It is refused in one sentence, or trains where there is the device that the sentence asks for."""
    if refusal.message == f"needs device={DEVICE}, not cpu":
        check_run(runs, cell)
        return
    with pytest.raises(UserError) as raised:
        runs.get(cell)
    assert refusal.message in str(raised.value)
    assert "\n" not in str(raised.value)


def alike(one: Run, other: Run) -> float:
    """Cosine between two updates."""
    return float(torch.cosine_similarity(one.update(), other.update(), dim=0))
