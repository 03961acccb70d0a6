"""Training state: everything besides the weights that an exact resume needs, without pickled objects.

Every rank writes ``rank_N.safetensors`` with its shards and its random number generators. ``state.json`` is the index:
the structure of the state, with shape and dtype of each tensor. The header of a rank's file records where its shards
start, so saving needs no all-gather. On resume, a rank with the same shards reads its own file; with another number of
ranks or another mesh it reads slices from several files. Checkpoints of earlier releases, with one
``state.safetensors`` of full tensors, can be read too.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchtune.checkpoints._checkpoint_error import CheckpointError
from torchtune.checkpoints._safetensors_file import Entry, TensorFile, tensor_file
from torchtune.checkpoints._sources import SafetensorsFiles
from torchtune.checkpoints._state_json import NodeTensors, decode, encode
from torchtune.models import Slices
from torchtune.training import RNGState
from torchtune.training.optim import OptimizerStateError, check_state_format
from torchtune.training.parallel import LocalShard, Ranks, ShardGrid, full_slices, read_shard, reduce_partial

STATE_DIR = "state"
STRUCTURE = "state.json"
# File with the run's trained and frozen models, if there are any besides the policy.
MODELS = "models.json"
# File of full tensors in earlier releases.
_TENSORS = "state.safetensors"
# Key of the structure: parameter names of the optimizers.
_NAMES = "parameter names"
# Key of the structure: number of files, one for each rank.
_FILES = "files of ranks"
# Kind of a node with its value in the header of each rank's file.
_OWN = "own"
# Keys of this header: the values, and the first indices of shards.
_VALUES, _STARTS = "values", "starts"
# Key of earlier releases: the random number generator states of all ranks.
_RANKS = "ranks"
# Rank 0 writes replicated tensors up to this number of bytes; ranks take turns with larger ones.
_SMALL = 2**16
# Maximum number of open files.
_OPEN = 16
_MOST_RANKS = 10**6


def optimizers_of(key: str, value: Any) -> Iterator[tuple[str, Optimizer]]:
    """Yield the optimizers in a value of the state: itself, or all in a wrapper with one optimizer per parameter."""
    if isinstance(value, Optimizer):
        yield key, value
    for name, optimizer in getattr(value, "optim_map", {}).items():
        yield f"{key}/{name}", optimizer


def _parameter_names(state: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> dict[str, list[list[str]]]:
    """Return the parameter names of every optimizer, group by group; its ``state_dict`` only has their indices.

    Raises:
        CheckpointError: an optimizer has a parameter of another model, which the checkpoint would not contain.
    """
    names = {parameter: name for name, parameter in parameters.items()}
    found: dict[str, list[list[str]]] = {}
    for key, value in state.items():
        for path, optimizer in optimizers_of(key, value):
            groups = [group["params"] for group in optimizer.param_groups]
            if any(parameter not in names for group in groups for parameter in group):
                raise CheckpointError(
                    f"'{path}' trains a parameter that is in none of the models to be saved or resumed: pass every "
                    "trained model, by name."
                )
            found[path] = [[names[parameter] for parameter in group] for group in groups]
    return found


def _parameters(state: Mapping[str, Any], named: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Map the path of a parameter's optimizer state to the parameter; by index, as in torch, and by name."""
    found: dict[str, torch.Tensor] = {}
    names = {parameter: name for name, parameter in named.items()}
    for key, value in state.items():
        for path, optimizer in optimizers_of(key, value):
            every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            found |= {f"{path}/state/{number}": parameter for number, parameter in enumerate(every)}
            found |= {f"{path}/state/{names[parameter]}": parameter for parameter in every if parameter in names}
    return found


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

    Values that are not sharded are rank 0's, except the random number generators, which each rank saves.

    Args:
        state: objects with ``state_dict()``, or dicts, by name.
        named: parameters of the models by name.
        ranks: all ranks.

    Raises:
        CheckpointError: a value is not a tensor, dict, list, number or string, or an optimizer has a parameter of
            another model.
    """
    tensors: NodeTensors = {}
    own_tensors: NodeTensors = {}
    structure, values, parameters = {}, {}, _parameters(state, named)
    with ranks.raise_on_all():
        for key, value in state.items():
            plain = value.state_dict() if hasattr(value, "state_dict") else value
            if isinstance(value, RNGState):
                structure[key], values[key] = {_OWN: key}, encode(plain, key, own_tensors)
            else:
                structure[key] = encode(plain, key, tensors)
    structure |= {_NAMES: _parameter_names(state, named), _FILES: ranks.size}
    entries, starts = [], {}
    for turn, (name, (path, tensor, node)) in enumerate(tensors.items()):
        parameter = parameters.get(path.rpartition("/")[0])
        # Optimizer state only changes at the next step; other objects may change any time, so copy theirs now.
        tensor = tensor.clone() if parameter is None else reduce_partial(tensor)
        turn = 0 if parameter is None or tensor.nbytes <= _SMALL else turn
        shard = LocalShard.of(tensor, ranks, turn, parameter)
        node |= {"shape": list(shard.spec.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        if isinstance(parameter, DTensor) and isinstance(tensor, DTensor) and tensor.shape != parameter.shape:
            node["shards"] = list(ShardGrid.of(parameter).sizes)  # one row per shard, useless to others
        if shard.data.shape == shard.spec.shape:
            node["rank"] = turn % ranks.size
        if shard.is_writer and shard.data.numel():
            starts[name] = [part.start for part in shard.slices]
            entries.append(Entry.of(name, shard.data))
    entries += [Entry.of(name, tensor.clone()) for name, (_, tensor, _) in own_tensors.items()]
    metadata = {_VALUES: json.dumps(values), _STARTS: json.dumps(starts)}
    agreed = json.dumps([[name, node.get("shape"), node.get("dtype")] for name, (_, _, node) in tensors.items()])
    return LocalState(tensor_file(_of_rank(ranks.rank), entries, metadata), structure, agreed.encode())


def _of_rank(rank: int) -> str:
    return f"{STATE_DIR}/rank_{rank}.safetensors"


class _WholeFile:
    """State of an earlier release: full tensors in one file."""

    def __init__(self, folder: Path) -> None:
        self._source = SafetensorsFiles([folder / STATE_DIR / _TENSORS])

    def shape(self, node: dict[str, Any]) -> tuple[int, ...]:
        """Return the shape of the full tensor."""
        return self._source.shape(node["tensor"])

    def dtype(self, node: dict[str, Any]) -> torch.dtype:
        """Return the dtype of the tensor."""
        first = tuple(slice(0, 1) for _ in self.shape(node))
        return self._source.read(node["tensor"], first or None).dtype

    def read(self, node: dict[str, Any], slices: Slices) -> torch.Tensor:
        """Read a slice of a tensor."""
        return self._source.read(node["tensor"], slices or None).clone()  # the folder may be deleted meanwhile


class _RankFiles:
    """State in one file per rank; headers and tensors are read lazily."""

    def __init__(self, folder: Path, count: int, rank: int) -> None:
        self._folder = folder
        self._order = list(dict.fromkeys([min(rank, count - 1), *range(count)]))
        self._headers: dict[int, dict[str, Any]] = {}
        self._open: dict[int, SafetensorsFiles] = {}

    def shape(self, node: dict[str, Any]) -> tuple[int, ...]:
        """Return the shape of the full tensor."""
        return tuple(int(size) for size in node["shape"])

    def dtype(self, node: dict[str, Any]) -> torch.dtype:
        """Return the dtype of the tensor."""
        dtype = getattr(torch, node["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"'{node['dtype']}' is no dtype")
        return dtype

    def header(self, rank: int) -> dict[str, Any]:
        """Return the header of a rank's file: values, first indices and shapes of its shards."""
        if rank not in self._headers:
            path = self._folder / _of_rank(rank)
            try:
                with safe_open(path, framework="pt") as file:
                    told, slices = file.metadata(), {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                self._headers[rank] = {
                    _VALUES: json.loads(told[_VALUES]),
                    _STARTS: {name: tuple(map(int, start)) for name, start in json.loads(told[_STARTS]).items()},
                    "shapes": {name: tuple(part.get_shape()) for name, part in slices.items()},
                }
            except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise CheckpointError(
                    f"{path} is damaged ({type(error).__name__}: {error}): resume from another checkpoint."
                ) from error
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
        new = torch.empty([part.stop - part.start for part in slices], dtype=self.dtype(node))
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


class _Progress(dict[str, Any]):
    """Plain values; a missing key raises ``CheckpointError``."""

    path: Path

    def __missing__(self, key: str) -> Any:
        raise CheckpointError(f"{self.path} is damaged, its progress has no '{key}': resume from another checkpoint.")


def _structure(folder: Path) -> dict[str, Any]:
    path = folder / STATE_DIR / STRUCTURE
    try:
        structure = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): resume from another checkpoint.") from error
    if not isinstance(structure, dict):
        raise CheckpointError(f"{path} is damaged, it holds no object: resume from another checkpoint.")
    return structure


