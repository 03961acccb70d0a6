"""Model families: the specification attached to every model, and the registry."""

import importlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from torch import nn

from torchtune._lazy import modules_in
from torchtune.models._description import Description, ModelError
from torchtune.models._hf_config import HFFormat
from torchtune.models._parallel_plan import decoder_plan
from torchtune.models._weight_map import WeightMap

ENTRY_POINT_GROUP = "torchtune.models"


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """Specification of a model family: names, weight maps, config format, parallel plan.

    Attributes:
        name: name in the registry, for example ``"qwen3"``.
        architectures: supported ``architectures`` entries of a Hugging Face ``config.json``; exports write the first.
        from_hf_config: converts a ``config.json`` (a dict) to a description; raises :class:`ModelError` for the first
            field that a description cannot express. The second argument lists fields to skip.
        to_hf_config: inverse of ``from_hf_config``: makes a ``config.json`` from which ``transformers`` builds the same
            model.
        weight_maps: weight maps by format: ``"hf"``, ``"meta"``, ``"gguf"``, ``"earlier"`` (names of this library's
            earlier releases); other keys are variants of ``"hf"`` that are read but not written.
        untrained: Hugging Face name prefixes of untrained weights: weights that the model lacks and that an export
            copies, such as multi-token prediction.
        untrained_modules: further untrained weights: (name prefix within a layer, attribute of a description that lists
            the layers).
        layers_prefix: Hugging Face name prefix of a layer, for ``untrained_modules``.
        untrained_layers: name suffix of a weight that identifies layers after the model's last layer as untrained.
        builder: builds a composite model: ``builder(description, spec) -> model``. Checkpoints then hold the full
            model, and ``config.json`` describes it.
        image_processor: makes the image processor of a vision-language model from ``preprocessor_config.json`` and
            ``config.json`` (dicts).
        module_prefixes: module name prefix in the text-only class of ``transformers`` -> prefix in the composite class;
            empty if :func:`torchtune.models.module_prefixes` finds the prefixes.
        not_in_peft: suffixes of Hugging Face names of modules that ``peft`` cannot adapt.
        model_types: values of ``model_type:`` in YAML for this family.
        parallel_plan: tensor-parallel plan: ``plan(model) -> {module name pattern: style}``; by default the plan of
            :class:`~torchtune.modules.TransformerDecoder`.

    Example:
        >>> torchtune.models.get_spec("qwen3").architectures
        ('Qwen3ForCausalLM',)
    """

    name: str
    architectures: tuple[str, ...]
    from_hf_config: Callable[..., Description]
    to_hf_config: Callable[[Description], dict[str, Any]]
    weight_maps: Mapping[str, WeightMap]
    model_types: tuple[str, ...] = ()
    parallel_plan: Callable[..., Mapping[str, Any]] = decoder_plan
    untrained: tuple[str, ...] = ()
    untrained_modules: tuple[tuple[str, str], ...] = ()
    layers_prefix: str = "model.layers."
    untrained_layers: str | None = None
    module_prefixes: Mapping[str, str] = field(default_factory=dict)
    not_in_peft: tuple[str, ...] = ()
    builder: Callable[..., nn.Module] | None = None
    image_processor: Callable[[Mapping[str, Any], Mapping[str, Any]], Any] | None = None

    def untrained_names(self, names: Collection[str], description: Description) -> set[str]:
        """Select the names of untrained weights in a Hugging Face checkpoint; see the attributes ``untrained…``."""
        prefixes = set(self.untrained)
        if self.untrained_layers is not None:
            pattern = re.compile(rf"(model\.layers\.(\d+)\.){re.escape(self.untrained_layers)}")
            for name in names:
                match = pattern.fullmatch(name)
                # Layers of multi-token prediction are numbered after those of the model.
                if match and int(match[2]) >= description.num_layers:
                    prefixes.add(match[1])
        for module_prefix, layers_attribute in self.untrained_modules:
            for layer in getattr(description, layers_attribute):
                prefixes.add(f"{self.layers_prefix}{layer}.{module_prefix}")
        return {name for name in names if name.startswith(tuple(prefixes))}

    def weight_map(self, kind: str = "hf") -> WeightMap:
        """Return the weight map of a format. Raises :class:`ModelError` if the family has none."""
        if kind not in self.weight_maps:
            formats = ", ".join(sorted(self.weight_maps))
            raise ModelError(f"The model family '{self.name}' has no weight names for '{kind}', only for: {formats}.")
        return self.weight_maps[kind]

    def as_part(self, prefixes: Mapping[str, str]) -> "ModelSpec":
        """Return the specification of this family as the text decoder of a composite model.

        Args:
            prefixes: name prefix in a text-only Hugging Face checkpoint -> prefix in the composite checkpoint, for
                example from :func:`torchtune.models.text_prefixes`.

        Returns:
            The specification with the composite checkpoint's names, for the Hugging Face format only.
        """
        return replace(self, weight_maps={"hf": self.weight_map("hf").prefixed(prefixes)})

    def refused_by_peft(self, paths: Collection[str], description: Description) -> list[str]:
        """Select the paths of modules that match ``not_in_peft``."""
        if not self.not_in_peft:
            return []
        names = self.weight_maps["hf"]
        adaptable = names.adapted_modules(description)
        refused = []
        for path in paths:
            # Experts are parameters in peft, not modules with a name.
            if path not in adaptable or path.endswith(".experts"):
                continue
            if names.external_module(path, description).endswith(self.not_in_peft):
                refused.append(path)
        return refused

    def parameters_in_peft(self, paths: Collection[str], description: Description) -> list[str]:
        """Select the paths of linear layers that ``peft`` adapts as parameters, without dropout or magnitudes."""
        if "hf" not in self.weight_maps:
            return []
        names = self.weight_maps["hf"]
        return [path for path in paths if names.named_like_experts(path, description)]

    def fused_with(self, paths: Collection[str], description: Description) -> list[str]:
        """Return the other modules that checkpoints and ``peft`` fuse with modules of ``paths`` into one projection."""
        neighbors: dict[str, None] = {}  # a set that keeps the order
        for path in paths:
            neighbors |= dict.fromkeys(self.fused_modules(path, description))
        return [path for path in neighbors if path not in paths]

    def fused_modules(self, path: str, description: Description) -> tuple[str, ...]:
        """Return the modules that checkpoints and ``peft`` fuse with the module ``path``, and itself."""
        if "hf" not in self.weight_maps:
            return (path,)
        return self.weight_maps["hf"].fused_modules(path, description)

    def check_adapters(self, paths: Collection[str], description: Description) -> None:
        """Check before training that PEFT's format can express the adapters.

        Raises:
            ModelError: ``peft`` cannot adapt a module, or checkpoints have no separate module for it.
        """
        if "hf" not in self.weight_maps:
            return
        adaptable = self.weight_maps["hf"].adapted_modules(description)
        for path in paths:
            if path.endswith(".router.gate"):
                raise ModelError(f"LoRA: '{path}' is a router, which peft cannot adapt: leave it out.")
            if self.refused_by_peft([path], description):
                raise ModelError(f"LoRA: '{path}': peft adapts no such module of {self.name} models: leave it out.")
            if path not in adaptable:
                raise ModelError(
                    f"LoRA: '{path}' is not a module of its own in checkpoints of {self.name}: leave it out."
                )


