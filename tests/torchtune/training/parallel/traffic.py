"""The least bytes that collectives move to each rank, their numbers and their order."""

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

# Operator -> what it does, the argument whose size counts, and its least traffic relative to that size times
# (p - 1) / p. The argument is what is whole on one rank.
_COLLECTIVES = {
    "_allgather_base_": ("all-gather", 0, 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1, 1),
    "allreduce_": ("all-reduce", 0, 2),
    "alltoall_base_": ("all-to-all", 0, 1),
}


class Traffic(TorchDispatchMode):
    """Counts the collectives of a block.

    Attributes:
        moved: least bytes that this rank receives, by kind.
        calls: number of collectives, by kind.
        order: kinds in the order of their calls, and what :meth:`mark` has put between them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moved: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.order: list[Any] = []

    def mark(self, event: Any) -> None:
        """Note an event between collectives."""
        self.order.append(event)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func._schema.name.split("::")
        if namespace != "c10d":
            return func(*args, **(kwargs or {}))
        kind, position, factor = _COLLECTIVES[name]
        tensors = args[position] if isinstance(args[position], list | tuple) else [args[position]]
        group = dist.ProcessGroup.unbox(args[1 if name == "allreduce_" else 2])
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.moved[kind] += factor * size * (group.size() - 1) / group.size()
        self.calls[kind] += 1
        self.order.append(kind)
        result = func(*args, **(kwargs or {}))
        if name == "alltoall_base_" and group.name() == "fake":
            # Every other rank sends what this one sends: sizes that experts read from a message fit then.
            args[0].copy_(args[1])
        return result