def _decoded(structure: dict[str, Any], key: str, tensor: Callable[[str, dict[str, Any]], Any], folder: Path) -> Any:
    """Decode the value of ``key``. Raises ``CheckpointError`` if :func:`local_state` did not write the structure."""
    try:
        return decode(structure[key], key, tensor)
    except CheckpointError:
        raise
    except (*_WRONG, RecursionError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder / STATE_DIR / STRUCTURE} is damaged: what it says of '{key}' cannot be read "
            f"({type(error).__name__}: {error}): resume from another checkpoint."
        ) from error


def load_progress(folder: Path) -> dict[str, Any]:
    """Load the plain values under ``progress`` without reading any tensor.

    Raises:
        CheckpointError: the state is corrupt.
    """
    path = folder / STATE_DIR / STRUCTURE
    progress = _decoded(_structure(folder), "progress", lambda path, node: None, folder)
    if not isinstance(progress, dict):
        raise CheckpointError(f"{path} is damaged, its progress is no object: resume from another checkpoint.")
    for key in progress.keys() & {"seed", "global_step", "total_steps"}:
        _check_number(progress[key], f"its '{key}'", path)
    progress = _Progress(progress)
    progress.path = path
    return progress


def _check_number(value: Any, what: str, path: Path, most: int = 2**63 - 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise CheckpointError(
            f"{path} is damaged, {what} is {str(value)[:40]!r} and no count: resume from another checkpoint."
        )


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
    structure = _structure(folder)
    saved_names = structure.pop(_NAMES, {})
    if "best" in state and "best" not in structure:  # earlier releases have it in the guard
        guard = _decoded(structure, "guard", lambda *_: None, folder) if "guard" in structure else {}
        structure["best"] = encode(guard.get("best", {}), "best", {})
    for key in sorted(state.keys() ^ (structure.keys() - {_FILES})):
        where = "this run has" if key in state else "the checkpoint has"
        raise CheckpointError(
            f"{folder}: {where} '{key}' and the other has not: resume with the saved torchtune_config.yaml."
        )
    _check_names(saved_names, _parameter_names(state, named), folder)
    parameters, path = _parameters(state, named), folder / STATE_DIR / STRUCTURE
    count = structure.pop(_FILES, None)
    if count is not None:
        _check_number(count, f"the number of its {_FILES}", path, most=_MOST_RANKS)
    source = _WholeFile(folder) if count is None else _RankFiles(folder, max(count, 1), rank)

    def tensor(path: str, node: dict[str, Any]) -> torch.Tensor:
        parameter, shape = parameters.get(path.rpartition("/")[0]), source.shape(node)
        if "shards" in node or path.endswith(" codes"):
            return source.read(node, _own_row(parameter, node, shape, folder))
        if not isinstance(parameter, DTensor) or not shape:
            return source.read(node, full_slices(shape))
        return read_shard(parameter, shape, source.dtype(node), lambda slices: source.read(node, slices))

    for key, value in state.items():
        if isinstance(value, RNGState):
            _load_generators(key, value, structure, source, folder, rank)
            continue
        saved = _decoded(structure, key, tensor, folder)
        if not isinstance(saved, dict):
            raise CheckpointError(f"{path} is damaged, its '{key}' is no object: resume from another checkpoint.")
        _check_kinds(key, value, saved, folder)
        if not hasattr(value, "load_state_dict"):
            for name in value.keys() & saved.keys():
                if type(value[name]) is int:
                    _check_number(saved[name], f"its '{key}/{name}'", path)
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
    """Return the row of this rank's shard in stacked states, such as those of low-bit optimizers."""
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


def _load_generators(
    key: str, generators: RNGState, structure: dict[str, Any], source: _WholeFile | _RankFiles, folder: Path, rank: int
) -> None:
    """Load this rank's random number generators; a new rank derives them from rank 0's."""
    if isinstance(source, _RankFiles):
        count = len(source._order)
        theirs = rank if rank < count else 0

        def tensor(path: str, node: dict[str, Any]) -> torch.Tensor:
            return source.file(theirs).read(node["tensor"]).clone()

        saved = _decoded(source.header(theirs)[_VALUES], key, tensor, folder)
    else:
        saved = _decoded(structure, key, lambda path, node: source.read(node, ()), folder)
        every = saved[_RANKS] if isinstance(saved, dict) and _RANKS in saved else [saved]
        count = len(every)
        saved = every[rank if rank < count else 0]
    try:
        generators.load_state_dict(saved)
    except _WRONG as error:
        raise CheckpointError(
            f"{folder}: the state of its random generators is damaged ({_told(error)}): resume from another checkpoint."
        ) from error
    if rank >= count:
        generators.derive(rank)


def _check_kinds(key: str, value: Any, saved: Any, folder: Path) -> None:
    """Raise on the state of another kind of optimizer: torch accepts it, but fails or diverges at the first step."""
    if not isinstance(value, Optimizer) or not isinstance(saved, dict):
        return
    groups = saved.get("param_groups", ())
    if not isinstance(groups, list | tuple) or not all(isinstance(group, dict) for group in groups):
        raise CheckpointError(
            f"{folder / STATE_DIR / STRUCTURE} is damaged, the groups of its '{key}' are none: resume from another "
            "checkpoint."
        )
    try:
        for path, one in optimizers_of(key, value):
            check_state_format(one, saved if path == key else saved.get(path.removeprefix(f"{key}/"), {}))
    except OptimizerStateError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    for ours, theirs in zip(value.param_groups, groups, strict=False):
        # Settings on one side only come from a newer release; on both sides, from another optimizer.
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
    try:
        before = {name for groups in saved.values() for group in groups for name in group}
    except (AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{folder / STATE_DIR / STRUCTURE} is damaged, its '{_NAMES}' are none: resume from another checkpoint."
        ) from error
    now = {name for groups in ours.values() for group in groups for name in group}
    what = "their parameters are in another order or in other groups"
    if before ^ now:
        name = min(before ^ now)
        what = f"'{name}' was trained then and is not now" if name in before else f"'{name}' is trained now only"
    raise CheckpointError(
        f"{folder}: the optimizer's state does not fit this run ({what}): resume with the saved torchtune_config.yaml."
    )