def family(
    name: str,
    hf_format: HFFormat,
    names: WeightMap,
    *,
    formats: Mapping[str, WeightMap] | None = None,
    **attributes: Any,
) -> ModelSpec:
    """Make the specification of a family.

    Args:
        name: name in the registry, equal to the name of the module.
        hf_format: reads and writes the ``config.json`` of the family.
        names: weight names of Hugging Face's files.
        formats: weight names of other formats.
        **attributes: further attributes of the :class:`ModelSpec`, or replacements of the above.
    """
    values = {
        "architectures": (hf_format.architecture,),
        "from_hf_config": hf_format.read,
        "to_hf_config": hf_format.write,
        "weight_maps": {"hf": names, **(formats or {})},
    }
    return ModelSpec(name=name, **{**values, **attributes})


# Architectures that several families have -> the family that reads them, because its options cover the others.
_READERS = {"LlamaForCausalLM": "llama3", "Phi3ForCausalLM": "phi3", "Qwen2ForCausalLM": "qwen2"}

_registered: dict[str, ModelSpec] = {}


@cache  # imports all families, which takes a tenth of a second
def _builtin() -> Mapping[str, ModelSpec]:
    """Return the built-in families by name: modules in this folder with a ``SPEC`` named like the module."""
    specs = {}
    for name in modules_in([str(Path(__file__).parent)]):
        spec = getattr(importlib.import_module(f"torchtune.models.{name}"), "SPEC", None)
        # A module without such a SPEC is a part of families (clip), or has sizes of another family (llama3_3).
        if spec is not None and spec.name == name:
            specs[name] = spec
    return specs


