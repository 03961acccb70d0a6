"""What a run needs besides the weights to continue bit for bit, in files that hold no code.

``state.safetensors`` holds every tensor, ``state.json`` the structure around them. A directory that was shared by
somebody else can be resumed without unpickling anything (the metadata of ``torch.distributed.checkpoint``'s own
format is a pickle; its safetensors reader reads these files).
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchtune.training.checkpointing._errors import CheckpointError
from torchtune.training.checkpointing._safetensors_file import save_tensors
from torchtune.training.checkpointing._sources import SafetensorsFiles

STATE_DIR = "state"
_TENSORS, _STRUCTURE = "state.safetensors", "state.json"
# Key of the structure under which the names of the optimizers' parameters stand, beside the values of the run.
_NAMES = "parameter names"


def _encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """JSON of ``value``; its tensors go into ``tensors`` under their path."""
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, nn.Parameter) or value.is_sparse or value.is_quantized:
            raise CheckpointError(
                f"The training state '{path}' holds a {type(value).__name__}, which cannot be saved: use an optimizer "
                "whose state is plain tensors."
            )
        name = path if path not in tensors else f"{path} {len(tensors)}"  # 1 and "1" may both be keys of a dict
        tensors[name] = value.detach()
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"dict": [[_key(key, path), _encode(item, f"{path}/{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{path}/{index}", tensors) for index, item in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise CheckpointError(f"The training state '{path}' holds a {type(value).__name__}, which cannot be saved.")


def _key(key: Any, path: str) -> Any:
    if key is None or isinstance(key, bool | int | float | str):
        return key
    raise CheckpointError(f"The training state '{path}' has a key {key!r}, which cannot be saved: use text or numbers.")


def _decode(node: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    ((kind, content),) = node.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _decode(item, tensors) for key, item in content}
    if kind in ("list", "tuple"):
        items = [_decode(item, tensors) for item in content]
        return items if kind == "list" else tuple(items)
    return content


def _optimizers(key: str, value: Any) -> Iterator[tuple[str, Optimizer]]:
    """The optimizers of a value of the state: itself, or those of a wrapper that keeps one per parameter."""
    if isinstance(value, Optimizer):
        yield key, value
    for name, optimizer in getattr(value, "optim_map", {}).items():
        yield f"{key}/{name}", optimizer


def _parameter_names(state: Mapping[str, Any], model: nn.Module) -> dict[str, list[list[str]]]:
    """Names of the parameters of every optimizer, group by group: their own state knows them by number only."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        path: [[names.get(parameter, "?") for parameter in group["params"]] for group in optimizer.param_groups]
        for key, value in state.items()
        for path, optimizer in _optimizers(key, value)
    }


def save_state(state: Mapping[str, Any], model: nn.Module, folder: Path) -> None:
    """Write the state of every value: its ``state_dict()``, or a plain dict as it is.

    Args:
        state: see above.
        model: names the parameters of the optimizers.
        folder: exists, and is temporary.

    Raises:
        CheckpointError: a value holds anything but tensors, dicts, lists, numbers and text.
    """
    tensors: dict[str, torch.Tensor] = {}
    plain = {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in state.items()}
    structure = {key: _encode(value, key, tensors) for key, value in plain.items()}
    structure[_NAMES] = _parameter_names(state, model)
    (folder / STATE_DIR).mkdir()
    save_tensors(tensors, folder / STATE_DIR / _TENSORS)
    (folder / STATE_DIR / _STRUCTURE).write_text(json.dumps(structure), encoding="utf-8")


def _structure(folder: Path) -> dict[str, Any]:
    path = folder / STATE_DIR / _STRUCTURE
    try:
        structure = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): resume from another checkpoint.") from error
    if not isinstance(structure, dict):
        raise CheckpointError(f"{path} is damaged, it holds no object: resume from another checkpoint.")
    return structure


