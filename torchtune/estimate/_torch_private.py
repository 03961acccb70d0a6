"""All private names of torch that the simulation needs; a release of torch may change them."""

from typing import Any

from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves


def fake_store() -> Any:
    """Return the store of a process group that sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def fsdp_groups() -> type:
    """Return FSDP's class for a group of parameters with a common all-gather."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    return FSDPParamGroup


def shape_propagation() -> type:
    """Return DTensor's class for shape propagation."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    return ShardingPropagator


def group_named(name: str) -> Any:
    """Return the process group with the name that functional collectives use."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._resolve_process_group(name)


def forget_meshes() -> None:
    """Clear DTensor's caches of shardings, whose keys do not tell meshes of different process groups apart."""
    from torch.distributed.tensor._redistribute import _gen_transform_infos
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _gen_transform_infos.cache_clear()
