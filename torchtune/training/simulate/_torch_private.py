"""The names of torch that are not public and that a simulation cannot do without; nothing else in it names them.

A release of torch may take any of them away: here is the place to mend.
"""

from typing import Any

from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves


def fake_store() -> Any:
    """The store of a process group that sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def fsdp_groups() -> type:
    """FSDP's class of parameters that are gathered together."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    return FSDPParamGroup


def shape_propagation() -> type:
    """What DTensor finds the shapes of results with."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    return ShardingPropagator


def group_named(name: str) -> Any:
    """The process group that functional collectives call by its name."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._resolve_process_group(name)