def _decoded(structure: dict[str, Any], key: str, tensors: Mapping[str, torch.Tensor], folder: Path) -> Any:
    """The value of ``key``. Raises ``CheckpointError`` if the structure is not one that :func:`save_state` wrote."""
    try:
        return _decode(structure[key], tensors)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder / STATE_DIR / _STRUCTURE} is damaged: what it says of '{key}' cannot be read "
            f"({type(error).__name__}: {error}): resume from another checkpoint."
        ) from error


class _NoTensors(dict):
    """Stands for every tensor where only plain values are wanted."""

    def __missing__(self, name: str) -> None:
        return None


def load_progress(folder: Path) -> dict[str, Any]:
    """The plain values under ``progress``, without reading any tensor.

    Raises:
        CheckpointError: the state is corrupt.
    """
    progress = _decoded(_structure(folder), "progress", _NoTensors(), folder)
    if not isinstance(progress, dict):
        raise CheckpointError(f"{folder / STATE_DIR / _STRUCTURE} is damaged: resume from another checkpoint.")
    return progress


def load_state(state: Mapping[str, Any], model: nn.Module, folder: Path) -> None:
    """Put a saved state into the values of ``state``: ``load_state_dict``, or an update in place of plain dicts.

    Raises:
        CheckpointError: the state is corrupt, or is that of another kind of run.
    """
    structure = _structure(folder)
    saved_names = structure.pop(_NAMES, {})
    for key in sorted(state.keys() ^ structure.keys()):
        where = "this run has" if key in state else "the checkpoint has"
        raise CheckpointError(
            f"{folder}: {where} '{key}' and the other has not: resume with the saved torchtune_config.yaml."
        )
    _check_names(saved_names, _parameter_names(state, model), folder)
    source = SafetensorsFiles([folder / STATE_DIR / _TENSORS])
    # Copies: the directory may be pruned while the run goes on.
    tensors = {name: source.read(name).clone() for name in source.names()}
    for key, value in state.items():
        saved = _decoded(structure, key, tensors, folder)
        _check_kinds(key, value, saved, folder)
        if not hasattr(value, "load_state_dict"):
            value.update(saved)
            continue
        try:
            value.load_state_dict(saved)
        except (ValueError, KeyError, RuntimeError) as error:
            raise CheckpointError(
                f"{folder}: its '{key}' does not fit this run ({str(error).rstrip('.')}): resume with the saved "
                "torchtune_config.yaml."
            ) from error


def _check_kinds(key: str, value: Any, saved: Any, folder: Path) -> None:
    """Refuse the state of another kind of optimizer: torch takes it, and fails or goes wrong at the first step."""
    if not isinstance(value, Optimizer) or not isinstance(saved, dict):
        return
    for ours, theirs in zip(value.param_groups, saved.get("param_groups", ()), strict=False):
        # A setting that only one side has is a newer release's; where both have their own, it is another optimizer.
        lacking, left = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys() - {"initial_lr"})
        if lacking and left:
            raise CheckpointError(
                f"{folder}: its '{key}' is of another optimizer, which has {', '.join(left)} where this run's "
                f"{type(value).__name__} has {', '.join(lacking)}: resume with the saved torchtune_config.yaml."
            )


def _check_names(saved: dict[str, list[list[str]]], ours: dict[str, list[list[str]]], folder: Path) -> None:
    """Refuse optimizers over other parameters: by number alone their states would be mixed up."""
    if saved == ours:
        return
    before = {name for groups in saved.values() for group in groups for name in group}
    now = {name for groups in ours.values() for group in groups for name in group}
    what = "their parameters are in another order or in other groups"
    if before ^ now:
        name = min(before ^ now)
        what = f"'{name}' was trained then and is not now" if name in before else f"'{name}' is trained now only"
    raise CheckpointError(
        f"{folder}: the optimizer's state does not fit this run ({what}): resume with the saved torchtune_config.yaml."
    )
