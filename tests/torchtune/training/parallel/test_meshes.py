"""A family may shard chosen modules over a mesh of their own, on a process group without processes."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtune.models import Description, build, get_spec
from torchtune.training import ParallelDims, parallelize
from torchtune.training.parallel._parallel_dims import ParallelDimsError

CPU = torch.device("cpu")
TINY = Description(
    vocab_size=32, num_layers=2, embed_dim=16, intermediate_dim=24, max_seq_len=32, num_heads=4, num_kv_heads=2
)


@pytest.fixture
def dims() -> Iterator[ParallelDims]:
    """Two copies of two shards."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    dims = ParallelDims(dp_replicate=2, dp_shard=2, world_size=4)
    dims.build_mesh("cpu")
    yield dims
    dist.destroy_process_group()


def _meshes(dims: ParallelDims, meshes: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Dimensions of the mesh of every parameter."""
    with torch.device("meta"):
        model = build(TINY, replace(get_spec("llama3"), meshes=meshes))
    parallelize(model, dims, device=CPU)
    return {name: parameter.device_mesh.mesh_dim_names for name, parameter in model.named_parameters()}


def test_by_default_everything_is_on_the_data_mesh(dims):
    assert get_spec("llama3").meshes == {}
    assert set(_meshes(dims, {}).values()) == {("dp_replicate", "dp_shard")}


def test_modules_of_a_pattern_are_on_the_mesh_that_the_spec_names(dims):
    found = _meshes(dims, {"layers.*.mlp": "dp_shard"})
    for name, mesh in found.items():
        assert mesh == (("dp_shard",) if ".mlp." in name else ("dp_replicate", "dp_shard")), name


@pytest.mark.parametrize(
    ("meshes", "message"),
    [
        (
            {"layers.*.mlp": "experts"},
            "'llama3' shards 'layers.\\*.mlp' over 'experts', but the device mesh has only dp_rep",
        ),
        (
            {"layers.*.moe": "dp_shard"},
            "'llama3' names a mesh for 'layers.\\*.moe', which no module of the model matches",
        ),
    ],
)
def test_what_a_spec_gets_wrong_is_named(dims, meshes, message):
    with pytest.raises(ParallelDimsError, match=message):
        _meshes(dims, meshes)
