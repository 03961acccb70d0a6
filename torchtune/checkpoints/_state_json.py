"""JSON encoding of the structure of a training state, with nodes for its tensors."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtune.checkpoints._checkpoint_error import CheckpointError

# Name of a tensor -> path in the state, tensor, JSON node.
NodeTensors = dict[str, tuple[str, torch.Tensor, dict[str, Any]]]


def encode(value: Any, path: str, tensors: NodeTensors) -> Any:
    """Encode ``value`` as JSON, and add its tensors to ``tensors``."""
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, nn.Parameter, DTensor) or value.is_sparse or value.is_quantized:
            raise CheckpointError(
                f"The training state '{path}' holds a {type(value).__name__}, which cannot be saved: use an optimizer "
                "whose state is plain tensors."
            )
        name = path if path not in tensors else f"{path} {len(tensors)}"  # 1 and "1" may both be keys of a dict
        node = {"tensor": name}
        tensors[name] = path, value.detach(), node
        return node
    if isinstance(value, Mapping):
        return {"dict": [[_key(key, path), encode(item, f"{path}/{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{path}/{index}", tensors) for index, item in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise CheckpointError(f"The training state '{path}' holds a {type(value).__name__}, which cannot be saved.")


def _key(key: Any, path: str) -> Any:
    if key is None or isinstance(key, bool | int | float | str):
        return key
    raise CheckpointError(f"The training state '{path}' has a key {key!r}, which cannot be saved: use text or numbers.")


def decode(node: dict[str, Any], path: str, tensor: Callable[[str, dict[str, Any]], Any]) -> Any:
    """Decode a JSON node; ``tensor`` returns the tensor for a path and a node."""
    if "tensor" in node:
        return tensor(path, node)
    ((kind, content),) = node.items()
    if kind == "dict":
        return {key: decode(item, f"{path}/{key}", tensor) for key, item in content}
    if kind in ("list", "tuple"):
        items = [decode(item, f"{path}/{index}", tensor) for index, item in enumerate(content)]
        return items if kind == "list" else tuple(items)
    if kind != "value" or isinstance(content, list | dict):
        raise ValueError(f"'{path}' is of the unknown kind '{kind}'")
    return content
