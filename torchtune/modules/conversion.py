"""Conversions: changes of a model before its weights are loaded.

A conversion replaces modules in place, usually with parameters on the meta device, and reports what it did. Examples
are LoRA, quantized base weights, fake quantization and fused kernels. To add one, subclass :class:`Conversion`;
``phase`` and ``convert`` are required, every other method has a default.
"""

import copy
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import IntEnum
from itertools import combinations
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from torchtune.utils import UserError, get_logger, log_rank_zero

if TYPE_CHECKING:  # DTensor is slow to import
    from torch.distributed.tensor.parallel import ParallelStyle

__all__ = [
    "Conversion",
    "ConversionError",
    "ConversionReport",
    "Phase",
    "StoredWeight",
    "apply_conversions",
    "full_shapes",
    "get_conversions",
    "nearest_module_names",
    "run_post_optimizer_hooks",
    "run_pre_optimizer_hooks",
]


class ConversionError(UserError, ValueError):
    """Raised when a conversion does not support the model, or when conversions exclude each other."""


class Phase(IntEnum):
    """Order in which conversions run: lower phases first.

    Example:
        >>> from torchtune.modules.conversion import Phase
        >>> Phase.QUANTIZED_BASE < Phase.ADAPTER
        True
    """

    KERNEL = 0
    QUANTIZED_BASE = 1
    ADAPTER = 2
    FAKE_QUANT = 3
    FLOAT8_TRAINING = 4
    OBJECTIVE = 5  # changes no weight: training objectives besides the loss


# Pairs of phases that exclude each other on one model -> reason. A phase paired with itself allows one conversion.
_FORBIDDEN: dict[tuple[Phase, Phase], str] = {
    (Phase.QUANTIZED_BASE, Phase.QUANTIZED_BASE): "a base weight is quantized once",
    (Phase.ADAPTER, Phase.ADAPTER): "a model has one adapter",
    (Phase.FAKE_QUANT, Phase.FAKE_QUANT): "a weight is fake-quantized once",
    (Phase.FLOAT8_TRAINING, Phase.FLOAT8_TRAINING): "a layer computes in float8 or not",
    (Phase.QUANTIZED_BASE, Phase.FLOAT8_TRAINING): "products in float8 are for weights that are trained",
    (Phase.ADAPTER, Phase.FLOAT8_TRAINING): "products in float8 are for weights that are trained",
    (Phase.FAKE_QUANT, Phase.FLOAT8_TRAINING): "a layer simulates one precision",
    (Phase.QUANTIZED_BASE, Phase.FAKE_QUANT): "fake quantization needs a base weight that is not quantized yet",
}


@dataclass(frozen=True)
class ConversionReport:
    """The result of a conversion, for the log.

    Attributes:
        name: name of the conversion in the log, for example ``"LoRA"``.
        replaced: paths of the modules that were replaced or changed.
        num_parameters: number of added parameters.
        note: further information for the log.

    Example:
        >>> from torchtune.modules.conversion import ConversionReport
        >>> print(ConversionReport("LoRA", ["layers.0.attn.q_proj"], num_parameters=128))
        LoRA: 1 modules converted (q_proj), 128 parameters added
    """

    name: str
    replaced: list[str] = field(default_factory=list)
    num_parameters: int = 0
    note: str = ""

    def __str__(self) -> str:
        text = f"{self.name}: {len(self.replaced)} modules converted"
        kinds = sorted({path.rpartition(".")[2] for path in self.replaced})
        if kinds:
            text += f" ({', '.join(kinds)})"
        if self.num_parameters:
            text += f", {self.num_parameters:,} parameters added"
        if self.note:
            text += f"; {self.note}"
        return text


