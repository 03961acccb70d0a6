"""Every pair of settings trains as the plainest run of the same arithmetic does, or is refused in one sentence.

Cells of two ranks are in ``test_matrix_of_ranks.py``.
"""

import itertools
from pathlib import Path

import pytest
import torch

from tests.torchtune.training.matrix.checks import (
    CELLS,
    REFUSED,
    alike,
    check_refusal,
    check_run,
    label,
    parameters,
)
from tools.composition_table import DIMENSIONS, plain, refusals, table

ROOT = Path(__file__).parents[4]
ALONE = [cell for cell in CELLS if cell["mesh"] == "one"]
REFUSED_ALONE = [(cell, refusal) for cell, refusal in REFUSED if cell["mesh"] == "one"]
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
    ("base", "fake_quant"): 0.45,  # 4 bits in groups of 16
    ("base", "float8_training"): 0.5,
    ("dtype", "bf16"): 0.6,
}


def test_cells_have_every_pair_of_values_that_is_not_refused():
    pairs_of_cells = set()
    for cell in CELLS:
        assert not refusals(cell), cell
        pairs_of_cells.update(itertools.combinations(cell.items(), 2))
    for first, second in itertools.combinations(DIMENSIONS, 2):
        for first_value, second_value in itertools.product(DIMENSIONS[first], DIMENSIONS[second]):
            pair = ((first, first_value), (second, second_value))
            if pair in pairs_of_cells:
                continue
            for adapter in DIMENSIONS["adapter"]:  # whatever the adapter is, the pair is refused
                assert refusals({"adapter": adapter, **dict(pair)}), (pair, adapter)


@pytest.mark.parametrize("cell", parameters(ALONE))
def test_cell_trains_as_the_plainest_run_does(runs, cell):
    check_run(runs, cell)


@pytest.mark.parametrize("cell", parameters([*{label(plain(cell)): plain(cell) for cell in CELLS}.values()]))
def test_cell_learns_what_adamw_learns_in_full_precision(runs, cell):
    """Quantized bases exactly what it learns from the rounded weights; others something like it."""
    base = cell["base"]
    outcome = runs.get(cell)
    # DoRA's magnitudes start as the lengths of the stored rows, which are not those of a weight rounded afterward
    rounded_like = base if base in ("nf4", "int8", "float8") and cell["adapter"] != "dora" else None
    if rounded_like and cell["dtype"] == "fp32":
        exact = runs.get(cell | {"base": "plain"}, rounded_like)
        assert outcome.losses == exact.losses
        assert torch.equal(outcome.update(), exact.update())
    plainest = {name: values[0] for name, values in DIMENSIONS.items()} | {"adapter": cell["adapter"]}
    # Adapters are drawn in the dtype of the model, from which releases of torch draw other numbers.
    reference = runs.get(plainest, rounded_like, outcome if cell["dtype"] == "bf16" else None)
    assert outcome.losses == pytest.approx(reference.losses, rel=0.05)
    least = [bound for pair, bound in ALIKE.items() if pair in cell.items()]
    assert alike(outcome, reference) > min(least, default=0.9)


@pytest.mark.parametrize(("cell", "refusal"), REFUSED_ALONE, ids=[label(cell) for cell, _ in REFUSED_ALONE])
def test_cell_that_does_not_fit_is_refused_in_one_sentence(runs, cell, refusal):
    check_refusal(runs, cell, refusal)


def test_the_table_of_the_docs_is_made_of_the_same_lines():
    assert (ROOT / "docs" / "tables" / "compositions.rst").read_text() == table(), "run `make configs`"
