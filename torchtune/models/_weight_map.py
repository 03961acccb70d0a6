"""Weight maps: names and layouts of weights in other formats, as tables for both directions.

"Our" names and tensors are torchtune's; "external" names and tensors belong to the other format. A
:class:`WeightMap` is a table of :class:`Row`: template of the external names, template of our names, and a reversible
:class:`Op`. Templates have the placeholder ``{layer}`` (and, for mixtures of experts, ``{expert}``). For a given
:class:`~torchtune.models.Description`, the rows expand into :class:`Group` objects, the smallest sets of tensors that
can be converted separately. Usually a group is one tensor on either side; a fused projection is one external tensor
and several of ours; stacked experts are several external tensors and one of ours. Conversion is streamed: only
incomplete groups are in memory.

Reading from files, group by group, only the slice of each tensor that is needed::

    for group in weight_map.select(names_in_files, description):
        for name in group.tune:
            for external_slice in group.external_slices(name, slices, shapes):
                external_name = group.external[external_slice.external]
                value = files.read(external_name, external_slice.slices)
                external_slice.fill(target, value)  # target: the slice of our tensor

or from a stream of full tensors::

    weight_map.to_tune(iterator of (external name, tensor), description)  # yields (our name, tensor)

Writing is the inverse: ``group.op.external_slices`` says where the slices of our tensors belong, and ``to_external``
converts full tensors. For adapters, ``weight_map.peft()`` maps between our adapter names and
PEFT's, derived from the same rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise, product
from operator import attrgetter
from typing import ClassVar

import torch
from torch import Tensor

from torchtune.models._description import Description
from torchtune.utils import UserError


class WeightMapError(UserError, ValueError):
    """Raised when names or tensors of a checkpoint do not match the model; the message names the tensor."""


PEFT_PREFIX = "base_model.model."

# Slice of a tensor: one range per dimension.
Slices = tuple[slice, ...]


def is_empty(slices: Slices) -> bool:
    """Return whether a slice is empty, for example a rank's shard if there are more ranks than rows."""
    return any(dim.stop <= dim.start for dim in slices)


@dataclass(frozen=True, eq=False)
class ExternalSlice:
    """Slice of an external tensor, and the corresponding rows in a slice of our tensor.

    Attributes:
        external: index of the external tensor in its group.
        slices: slice of the external tensor.
        rows: rows of our slice: indices int64 ``[rows]``, a range, one index (which drops the dimension), a tuple of
            such values, or None for all rows.
        transposed: whether the last two dimensions are swapped.
    """

    external: int
    slices: Slices
    rows: Tensor | slice | int | tuple[slice | int, ...] | None = None
    transposed: bool = False

    def of(self, ours: Tensor) -> Tensor:
        """Return the values of the external slice from our slice."""
        values = ours
        if self.rows is not None:
            values = ours[self.rows]
        if self.transposed:
            values = values.transpose(-1, -2)
        return values

    def fill(self, ours: Tensor, value: Tensor) -> None:
        """Copy the values of the external slice to our slice."""
        if self.transposed:
            value = value.transpose(-1, -2)
        if isinstance(self.rows, Tensor):
            ours[self.rows.to(ours.device)] = value.to(ours)
        elif self.rows is None:
            ours.copy_(value)
        else:
            ours[self.rows].copy_(value)


