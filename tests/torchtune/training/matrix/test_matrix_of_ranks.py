"""Settings on two ranks train as the plainest run of the same arithmetic does on one device, or are refused."""

import pytest

from tests.torchtune.training.matrix.checks import CELLS, REFUSED, check_refusal, check_run, label, parameters

SPLIT = [cell for cell in CELLS if cell["mesh"] != "one"]
REFUSED_SPLIT = [(cell, refusal) for cell, refusal in REFUSED if cell["mesh"] != "one"]


@pytest.mark.slow
@pytest.mark.parametrize("cell", parameters(SPLIT))
def test_cell_of_two_ranks_trains_as_the_plainest_run_does(runs, cell):
    check_run(runs, cell)


@pytest.mark.parametrize(("cell", "refusal"), REFUSED_SPLIT, ids=[label(cell) for cell, _ in REFUSED_SPLIT])
def test_cell_that_two_ranks_do_not_fit_is_refused_in_one_sentence(runs, cell, refusal):
    check_refusal(runs, cell, refusal)
