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
from torchtune.checkpoints._save import ExistingTensor, TensorFile
from torchtune.checkpoints._weight_files import CheckpointError, SafetensorsFiles
from torchtune.config import RecipeSettingsError
from torchtune.models import Slices
from torchtune.training import RNGState
from torchtune.training.optim import OptimizerStateError, check_state_format
from torchtune.training.parallel import LocalShard, Ranks, ShardGrid, full_slices, read_shard, reduce_partial

# Key of the structure: parameter names of the optimizers.
_NAMES = "parameter names"
# Kind of a node with its value in the header of each rank's file.
_OWN = "own"
# Keys of this header: the values, and the first indices of shards.
_VALUES = "values"
_STARTS = "starts"
# Rank 0 writes replicated tensors up to this number of bytes; ranks take turns with larger ones.
_SMALL = 2**16
# Maximum number of open files.
_OPEN = 16
# Types of values and keys in JSON, besides None.
_PLAIN = (bool, int, float, str)

# Node of the structure: a JSON object with one key, the kind of the value (and shape, dtype, … of a tensor).
_Node = dict[str, Any]
# Parameter names of an optimizer, by parameter group.
_NameGroups = list[list[str]]
# Decodes a node of a tensor: its path in the state, and the node.
_ReadTensor = Callable[[str, _Node], Any]


def optimizers_of(key: str, value: Any) -> Iterator[tuple[str, Optimizer]]:
    """Yield the optimizers in a value of the state: itself, or all in a wrapper with one optimizer per parameter."""
    if isinstance(value, Optimizer):
        yield key, value
    for name, optimizer in getattr(value, "optim_map", {}).items():
        yield f"{key}/{name}", optimizer


