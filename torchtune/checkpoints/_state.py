"""Training state: everything besides the weights that an exact resume needs, without pickled objects.

Every rank writes ``rank_N.safetensors`` with its shards and its random number generators. ``state.json`` is the index:
the structure of the state, with shape and dtype of each tensor. The header of a rank's file records where its shards
start, so saving needs no all-gather. On resume, a rank with the same shards reads its own file; with another number of
ranks or another mesh it reads slices from several files.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchtune.checkpoints._directories import STATE_DIR, STRUCTURE
from torchtune.checkpoints._save import Entry, TensorFile
from torchtune.checkpoints._weight_files import CheckpointError, SafetensorsFiles
from torchtune.models import Slices
from torchtune.training import RecipeSettingsError, RNGState
from torchtune.training.optim import OptimizerStateError, check_state_format
from torchtune.training.parallel import LocalShard, Ranks, ShardGrid, full_slices, read_shard, reduce_partial

# Key of the structure: parameter names of the optimizers.
_NAMES = "parameter names"
# Kind of a node with its value in the header of each rank's file.
_OWN = "own"
# Keys of this header: the values, and the first indices of shards.
_VALUES, _STARTS = "values", "starts"
# Rank 0 writes replicated tensors up to this number of bytes; ranks take turns with larger ones.
_SMALL = 2**16
# Maximum number of open files.
_OPEN = 16
# Types of values and keys in JSON, besides None.
_PLAIN = (bool, int, float, str)

# Name of a tensor -> path in the state, tensor, JSON node.
_NodeTensors = dict[str, tuple[str, torch.Tensor, dict[str, Any]]]


def optimizers_of(key: str, value: Any) -> Iterator[tuple[str, Optimizer]]:
    """Yield the optimizers in a value of the state: itself, or all in a wrapper with one optimizer per parameter."""
    if isinstance(value, Optimizer):
        yield key, value
    for name, optimizer in getattr(value, "optim_map", {}).items():
        yield f"{key}/{name}", optimizer


def _parameters(
    state: Mapping[str, Any], named: Mapping[str, nn.Parameter]
) -> tuple[dict[str, list[list[str]]], dict[str, torch.Tensor]]:
    """Return the parameters of every optimizer in a state.

    Returns:
        Path of an optimizer -> parameter names by parameter group (its ``state_dict`` only has indices); and path of a
        parameter's optimizer state -> parameter, once with the parameter's index, as in torch, and once with its name.

    Raises:
        CheckpointError: an optimizer has a parameter of another model, which the checkpoint would not contain.
    """
    names = {parameter: name for name, parameter in named.items()}
    found, parameters = {}, {}
    for path, optimizer in (found for item in state.items() for found in optimizers_of(*item)):
        groups = [group["params"] for group in optimizer.param_groups]
        every = [parameter for group in groups for parameter in group]
        if any(parameter not in names for parameter in every):
            raise CheckpointError(
                f"'{path}' trains a parameter that is in none of the models to be saved or resumed: pass every trained "
                "model, by name."
            )
        found[path] = [[names[parameter] for parameter in group] for group in groups]
        for number, parameter in enumerate(every):
            parameters |= {f"{path}/state/{key}": parameter for key in (number, names[parameter])}
    return found, parameters


@dataclass(frozen=True)
class LocalState:
    """The training state on this rank.

    Attributes:
        file: file of this rank.
        structure: the index; rank 0 writes it.
        agreed: names, shapes and dtypes; they must be equal on all ranks.
    """

    file: TensorFile
    structure: dict[str, Any]
    agreed: bytes


def local_state(state: Mapping[str, Any], named: Mapping[str, nn.Parameter], ranks: Ranks) -> LocalState:
    """Describe the training state on this rank: tensors as a file, all other values as JSON.

    Rank 0 saves the values that are not sharded; every rank saves its own random number generators.

    Args:
        state: objects with ``state_dict()``, or dicts, by name.
        named: parameters of the models by name.
        ranks: all ranks.

    Raises:
        CheckpointError: a value is not a tensor, dict, list, number or string, or an optimizer has a parameter of
            another model.
    """
    tensors: _NodeTensors = {}
    own_tensors: _NodeTensors = {}
    structure, values, (names, parameters) = {}, {}, _parameters(state, named)
    with ranks.raise_on_all():
        for key, value in state.items():
            plain = value.state_dict() if hasattr(value, "state_dict") else value
            if isinstance(value, RNGState):
                structure[key], values[key] = {_OWN: key}, _encode(plain, key, own_tensors)
            else:
                structure[key] = _encode(plain, key, tensors)
    structure[_NAMES] = names
    entries, starts = [], {}
    for turn, (name, (path, tensor, node)) in enumerate(tensors.items()):
        parameter = parameters.get(path.rpartition("/")[0])
        # Optimizer state only changes at the next step; other objects may change any time, so copy theirs now.
        tensor = tensor.clone() if parameter is None else reduce_partial(tensor)
        turn = 0 if parameter is None or tensor.nbytes <= _SMALL else turn
        shard = LocalShard.of(tensor, ranks, turn, parameter)
        node |= {"shape": list(shard.spec.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        if isinstance(parameter, DTensor) and isinstance(tensor, DTensor) and tensor.shape != parameter.shape:
            node["shards"] = list(ShardGrid.of(parameter).sizes)  # one row per shard: only the same shards can load it
        if shard.data.shape == shard.spec.shape:
            node["rank"] = turn % ranks.size
        if shard.is_writer and shard.data.numel():
            starts[name] = [part.start for part in shard.slices]
            entries.append(Entry.of(name, shard.data))
    entries += [Entry.of(name, tensor.clone()) for name, (_, tensor, _) in own_tensors.items()]
    metadata = {_VALUES: json.dumps(values), _STARTS: json.dumps(starts)}
    agreed = json.dumps([[name, node.get("shape"), node.get("dtype")] for name, (_, _, node) in tensors.items()])
    return LocalState(TensorFile(_of_rank(ranks.rank), entries, metadata), structure, agreed.encode())


def _of_rank(rank: int) -> str:
    return f"{STATE_DIR}/rank_{rank}.safetensors"


def _encode(value: Any, path: str, tensors: _NodeTensors) -> Any:
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
        for key in value:
            if not (key is None or isinstance(key, _PLAIN)):
                raise CheckpointError(
                    f"The training state '{path}' has a key {key!r}, which cannot be saved: use text or numbers."
                )
        return {"dict": [[key, _encode(item, f"{path}/{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{path}/{index}", tensors) for index, item in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    if value is None or isinstance(value, _PLAIN):
        return {"value": value}
    raise CheckpointError(f"The training state '{path}' holds a {type(value).__name__}, which cannot be saved.")


def _decode(node: dict[str, Any], path: str, tensor: Callable[[str, dict[str, Any]], Any]) -> Any:
    """Decode a JSON node; ``tensor`` returns the tensor for a path and a node."""
    if "tensor" in node:
        return tensor(path, node)
    ((kind, content),) = node.items()
    if kind == "dict":
        return {key: _decode(item, f"{path}/{key}", tensor) for key, item in content}
    if kind in ("list", "tuple"):
        items = [_decode(item, f"{path}/{index}", tensor) for index, item in enumerate(content)]
        return items if kind == "list" else tuple(items)
    return content


class _RankFiles:
    """State in one file per rank; headers and tensors are read lazily.

    Attributes:
        count: number of ranks of the saved run.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self.count = max(len(list((folder / STATE_DIR).glob("rank_*.safetensors"))), 1)
        self._order = list(dict.fromkeys([min(rank, self.count - 1), *range(self.count)]))
        self._headers: dict[int, dict[str, Any]] = {}
        self._open: dict[int, SafetensorsFiles] = {}

    def header(self, rank: int) -> dict[str, Any]:
        """Return the header of a rank's file: values, first indices and shapes of its shards."""
        if rank not in self._headers:
            with (
                damage_named(self._folder / _of_rank(rank)),
                safe_open(self._folder / _of_rank(rank), framework="pt") as file,
            ):
                told, slices = file.metadata(), {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                self._headers[rank] = {
                    _VALUES: json.loads(told[_VALUES]),
                    _STARTS: {name: tuple(map(int, start)) for name, start in json.loads(told[_STARTS]).items()},
                    "shapes": {name: tuple(part.get_shape()) for name, part in slices.items()},
                }
        return self._headers[rank]

    def file(self, rank: int) -> SafetensorsFiles:
        """Return a rank's file, opened."""
        if rank not in self._open:
            while len(self._open) >= _OPEN:
                self._open.pop(next(iter(self._open)))
            self._open[rank] = SafetensorsFiles([self._folder / _of_rank(rank)])
        return self._open[rank]

    def read(self, node: dict[str, Any], slices: Slices) -> torch.Tensor:
        """Read a slice of a tensor, assembled from all overlapping shards."""
        name = node["tensor"]
        new = torch.empty([part.stop - part.start for part in slices], dtype=getattr(torch, node["dtype"]))
        missing = new.numel()
        ranks = [node["rank"], *self._order] if "rank" in node else self._order
        for rank in dict.fromkeys(ranks):
            if missing == 0:
                break
            start = self.header(rank)[_STARTS].get(name)
            if start is None:
                continue
            shape = self.header(rank)["shapes"][name]
            low = [max(a, part.start) for a, part in zip(start, slices, strict=True)]
            high = [min(a + n, part.stop) for a, n, part in zip(start, shape, slices, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            theirs = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))
            ours = tuple(slice(a - p.start, b - p.start) for a, b, p in zip(low, high, slices, strict=True))
            new[ours] = self.file(rank).read(name, theirs or None)
            missing -= math.prod(b - a for a, b in zip(low, high, strict=True))
            self._order.remove(rank)  # the next slice is likely in the same file
            self._order.insert(0, rank)
        if missing:
            raise KeyError(f"'{name}' is incomplete in the files of the ranks")
        return new


# Exceptions caused by values of a wrong type.
_WRONG = (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError, OverflowError)


@contextmanager
def damage_named(path: Path, what: str = "") -> Iterator[None]:
    """Context manager that raises ``CheckpointError`` for errors caused by values not written by this library."""
    try:
        yield
    except CheckpointError:
        raise
    except (*_WRONG, OSError, SafetensorError, yaml.YAMLError) as error:
        raise CheckpointError(
            f"{path} is damaged{what} ({type(error).__name__}: {error}): resume from another checkpoint."
        ) from error


class _Progress(dict[str, Any]):
    """Plain values; a missing key raises ``CheckpointError``."""

    path: Path

    def __missing__(self, key: str) -> Any:
        raise CheckpointError(f"{self.path} is damaged, its progress has no '{key}': resume from another checkpoint.")


def _structure(folder: Path) -> dict[str, Any]:
    path = folder / STATE_DIR / STRUCTURE
    with damage_named(path):
        return dict(json.loads(path.read_text(encoding="utf-8")))


def _decoded(structure: dict[str, Any], key: str, tensor: Callable[[str, dict[str, Any]], Any], folder: Path) -> Any:
    with damage_named(folder / STATE_DIR / STRUCTURE, f" in '{key}'"):
        return _decode(structure[key], key, tensor)


def load_progress(folder: Path) -> dict[str, Any]:
    """Load the plain values under ``progress`` without reading any tensor.

    Raises:
        CheckpointError: the state is corrupt.
    """
    structure = _structure(folder)
    with damage_named(folder / STATE_DIR / STRUCTURE, " in 'progress'"):
        progress = _Progress(_decode(structure["progress"], "progress", lambda path, node: None))
    progress.path = folder / STATE_DIR / STRUCTURE
    return progress


def load_state(state: Mapping[str, Any], named: Mapping[str, nn.Parameter], folder: Path, rank: int) -> None:
    """Load a saved state into the values of ``state``: with ``load_state_dict``, or by updating dicts in place.

    Only this rank's shards are read. A rank that the saved run did not have derives its random number generators from
    rank 0's.

    Args:
        state: the same as in :func:`local_state`.
        named: parameters of the models by name.
        folder: folder of the checkpoint.
        rank: rank of this process.

    Raises:
        CheckpointError: the state is corrupt, or belongs to another kind of run.
    """
    structure, (names, parameters) = _structure(folder), _parameters(state, named)
    saved_names = structure.pop(_NAMES, {})
    structure.pop("files of ranks", None)  # checkpoints of 0.8.0's previews
    if "best" in state and "best" not in structure:  # earlier releases have it in the guard
        guard = _decoded(structure, "guard", lambda *_: None, folder) if "guard" in structure else {}
        structure["best"] = _encode(guard.get("best", {}), "best", {})
    for key in sorted(state.keys() ^ structure.keys()):
        where = "this run has" if key in state else "the checkpoint has"
        raise CheckpointError(
            f"{folder}: {where} '{key}' and the other has not: resume with the saved torchtune_config.yaml."
        )
    with damage_named(folder / STATE_DIR / STRUCTURE, f" in '{_NAMES}'"):
        _check_names(saved_names, names, folder)
    files = _RankFiles(folder, rank)

    def tensor(path: str, node: dict[str, Any]) -> torch.Tensor:
        parameter, shape = parameters.get(path.rpartition("/")[0]), tuple(node["shape"])
        if "shards" in node or path.endswith(" codes"):
            return files.read(node, _own_row(parameter, node, shape, folder))
        if not isinstance(parameter, DTensor) or not shape:
            return files.read(node, full_slices(shape))
        return read_shard(parameter, shape, getattr(torch, node["dtype"]), lambda slices: files.read(node, slices))

    for key, value in state.items():
        if isinstance(value, RNGState):
            _load_generators(key, value, files, folder, rank)
            continue
        saved = _decoded(structure, key, tensor, folder)
        with damage_named(folder / STATE_DIR / STRUCTURE, f" in '{key}'"):
            _check_kinds(key, value, saved, folder)
            if not hasattr(value, "load_state_dict"):
                value.update(saved)
                continue
        try:
            value.load_state_dict(saved)
        except _WRONG as error:
            raise CheckpointError(
                f"{folder}: its '{key}' does not fit this run ({_told(error)}): resume with the saved "
                "torchtune_config.yaml."
            ) from error


def _own_row(parameter: torch.Tensor, node: dict[str, Any], shape: tuple[int, ...], folder: Path) -> Slices:
    """Return the row of this rank's shard in stacked states, such as states of low-bit optimizers."""
    grid, saved = ShardGrid.of(parameter), tuple(node.get("shards", ()))
    if grid.sizes != saved:
        raise CheckpointError(
            f"{folder}: its optimizer has low-bit states of {math.prod(saved)} shards and this run has "
            f"{math.prod(grid.sizes)}: resume with as many, or from the weights alone."
        )
    return (*(slice(place, place + 1) for place in grid.place), *full_slices(shape[len(saved) :]))


def _told(error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return text if isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__}: {text}"


def _load_generators(key: str, generators: RNGState, files: _RankFiles, folder: Path, rank: int) -> None:
    """Load this rank's random number generators; a new rank derives them from rank 0's."""
    theirs = rank if rank < files.count else 0

    def tensor(path: str, node: dict[str, Any]) -> torch.Tensor:
        return files.file(theirs).read(node["tensor"]).clone()

    with damage_named(folder / _of_rank(theirs)):
        generators.load_state_dict(_decode(files.header(theirs)[_VALUES][key], key, tensor))
    if rank >= files.count:
        generators.derive(rank)


def _check_kinds(key: str, value: Any, saved: Any, folder: Path) -> None:
    """Raise on the state of another kind of optimizer: torch accepts it, but fails or diverges at the first step."""
    if not isinstance(value, Optimizer):
        return
    try:
        for path, one in optimizers_of(key, value):
            check_state_format(one, saved if path == key else saved.get(path.removeprefix(f"{key}/"), {}))
    except OptimizerStateError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    for ours, theirs in zip(value.param_groups, saved.get("param_groups", ()), strict=False):
        # If only one side has additional settings, the release is another; if both have some, the optimizer is.
        lacking, left = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys() - {"initial_lr"})
        if lacking and left:
            raise CheckpointError(
                f"{folder}: its '{key}' is of another optimizer, which has {', '.join(left)} where this run's "
                f"{type(value).__name__} has {', '.join(lacking)}: resume with the saved torchtune_config.yaml."
            )


def _check_names(saved: dict[str, list[list[str]]], ours: dict[str, list[list[str]]], folder: Path) -> None:
    """Raise if the optimizers have other parameters: their state dicts only have indices, which would be mixed up."""
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


def check_training_state(state: Mapping[str, Any]) -> None:
    """Check that a resume can set every part of a training state, before the first step.

    Args:
        state: name -> dict, or object with ``state_dict`` and ``load_state_dict``.

    Raises:
        RecipeSettingsError: a value is neither.

    Example:
        >>> torchtune.checkpoints.check_training_state({"progress": {"step": 1}})
    """
    for key, value in state.items():
        if not isinstance(value, Mapping) and not hasattr(value, "state_dict"):
            raise RecipeSettingsError(
                f"training_state: '{key}' is a {type(value).__name__}, which a resume could not set: give a dict, "
                f"{{'{key}': ...}}, or an object with state_dict and load_state_dict."
            )
