"""bfloat16 training against float64: norms without bias, and noise that does not depend on the mesh."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtune.training import clip_grad_norm_, prepare_optimizer

ON_HOST = True  # its meshes are there

R = Replicate()
S0 = Shard(0)
S1 = Shard(1)


@contextmanager
def as_rank(rank, world_size):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def noise(rank, sizes, placements, *, steps=1, resumed=False):
    """What the roundings of one rank do to the same values: weights after steps, local shards of equal sizes."""
    with as_rank(rank, torch.Size(sizes).numel()):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[-len(sizes) :])
        model = nn.Module()
        for name, tensor_placements in placements.items():
            local = torch.ones(64, 64, dtype=torch.bfloat16)
            model.register_parameter(
                name, nn.Parameter(DTensor.from_local(local, mesh, tensor_placements, run_check=False))
            )

        def build():
            return prepare_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, seed=5)

        optimizer = build()
        for step in range(steps):
            if resumed and step:
                saved = optimizer.state_dict()
                optimizer = build()
                optimizer.load_state_dict(saved)
            for parameter in model.parameters():
                local = torch.full((64, 64), -(2.0**-8), dtype=torch.bfloat16)  # half a spacing
                parameter.grad = DTensor.from_local(local, mesh, parameter.placements, run_check=False)
            optimizer.step()
        return {name: parameter.to_local().detach().double() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("sizes", "placements"),
    [
        ((2, 2), {"norm": [R, R], "column": [R, S0], "row": [R, S1], "vector": [R, R]}),
        ((2, 2), {"norm": [S0, R], "column": [S0, S0], "row": [S0, S1], "whole": [R, R]}),
        ((4,), {"norm": [R], "column": [S0]}),
        ((4,), {"one": [S0], "other": [S0]}),
    ],
    ids=["copies x tp", "fsdp x tp", "tp", "fsdp"],
)
def test_each_shard_draws_the_noise_of_its_elements(sizes, placements):
    """The same on all replicas of a shard, independent on different shards and for different parameters."""
    # A thread for each, all alive: meshes of one thread are equal, and DTensor's caches would give the first for all
    one_at_a_time = threading.Lock()
    turn = threading.Barrier(4)

    def run(rank):
        turn.wait()
        with one_at_a_time:
            return noise(rank, sizes, placements)

    with ThreadPoolExecutor(4) as pool:
        ranks = list(pool.map(run, range(4)))
    drawn = {}
    for rank, noise_of_rank in enumerate(ranks):
        coordinates = (rank,) if len(sizes) == 1 else divmod(rank, sizes[1])
        for name, values in noise_of_rank.items():
            coordinates_of_shard = []  # without those of dimensions that replicate
            for kind, coordinate in zip(placements[name], coordinates, strict=True):
                if kind.is_shard():
                    coordinates_of_shard.append(coordinate)
            shard = (name, *coordinates_of_shard)
            assert torch.equal(drawn.setdefault(shard, values), values), f"replicas of {shard} differ"
    rows = torch.stack([values.flatten() for values in drawn.values()])
    assert rows.std(1).min() > 0
    correlation = torch.corrcoef(rows) - torch.eye(len(rows))
    assert correlation.abs().max() < 5 / 64  # five deviations of independent draws of 64 x 64


def whole_noise(shape):
    """Weights after a step of half a spacing, in a single process."""
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)))
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, seed=5)
    model.weight.grad = torch.full(shape, -(2.0**-8), dtype=torch.bfloat16)
    optimizer.step()
    return model.weight.detach().double()


@pytest.mark.parametrize(
    ("placements", "slices"),
    [
        ([S0, R], (slice(64, 128), slice(None))),
        ([R, S1], (slice(None), slice(64, 128))),
        ([S0, S1], (slice(64, 128), slice(64, 128))),
    ],
    ids=["rows", "columns", "both"],
)
def test_noise_of_a_shard_is_a_slice_of_the_full_tensors_noise(placements, slices):
    shape = [64, 64]
    for placement in placements:
        if placement.is_shard():
            shape[placement.dim] = 128  # 64 for each of two ranks
    last = noise(3, (2, 2), {"weight": placements})["weight"]
    assert torch.equal(last, whole_noise(shape)[slices])


def test_noise_of_a_shard_goes_on_after_a_resume():
    for rank in (0, 1):
        arguments = (rank, (2, 2), {"norm": [R, R], "column": [R, S0]})
        through, resumed = noise(*arguments, steps=4), noise(*arguments, steps=4, resumed=True)
        assert all(torch.equal(through[name], resumed[name]) for name in through)


def gradients(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = [(7,), (300, 401), (3, 2**17), (1, 1)]
    return [(torch.randn(shape, generator=generator) * 1e-2 + 3e-3).to(dtype) for shape in shapes]


def exact(grads):
    return torch.cat([grad.double().flatten() for grad in grads]).norm().item()


@pytest.mark.parametrize("dtypes", [(torch.bfloat16,), (torch.float16,), (torch.bfloat16, torch.float32)])
def test_the_norm_of_16_bit_gradients_is_that_of_float64(dtypes):
    grads = []
    for dtype in dtypes:
        grads += gradients(dtype)
    grads.append(torch.ones(6, 4, dtype=dtypes[0]).t())  # not contiguous
    parameters = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    norm = clip_grad_norm_(parameters, None)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(exact(grads), rel=1e-4)
    assert clip_grad_norm_(parameters, 1.0).item() == pytest.approx(exact(grads), rel=1e-4)
    clipped = [parameter.grad for parameter in parameters]
    assert [grad.dtype for grad in clipped] == [grad.dtype for grad in grads]
    assert exact(clipped) == pytest.approx(1.0, rel=1e-3)  # of elements that are rounded to 16 bits again


@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_norm_of_16_bit_gradients_on_a_mesh(clip):
    """A mesh of one process: every placement, meshes of both kinds, and summands that are not added up yet."""
    with as_rank(0, 1):
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        other_mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        places = [
            (mesh, [S0, R]),
            (mesh, [R, S1]),
            (other_mesh, [S0]),
            (other_mesh, [Partial()]),
            (mesh, [R, R]),
            None,
            None,
        ]
        grads = gradients(torch.bfloat16) + gradients(torch.bfloat16)[1:]
        parameters = []
        for grad, placement in zip(grads, places, strict=True):
            weight = torch.zeros_like(grad)
            own_grad = grad.clone()
            if placement is not None:
                mesh_of_grad, kinds = placement
                kinds_of_weight = []
                for kind in kinds:
                    kinds_of_weight.append(R if kind.is_partial() else kind)
                weight = DTensor.from_local(weight, mesh_of_grad, kinds_of_weight)
                own_grad = DTensor.from_local(own_grad, mesh_of_grad, kinds)
            parameters.append(nn.Parameter(weight))
            parameters[-1].grad = own_grad
        norm = clip_grad_norm_(parameters, clip)
        assert norm.item() == pytest.approx(exact(grads), rel=1e-4)
        local = []
        for parameter in parameters:
            grad = parameter.grad
            if isinstance(grad, DTensor):
                grad = grad.to_local()
            local.append(grad)
        assert exact(local) == pytest.approx(exact(grads) if clip is None else clip, rel=2e-3)
