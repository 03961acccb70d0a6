"""What a run needs besides the weights to continue bit for bit, in files that hold no code.

``state.safetensors`` holds every tensor, ``state.json`` the structure around them. A directory that was shared by
somebody else can be resumed without unpickling anything (the metadata of ``torch.distributed.checkpoint``'s own
format is a pickle; its safetensors reader reads these files). Sharded tensors stand there whole, each rank having
written its part into its place, so that any number of processes can go on, each reading its own part.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchtune.training._rng import RNGState
from torchtune.training.checkpointing._errors import CheckpointError
from torchtune.training.checkpointing._ranks import Held, Ranks, read_like, whole_where_partial
from torchtune.training.checkpointing._safetensors_file import Block, Part
from torchtune.training.checkpointing._sources import SafetensorsFiles

STATE_DIR = "state"
TENSORS, STRUCTURE = "state.safetensors", "state.json"
# Key of the structure under which the names of the optimizers' parameters stand, beside the values of the run.
_NAMES = "parameter names"
# Key under which the states of the random generators of several ranks stand.
_RANKS = "ranks"


def _encode(value: Any, path: str, tensors: dict[str, tuple[str, torch.Tensor]]) -> Any:
    """JSON of ``value``; its tensors go, with their path, into ``tensors`` under a name made from it."""
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, nn.Parameter, DTensor) or value.is_sparse or value.is_quantized:
            raise CheckpointError(
                f"The training state '{path}' holds a {type(value).__name__}, which cannot be saved: use an optimizer "
                "whose state is plain tensors."
            )
        name = path if path not in tensors else f"{path} {len(tensors)}"  # 1 and "1" may both be keys of a dict
        tensors[name] = path, value.detach()
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


def _decode(node: dict[str, Any], path: str, tensor: Callable[[str, str], Any]) -> Any:
    """The value of a node; ``tensor`` gives those in it from their path and name."""
    ((kind, content),) = node.items()
    if kind == "tensor":
        return tensor(path, content)
    if kind == "dict":
        return {key: _decode(item, f"{path}/{key}", tensor) for key, item in content}
    if kind in ("list", "tuple"):
        items = [_decode(item, f"{path}/{index}", tensor) for index, item in enumerate(content)]
        return items if kind == "list" else tuple(items)
    return content


def optimizers_of(key: str, value: Any) -> Iterator[tuple[str, Optimizer]]:
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
        for path, optimizer in optimizers_of(key, value)
    }


def _parameters(state: Mapping[str, Any], model: nn.Module) -> dict[str, torch.Tensor]:
    """Path of what an optimizer keeps about a parameter -> the parameter; by number, as torch does it, and by name."""
    found: dict[str, torch.Tensor] = {}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for key, value in state.items():
        for path, optimizer in optimizers_of(key, value):
            every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            found |= {f"{path}/state/{number}": parameter for number, parameter in enumerate(every)}
            found |= {f"{path}/state/{names[parameter]}": parameter for parameter in every if parameter in names}
    return found


def state_parts(state: Mapping[str, Any], model: nn.Module, ranks: Ranks) -> tuple[list[Part], dict[str, Any]]:
    """The state of every value, its ``state_dict()`` or a plain dict as it is: the tensors, and the rest as JSON.

    What is not sharded is rank 0's, but for the random generators: each rank has its own.

    Args:
        state: see above.
        model: names the parameters of the optimizers.
        ranks: each makes what it holds.

    Raises:
        CheckpointError: a value holds anything but tensors, dicts, lists, numbers and text.
    """
    tensors: dict[str, tuple[str, torch.Tensor]] = {}
    plain = {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in state.items()}
    for key, value in state.items():
        if isinstance(value, RNGState) and ranks.size > 1:
            plain[key] = {_RANKS: ranks.gather(plain[key])}
    structure, parameters = {}, _parameters(state, model)
    with ranks.together():
        structure = {key: _encode(value, key, tensors) for key, value in plain.items()}
    structure[_NAMES] = _parameter_names(state, model)
    parts = []
    for turn, (name, (path, tensor)) in enumerate(tensors.items()):
        like = parameters.get(path.rpartition("/")[0])
        # An optimizer changes its own at its next step; who knows when others do that, so these are copied now.
        tensor = tensor.clone() if like is None else whole_where_partial(tensor)
        held = Held.of(tensor, ranks, 0 if like is None else turn, like)
        parts.append(({name: held.outline}, partial(_blocks, name, held)))
    return parts, structure


def _blocks(name: str, held: Held) -> list[Block]:
    return [Block(name, tuple(part.start for part in held.box), held.data)] if held.writes else []


def _structure(folder: Path) -> dict[str, Any]:
    path = folder / STATE_DIR / STRUCTURE
    try:
        structure = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): resume from another checkpoint.") from error
    if not isinstance(structure, dict):
        raise CheckpointError(f"{path} is damaged, it holds no object: resume from another checkpoint.")
    return structure


def _decoded(structure: dict[str, Any], key: str, tensor: Callable[[str, str], Any], folder: Path) -> Any:
    """The value of ``key``. Raises ``CheckpointError`` if the structure is not one that :func:`state_parts` made."""
    try:
        return _decode(structure[key], key, tensor)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder / STATE_DIR / STRUCTURE} is damaged: what it says of '{key}' cannot be read "
            f"({type(error).__name__}: {error}): resume from another checkpoint."
        ) from error


def load_progress(folder: Path) -> dict[str, Any]:
    """The plain values under ``progress``, without reading any tensor.

    Raises:
        CheckpointError: the state is corrupt.
    """
    progress = _decoded(_structure(folder), "progress", lambda path, name: None, folder)
    if not isinstance(progress, dict):
        raise CheckpointError(f"{folder / STATE_DIR / STRUCTURE} is damaged: resume from another checkpoint.")
    return progress


def load_state(state: Mapping[str, Any], model: nn.Module, folder: Path, rank: int) -> None:
    """Put a saved state into the values of ``state``: ``load_state_dict``, or an update in place of plain dicts.

    Of what belongs to sharded parameters only this rank's part is read. A rank that the saved run had not gets
    random generators of its own, derived from rank 0's.

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
    source, parameters = SafetensorsFiles([folder / STATE_DIR / TENSORS]), _parameters(state, model)

    def tensor(path: str, name: str) -> torch.Tensor:
        like = parameters.get(path.rpartition("/")[0])
        if not isinstance(like, DTensor) or not (shape := source.shape(name)):
            return source.read(name).clone()  # the directory may be pruned while the run goes on
        return read_like(like, shape, lambda box: source.read(name, box))

    for key, value in state.items():
        saved = _decoded(structure, key, tensor, folder)
        if isinstance(value, RNGState):
            value.load_state_dict(saved[_RANKS][min(rank, len(saved[_RANKS]) - 1)] if _RANKS in saved else saved)
            if rank >= len(saved.get(_RANKS, [saved])):
                value.derive(rank)
            continue
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
