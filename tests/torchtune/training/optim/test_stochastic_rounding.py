"""The rounding itself: unbiased, with the right variance, and neighbours only."""

import math

import pytest
import torch

from torchtune.training.optim._stochastic_rounding import RandomBits, chunk_size, round_stochastically_


def rounded(values: torch.Tensor, step: int = 0) -> torch.Tensor:
    return round_stochastically_(values.clone(), RandomBits(seed=3, stream=1, step=step))


@pytest.mark.parametrize("value", [1.001, -1.001, 3.1415926, 1e-30, -2.7e20, 0.1])
def test_mean_is_exact_and_variance_is_that_of_independent_draws(value):
    draws = 400_000
    exact = torch.tensor(value, dtype=torch.float32).double().item()
    result = rounded(torch.full((draws,), value))
    assert torch.equal(result, result.bfloat16().float())
    low, high = result.min().double().item(), result.max().double().item()
    assert low <= exact <= high
    assert high - low <= abs(exact) * 2**-7
    p = (exact - low) / (high - low)
    deviation = (high - low) * math.sqrt(p * (1 - p))
    assert abs(result.double().mean().item() - exact) < 5 * deviation / math.sqrt(draws)
    assert result.double().std().item() == pytest.approx(deviation, rel=0.02)


def test_sum_over_steps_has_the_variance_of_independent_steps():
    """One window of the table serves many chunks and steps: they must not move together."""
    values = torch.full((2048,), 1.0 + 2**-9)
    steps = 600
    total = torch.zeros_like(values)
    for step in range(steps):
        total += rounded(values, step) - values
    deviation = 2**-7 * math.sqrt(0.25 * 0.75) * math.sqrt(steps)
    assert total.std().item() == pytest.approx(deviation, rel=0.08)
    assert abs(total.mean().item()) < 5 * deviation / math.sqrt(len(values))


def test_chunks_of_a_step_are_uncorrelated():
    bits = RandomBits(seed=0, stream=0, step=1)
    rows = torch.stack([bits.next(50_000, torch.device("cpu")).clone() for _ in range(12)]).double()
    correlation = torch.corrcoef(rows) - torch.eye(12)
    assert correlation.abs().max() < 6 / math.sqrt(50_000)
    assert rows.mean().item() == pytest.approx(2**15, rel=0.01)
    assert rows.min() >= 0
    assert rows.max() < 2**16


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, 2.0**-133])
def test_what_bfloat16_represents_stays(value):
    result = rounded(torch.full((70_000,), value))
    assert torch.equal(result, torch.full((70_000,), value))
    assert math.copysign(1, result[0].item()) == math.copysign(1, value)


def test_nan_stays_nan():
    assert rounded(torch.full((1000,), math.nan)).isnan().all()


def test_more_than_one_chunk():
    count = chunk_size(torch.device("cpu")) + 1000
    result = rounded(torch.full((count,), 1.0 + 2**-9))
    assert result.mean().item() == pytest.approx(1.0 + 2**-9, abs=1e-4)
    assert set(result.unique().tolist()) == {1.0, 1.0 + 2**-7}


def test_depends_on_seed_stream_and_step_alone():
    values = torch.randn(5000)

    def once(*key: int) -> torch.Tensor:
        return round_stochastically_(values.clone(), RandomBits(*key))

    first = once(1, 2, 3)
    torch.manual_seed(77)
    assert torch.equal(first, once(1, 2, 3))
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert not torch.equal(first, once(*other))
