"""The names of torch that are not public and that the library cannot do without, each with what it is for.

A release of torch may take any of them away: nothing else in the library names them, so that here is the one place to
mend. Where torch has a public name by now, that one is used.
"""

import warnings
from datetime import timedelta
from typing import Any


def flatten_mesh(mesh: Any, name: str) -> Any:
    """Join all dimensions of a device mesh into one, a process group of its own; torch has no public way."""
    return mesh._flatten(name)


def set_collective_timeout(seconds: float, known: int = 0) -> int:
    """Set the time after which torch gives a collective up, in all process groups of this rank.

    Only ``torch.distributed`` itself can name all groups. ``set_timeout`` is public from 2.14 on.

    Args:
        seconds: the time.
        known: do nothing if there are no more groups than that.

    Returns:
        how many groups there are.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    groups = list(distributed_c10d._world.pg_map)
    if len(groups) <= known:
        return known
    with warnings.catch_warnings():  # for backends that have none
        warnings.filterwarnings("ignore", "Set timeout is now only supported", UserWarning)
        for group in groups:
            # a group that another thread is about to make has no ranks yet
            if group not in distributed_c10d._world.pg_group_ranks or dist.get_rank(group) < 0:
                continue
            if hasattr(dist, "set_timeout"):
                dist.set_timeout(timedelta(seconds=seconds), group)
            else:
                distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
    return len(groups)
