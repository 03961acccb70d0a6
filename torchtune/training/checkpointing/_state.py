"""What a run needs besides the weights to continue bit for bit, in files that hold no code.

``state.safetensors`` holds every tensor, ``state.json`` the structure around them. A directory that was shared by
somebody else can be resumed without unpickling anything.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from torchtune.training.checkpointing._errors import CheckpointError
from torchtune.training.checkpointing._export import save_tensors

STATE_DIR = "state"
_TENSORS, _STRUCTURE = "state.safetensors", "state.json"


def _encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """JSON of ``value``; its tensors go into ``tensors`` under their path."""
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach().contiguous().cpu()
        return {"tensor": path}
    if isinstance(value, Mapping):
        return {"dict": [[key, _encode(item, f"{path}/{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{path}/{index}", tensors) for index, item in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise CheckpointError(f"The training state '{path}' holds a {type(value).__name__}, which cannot be saved.")


def _decode(node: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    ((kind, content),) = node.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _decode(item, tensors) for key, item in content}
    if kind in ("list", "tuple"):
        items = [_decode(item, tensors) for item in content]
        return items if kind == "list" else tuple(items)
    return content


def save_state(state: Mapping[str, Any], folder: Path) -> None:
    """Write the state of every value: its ``state_dict()``, or a plain dict as it is."""
    tensors: dict[str, torch.Tensor] = {}
    plain = {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in state.items()}
    structure = {key: _encode(value, key, tensors) for key, value in plain.items()}
    (folder / STATE_DIR).mkdir()
    save_tensors(_unshared(tensors), folder / STATE_DIR / _TENSORS)
    (folder / STATE_DIR / _STRUCTURE).write_text(json.dumps(structure), encoding="utf-8")


def _unshared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that do not overlap in memory, as safetensors wants them."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        start = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if start in seen and tensor.numel() else tensor
        seen.add(start)
    return result


def _structure(folder: Path) -> dict[str, Any]:
    path = folder / STATE_DIR / _STRUCTURE
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): resume from another checkpoint.") from error


def load_progress(folder: Path) -> dict[str, Any]:
    """The plain numbers under ``progress``, without reading any tensor."""
    return _decode(_structure(folder)["progress"], {})


def load_state(state: Mapping[str, Any], folder: Path) -> None:
    """Put a saved state into the values of ``state``: ``load_state_dict``, or an update in place of plain dicts.

    Raises:
        CheckpointError: the state is corrupt, or is that of another kind of run.
    """
    structure = _structure(folder)
    try:
        tensors = load_file(folder / STATE_DIR / _TENSORS)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder / STATE_DIR / _TENSORS} cannot be read ({error}): resume from another checkpoint."
        ) from error
    for key in state.keys() ^ structure.keys():
        where = "this run has" if key in state else "the checkpoint has"
        raise CheckpointError(
            f"{folder}: {where} '{key}' and the other has not: resume with the saved torchtune_config.yaml."
        )
    for key, value in state.items():
        saved = _decode(structure[key], tensors)
        if not hasattr(value, "load_state_dict"):
            value.update(saved)
            continue
        try:
            value.load_state_dict(saved)
        except (ValueError, KeyError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{folder}: its '{key}' does not fit this run ({error}): resume with the saved torchtune_config.yaml."
            ) from error