@dataclass(frozen=True)
class _OptimizerParameters:
    """Parameters of the optimizers in a state.

    Attributes:
        names: path of an optimizer -> parameter names by parameter group (its ``state_dict`` only has indices).
        by_path: path of a parameter's optimizer state -> parameter, once with the parameter's index, as in torch, and
            once with its name.
    """

    names: dict[str, _NameGroups]
    by_path: dict[str, torch.Tensor]

    @staticmethod
    def of(state: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> "_OptimizerParameters":
        """Collect the parameters of every optimizer in a state.

        Raises:
            CheckpointError: an optimizer has a parameter of another model, which the checkpoint would not contain.
        """
        name_of = {parameter: name for name, parameter in parameters.items()}
        optimizers: dict[str, Optimizer] = {}
        for key, value in state.items():
            optimizers.update(optimizers_of(key, value))
        names: dict[str, _NameGroups] = {}
        by_path: dict[str, torch.Tensor] = {}
        for path, optimizer in optimizers.items():
            names[path] = []
            index = 0  # counts through all groups, as in the optimizer's state_dict
            for group in optimizer.param_groups:
                group_names = []
                for parameter in group["params"]:
                    if parameter not in name_of:
                        raise CheckpointError(
                            f"'{path}' trains a parameter that is in none of the models to be saved or resumed: pass "
                            "every trained model, by name."
                        )
                    name = name_of[parameter]
                    group_names.append(name)
                    by_path[f"{path}/state/{index}"] = parameter
                    by_path[f"{path}/state/{name}"] = parameter
                    index += 1
                names[path].append(group_names)
        return _OptimizerParameters(names, by_path)

    def of_tensor(self, path: str) -> torch.Tensor | None:
        """Return the parameter of an optimizer's tensor; None for other tensors."""
        return self.by_path.get(path.rpartition("/")[0])


@dataclass(frozen=True)
class RankState:
    """The training state on this rank, to write.

    Attributes:
        file: file of this rank.
        structure: the index; rank 0 writes it.
        signature: names, shapes and dtypes; they must be equal on all ranks.
    """

    file: TensorFile
    structure: dict[str, Any]
    signature: bytes


@dataclass
class _StateTensor:
    """A tensor in the state.

    Attributes:
        path: its path in the state.
        tensor: its value.
        node: its node in the structure.
    """

    path: str
    tensor: torch.Tensor
    node: _Node


def rank_state(state: Mapping[str, Any], named: Mapping[str, nn.Parameter], ranks: Ranks) -> RankState:
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
    parameters = _OptimizerParameters.of(state, named)
    tensors: dict[str, _StateTensor] = {}
    generator_tensors: dict[str, _StateTensor] = {}
    structure: dict[str, Any] = {}
    values: dict[str, Any] = {}
    # An error of one rank's values is raised on all ranks, which would else wait for it in the save.
    with ranks.raise_on_all():
        for key, value in state.items():
            state_dict = value.state_dict() if hasattr(value, "state_dict") else value
            if isinstance(value, RNGState):
                structure[key] = {_OWN: key}
                values[key] = _encode(state_dict, key, generator_tensors)
            else:
                structure[key] = _encode(state_dict, key, tensors)
    structure[_NAMES] = parameters.names
    groups = []
    starts = {}
    for turn, (name, state_tensor) in enumerate(tensors.items()):
        shard = _shard_to_write(state_tensor, parameters.of_tensor(state_tensor.path), ranks, turn)
        if shard.is_writer and shard.data.numel():  # an empty shard is in no file
            starts[name] = [dim.start for dim in shard.slices]
            groups.append(ExistingTensor(name, shard.data))
    for name, state_tensor in generator_tensors.items():
        # Cloned, because training goes on drawing numbers while a save in the background writes them.
        groups.append(ExistingTensor(name, state_tensor.tensor.clone()))
    metadata = {_VALUES: json.dumps(values), _STARTS: json.dumps(starts)}
    # Ranks compare this signature: their files must hold shards of the same tensors.
    layout = []
    for name, state_tensor in tensors.items():
        node = state_tensor.node
        layout.append([name, node.get("shape"), node.get("dtype")])
    file = TensorFile(_file_of(ranks.rank), groups, metadata)
    return RankState(file, structure, signature=json.dumps(layout).encode())


def _shard_to_write(state_tensor: _StateTensor, parameter: torch.Tensor | None, ranks: Ranks, turn: int) -> LocalShard:
    """Return this rank's shard of a tensor, and complete the tensor's node.

    Args:
        state_tensor: the tensor, with the node of the JSON that stands for it.
        parameter: parameter of which it is a state; None for other tensors.
        ranks: all ranks.
        turn: number of the tensor; ranks take turns as the writer of tensors that all of them have.
    """
    if parameter is None:
        tensor = state_tensor.tensor.clone()  # the run may change it while the save writes
    else:
        # Not cloned: only the next step of the optimizer changes it, and waits until it is copied.
        tensor = reduce_partial(state_tensor.tensor)
    if parameter is None or tensor.nbytes <= _SMALL:
        turn = 0  # rank 0 writes it, so that a resume finds the many small tensors in one file
    shard = LocalShard.of(tensor, ranks, turn, parameter)
    node = state_tensor.node
    node["shape"] = list(shard.spec.shape)
    node["dtype"] = str(tensor.dtype).removeprefix("torch.")
    if isinstance(parameter, DTensor) and isinstance(tensor, DTensor) and tensor.shape != parameter.shape:
        # One row per shard of the parameter: only a run with the same shards can load it.
        node["shards"] = list(ShardGrid.of(parameter).sizes)
    if shard.data.shape == shard.spec.shape:
        node["rank"] = turn % ranks.size  # whose file is read first
    return shard


def _file_of(rank: int) -> str:
    return f"{STATE_DIR}/rank_{rank}.safetensors"


def _encode(value: Any, path: str, tensors: dict[str, _StateTensor]) -> _Node:
    """Encode ``value`` as JSON, and add its tensors to ``tensors``, by their names in the file.

    The node of a tensor is in both results, so that :func:`_shard_to_write` can add the shape and dtype to it.
    """
    if isinstance(value, torch.Tensor):
        is_plain = type(value) in (torch.Tensor, nn.Parameter, DTensor)  # a subclass may hold several tensors
        if not is_plain or value.is_sparse or value.is_quantized:
            raise CheckpointError(
                f"The training state '{path}' holds a {type(value).__name__}, which cannot be saved: use an optimizer "
                "whose state is plain tensors."
            )
        name = path if path not in tensors else f"{path} {len(tensors)}"  # 1 and "1" may both be keys of a dict
        node = {"tensor": name}
        tensors[name] = _StateTensor(path, value.detach(), node)
        return node
    if isinstance(value, Mapping):
        for key in value:
            if not (key is None or isinstance(key, _PLAIN)):
                raise CheckpointError(
                    f"The training state '{path}' has a key {key!r}, which cannot be saved: use text or numbers."
                )
        # Pairs, because keys of JSON objects would all be text.
        return {"dict": [[key, _encode(item, f"{path}/{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(item, f"{path}/{index}", tensors) for index, item in enumerate(value)]}
    if value is None or isinstance(value, _PLAIN):
        return {"value": value}
    raise CheckpointError(f"The training state '{path}' holds a {type(value).__name__}, which cannot be saved.")


def _decode(node: _Node, path: str, read_tensor: _ReadTensor) -> Any:
    """Decode a node; ``read_tensor`` returns the tensor for a path and a node."""
    if "tensor" in node:
        return read_tensor(path, node)
    if len(node) != 1:
        raise ValueError(f"'{path}' has {len(node)} kinds of values")
    kind, content = next(iter(node.items()))
    if kind == "dict":
        return {key: _decode(item, f"{path}/{key}", read_tensor) for key, item in content}
    if kind in ("list", "tuple"):
        items = [_decode(item, f"{path}/{index}", read_tensor) for index, item in enumerate(content)]
        return items if kind == "list" else tuple(items)
    return content


def _no_tensor(path: str, node: _Node) -> None:
    """Leave tensors out when plain values are decoded."""


@dataclass(frozen=True)
class _RankHeader:
    """Header of a rank's file.

    Attributes:
        values: encoded values of this rank, such as its random number generators.
        starts: first indices of its shards, by name.
        shapes: shapes of its shards, by name.
    """

    values: dict[str, _Node]
    starts: dict[str, tuple[int, ...]]
    shapes: dict[str, tuple[int, ...]]


class _RankFiles:
    """State in one file per rank; headers and tensors are read lazily.

    Attributes:
        count: number of ranks of the saved run.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        paths = list((folder / STATE_DIR).glob("rank_*.safetensors"))
        self.count = max(len(paths), 1)
        # A rank looks into its own file first, which has all of its shards if the mesh is the same.
        own_file = min(rank, self.count - 1)
        self._order = list(dict.fromkeys([own_file, *range(self.count)]))
        self._headers: dict[int, _RankHeader] = {}
        self._open: dict[int, SafetensorsFiles] = {}

    def header(self, rank: int) -> _RankHeader:
        """Return the header of a rank's file."""
        if rank not in self._headers:
            path = self._folder / _file_of(rank)
            with damage_named(path), safe_open(path, framework="pt") as file:
                metadata = file.metadata()
                values = json.loads(metadata[_VALUES])
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
                starts = {}
                for name, start in json.loads(metadata[_STARTS]).items():
                    starts[name] = tuple(int(index) for index in start)
                self._headers[rank] = _RankHeader(values, starts, shapes)
        return self._headers[rank]

    def file(self, rank: int) -> SafetensorsFiles:
        """Return a rank's file, opened."""
        if rank not in self._open:
            while len(self._open) >= _OPEN:
                longest_open = next(iter(self._open))
                self._open.pop(longest_open)
            self._open[rank] = SafetensorsFiles([self._folder / _file_of(rank)])
        return self._open[rank]

    def read(self, node: _Node, slices: Slices) -> torch.Tensor:
        """Read a slice of a tensor, assembled from all overlapping shards."""
        name = node["tensor"]
        sizes = [dim.stop - dim.start for dim in slices]
        values = torch.empty(sizes, dtype=getattr(torch, node["dtype"]))
        num_missing = values.numel()
        ranks = list(self._order)  # a copy, because the loop changes the order
        if "rank" in node:  # the only file with the whole tensor
            ranks.insert(0, node["rank"])
        for rank in dict.fromkeys(ranks):
            if num_missing == 0:
                break
            header = self.header(rank)
            if name not in header.starts:
                continue  # another rank was the writer, or the shard was empty
            dims = zip(header.starts[name], header.shapes[name], strict=True)
            shard = tuple(slice(start, start + size) for start, size in dims)
            overlap = _overlap(shard, slices)
            if overlap is None:
                continue
            in_file = _relative(overlap, shard)
            in_values = _relative(overlap, slices)
            values[in_values] = self.file(rank).read(name, in_file or None)  # (): the slice of a scalar
            # Shards do not overlap each other: one rank writes those that are replicated.
            num_missing -= math.prod(dim.stop - dim.start for dim in overlap)
            self._order.remove(rank)  # the next slice is likely in the same file
            self._order.insert(0, rank)
        if num_missing:
            raise KeyError(f"'{name}' is incomplete in the files of the ranks")
        return values


def _overlap(first: Slices, second: Slices) -> Slices | None:
    """Return the intersection of two slices of a tensor; None if it is empty."""
    overlap = []
    for dim, other_dim in zip(first, second, strict=True):
        start = max(dim.start, other_dim.start)
        stop = min(dim.stop, other_dim.stop)
        if start >= stop:
            return None
        overlap.append(slice(start, stop))
    return tuple(overlap)


def _relative(slices: Slices, origin: Slices) -> Slices:
    """Return a slice of a tensor as a slice of another one, ``origin``, which contains it."""
    relative = []
    for dim, origin_dim in zip(slices, origin, strict=True):
        relative.append(slice(dim.start - origin_dim.start, dim.stop - origin_dim.start))
    return tuple(relative)


# Exceptions caused by values of a wrong type.
_WRONG_VALUE = (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError, OverflowError)


@contextmanager
def damage_named(path: Path, where: str = "") -> Iterator[None]:
    """Context manager that raises ``CheckpointError`` for errors caused by values not written by this library."""
    try:
        yield
    except CheckpointError:
        raise
    except (*_WRONG_VALUE, OSError, SafetensorError, yaml.YAMLError) as error:
        raise CheckpointError(
            f"{path} is damaged{where} ({type(error).__name__}: {error}): resume from another checkpoint."
        ) from error


class _Progress(dict[str, Any]):
    """Plain values; a missing key raises ``CheckpointError``."""

    path: Path

    def __missing__(self, key: str) -> Any:
        raise CheckpointError(f"{self.path} is damaged, its progress has no '{key}': resume from another checkpoint.")


def _read_structure(folder: Path) -> dict[str, Any]:
    path = folder / STATE_DIR / STRUCTURE
    with damage_named(path):
        return dict(json.loads(path.read_text(encoding="utf-8")))


def _decode_key(structure: dict[str, Any], key: str, read_tensor: _ReadTensor, folder: Path) -> Any:
    with damage_named(folder / STATE_DIR / STRUCTURE, f" in '{key}'"):
        return _decode(structure[key], key, read_tensor)


def load_progress(folder: Path) -> dict[str, Any]:
    """Load the plain values under ``progress`` without reading any tensor.

    Raises:
        CheckpointError: the state is corrupt.
    """
    path = folder / STATE_DIR / STRUCTURE
    structure = _read_structure(folder)
    with damage_named(path, " in 'progress'"):
        progress = _Progress(_decode(structure["progress"], "progress", _no_tensor))
    progress.path = path
    return progress


def load_state(state: Mapping[str, Any], named: Mapping[str, nn.Parameter], folder: Path, rank: int) -> None:
    """Load a saved state into the values of ``state``: with ``load_state_dict``, or by updating dicts in place.

    Only this rank's shards are read. A rank that the saved run did not have derives its random number generators from
    rank 0's.

    Args:
        state: the same as in :func:`rank_state`.
        named: parameters of the models by name.
        folder: folder of the checkpoint.
        rank: rank of this process.

    Raises:
        CheckpointError: the state is corrupt, or belongs to another kind of run.
    """
    structure = _read_structure(folder)
    parameters = _OptimizerParameters.of(state, named)
    saved_names = structure.pop(_NAMES, {})
    structure.pop("files of ranks", None)  # in checkpoints of 0.8.0's previews; no value of the state
    if "best" in state and "best" not in structure:  # earlier releases have it in the guard
        guard = {}
        if "guard" in structure:
            guard = _decode_key(structure, "guard", _no_tensor, folder)
        structure["best"] = _encode(guard.get("best", {}), "best", {})
    for key in sorted(state.keys() ^ structure.keys()):
        owner = "this run has" if key in state else "the checkpoint has"
        raise CheckpointError(
            f"{folder}: {owner} '{key}' and the other has not: resume with the saved torchtune_config.yaml."
        )
    with damage_named(folder / STATE_DIR / STRUCTURE, f" in '{_NAMES}'"):
        _check_parameter_names(saved_names, parameters.names, folder)
    files = _RankFiles(folder, rank)

    def read_tensor(path: str, node: _Node) -> torch.Tensor:
        parameter = parameters.of_tensor(path)
        shape = tuple(node["shape"])
        # Codes of a low-bit optimizer have no "shards" if the saved run was not sharded: then this run must not be.
        if "shards" in node or path.endswith(" codes"):
            return files.read(node, _row_of_shard(parameter, node, shape, folder))
        if not isinstance(parameter, DTensor) or not shape:  # a scalar, such as a count of steps, has no shards
            return files.read(node, full_slices(shape))
        dtype = getattr(torch, node["dtype"])
        return read_shard(parameter, shape, dtype, lambda slices: files.read(node, slices))

    for key, value in state.items():
        if isinstance(value, RNGState):
            _load_generators(key, value, files, folder, rank)
            continue
        saved = _decode_key(structure, key, read_tensor, folder)
        with damage_named(folder / STATE_DIR / STRUCTURE, f" in '{key}'"):
            _check_optimizer_kind(key, value, saved, folder)
            if not hasattr(value, "load_state_dict"):  # a dict
                value.update(saved)
                continue
        # The error of an object that refuses a state says that the run differs, and not that the file is damaged.
        try:
            value.load_state_dict(saved)
        except _WRONG_VALUE as error:
            reason = " ".join(str(error).split()).rstrip(".")  # in one line
            if not isinstance(error, ValueError | RuntimeError):  # a KeyError's text is just the key
                reason = f"{type(error).__name__}: {reason}"
            raise CheckpointError(
                f"{folder}: its '{key}' does not fit this run ({reason}): resume with the saved torchtune_config.yaml."
            ) from error


def _row_of_shard(parameter: torch.Tensor, node: _Node, shape: tuple[int, ...], folder: Path) -> Slices:
    """Return the row of this rank's shard in stacked states, such as states of low-bit optimizers."""
    grid = ShardGrid.of(parameter)
    saved_sizes = tuple(node.get("shards", ()))
    if grid.sizes != saved_sizes:
        raise CheckpointError(
            f"{folder}: its optimizer has low-bit states of {math.prod(saved_sizes)} shards and this run has "
            f"{math.prod(grid.sizes)}: resume with as many, or from the weights alone."
        )
    row = tuple(slice(index, index + 1) for index in grid.coordinates)
    return (*row, *full_slices(shape[len(saved_sizes) :]))


def _load_generators(key: str, generators: RNGState, files: _RankFiles, folder: Path, rank: int) -> None:
    """Load this rank's random number generators; a new rank derives them from rank 0's."""
    is_new_rank = rank >= files.count
    saved_rank = 0 if is_new_rank else rank

    def read_tensor(path: str, node: _Node) -> torch.Tensor:
        return files.file(saved_rank).read(node["tensor"]).clone()

    with damage_named(folder / _file_of(saved_rank)):
        generators.load_state_dict(_decode(files.header(saved_rank).values[key], key, read_tensor))
    if is_new_rank:
        generators.derive(rank)


def _check_optimizer_kind(key: str, value: Any, saved: Any, folder: Path) -> None:
    """Raise on the state of another kind of optimizer: torch accepts it, but fails or diverges at the first step."""
    if not isinstance(value, Optimizer):
        return
    try:
        for path, optimizer in optimizers_of(key, value):
            saved_state = saved
            if path != key:  # of a wrapper of several
                saved_state = saved.get(path.removeprefix(f"{key}/"), {})
            check_state_format(optimizer, saved_state)
    except OptimizerStateError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    # load_state_dict itself compares the number of groups, and a wrapper's state has none of its own.
    for group, saved_group in zip(value.param_groups, saved.get("param_groups", ()), strict=False):
        # If only one side has additional settings, the release is another; if both have some, the optimizer is.
        only_here = sorted(group.keys() - saved_group.keys())
        only_saved = sorted(saved_group.keys() - group.keys() - {"initial_lr"})  # set by a learning rate scheduler
        if only_here and only_saved:
            raise CheckpointError(
                f"{folder}: its '{key}' is of another optimizer, which has {', '.join(only_saved)} where this run's "
                f"{type(value).__name__} has {', '.join(only_here)}: resume with the saved torchtune_config.yaml."
            )


def _check_parameter_names(saved: dict[str, _NameGroups], current: dict[str, _NameGroups], folder: Path) -> None:
    """Raise if the optimizers have other parameters: their state dicts only have indices, which would be mixed up."""
    if saved == current:
        return
    saved_names = _flat_names(saved)
    different = saved_names ^ _flat_names(current)
    name = min(different, default=None)
    if name is None:
        reason = "their parameters are in another order or in other groups"
    elif name in saved_names:
        reason = f"'{name}' was trained then and is not now"
    else:
        reason = f"'{name}' is trained now only"
    raise CheckpointError(
        f"{folder}: the optimizer's state does not fit this run ({reason}): resume with the saved "
        "torchtune_config.yaml."
    )


def _flat_names(names: dict[str, _NameGroups]) -> set[str]:
    """Return all parameter names of the optimizers."""
    flat = set()
    for groups in names.values():
        flat.update(*groups)
    return flat


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
