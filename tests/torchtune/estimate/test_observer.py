"""FLOPs of the library's own operators."""

import pytest
import torch

from torchtune.estimate._observer import _delta_rule_flops


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 1), (1, 4), (3, 4)])
def test_flops_of_the_delta_rule_are_those_of_its_products(batch, length):
    """Per token and head: an element of the state, and a value and a key for each of the 64 positions of a chunk."""
    keys = torch.empty(batch, length, 2, 5)
    values = torch.empty(batch, length, 4, 7)
    state = 11 * 4 * 5 * 7
    chunk = 64 * (4 * (13 * 7 + 17 * 5) + 19 * 2 * 5)
    assert _delta_rule_flops(11, 13, 17, 19, keys, values) == batch * length * state + batch * length * chunk
