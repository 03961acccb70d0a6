"""The rounding itself: unbiased, with the right variance, and neighbors only."""

import math

import pytest
import torch

from torchtune.training.optim._stochastic_rounding import make_generator, round_stochastically_

CPU = torch.device("cpu")


def rounded(values: torch.Tensor, step: int = 0) -> torch.Tensor:
    return round_stochastically_(values.clone(), make_generator(3, "weight", step, CPU))


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
    values = torch.full((2048,), 1.0 + 2**-9)
    steps = 600
    total = torch.zeros_like(values)
    for step in range(steps):
        total += rounded(values, step) - values
    deviation = 2**-7 * math.sqrt(0.25 * 0.75) * math.sqrt(steps)
    assert total.std().item() == pytest.approx(deviation, rel=0.08)
    assert abs(total.mean().item()) < 5 * deviation / math.sqrt(len(values))


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -1.5, math.inf, -math.inf, 2.0**-133])
def test_what_bfloat16_represents_stays(value):
    result = rounded(torch.full((70_000,), value))
    assert torch.equal(result, torch.full((70_000,), value))
    assert math.copysign(1, result[0].item()) == math.copysign(1, value)


def test_nan_stays_nan():
    assert rounded(torch.full((1000,), math.nan)).isnan().all()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 1001])
def test_any_number_of_elements(count):
    result = rounded(torch.full((count,), 1.0 + 2**-9))
    assert set(result.tolist()) <= {1.0, 1.0 + 2**-7}


def test_depends_on_seed_stream_and_step_alone():
    values = torch.randn(5000)

    def once(*key) -> torch.Tensor:
        return round_stochastically_(values.clone(), make_generator(*key, CPU))

    first = once(1, "a", 3)
    torch.manual_seed(77)
    assert torch.equal(first, once(1, "a", 3))
    for other in ((2, "a", 3), (1, "b", 3), (1, "a", 4)):
        assert not torch.equal(first, once(*other))