class Op(ABC):
    """Base class of exact, reversible conversions between the external tensors of a group and ours, without arithmetic.

    Attributes:
        rowwise: whether the op only reorders the first dimension of one tensor, so that it also applies to biases,
            ``lora_b`` and magnitudes.
        matrix_per_expert: whether the external tensors are matrices, one for each expert.
    """

    rowwise: ClassVar[bool] = False
    matrix_per_expert: ClassVar[bool] = False

    @abstractmethod
    def to_tune(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Convert external tensors to our tensors."""

    @abstractmethod
    def to_external(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Convert our tensors to external tensors."""

    def for_shapes(self, shapes: Sequence[Sequence[int]], description: Description) -> "Op":
        """Return the op for external tensors of these shapes, for families with several file layouts."""
        return self

    def external_slices(
        self, which: int, slices: Slices, shapes: Sequence[Sequence[int]], description: Description
    ) -> list[ExternalSlice]:
        """Return the slices of external tensors that form a slice of one of our tensors.

        The default implementation applies :meth:`to_tune` to the row indices; it is for ops that only move rows.

        Args:
            which: index of our tensor in its group.
            slices: slice of our tensor.
            shapes: shapes of the external tensors.
            description: the description of the model.
        """
        if is_empty(slices):
            return []
        # Number the rows of all external tensors, and let the op move the numbers instead of the rows.
        ends = list(accumulate(shape[0] for shape in shapes))
        numbers = [torch.arange(end - shape[0], end) for end, shape in zip(ends, shapes, strict=True)]
        rows, order = self.to_tune(numbers, description)[which][slices[0]].sort()  # order: rows of our slice
        # External tensor of each row; right=True, because row ends[i] is the first one of tensor i + 1.
        tensors = torch.bucketize(rows, torch.tensor(ends), right=True)
        # Each run of consecutive rows of one tensor is read at once.
        breaks = (rows.diff() != 1) | (tensors.diff() != 0)
        cuts = [0, *(breaks.nonzero().flatten() + 1).tolist(), len(rows)]
        external_slices = []
        for start, stop in pairwise(cuts):
            external = int(tensors[start])
            first = int(rows[start]) - (ends[external] - shapes[external][0])
            our_rows = order[start:stop]
            index: Tensor | slice = our_rows
            if bool((our_rows.diff() == 1).all()):  # consecutive: a slice is a view, an index would copy
                first_of_ours = int(our_rows[0])
                index = slice(first_of_ours, first_of_ours + len(our_rows))
            external_rows = slice(first, first + stop - start)
            external_slices.append(ExternalSlice(external, (external_rows, *slices[1:]), index))
        return external_slices

    def peft_rows(self, row: "Row") -> list["Row"]:
        """Return the rows of the adapter of a weight whose row has this op; none if no layer of it has adapters.

        The default implementation is for linear layers.
        """
        if len(row.external_templates) != 1 or len(row.tune_templates) != 1 or not self.rowwise:
            return []
        external = row.external_templates[0]
        tune = row.tune_templates[0]
        # Other weights are experts, norms (``scale``), biases, and parameters without a module.
        is_linear = external.endswith(".weight") and tune.endswith(".weight")
        if not is_linear or "{expert}" in external + tune:
            return []
        external = PEFT_PREFIX + external.removesuffix(".weight")
        tune = tune.removesuffix(".weight")
        return [
            # An op reorders output rows, which only lora_b and the magnitude have.
            Row(f"{external}.lora_A.weight", f"{tune}.lora_a.weight", when=row.when),
            Row(f"{external}.lora_B.weight", f"{tune}.lora_b.weight", self, row.when),
            Row(f"{external}.lora_magnitude_vector", f"{tune}.magnitude", self, row.when),
        ]


@dataclass(frozen=True)
class Identity(Op):
    """Op that changes nothing.

    Example:
        >>> torchtune.models.Identity().to_tune([torch.ones(2)], None)
        [tensor([1., 1.])]
    """

    rowwise: ClassVar[bool] = True

    def to_tune(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Return the same tensors."""
        return list(tensors)

    def to_external(self, tensors: Sequence[Tensor], description: Description) -> list[Tensor]:
        """Return the same tensors."""
        return list(tensors)

    def external_slices(
        self, which: int, slices: Slices, shapes: Sequence[Sequence[int]], description: Description
    ) -> list[ExternalSlice]:
        """Return the same slice."""
        return [ExternalSlice(which, slices)]


@dataclass(frozen=True)
class Row:
    """Row of a weight map.

    Attributes:
        external: template or templates of the external names.
        tune: template or templates of our names.
        op: converts the external tensors to ours and back.
        when: conditions, separated by spaces: attributes of the description, such as ``vision.clipped``. An attribute
            is a bool, a number (0 is False), or the indices of layers; ``!`` before its name negates it.
    """

    external: str | tuple[str, ...]
    tune: str | tuple[str, ...]
    op: Op = Identity()
    when: str = ""

    @property
    def external_templates(self) -> tuple[str, ...]:
        """Templates of the external names."""
        return (self.external,) if isinstance(self.external, str) else self.external

    @property
    def tune_templates(self) -> tuple[str, ...]:
        """Templates of our names."""
        return (self.tune,) if isinstance(self.tune, str) else self.tune


@dataclass(frozen=True)
class Tied:
    """Tied tensor that other formats may store as a copy; the copy must equal its source.

    Attributes:
        external: external name, for example ``lm_head.weight``.
        source: our name of the shared tensor, for example ``tok_embeddings.weight``.
        when: attribute of the description that is True if the weights are tied.
        write: whether to write the copy.
    """

    external: str
    source: str
    when: str = "tie_word_embeddings"
    write: bool = False


@dataclass(frozen=True, eq=False)
class Group:
    """External tensors and our tensors that are converted together, with concrete names.

    Attributes:
        external: external names, in the order of :meth:`to_tune`.
        tune: names in this library, whose format is called ``tune``; in the order of :meth:`to_external`.

    Example:
        >>> group = torchtune.models.Group(("a.weight",), ("b.weight",), torchtune.models.Identity(), None)
        >>> group.to_tune([torch.ones(2)])
        [tensor([1., 1.])]
    """

    external: tuple[str, ...]
    tune: tuple[str, ...]
    op: Op
    description: Description

    def to_tune(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Convert external tensors, in the order of ``external``, to our tensors, in the order of ``tune``."""
        return self.op.to_tune(tensors, self.description)

    def to_external(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Convert our tensors, in the order of ``tune``, to external tensors, in the order of ``external``."""
        return self.op.to_external(tensors, self.description)

    def for_shapes(self, shapes: Sequence[Sequence[int]]) -> "Group":
        """Return the group for external tensors of these shapes, for families with several file layouts."""
        return replace(self, op=self.op.for_shapes(shapes, self.description))

    def read(
        self,
        name: str,
        slices: Slices,
        target: Tensor,
        shapes: Sequence[Sequence[int]],
        read_slice: Callable[[str, Slices], Tensor],
    ) -> None:
        """Fill ``target`` with a slice of one of our tensors, reading only the required data.

        Args:
            name: see :meth:`external_slices`.
            slices: see :meth:`external_slices`.
            target: tensor with the shape of the slice.
            shapes: see :meth:`external_slices`.
            read_slice: reads a slice of an external tensor, by its name.
        """
        for external_slice in self.external_slices(name, slices, shapes):
            external_name = self.external[external_slice.external]
            value = read_slice(external_name, external_slice.slices)
            external_slice.fill(target, value)

    def external_slices(self, name: str, slices: Slices, shapes: Sequence[Sequence[int]]) -> list[ExternalSlice]:
        """Return the slices of external tensors that form a slice of one of our tensors.

        Args:
            name: name of our tensor.
            slices: the slice.
            shapes: shapes of the external tensors, in the order of ``external``.
        """
        return self.op.external_slices(self.tune.index(name), slices, shapes, self.description)


# Placeholder in a template -> attribute of the description that holds the number of its values.
_PLACEHOLDERS = {
    "layer": "num_layers",
    "expert": "num_experts",
    "block": "vision.num_layers",
    "head": "vision.num_projection_layers",
    "deep": "vision.num_deep_layers",
}
_LAYERS = ("layer", "block", "head", "deep")  # a group has tensors of one layer only


def rename_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    """Replace the longest matching prefix of ``name``; without a match, return ``name``.

    Example:
        >>> torchtune.models.rename_prefix("model.layers.0", {"model.": "text."})
        'text.layers.0'
    """
    matches = [prefix for prefix in prefixes if name.startswith(prefix)]
    if not matches:
        return name
    longest = max(matches, key=len)
    return prefixes[longest] + name.removeprefix(longest)


@dataclass(frozen=True)
class WeightMap:
    """Names and layouts of one external format for one kind of model. Immutable and hashable.

    Attributes:
        rows: rows of the table.
        tied: tied tensors that the format may store as copies.
        ignore: templates of external names that are not weights, for example cached RoPE frequencies.
        modules: pairs (prefix of external names, prefix of the module names in ``transformers``, which ``peft`` uses).

    Example:
        >>> model.spec.weight_map("hf").external_module("layers.0.mlp.w1", model.description)
        'model.layers.0.mlp.gate_proj'
    """

    rows: tuple[Row, ...]
    tied: tuple[Tied, ...] = ()
    ignore: tuple[str, ...] = ()
    modules: tuple[tuple[str, str], ...] = (("", ""),)

    def extended(self, rows: Iterable[Row]) -> "WeightMap":
        """Return the map with further rows."""
        return replace(self, rows=(*self.rows, *rows))

    def prefixed(self, prefixes: Mapping[str, str], tune_prefix: str = "") -> "WeightMap":
        """Return the map for a composite checkpoint with this model as one part.

        Args:
            prefixes: prefix of an external name -> prefix in the composite checkpoint; the longest match is replaced.
                ``{"": "language_model."}`` adds a prefix to every name.
            tune_prefix: prefix to add to our names, for example ``"decoder."``.
        """
        return _prefixed(self, tuple(sorted(prefixes.items())), tune_prefix)

    def groups(self, description: Description) -> tuple[Group, ...]:
        """Return all groups of the model, ordered by row, then by layer."""
        return _expand(self, description).groups

    def select(
        self,
        external_names: Iterable[str],
        description: Description,
        owns: Callable[[str], bool] = lambda name: True,
    ) -> list[Group]:
        """Return the groups to read from a checkpoint with ``external_names``, in the order of these names.

        Args:
            external_names: all tensor names of the checkpoint.
            description: the description of the full model.
            owns: filter of our parameter names, for example by pipeline stage; by default all. A group is selected if
                the filter accepts one of its parameters.

        Raises:
            WeightMapError: a name is unknown, or a selected parameter is missing from the checkpoint.
        """
        names = list(external_names)
        for name in names:
            self._group_of_external(name, description)  # raises for an unknown name
        selected = []
        missing = []
        present = set(names)
        for group in self.groups(description):
            if any(owns(name) for name in group.tune):
                selected.append(group)
                missing += [name for name in group.external if name not in present]
        if missing:
            raise self._missing(missing, description)
        # In the order of the file, reads of a disk or a network are sequential.
        order = {name: index for index, name in enumerate(names)}
        return sorted(selected, key=lambda group: min(order[name] for name in group.external))

    def to_tune(
        self, tensors: Iterable[tuple[str, Tensor]], description: Description, *, partial: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Convert a stream of external tensors to our tensors; only incomplete groups stay in memory.

        Args:
            tensors: (external name, tensor) pairs in any order.
            description: the description of the model.
            partial: allow missing groups (an adapter, one shard file).

        Raises:
            WeightMapError: a name is unknown, missing or repeated, or a tied tensor differs from its source.
        """
        waiting: dict[Group, dict[str, Tensor]] = {}  # tensors of incomplete groups, by external name
        finished: set[Group] = set()
        tied = _TiedCheck(self, description)
        for name, tensor in tensors:
            group = self._group_of_external(name, description)
            tied.check(name, tensor)
            if group is None:
                continue
            parts = waiting.setdefault(group, {})
            if group in finished or name in parts:
                raise WeightMapError(f"The checkpoint holds the tensor '{name}' twice.")
            parts[name] = tensor
            if len(parts) == len(group.external):
                del waiting[group]
                finished.add(group)
                converted = group.to_tune([parts[part] for part in group.external])
                yield from zip(group.tune, converted, strict=True)
        # A group with a part of its tensors is an error even if groups may be missing.
        required = waiting if partial else self.groups(description)
        missing = []
        for group in required:
            if group not in finished:
                missing += [name for name in group.external if name not in waiting.get(group, {})]
        if missing:
            raise self._missing(missing, description)

    def to_external(
        self, tensors: Iterable[tuple[str, Tensor]], description: Description, *, partial: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Convert a stream of our tensors to external tensors; the inverse of :meth:`to_tune`.

        Args:
            tensors: (our name, tensor) pairs in any order.
            description: the description of the model.
            partial: allow missing groups.

        Raises:
            WeightMapError: a name is unknown or missing.
        """
        table = _expand(self, description)
        waiting: dict[Group, dict[str, Tensor]] = {}  # tensors of incomplete groups, by our name
        written: set[str] = set()
        for name, tensor in tensors:
            group = table.by_tune.get(name)
            if group is None:
                raise WeightMapError(f"The parameter '{name}' has no name in the format to be written.")
            written.add(name)
            parts = waiting.setdefault(group, {})
            parts[name] = tensor
            if len(parts) == len(group.tune):
                del waiting[group]
                converted = group.to_external([parts[part] for part in group.tune])
                yield from zip(group.external, converted, strict=True)
            for tie in table.tied:
                if tie.write and tie.source == name:
                    yield tie.external, tensor.clone()  # two names of one tensor would share its memory
        # As in to_tune, an incomplete group is an error even with ``partial``.
        required = waiting if partial else table.groups
        for group in required:
            for name in group.tune:
                if name not in written:
                    raise WeightMapError(f"The parameter '{name}' is missing from what is to be written.")

    def external_module(self, tune_module: str, description: Description) -> str:
        """Return the external name of a module: ``layers.0.attn.output_proj`` -> ``model.layers.0.self_attn.o_proj``.

        Raises:
            WeightMapError: the other format has no separate module with a ``weight`` for our module.
        """
        group = _expand(self, description).by_tune.get(f"{tune_module}.weight")
        if group is None or len(group.external) != 1 or len(group.tune) != 1:
            raise WeightMapError(f"The module '{tune_module}' is not a single module in the other format.")
        return rename_prefix(group.external[0].removesuffix(".weight"), dict(self.modules))

    def peft(self) -> "WeightMap":
        """Return the map between our adapter names and PEFT's files, derived from the weight rows of this map.

        ``X.lora_a.weight``, ``X.lora_b.weight`` and ``X.magnitude`` of a linear layer X become
        ``base_model.model.Y.lora_A.weight``, ``….lora_B.weight`` and ``….lora_magnitude_vector``. An op that reorders
        the rows of a weight also reorders the rows of ``lora_b`` and of the magnitude. Convert with ``partial=True``.
        """
        return _derive_peft(self.prefixed(dict(self.modules)))

    def adapted_modules(self, description: Description) -> frozenset[str]:
        """Return our names of the modules that can have adapters in PEFT's format."""
        return frozenset(name.partition(".lora_")[0] for name in _expand(self.peft(), description).by_tune)

    def named_like_experts(self, tune_module: str, description: Description) -> bool:
        """Return whether a linear layer has the external name of an expert matrix, for example ``mlp.gate_proj``.

        ``peft`` interprets target modules with such names as experts, so adapter files list the layer's weight as a
        target parameter.
        """
        expert_matrices = {_leaf(row.external_templates[0]) for row in self.rows if row.op.matrix_per_expert}
        if not expert_matrices:
            return False
        group = _expand(self, description).by_tune.get(f"{tune_module}.weight")
        return group is not None and _leaf(group.external[0]) in expert_matrices

    def fused_modules(self, tune_module: str, description: Description) -> tuple[str, ...]:
        """Return our names of all modules that a checkpoint fuses with this one, including itself."""
        suffix = ".lora_a.weight"
        group = _expand(self.peft(), description).by_tune.get(f"{tune_module}{suffix}")
        if group is None:
            return (tune_module,)
        return tuple(name.removesuffix(suffix) for name in group.tune if name.endswith(suffix))

    def _group_of_external(self, name: str, description: Description) -> Group | None:
        """Return the group of an external name; None for a tied copy or a tensor that is not a weight."""
        table = _expand(self, description)
        if name in table.by_external:
            return table.by_external[name]
        if name in table.ignored or any(name == tie.external for tie in table.tied):
            return None
        if "layers." in name or "blk." in name:
            hint = f"the model has {description.num_layers} layers"
        else:
            hint = f"a tensor of the model is called '{next(iter(table.by_external))}'"
        raise WeightMapError(f"The checkpoint's tensor '{name}' has no place in this model ({hint}).")

    def _missing(self, names: Sequence[str], description: Description) -> WeightMapError:
        text = f"The checkpoint lacks the tensor '{names[0]}'"
        if len(names) > 1:
            text += f" and {len(names) - 1} more"
        if any(names[0] == tie.external for tie in self.tied):
            return WeightMapError(
                f"{text}: it shares its output layer with its embeddings, while the model does not "
                "(build the model with tie_word_embeddings=True)."
            )
        return WeightMapError(f"{text}, which this model of {description.num_layers} layers needs.")


class _TiedCheck:
    """Comparison of tied tensors with their sources in a stream."""

    def __init__(self, weight_map: WeightMap, description: Description) -> None:
        table = _expand(weight_map, description)
        self._pairs = {tie.external: table.by_tune[tie.source].external[0] for tie in table.tied}
        self._tensors: dict[str, Tensor] = {}  # the first tensor of each pair, until the second one comes

    def check(self, name: str, tensor: Tensor) -> None:
        """Compare a tensor with its copy or source, if that came before. Raises ``WeightMapError`` if they differ."""
        for copy, source in self._pairs.items():
            if name not in (copy, source):
                continue
            self._tensors[name] = tensor
            if copy in self._tensors and source in self._tensors:
                copy_tensor = self._tensors.pop(copy)
                source_tensor = self._tensors.pop(source)
                if copy_tensor.shape != source_tensor.shape or not torch.equal(copy_tensor, source_tensor):
                    raise WeightMapError(
                        f"The checkpoint's '{copy}' differs from '{source}' although the model shares the two "
                        "(build the model with tie_word_embeddings=False)."
                    )


@dataclass(frozen=True)
class _Table:
    """A weight map expanded for one description: all groups, and the group of each name."""

    groups: tuple[Group, ...]
    by_external: dict[str, Group]
    by_tune: dict[str, Group]
    tied: tuple[Tied, ...]
    ignored: frozenset[str]


def _leaf(external: str) -> str:
    """Return the last part of a module's name: ``gate_proj`` for ``….mlp.gate_proj.weight``."""
    return external.removesuffix(".weight").rpartition(".")[2]


def _fill(template: str, description: Description, **fixed: int) -> list[str]:
    """Return all names of a template; placeholders that are not in ``fixed`` take every value."""
    free = [key for key in _PLACEHOLDERS if f"{{{key}}}" in template and key not in fixed]
    ranges = [range(attrgetter(_PLACEHOLDERS[key])(description)) for key in free]
    names = []
    for numbers in product(*ranges):
        names.append(template.format(**fixed, **dict(zip(free, numbers, strict=True))))
    return names


def _holds(condition: str, description: Description, layer: int | None) -> bool:
    """Return whether a condition of :attr:`Row.when` holds in a layer."""
    value = attrgetter(condition.removeprefix("!"))(description)
    holds = bool(value)
    if isinstance(value, Sequence | frozenset):  # the indices of the layers in which it holds
        holds = layer in value
    if condition.startswith("!"):
        return not holds
    return holds


# Cached, because a conversion asks for the table at every tensor; 32 is more than the models of a run.
@lru_cache(maxsize=32)
def _expand(weight_map: WeightMap, description: Description) -> _Table:
    """Return the table of a weight map for one model: a group for each row, and for each layer that has the row."""
    groups = []
    for row in weight_map.rows:
        conditions = row.when.split()
        placeholder = None  # of the row, if its names have the number of a layer of the decoder or of a tower
        for key in _LAYERS:
            if any(f"{{{key}}}" in template for template in row.tune_templates):
                placeholder = key
        layers: Sequence[int | None] = [None]  # a row without layers makes one group
        if placeholder is not None:
            layers = range(attrgetter(_PLACEHOLDERS[placeholder])(description))
        for layer in layers:
            if not all(_holds(condition, description, layer) for condition in conditions):
                continue
            numbers = {}
            if layer is not None:
                numbers[placeholder] = layer
            if placeholder == "layer":
                numbers |= description.other_numbers(layer)  # if the other format counts layers in other ways
            external: list[str] = []
            for template in row.external_templates:
                external += _fill(template, description, **numbers)
            tune: list[str] = []
            for template in row.tune_templates:
                tune += _fill(template, description, **numbers)
            groups.append(Group(tuple(external), tuple(tune), row.op, description))
    by_external: dict[str, Group] = {}
    by_tune: dict[str, Group] = {}
    num_names = 0
    for group in groups:
        by_external |= dict.fromkeys(group.external, group)
        by_tune |= dict.fromkeys(group.tune, group)
        num_names += len(group.external) + len(group.tune)
    # Every parameter is mapped exactly once in each direction.
    num_repeated = num_names - len(by_external) - len(by_tune)
    if num_repeated:
        raise ValueError(f"A weight map names {num_repeated} tensors more than once.")
    tied = tuple(tie for tie in weight_map.tied if getattr(description, tie.when))
    ignored: set[str] = set()
    for template in weight_map.ignore:
        ignored.update(_fill(template, description))
    return _Table(tuple(groups), by_external, by_tune, tied, frozenset(ignored))


@lru_cache(maxsize=32)
def _prefixed(weight_map: WeightMap, prefixes: tuple[tuple[str, str], ...], tune_prefix: str) -> WeightMap:
    """See :meth:`WeightMap.prefixed`; cached, because it is called for every weight of an export.

    The result has the default ``modules``; families that need others set them with ``dataclasses.replace``.
    """
    external_prefixes = dict(prefixes)
    rows = []
    for row in weight_map.rows:
        external: str | tuple[str, ...]
        if isinstance(row.external, str):
            external = rename_prefix(row.external, external_prefixes)
        else:
            external = tuple(rename_prefix(name, external_prefixes) for name in row.external)
        tune: str | tuple[str, ...]
        if isinstance(row.tune, str):
            tune = f"{tune_prefix}{row.tune}"
        else:
            tune = tuple(f"{tune_prefix}{name}" for name in row.tune)
        rows.append(replace(row, external=external, tune=tune))
    tied = []
    for tie in weight_map.tied:
        external_name = rename_prefix(tie.external, external_prefixes)
        tied.append(replace(tie, external=external_name, source=f"{tune_prefix}{tie.source}"))
    ignore = tuple(rename_prefix(name, external_prefixes) for name in weight_map.ignore)
    return WeightMap(tuple(rows), tuple(tied), ignore)


@lru_cache(maxsize=32)
def _derive_peft(weight_map: WeightMap) -> WeightMap:
    """See :meth:`WeightMap.peft`; cached like :func:`_prefixed`."""
    rows = []
    for row in weight_map.rows:
        rows += row.op.peft_rows(row)
    return WeightMap(tuple(rows))
