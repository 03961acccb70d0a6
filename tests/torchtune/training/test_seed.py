import random

import numpy as np
import pytest
import torch

from torchtune import training
from torchtune.training.seed import SeedError


def draw():
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), *torch.rand(3).tolist()]


def test_a_seed_fixes_everything_random():
    assert training.set_seed(7) == 7
    first = draw()
    training.set_seed(7)
    assert draw() == first
    training.set_seed(8)
    assert draw() != first


def test_none_draws_a_seed_that_does_not_depend_on_the_global_state():
    training.set_seed(7)
    first = training.set_seed(None)
    training.set_seed(7)
    second = training.set_seed(None)
    assert first != second
    assert 0 <= first < 2**32


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_out_of_range_is_refused(seed):
    with pytest.raises(SeedError, match=f"seed: {seed} is not between 0 and 4294967295"):
        training.set_seed(seed)


@pytest.mark.parametrize("mode", ["loud", 9])
def test_unknown_debug_mode_is_refused(mode):
    with pytest.raises(SeedError, match=f"cudnn_deterministic_mode: .* but got {mode}: choose one of them"):
        training.set_seed(1, debug_mode=mode)


def test_debug_mode_makes_kernels_deterministic(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        training.set_seed(1, debug_mode="warn")
        assert torch.get_deterministic_debug_mode() == 1
        assert torch.backends.cudnn.deterministic
        assert not torch.backends.cudnn.benchmark
        import os

        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        training.set_seed(1, debug_mode=0)
    assert not torch.backends.cudnn.deterministic


def test_rng_state_goes_through_a_file(tmp_path):
    training.set_seed(3)
    draw()
    random.gauss(0, 1)  # leaves the second number of the pair waiting
    torch.save(training.RNGState().state_dict(), tmp_path / "rng.pt")
    expected = draw()
    training.set_seed(99)
    training.RNGState().load_state_dict(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert draw() == expected