@dataclass(frozen=True)
class StoredWeight:
    """A weight that the model stores in another format than checkpoints do.

    Attributes:
        shape: shape of the full weight, as checkpoints hold it.
        dtype: dtype of the full weight when it is saved.
        names: names of the parameters that store it; the name of the full weight may be one of them.
        by_rows: whether row i of every stored tensor depends only on row i of the full weight. A rank then converts
            only the rows of its shard; otherwise it converts the full weight and keeps its shard.

    Example:
        >>> torchtune.modules.conversion.StoredWeight((4, 8), torch.bfloat16, ("weight", "scale")).names
        ('weight', 'scale')
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    names: tuple[str, ...]
    by_rows: bool = False


class Conversion(ABC):
    """Base class of conversions. Every method but :meth:`convert` has a default that does nothing.

    Parameters are named as in ``model.named_parameters()``. Methods that take a model find their modules by type, so
    that one conversion can be applied to several models.

    Attributes:
        phase: position in the order of conversions.

    Example:
        >>> from torchtune.modules.conversion import Conversion, ConversionReport, Phase, apply_conversions
        >>> class FreezeNorm(Conversion):
        ...     phase = Phase.KERNEL
        ...     def convert(self, model):
        ...         model.norm.requires_grad_(False)
        ...         return ConversionReport("FreezeNorm", ["norm"])
        >>> print(*apply_conversions(model, [FreezeNorm()]))
        FreezeNorm: 1 modules converted (norm)
    """

    phase: ClassVar[Phase]

    @abstractmethod
    def convert(self, model: nn.Module) -> ConversionReport:
        """Convert ``model`` in place; its parameters may be on the meta device."""

    def revert(self, model: nn.Module) -> None:
        """Undo :meth:`convert` while the parameters are on the meta device.

        A conversion with this method may be applied before conversions of an earlier phase, as builders do.

        Raises:
            NotImplementedError: the conversion cannot be undone (the default).
        """
        raise NotImplementedError

    def owned_parameters(self, model: nn.Module) -> set[str]:
        """Return the names of parameters that are saved separately from the base weights, such as an adapter's."""
        return set()

    def trained_weights(self, model: nn.Module) -> set[str]:
        """Return the names of base weights that are trained whole and saved with an adapter.

        They are read with the base, then from the adapter (PEFT's ``modules_to_save``).
        """
        return set()

    def moved_parameters(self, model: nn.Module) -> set[str]:
        """Return the names of parameters that optimizer hooks change without a gradient; every save includes them."""
        return set()

    def stored_weights(self, model: nn.Module) -> Mapping[str, StoredWeight]:
        """Return the weights that this conversion stores in another format, by the name of the full weight."""
        return {}

    def from_full(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Convert a full weight to the stored tensors when a checkpoint is loaded.

        Args:
            name: name of the full weight, a key of :meth:`stored_weights`.
            tensor: the full weight, or some of its rows if it is stored ``by_rows``.

        Returns:
            Stored tensors by the names of their parameters.
        """
        return {name: tensor}

    def to_full(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Convert stored tensors to the full weight when a checkpoint is saved; the inverse of :meth:`from_full`.

        Args:
            name: name of the full weight.
            tensors: stored tensors by the names of their parameters, or some rows of them.

        Returns:
            The full weight, or these rows of it, in any floating-point dtype.
        """
        return tensors[name]

    @property
    def can_merge(self) -> bool:
        """Whether :meth:`merged` is implemented."""
        return type(self).merged is not Conversion.merged

    def merged(self, name: str, weight: Tensor, model: nn.Module) -> Tensor:
        """Return the merged weight: ``weight`` with the owned parameters merged in; other weights are unchanged.

        Args:
            name: name of the full base weight.
            weight: value of the full base weight. The result has the same shape and dtype.
            model: the converted model with unsharded parameters.
        """
        return weight

    def peft_config(self, model: nn.Module) -> dict[str, Any]:
        """Return the fields of ``adapter_config.json`` for the owned parameters."""
        return {}

    def new_rows(self, model: nn.Module) -> dict[str, tuple[str, list[int]]]:
        """Return the trained rows of frozen weights (PEFT's ``trainable_token_indices``).

        Returns:
            Weight name -> (name of the parameter with the rows, their token ids).
        """
        return {}

    def pre_optimizer_hook(self, model: nn.Module) -> None:  # noqa: B027 - the default does nothing
        """Called before every optimizer step, including skipped ones."""

    def post_optimizer_hook(self, model: nn.Module) -> None:  # noqa: B027 - the default does nothing
        """Called after every optimizer step, except skipped ones."""

    def parallel_style(self, module: nn.Module, style: "ParallelStyle") -> "ParallelStyle":
        """Return the tensor-parallel style of a module that this conversion made or changed.

        Data parallelism needs no such method, because it shards all parameters of a module alike.

        Args:
            module: any module in the model's parallel plan.
            style: style of the original module.
        """
        return style

    def post_shard_hook(self, model: nn.Module, *, cpu_offload: bool) -> None:  # noqa: B027 - the default does nothing
        """Called after FSDP sharded the parameters of ``model``, which may be on the meta device.

        Args:
            model: the converted model, FSDP's root module.
            cpu_offload: whether the shards are in host memory.
        """


_Module = TypeVar("_Module", bound=nn.Module)


def change_class(module: nn.Module, kind: type[_Module]) -> _Module:
    """Return a module of another class with the same parameters and attributes; ``module`` is unchanged."""
    converted = kind.__new__(kind)
    for name, value in vars(module).items():
        if isinstance(value, dict):
            # Parameters, buffers and submodules: names are added to those of the new module alone.
            value = copy.copy(value)
        converted.__dict__[name] = value
    return converted


def _name(conversion: object) -> str:
    return type(conversion).__name__


def _check_member(conversion: object) -> None:
    """Raise if an object of the list is no conversion."""
    if isinstance(conversion, type):
        raise ConversionError(f"model_converters: {conversion.__name__} is a class: give one of its objects.")
    if not isinstance(conversion, Conversion):
        raise ConversionError(
            f"model_converters: {_name(conversion)} is no conversion: derive it from "
            "torchtune.modules.conversion.Conversion."
        )
    if not isinstance(getattr(conversion, "phase", None), Phase):
        raise ConversionError(
            f"model_converters: {_name(conversion)} must set `phase` to a member of torchtune.modules.conversion.Phase."
        )


def _sort_by_phase(conversions: Sequence[Conversion]) -> list[Conversion]:
    """Sort conversions by phase; those of a phase keep their order."""
    return sorted(conversions, key=lambda conversion: conversion.phase)


def _revert_later(model: nn.Module, conversions: Sequence[Conversion]) -> list[Conversion]:
    """Undo and return the conversions of the model of a later phase than one of ``conversions``."""
    if not conversions:
        return []
    first = min(conversions, key=lambda conversion: conversion.phase)
    applied = get_conversions(model)
    later = [conversion for conversion in applied if conversion.phase > first.phase]
    for conversion in reversed(later):  # each was applied to a model with those before it
        try:
            conversion.revert(model)
        except NotImplementedError as error:
            raise ConversionError(
                f"model_converters: {_name(first)} must come before {_name(conversion)}, which the model already has "
                "and which cannot be undone: apply both in one call, or list both in model_converters."
            ) from error
    model.conversions = [conversion for conversion in applied if conversion not in later]
    return later


def apply_conversions(model: nn.Module, conversions: Sequence[Conversion]) -> list[ConversionReport]:
    """Apply conversions in the order of their phases, log each and record them as ``model.conversions``.

    Earlier conversions of a later phase are undone and applied again, for example the LoRA of a ``lora_*`` builder
    when a kernel is swapped.

    Args:
        model: the model, usually on the meta device.
        conversions: conversions in any order, possibly none; within a phase they run in this order.

    Returns:
        One report per applied conversion, in order of application.

    Raises:
        ConversionError: conversions exclude each other, an object is no conversion, an earlier conversion cannot be
            undone, or the model lacks a target module. Only the last one can leave the model changed.

    Example:
        >>> from torchtune.modules.conversion import apply_conversions, get_conversions
        >>> from torchtune.modules.peft import LoRA
        >>> reports = apply_conversions(model, [LoRA(rank=2)])
        >>> get_conversions(model)
        [<torchtune.modules.peft.conversion.LoRA ...>]
    """
    # All checks come before the first change, so that an error leaves the model unchanged.
    for conversion in conversions:
        _check_member(conversion)
    # In the order of phases, as the keys of _FORBIDDEN are.
    all_conversions = _sort_by_phase([*get_conversions(model), *conversions])
    for first, second in combinations(all_conversions, 2):
        reason = _FORBIDDEN.get((first.phase, second.phase))
        if reason is not None:
            raise ConversionError(
                f"model_converters: {_name(first)} and {_name(second)} cannot be combined on one model ({reason}): "
                "remove one of them."
            )
    reverted = _revert_later(model, conversions)
    applied = get_conversions(model)
    reports = []
    for conversion in _sort_by_phase([*reverted, *conversions]):
        report = conversion.convert(model)
        if not isinstance(report, ConversionReport):
            raise ConversionError(
                f"model_converters: {_name(conversion)}.convert returned {type(report).__name__}, "
                "it must return a ConversionReport."
            )
        # After each one, so that the record is right if the next one raises.
        applied = [*applied, conversion]
        model.conversions = applied
        has_effect = report.replaced or report.num_parameters  # a conversion without an effect is probably a mistake
        log_rank_zero(get_logger(), str(report), logging.INFO if has_effect else logging.WARNING)
        reports.append(report)
    model.conversions = applied  # also without any conversion
    return reports


def get_conversions(model: nn.Module) -> list[Conversion]:
    """Return the conversions that were applied to ``model``, in order.

    Example:
        >>> from torchtune.modules.conversion import get_conversions
        >>> get_conversions(model)
        []
    """
    return list(getattr(model, "conversions", ()))


def full_shapes(model: nn.Module) -> dict[nn.Parameter, tuple[int, ...]]:
    """Return the shape of every parameter in a checkpoint.

    If several parameters store a weight, the first one has the shape of the full weight and the others ``(0,)``.

    Example:
        >>> from torchtune.modules.conversion import full_shapes
        >>> full_shapes(model)[model.norm.scale]
        (32,)
    """
    parameters = dict(model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    for conversion in get_conversions(model):
        for stored in conversion.stored_weights(model).values():
            first_name, *further_names = stored.names
            shapes[first_name] = stored.shape
            for name in further_names:
                shapes[name] = (0,)
    shape_of_parameter = {parameters[name]: shape for name, shape in shapes.items()}
    if isinstance(model, nn.ModuleDict):  # models that are trained together have conversions of their own
        for part in _models_of(model):
            shape_of_parameter |= full_shapes(part)
    return shape_of_parameter


def _models_of(model: nn.Module) -> list[nn.Module]:
    """The models of a ``ModuleDict`` (trained together), or the model itself."""
    if isinstance(model, nn.ModuleDict):
        return list(model.values())
    return [model]


def run_pre_optimizer_hooks(model: nn.Module) -> None:
    """Call ``pre_optimizer_hook(model)`` of every conversion, in order of application.

    Call it before every step; for a skipped step, no post hook follows.

    Example:
        >>> from torchtune.modules.conversion import run_pre_optimizer_hooks
        >>> run_pre_optimizer_hooks(model)  # before optimizer.step()
    """
    for part in _models_of(model):
        for conversion in get_conversions(part):
            conversion.pre_optimizer_hook(part)


def run_post_optimizer_hooks(model: nn.Module) -> None:
    """Call ``post_optimizer_hook(model)`` of every conversion, in order of application.

    Example:
        >>> from torchtune.modules.conversion import run_post_optimizer_hooks
        >>> run_post_optimizer_hooks(model)  # after optimizer.step()
    """
    for part in _models_of(model):
        for conversion in get_conversions(part):
            conversion.post_optimizer_hook(part)


_LAYER_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a path that is a number
# Names of layers in transformers and peft -> names here.
_NAMES_IN_TRANSFORMERS = {
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
    "o_proj": "output_proj",
    "embed_tokens": "tok_embeddings",
    "lm_head": "output",
    "score": "output",
}


def nearest_module_names(wanted: str, paths: Sequence[str], count: int = 3) -> list[str]:
    """Return the module names most similar to ``wanted``, for an error message; layer numbers become ``*``.

    Args:
        wanted: a module name or a pattern that matched nothing.
        paths: paths of the candidate modules.
        count: maximum number of names.

    Example:
        >>> from torchtune.modules.conversion import nearest_module_names
        >>> nearest_module_names("qproj", ["layers.0.attn.q_proj", "norm"])
        ['layers.*.attn.q_proj']
    """
    # "layers.*.attn.q_proj" once instead of a path for each layer.
    templates = list(dict.fromkeys(_LAYER_NUMBER.sub("*", path) for path in paths))
    by_leaf = {}
    for template in templates:
        _, _, leaf = template.rpartition(".")
        by_leaf[leaf] = template  # one example of each last component
    _, _, wanted_leaf = wanted.rpartition(".")
    # A name of transformers or peft has an exact counterpart, so that no guess by similarity is needed.
    translated = by_leaf.get(_NAMES_IN_TRANSFORMERS.get(wanted_leaf, ""))
    if translated is not None:
        return [translated]
    # Leaves first: they decide more often than whole paths, which are similar to each other. Whole paths differ from a
    # wanted last component in most characters, so that their cutoff is lower.
    nearest = [by_leaf[leaf] for leaf in get_close_matches(wanted_leaf, by_leaf, n=count, cutoff=0.5)]
    for template in get_close_matches(wanted, templates, n=count, cutoff=0.3):
        if template not in nearest:
            nearest.append(template)
    if not nearest:  # the first names at least show what names look like
        nearest = templates
    return nearest[:count]
