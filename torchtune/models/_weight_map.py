"""Weight maps: names and layouts of weights in other formats, as tables for both directions.

"Our" names and tensors are torchtune's; "external" names and tensors belong to the other format. A
:class:`WeightMap` is a table of :class:`Row`: template of the external names, template of our names, and a reversible
:class:`Op`. Templates have the placeholder ``{layer}`` (and, for mixtures of experts, ``{expert}``). For a given
:class:`~torchtune.models.Description`, the rows expand into :class:`Group` objects, the smallest sets of tensors that
can be converted separately. Usually a group is one tensor on either side; a fused projection is one external tensor
and several of ours; stacked experts are several external tensors and one of ours. Conversion is streamed: only
incomplete groups are in memory.

Reading::

    spec.weight_map("hf").to_tune(iterator of (name, tensor), description)  # yields (our name, tensor)

or, with random access to the source, group by group::

    for group in weight_map.select(names_in_checkpoint, description):
        for name, tensor in zip(group.tune, group.to_tune([read(n) for n in group.external])):
            ...

Writing works the same with ``to_external``. For adapters, ``weight_map.peft()`` maps between our adapter names and
PEFT's, derived from the same rows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from operator import attrgetter

import torch
from torch import Tensor

from torchtune.models._description import Description
from torchtune.models._weight_ops import (
    ExpertAdapter,
    ExternalSlice,
    FusedAdapter,
    FusedExperts,
    Identity,
    Op,
    Slices,
    Split,
    Stack,
)
from torchtune.utils import UserError


class WeightMapError(UserError, ValueError):
    """Raised when names or tensors of a checkpoint do not match the model; the message names the tensor."""


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
    op: Op = Identity()  # noqa: RUF009 - ops are frozen dataclasses
    when: str = ""


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
        tune: our names, in the order of :meth:`to_external`.

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
        source: Callable[[str, Slices], Tensor],
    ) -> None:
        """Fill ``target`` with a slice of one of our tensors, reading only the required data.

        Args:
            name: name of our tensor.
            slices: the slice.
            target: tensor with the shape of the slice.
            shapes: shapes of the external tensors, in the order of ``external``.
            source: reads a slice of an external tensor.
        """
        for part in self.op.external_slices(self.tune.index(name), slices, shapes, self.description):
            part.fill(target, source(self.external[part.external], part.slices))

    def external_slices(self, name: str, slices: Slices, shapes: Sequence[Sequence[int]]) -> list[ExternalSlice]:
        """Return the slices of external tensors that form a slice of one of our tensors; see :meth:`read`."""
        return self.op.external_slices(self.tune.index(name), slices, shapes, self.description)


# Placeholder in a template -> attribute of the description that holds the number of its values.
_PLACEHOLDERS = {
    "layer": "num_layers",
    "expert": "num_experts",
    "clip": "num_clip_layers",
    "head": "num_projection_layers",
    "block": "vision.num_layers",
    "deep": "vision.num_deep_layers",
}
_LAYERS = ("layer", "clip", "head", "block", "deep")  # a group has tensors of one layer only

PEFT_PREFIX = "base_model.model."


def rename_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    """Replace the longest matching prefix of ``name``; without a match, return ``name``.

    Example:
        >>> torchtune.models.rename_prefix("model.layers.0", {"model.": "text."})
        'text.layers.0'
    """
    found = max((prefix for prefix in prefixes if name.startswith(prefix)), key=len, default=None)
    return name if found is None else prefixes[found] + name.removeprefix(found)


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

    def prefixed(self, prefixes: Mapping[str, str], ours: str = "") -> "WeightMap":
        """Return the map for a composite checkpoint with this model as one part.

        Args:
            prefixes: prefix of an external name -> prefix in the composite checkpoint; the longest match is replaced.
                ``{"": "language_model."}`` adds a prefix to every name.
            ours: prefix to add to our names, for example ``"decoder."``.
        """
        return _prefixed(self, tuple(sorted(prefixes.items())), ours)

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
        table, names = _expand(self, description), list(external_names)
        present = set(names)
        for name in names:
            self._group_of_external(name, description)
        selected = [group for group in table.groups if any(map(owns, group.tune))]
        lacking = [name for group in selected for name in group.external if name not in present]
        if lacking:
            raise self._missing(lacking, description)
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
        waiting: dict[Group, dict[str, Tensor]] = {}
        finished: set[Group] = set()
        shared = _TiedCheck(self, description)
        for name, tensor in tensors:
            group = self._group_of_external(name, description)
            shared.see(name, tensor)
            if group is None:
                continue
            parts = waiting.setdefault(group, {})
            if group in finished or name in parts:
                raise WeightMapError(f"The checkpoint holds the tensor '{name}' twice.")
            parts[name] = tensor
            if len(parts) == len(group.external):
                del waiting[group]
                finished.add(group)
                yield from zip(group.tune, group.to_tune([parts[part] for part in group.external]), strict=True)
        if waiting or not partial:
            groups = waiting if partial else (group for group in self.groups(description) if group not in finished)
            lacking = [name for group in groups for name in group.external if name not in waiting.get(group, {})]
            if lacking:
                raise self._missing(lacking, description)

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
        waiting: dict[Group, dict[str, Tensor]] = {}
        seen: set[str] = set()
        for name, tensor in tensors:
            group = table.by_tune.get(name)
            if group is None:
                raise WeightMapError(f"The parameter '{name}' has no name in the format to be written.")
            seen.add(name)
            parts = waiting.setdefault(group, {})
            parts[name] = tensor
            if len(parts) == len(group.tune):
                del waiting[group]
                yield from zip(group.external, group.to_external([parts[part] for part in group.tune]), strict=True)
            for tie in table.tied:
                if tie.write and tie.source == name:
                    yield tie.external, tensor.clone()
        if waiting or not partial:
            names = [name for group in waiting for name in group.tune] if partial else table.by_tune
            lacking = [name for name in names if name not in seen]
            if lacking:
                raise WeightMapError(f"The parameter '{lacking[0]}' is missing from what is to be written.")

    def external_module(self, tune_module: str, description: Description) -> str:
        """Return the external name of a module: ``layers.0.attn.output_proj`` -> ``model.layers.0.self_attn.o_proj``.

        Raises:
            WeightMapError: the other format has no separate module with a ``weight`` for our module.
        """
        group = _expand(self, description).by_tune.get(f"{tune_module}.weight")
        if group is None or len(group.external) != 1 or len(group.tune) != 1:
            raise WeightMapError(f"The module '{tune_module}' is no single module in the other format.")
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
        matrices = {_leaf(_templates(row.external)[0]) for row in self.rows if isinstance(row.op, Stack)}
        if not matrices:
            return False
        group = _expand(self, description).by_tune.get(f"{tune_module}.weight")
        return group is not None and _leaf(group.external[0]) in matrices

    def adapted_together(self, tune_module: str, description: Description) -> tuple[str, ...]:
        """Return our names of all modules that a checkpoint fuses with this one, including itself."""
        group = _expand(self.peft(), description).by_tune.get(f"{tune_module}.lora_a.weight")
        end = ".lora_a.weight"
        return tuple(name.removesuffix(end) for name in group.tune if name.endswith(end)) if group else (tune_module,)

    def _group_of_external(self, name: str, description: Description) -> Group | None:
        table = _expand(self, description)
        group = table.by_external.get(name)
        if group is None and name not in table.ignored and name not in {tie.external for tie in table.tied}:
            raise WeightMapError(self._unexpected(name, description))
        return group

    def _unexpected(self, name: str, description: Description) -> str:
        known = _expand(self, description).by_external
        hint = f"a tensor of the model is called '{next(iter(known))}'"
        if "layers." in name or "blk." in name:
            hint = f"the model has {description.num_layers} layers"
        return f"The checkpoint's tensor '{name}' has no place in this model ({hint})."

    def _missing(self, names: Sequence[str], description: Description) -> WeightMapError:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        text = f"The checkpoint lacks the tensor '{names[0]}'{more}"
        if names[0] in {tie.external for tie in self.tied}:
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
        self._held: dict[str, Tensor] = {}

    def see(self, name: str, tensor: Tensor) -> None:
        for copy, source in self._pairs.items():
            if name in (copy, source):
                self._held[name] = tensor
                if copy in self._held and source in self._held:
                    first, second = self._held.pop(copy), self._held.pop(source)
                    if first.shape != second.shape or not torch.equal(first, second):
                        raise WeightMapError(
                            f"The checkpoint's '{copy}' differs from '{source}' although the model shares the two "
                            "(build the model with tie_word_embeddings=False)."
                        )


@dataclass(frozen=True)
class _Table:
    """A weight map expanded for one description."""

    groups: tuple[Group, ...]
    by_external: dict[str, Group]
    by_tune: dict[str, Group]
    tied: tuple[Tied, ...]
    ignored: frozenset[str]


def _leaf(external: str) -> str:
    return external.removesuffix(".weight").rpartition(".")[2]


def _templates(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


def _fill(template: str, description: Description, **fixed: int) -> list[str]:
    """Return all names of a template; placeholders that are not in ``fixed`` take every value."""
    free = [key for key in _PLACEHOLDERS if f"{{{key}}}" in template and key not in fixed]
    counts = [range(attrgetter(_PLACEHOLDERS[key])(description)) for key in free]
    return [template.format(**fixed, **dict(zip(free, values, strict=True))) for values in product(*counts)]


def _holds(condition: str, description: Description, layer: int | None) -> bool:
    value = attrgetter(condition.removeprefix("!"))(description)
    holds = layer in value if isinstance(value, Sequence | frozenset) else bool(value)
    return holds != condition.startswith("!")


@lru_cache(maxsize=32)
def _expand(weight_map: WeightMap, description: Description) -> _Table:
    groups = []
    for row in weight_map.rows:
        kinds = (kind for kind in _LAYERS if any(f"{{{kind}}}" in template for template in _templates(row.tune)))
        kind = next(kinds, None)
        for layer in range(attrgetter(_PLACEHOLDERS[kind])(description)) if kind else (None,):
            if not all(_holds(condition, description, layer) for condition in row.when.split()):
                continue
            fixed = {} if layer is None else {kind: layer}
            if kind == "layer":
                fixed |= description.other_numbers(layer)
            external = [name for template in _templates(row.external) for name in _fill(template, description, **fixed)]
            tune = [name for template in _templates(row.tune) for name in _fill(template, description, **fixed)]
            groups.append(Group(tuple(external), tuple(tune), row.op, description))
    by_external = {name: group for group in groups for name in group.external}
    by_tune = {name: group for group in groups for name in group.tune}
    doubled = sum(len(group.external) + len(group.tune) for group in groups) - len(by_external) - len(by_tune)
    if doubled:
        raise ValueError(f"A weight map names {doubled} tensors more than once.")
    tied = tuple(tie for tie in weight_map.tied if getattr(description, tie.when))
    ignored = frozenset(name for template in weight_map.ignore for name in _fill(template, description))
    return _Table(tuple(groups), by_external, by_tune, tied, ignored)


@lru_cache(maxsize=32)
def _prefixed(weight_map: WeightMap, prefixes: tuple[tuple[str, str], ...], ours: str) -> WeightMap:
    def rename(external: str | tuple[str, ...], prefixes: Mapping[str, str]) -> str | tuple[str, ...]:
        names = tuple(rename_prefix(name, prefixes) for name in _templates(external))
        return names[0] if isinstance(external, str) else names

    theirs, own = dict(prefixes), {"": ours}
    rows = [replace(row, external=rename(row.external, theirs), tune=rename(row.tune, own)) for row in weight_map.rows]
    return WeightMap(
        tuple(rows),
        tuple(
            replace(tie, external=rename(tie.external, theirs), source=rename(tie.source, own))
            for tie in weight_map.tied
        ),
        tuple(rename_prefix(name, theirs) for name in weight_map.ignore),
    )


@lru_cache(maxsize=32)
def _derive_peft(weight_map: WeightMap) -> WeightMap:
    rows = []
    for row in weight_map.rows:
        external, tune = _templates(row.external), _templates(row.tune)
        if isinstance(row.op, Stack):
            rows += _peft_rows_of_experts(row, external[0], tune[0])
            continue
        if isinstance(row.op, FusedExperts):
            rows.append(_peft_row_of_fused_experts(row))
            continue
        if isinstance(row.op, Split) and external[0].endswith(".weight"):
            rows += _peft_rows_of_fused(row, external[0], tune, row.op.sizes)
            continue
        single = len(external) == len(tune) == 1 and "{expert}" not in external[0] + tune[0]
        if not (single and row.op.rowwise and external[0].endswith(".weight") and tune[0].endswith(".weight")):
            continue
        theirs, ours = PEFT_PREFIX + external[0].removesuffix(".weight"), tune[0].removesuffix(".weight")
        rows += [
            Row(f"{theirs}.lora_A.weight", f"{ours}.lora_a.weight", when=row.when),
            Row(f"{theirs}.lora_B.weight", f"{ours}.lora_b.weight", row.op, row.when),
            Row(f"{theirs}.lora_magnitude_vector", f"{ours}.magnitude", row.op, row.when),
        ]
    return WeightMap(tuple(rows))


def _peft_rows_of_fused(row: Row, external: str, tune: tuple[str, ...], sizes: tuple[str, ...]) -> list[Row]:
    theirs, ours = PEFT_PREFIX + external.removesuffix(".weight"), [name.removesuffix(".weight") for name in tune]
    both = tuple(f"{name}.lora_{side}.weight" for side in "ab" for name in ours)
    magnitudes = tuple(f"{name}.magnitude" for name in ours)
    return [
        Row((f"{theirs}.lora_A.weight", f"{theirs}.lora_B.weight"), both, FusedAdapter(sizes), row.when),
        Row(f"{theirs}.lora_magnitude_vector", magnitudes, row.op, row.when),
    ]


def _peft_rows_of_experts(row: Row, external: str, tune: str) -> list[Row]:
    """Return the rows of ``X.lora_gate_a`` and ``_b``, the adapters of stacked experts ``X.gate_proj``.

    Files have one adapter per gated expert, or one fused adapter for experts without a gate.
    """
    theirs, (path, _, name) = PEFT_PREFIX + external.removesuffix(".weight"), tune.rpartition(".")
    ours = f"{path}.lora_{name.removesuffix('_proj')}"
    each = [
        Row(f"{theirs}.lora_{side}.weight", f"{ours}_{side.lower()}", row.op, f"{row.when} mlp_gated") for side in "AB"
    ]
    return [*each, _peft_row_of_fused_experts(replace(row, op=FusedExperts(), when=f"{row.when} !mlp_gated"))]


def _peft_row_of_fused_experts(row: Row) -> Row:  # peft wraps parameters in the order of the module's parameters
    names = [name.rpartition(".") for name in _templates(row.tune)]
    block = _templates(row.external)[0].replace(".experts", "").replace(".{expert}", "").removesuffix(".weight")
    inside = "experts" if names[0][2] == "down_proj" else "experts.base_layer"
    theirs = tuple(f"{PEFT_PREFIX}{block.rpartition('.')[0]}.{inside}.lora_{side}.weight" for side in "AB")
    ours = tuple(f"{path}.lora_{name.removesuffix('_proj')}_{side}" for side in "ab" for path, _, name in names)
    return Row(theirs, ours, ExpertAdapter(row.op.parts, row.op.peft_swaps), row.when)
