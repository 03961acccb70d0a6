"""The rounding itself: unbiased, with the right variance, and neighbors only."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from torchtune.training.optim._stochastic_rounding import (
    ElementIds,
    element_ids,
    hash_text,
    random_bits,
    round_to_bfloat16,
    rounding_key,
    rounding_noise,
)
from torchtune.utils import fake_store


def rounded(values, step=0, draw=0):
    ids = element_ids(torch.arange(len(values), dtype=torch.int32), 12345)
    return round_to_bfloat16(values, rounding_noise(random_bits(ids, rounding_key(3, step)), draw))


@pytest.mark.parametrize("draw", [0, 1, 2, 3])
@pytest.mark.parametrize("value", [1.001, -1.001, 3.1415926, 1e-30, -2.7e20, 0.1])
def test_mean_is_exact_and_variance_is_that_of_independent_draws(value, draw):
    draws = 400_000
    exact = torch.tensor(value, dtype=torch.float32).double().item()
    result = rounded(torch.full((draws,), value), draw=draw)
    assert torch.equal(result, result.bfloat16().float())
    low = result.min().double().item()
    high = result.max().double().item()
    assert low <= exact <= high
    assert high - low <= abs(exact) * 2**-7
    p = (exact - low) / (high - low)
    deviation = (high - low) * math.sqrt(p * (1 - p))
    assert abs(result.double().mean().item() - exact) < 5 * deviation / math.sqrt(draws)
    assert result.double().std().item() == pytest.approx(deviation, rel=0.02)


@pytest.mark.parametrize("value", [0.0, -0.0, -1.5, math.inf, -math.inf, 2.0**-133, math.nan])
def test_values_that_bfloat16_represents_are_not_changed(value):
    result = rounded(torch.full((70_001,), value))  # an odd number: four share a draw
    assert torch.equal(result, torch.full((70_001,), value)) or (math.isnan(value) and result.isnan().all())
    assert math.copysign(1, result[0].item()) == math.copysign(1, value)


@pytest.fixture
def mesh_of_two():
    """Mesh of two ranks, of which this process is the second, without communication."""
    dist.init_process_group("fake", store=fake_store(), rank=1, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("shape", "dim"), [((4,), 0), ((4, 6), 0), ((4, 6), 1), ((2, 4, 6), 0), ((2, 4, 6), 1), ((2, 4, 6), 2)]
)
def test_elements_of_a_shard_have_the_ids_of_the_whole_tensor(shape, dim, mesh_of_two):
    count = math.prod(shape)
    positions = torch.arange(count, dtype=torch.int32, device="cpu")  # as those of runs of earlier releases
    ids = ElementIds(torch.zeros(shape), "weight").of(0, count, torch.device("cpu"))
    assert torch.equal(ids, element_ids(positions, hash_text("weight")))
    ids = ids.view(shape)
    shard = ids.chunk(2, dim)[1]
    sharded = DTensor.from_local(torch.zeros(shard.shape), mesh_of_two, [Shard(dim)])
    ids_of_shard = ElementIds(sharded, "weight").of(0, shard.numel(), torch.device("cpu"))
    assert torch.equal(ids_of_shard, shard.flatten())
