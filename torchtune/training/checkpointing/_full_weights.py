"""The weights of a model as checkpoints hold them, whatever form its conversions store them in."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtune.models import Box
from torchtune.modules.conversion import Conversion, ConversionError, StoredWeight, complete_conversions
from torchtune.modules.peft import LoRALinear
from torchtune.modules.peft._functional import start_from_weight
from torchtune.training.checkpointing._ranks import Held, Ranks, full, local_part

# Fills a tensor with the part of a full weight that is in a box.
Read = Callable[[Box, torch.Tensor], None]


def parameter_at(model: nn.Module, name: str) -> nn.Parameter:
    """A parameter by its full name."""
    path, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(path), leaf)


def materialize(model: nn.Module, name: str, device: torch.device, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Make a parameter of the meta device real, unfilled; a real one is returned as it is."""
    parameter = parameter_at(model, name)
    if not parameter.is_meta:
        return parameter
    data = torch.empty_like(parameter, dtype=dtype or parameter.dtype, device=device)
    return set_parameter(model, name, nn.Parameter(data, requires_grad=parameter.requires_grad))


def set_parameter(model: nn.Module, name: str, new: nn.Parameter) -> nn.Parameter:
    """Register ``new`` under a full name, and return it."""
    path, _, leaf = name.rpartition(".")
    model.get_submodule(path).register_parameter(leaf, new)
    return new


