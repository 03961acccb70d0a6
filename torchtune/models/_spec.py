"""What a family of models is: the object that a built model carries, and the registry of them."""

import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from torchtune._lazy import packages_in
from torchtune.models._description import Description, ModelError
from torchtune.models._parallel_plan import decoder_plan
from torchtune.models._weight_map import WeightMap

ENTRY_POINT_GROUP = "torchtune.models"


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """Everything about a family that is not one model's numbers.

    Attributes:
        name: name in the registry, for example ``"qwen3"``.
        architectures: ``architectures`` entries of a Hugging Face ``config.json`` that it reads and writes; the first
            is written.
        from_hf_config: reads such a ``config.json`` (a dict); raises :class:`ModelError` with the first field that a
            description cannot express. Its second argument lists fields to leave unread.
        to_hf_config: the inverse: a ``config.json`` with which ``transformers`` builds the same model.
        weight_maps: by format: ``"hf"``, ``"meta"``, ``"gguf"``.
        model_types: names that ``model_type:`` in YAML may give for it.
        parallel_plan: how its layers are split over devices: ``plan(model) -> {module name pattern: style}``; by
            default as those of the one builder are.
        meshes: which modules have their parameters sharded over a mesh of their own: module name pattern (as in
            ``parallel_plan``) -> dimension of the device mesh, for example ``{"layers.*.mlp.experts": "dp_shard"}``.
            Every other parameter is sharded over the data mesh.
    """

    name: str
    architectures: tuple[str, ...]
    from_hf_config: Callable[..., Description]
    to_hf_config: Callable[[Description], dict[str, Any]]
    weight_maps: Mapping[str, WeightMap]
    model_types: tuple[str, ...] = ()
    parallel_plan: Callable[..., Mapping[str, Any]] = decoder_plan
    meshes: Mapping[str, str] = field(default_factory=dict)

    def weight_map(self, kind: str = "hf") -> WeightMap:
        """The map of one format. Raises :class:`ModelError` if the family has none for it."""
        if kind not in self.weight_maps:
            known = ", ".join(sorted(self.weight_maps))
            raise ModelError(f"The model family '{self.name}' has no weight names for '{kind}', only for: {known}.")
        return self.weight_maps[kind]

    def as_part(self, prefixes: Mapping[str, str]) -> "ModelSpec":
        """The family as the text decoder of a model with several parts.

        Args:
            prefixes: prefix of a name in Hugging Face's checkpoint of the text decoder -> prefix of that name in the
                checkpoint of the whole, for example from :func:`torchtune.models.text_prefixes`.

        Returns:
            this spec with the weight names of the whole, in Hugging Face's format alone.
        """
        return replace(self, weight_maps={"hf": self.weight_map("hf").prefixed(prefixes)})

    def check_adapters(self, paths: Collection[str], description: Description) -> None:
        """Refuse now, and not when it is saved, an adapter that has no place in PEFT's files.

        Raises:
            ModelError: a module of ``paths`` is a part of one in checkpoints of which other parts are left out.
        """
        if "hf" not in self.weight_maps:
            return
        names, chosen = self.weight_maps["hf"], set(paths)
        known = names.adapted_modules(description)
        for path in paths:
            if path.endswith(".router.gate"):
                raise ModelError(f"LoRA: '{path}' is a router, of which peft knows no adapter: leave it out.")
            if path not in known:
                raise ModelError(f"LoRA: '{path}' has no name of its own in checkpoints of {self.name}: leave it out.")
            if absent := [other for other in names.adapted_together(path, description) if other not in chosen]:
                raise ModelError(
                    f"LoRA: '{path}' and '{absent[0]}' are one projection in checkpoints of {self.name}, and so for "
                    "peft: adapt all of its parts (q_proj, k_proj and v_proj; w1 and w3), or none."
                )


# Architectures that several families of this library write -> the one that reads them. Every other architecture belongs
# to the one family whose ``SPEC`` lists it.
_READERS = {"LlamaForCausalLM": "llama3", "Phi3ForCausalLM": "phi3", "Qwen2ForCausalLM": "qwen2"}

_registered: dict[str, ModelSpec] = {}


@cache
def _builtin() -> Mapping[str, ModelSpec]:
    """The families of this library by name: every folder beside this file whose ``SPEC`` bears the folder's name."""
    specs = {}
    for name in packages_in([str(Path(__file__).parent)]):
        spec = importlib.import_module(f"torchtune.models.{name}").SPEC
        if spec.name == name:  # a folder may only give new names to sizes of another family
            specs[name] = spec
    return specs


def register(spec: ModelSpec) -> ModelSpec:
    """Add a family from outside, and return it. Its architectures then resolve to it, before the library's own.

    A package can instead declare an entry point in the group ``torchtune.models`` that names its ``ModelSpec``.

    Raises:
        ModelError: the name is taken by another family.
    """
    taken = _registered.get(spec.name)
    if spec.name in _builtin() or (taken is not None and taken is not spec):
        raise ModelError(f"A model family called '{spec.name}' is registered already: choose another name.")
    _registered[spec.name] = spec
    return spec


def list_specs() -> list[str]:
    """Names of all families: the library's, registered ones, and those of installed packages."""
    return sorted({*_builtin(), *_registered, *(entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))})


def get_spec(name: str) -> ModelSpec:
    """The family called ``name``, or at a dotted path such as ``"my_package.models.SPEC"``.

    Raises:
        ModelError: there is none.
    """
    if name in _registered:
        return _registered[name]
    if name in _builtin():
        return _builtin()[name]
    for entry in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return _checked(entry.load(), f"entry point '{name}'")
    if "." in name:
        module, _, attribute = name.rpartition(".")
        try:
            return _checked(getattr(importlib.import_module(module), attribute), f"'{name}'")
        except (ModuleNotFoundError, AttributeError) as error:
            raise ModelError(f"The model family '{name}' could not be imported: {error}.") from error
    raise ModelError(f"There is no model family '{name}'; there are: {', '.join(list_specs())}.")


def spec_for_architecture(architecture: str) -> ModelSpec:
    """The family that reads checkpoints of an architecture such as ``"LlamaForCausalLM"``.

    Raises:
        ModelError: no family does.
    """
    for spec in _registered.values():
        if architecture in spec.architectures:
            return spec
    language_model = architecture.replace("ForSequenceClassification", "ForCausalLM")  # every family has classifiers
    if language_model in _READERS:
        return get_spec(_READERS[language_model])
    for spec in _builtin().values():
        if language_model in spec.architectures:
            return spec
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        spec = get_spec(entry.name)
        if architecture in spec.architectures:
            return spec
    known = sorted({name for spec in _builtin().values() for name in spec.architectures})
    raise ModelError(f"No model family reads the architecture '{architecture}'; there are: {', '.join(known)}.")


def _checked(spec: Any, where: str) -> ModelSpec:
    if not isinstance(spec, ModelSpec):
        raise ModelError(
            f"The model family at {where} is of type {type(spec).__name__}, not a torchtune.models.ModelSpec."
        )
    return spec