def register(spec: ModelSpec) -> ModelSpec:
    """Register a family and return it. Its architectures take precedence over built-in families.

    A package can instead declare an entry point for its ``ModelSpec`` in the group ``torchtune.models``.

    Raises:
        ModelError: another family has the name.
    """
    namesake = _registered.get(spec.name)
    if spec.name in _builtin() or namesake not in (None, spec):
        raise ModelError(f"A model family called '{spec.name}' is registered already: choose another name.")
    _registered[spec.name] = spec
    return spec


def list_specs() -> list[str]:
    """Return the names of all families: built-in, registered, and from entry points of installed packages.

    Example:
        >>> "qwen3" in torchtune.models.list_specs()
        True
    """
    return sorted({*_builtin(), *_registered, *(entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))})


def get_spec(name: str) -> ModelSpec:
    """Return the family with this name or dotted path (``"my_package.models.SPEC"``).

    Raises:
        ModelError: there is no such family.

    Example:
        >>> torchtune.models.get_spec("qwen3").name
        'qwen3'
    """
    if name in _registered:
        return _registered[name]
    if name in _builtin():
        return _builtin()[name]
    entries = entry_points(group=ENTRY_POINT_GROUP, name=name)
    if entries:
        return _check_spec(entries[name].load(), f"entry point '{name}'")
    if "." in name:
        module, _, attribute = name.rpartition(".")
        try:
            value = getattr(importlib.import_module(module), attribute)
        except (ModuleNotFoundError, AttributeError) as error:
            raise ModelError(f"The model family '{name}' could not be imported: {error}.") from error
        return _check_spec(value, f"'{name}'")
    raise ModelError(f"There is no model family '{name}'; there are: {', '.join(list_specs())}.")


def spec_for_architecture(architecture: str) -> ModelSpec:
    """Return the family that reads an architecture such as ``"LlamaForCausalLM"``.

    Raises:
        ModelError: no family reads it.

    Example:
        >>> torchtune.models.spec_for_architecture("Qwen3ForCausalLM").name
        'qwen3'
    """
    # Registered families come first, so that a package can replace a built-in reader; entry points, which import a
    # package, come last.
    for spec in _registered.values():
        if architecture in spec.architectures:
            return spec
    # Every family also reads the classifiers of its architecture.
    language_model = architecture.replace("ForSequenceClassification", "ForCausalLM")
    if language_model in _READERS:  # several families have the architecture
        return get_spec(_READERS[language_model])
    for spec in _builtin().values():
        if language_model in spec.architectures:
            return spec
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        spec = get_spec(entry.name)
        if architecture in spec.architectures:
            return spec
    architectures: set[str] = set()
    for spec in _builtin().values():
        architectures.update(spec.architectures)
    raise ModelError(
        f"No model family reads the architecture '{architecture}'; there are: {', '.join(sorted(architectures))}."
    )


def _check_spec(value: Any, address: str) -> ModelSpec:
    """Return an object that was loaded from an address; raise :class:`ModelError` if it is not a family."""
    if not isinstance(value, ModelSpec):
        raise ModelError(
            f"The model family at {address} is of type {type(value).__name__}, not a torchtune.models.ModelSpec."
        )
    return value