@contextmanager
def whole_parameters(model: nn.Module, whole: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """A block in which the model has these tensors in the place of its parameters of these names."""
    kept = {name: parameter_at(model, name) for name in whole}
    for name, tensor in whole.items():
        set_parameter(model, name, nn.Parameter(tensor, requires_grad=False))
    try:
        yield
    finally:
        for name, parameter in kept.items():
            set_parameter(model, name, parameter)


def owned_names(model: nn.Module) -> set[str]:
    """Names of the parameters that conversions save apart from the base weights."""
    return set().union(*(conversion.owned_parameters(model) for conversion in complete_conversions(model)))


class FullWeights:
    """Reads and writes the full weights of a model, one tensor at a time.

    A full weight has a name of the weight map. Most are a parameter of that name; conversions may store others in
    another form (:meth:`torchtune.modules.conversion.Conversion.stored_weights`).

    Args:
        model: on the meta device or real, sharded or not. What is saved are the parameters that it has now: while it
            is trained, FSDP replaces them for a time.

    Attributes:
        owned: names of the parameters that conversions save apart.
        base: names of all other weights, in their full form.
        stored: names of those that are stored in another form.
        starts: adapted layers by the names of weights of which :meth:`fill` makes the adapter.
        inside: names of the parameters that store these.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._conversions = model, complete_conversions(model)
        self._parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.owned = owned_names(model)
        self._stored: dict[str, tuple[Conversion, StoredWeight]] = {}
        for conversion in self._conversions:
            self._stored |= {name: (conversion, form) for name, form in conversion.stored_weights(model).items()}
        self.stored = set(self._stored)
        self.starts: dict[str, LoRALinear] = {}
        self.inside = {name for _, form in self._stored.values() for name in form.names}
        self.base = {name for name in self._parameters if name not in self.owned | self.inside} | self.stored

    def parameters(self, name: str) -> tuple[str, ...]:
        """Names of the parameters that store a full weight."""
        return self._stored[name][1].names if name in self._stored else (name,)

    def outline(self, name: str) -> torch.Tensor:
        """A full weight on the meta device: its shape, and its dtype in files."""
        if name in self._stored:
            form = self._stored[name][1]
            return torch.empty(form.shape, dtype=form.dtype, device="meta")
        parameter = self._parameters[name]
        return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")

    def fill(self, name: str, read: Read, device: torch.device, dtype: torch.dtype | None = None) -> None:
        """Fill this rank's shard of a full weight, in whatever form it is stored.

        Args:
            name: of the full weight.
            read: is called once at most, for the part that this rank needs.
            device: where parameters of the meta device become real.
            dtype: of these, where a weight is stored as it is; theirs by default.

        Raises:
            ConversionError: ``from_full`` returns other tensors than the parameters that it is to fill.
        """
        if name in self.starts:
            return self._fill_started(name, read, device, dtype)
        if name not in self._stored:
            box, local = local_part(self._materialize(name, device, dtype))
            if local.numel():
                read(box, local)
            return
        form = self._stored[name][1]
        shards = {part: local_part(self._materialize(part, device)) for part in form.names}
        rows = _rows(form, [box for box, _ in shards.values()])
        if rows.start == rows.stop:
            return
        box = (rows, *(slice(0, size) for size in form.shape[1:]))
        value = torch.empty(_size(box), dtype=form.dtype, device=device)
        read(box, value)
        for part, tensor in self._from_full(name, value).items():
            place, local = shards[part]
            local.copy_(tensor[_relative(place, rows) if form.by_rows else place])

    def _fill_started(self, name: str, read: Read, device: torch.device, dtype: torch.dtype | None) -> None:
        """Read a full weight; fill the adapter with what it starts with, and the weight with the rest."""
        layer, path = self.starts.pop(name), name.rpartition(".")[0]
        value = torch.empty_like(self.outline(name), dtype=dtype, device=device)
        read(tuple(slice(0, size) for size in value.shape), value)
        parts = start_from_weight(value.float(), layer.start, layer.rank, layer.scaling)
        for part, tensor in zip((name, f"{path}.lora_a.weight", f"{path}.lora_b.weight"), parts, strict=True):
            self.fill(part, lambda box, target, tensor=tensor: target.copy_(tensor[box]), device, dtype)

    def put(self, name: str, value: torch.Tensor) -> None:
        """Fill this rank's shard of a real weight from the whole of it."""
        self.fill(name, lambda box, target: target.copy_(value[box]), value.device)

    def equals(self, name: str, value: torch.Tensor) -> bool:
        """Whether this rank's shard is that of ``value``, a full weight of the same shape, in the form of storage."""
        tensors = {name: value}
        if name in self._stored:
            tensors = self._from_full(name, value.to(self.outline(name).dtype))
        shards = {part: local_part(self._parameters[part]) for part in tensors}
        return all(torch.equal(tensors[part][box].to(local), local) for part, (box, local) in shards.items())

    def held(self, name: str, ranks: Ranks, turn: int) -> Held:
        """This rank's part of a full weight, to be saved; where a weight is stored across its rows, all ranks call it.

        Args:
            name: of the full weight.
            ranks: all of them.
            turn: which rank writes what several hold, see :class:`Held`.
        """
        if name not in self._stored:
            return Held.of(self._parameters[name], ranks, turn)
        box, writes = self._place(name, ranks, turn)
        if box is None:
            return self._whole(name, self.full(name), ranks, turn)
        tensors = {part: local_part(self._parameters[part])[1] for part in self.parameters(name)}
        return Held(self.outline(name), box, self._to_full(name, tensors, _size(box)), writes)

    def _place(self, name: str, ranks: Ranks, turn: int) -> tuple[Box | None, bool]:
        """Which rows of a stored weight this rank can make alone, if it can, and whether it writes them."""
        form = self._stored[name][1]
        held = [Held.of(self._parameters[part], ranks, turn) for part in form.names]
        whole = tuple(slice(0, size) for size in form.shape)
        if not any(isinstance(self._parameters[part], DTensor) for part in form.names):
            return whole, held[0].writes
        if not form.by_rows or any(_is_cut(part) or part.box[0] != held[0].box[0] for part in held):
            return None, False
        return (held[0].box[0], *whole[1:]), held[0].writes

    def _whole(self, name: str, weight: torch.Tensor, ranks: Ranks, turn: int) -> Held:
        """A weight that all ranks have whole."""
        return Held(self.outline(name), tuple(slice(0, size) for size in weight.shape), weight, _is_turn(ranks, turn))

    def full(self, name: str) -> torch.Tensor:
        """The full weight, on every rank; all of them call it."""
        return self._full(name, {})

    def _full(self, name: str, whole: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The full weight; ``whole`` has parameters that need not be gathered any more."""
        tensors = {
            part: whole[part] if part in whole else full(self._parameters[part]) for part in self.parameters(name)
        }
        return self._to_full(name, tensors, self.outline(name).shape) if name in self._stored else tensors[name]

    def merged(self, name: str, ranks: Ranks, turn: int) -> Held:
        """As :meth:`held`, with what conversions own merged in; the whole weight is made for that, by all ranks."""
        path = name.rpartition(".")[0]
        inside = {f"{path}.{leaf}" for leaf, _ in self._model.get_submodule(path).named_parameters()}
        if not inside & self.owned:
            return self.held(name, ranks, turn)
        sharded = [key for key in sorted(inside) if isinstance(self._parameters[key], DTensor)]
        whole = {key: full(self._parameters[key]) for key in sharded}
        with whole_parameters(self._model, whole):
            weight = self._full(name, whole)
            for conversion in self._conversions:
                weight = conversion.merged(name, weight, self._model)
        if name in self._stored:
            return self._whole(name, weight, ranks, turn)
        held = Held.of(self._parameters[name], ranks, turn)
        weight = weight[held.box].clone() if sharded else weight[held.box]  # a view would keep the whole weight
        return Held(held.outline, held.box, weight, held.writes)

    def _materialize(self, name: str, device: torch.device, dtype: torch.dtype | None = None) -> nn.Parameter:
        self._parameters[name] = materialize(self._model, name, device, dtype)
        return self._parameters[name]

    def _from_full(self, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        conversion, form = self._stored[name]
        tensors, wanted = conversion.from_full(name, value), {}
        for part in form.names:
            parameter = self._parameters[part]
            shape = (value.shape[0], *parameter.shape[1:]) if form.by_rows else tuple(parameter.shape)
            wanted[part] = (shape, parameter.dtype)
        found = {part: (tuple(tensor.shape), tensor.dtype) for part, tensor in tensors.items()}
        if found != wanted:
            raise ConversionError(
                f"model_converters: from_full('{name}') of {type(conversion).__name__} returned {_listed(found)}, but "
                f"the weight is stored as {_listed(wanted)}: make them equal."
            )
        return tensors

    def _to_full(self, name: str, tensors: Mapping[str, torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
        conversion, form = self._stored[name]
        weight = conversion.to_full(name, tensors)
        if tuple(weight.shape) != tuple(shape):
            raise ConversionError(
                f"model_converters: to_full('{name}') of {type(conversion).__name__} returned a tensor of the shape "
                f"{list(weight.shape)}, but the full weight has the shape {list(shape)}: make them equal."
            )
        return weight.to(form.dtype)


def _is_turn(ranks: Ranks, turn: int) -> bool:
    return ranks.rank == turn % ranks.size


def _size(box: Box) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in box)


def _rows(form: StoredWeight, boxes: Sequence[Box]) -> slice:
    """The rows of a full weight that are needed to fill these boxes of its stored tensors."""
    if not form.by_rows:
        return slice(0, form.shape[0])
    return slice(min(box[0].start for box in boxes), max(box[0].stop for box in boxes))


def _relative(box: Box, rows: slice) -> Box:
    return slice(box[0].start - rows.start, box[0].stop - rows.start), *box[1:]


def _is_cut(held: Held) -> bool:
    """Whether a rank lacks some of a parameter in another dimension than the first."""
    return any(part != slice(0, size) for part, size in zip(held.box[1:], held.outline.shape[1:], strict=True))


def _listed(tensors: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> str:
    return ", ".join(f"{name} {dtype} {list(shape)}" for name, (shape, dtype) in tensors.items()) or "nothing"
