"""The settings of a recipe that the library itself reads, by one set of names and types.

The library checks, plans and reports on a run before and after the recipe's own loop, so it reads some settings of
every recipe. They are declared here, in groups. A recipe's ``Settings`` declares a group whole or not at all, as
fields, properties or class constants; a missing name is an error, so a renamed setting is never read as unset.
"""

import dataclasses
import difflib
import inspect
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtune.config._schema import members, type_text
from torchtune.training.precision import best_dtype
from torchtune.utils import UserError
from torchtune.utils._device import parse_device

Node = Mapping[str, Any]  # a section of the config with ``_component_``


class RecipeSettingsError(UserError):
    """A recipe's settings lack a name that the library reads, or declare it with another type."""

    told_by_rank_0 = True  # all ranks find the same


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """What is loaded, and where to."""

    model: Node | None = None
    model_converters: Sequence[Node] = ()
    tokenizer: Node | None = None
    checkpointer: Node | None = None
    device: str | None = None
    dtype: str | None = "fp32"

    @property
    def max_seq_len(self) -> int | None:
        """Tokens of the longest row, where the tokenizer limits them."""
        return None if self.tokenizer is None else self.tokenizer.get("max_seq_len")


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What one optimizer step does."""

    batch_size: int = 1
    gradient_accumulation_steps: int = 1
    optimizer: Node | None = None
    optimizer_precision: str = "param_dtype"
    optimizer_in_bwd: bool = False
    lr_scheduler: Node | None = None
    loss: Node | None = None
    clip_grad_norm: float | None = None
    enable_activation_checkpointing: bool = False
    enable_activation_offloading: bool = False


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """What is read, and how often."""

    dataset: Node | Sequence[Node] | None = None
    dataset_val: Node | Sequence[Node] | None = None
    collate_fn: str | None = None
    batch_size_val: int | None = None
    run_val_every_n_steps: int | None = None
    epochs: int = 1
    max_steps_per_epoch: int | None = None


@dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """What is written, and when a run is ended."""

    output_dir: str | None = None
    resume_from_checkpoint: bool = False
    save_every_n_steps: int | None = None
    metric_logger: Node | None = None
    hang_timeout_minutes: float | None = None


@dataclass(frozen=True, kw_only=True)
class MeshSettings:
    """How several processes share the work."""

    data_parallel_replicate_dim: int = 1
    data_parallel_shard_dim: int = -1
    tensor_parallel_dim: int = 1
    tensor_parallel_plan: Node | None = None
    context_parallel_dim: int = 1
    fsdp_cpu_offload: bool = False
    fsdp_reshard_after_forward: bool = True


@dataclass(frozen=True, kw_only=True)
class ExpertMeshSettings:
    """Over how many of the shards experts are distributed; older recipes do not declare it."""

    expert_parallel_dim: int = 1


@dataclass(frozen=True, kw_only=True)
class BestValidationSettings:
    """What the best validation is, and when the run ends without a better one; older recipes do not declare it."""

    keep_best: str | None = None
    early_stopping_patience: int | None = None


@dataclass(frozen=True, kw_only=True)
class SelectiveCheckpointingSettings:
    """Which activations are recomputed, if not those of all layers."""

    ac_mode: str | None = None
    ac_option: int | str | None = None


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    """How adapters are saved; only recipes that train adapters declare it."""

    save_adapter_weights_only: bool = False


@dataclass(frozen=True, kw_only=True)
class VocabularySettings:
    """Whether new tokens may enlarge the embedding; only recipes for one device declare it."""

    resize_token_embeddings: bool = False


@dataclass(frozen=True, kw_only=True)
class QuantizerSettings:
    """How weights are quantised, or that is simulated in training; only recipes that do so declare it."""

    quantizer: Node | None = None


@dataclass(frozen=True, kw_only=True)
class TeacherSettings:
    """A second model, frozen; only recipes of distillation declare it."""

    teacher_model: Node | None = None
    teacher_checkpointer: Node | None = None
    teacher_cache: str | None = None


@dataclass(frozen=True, kw_only=True)
class ActorCriticSettings:
    """A value model, which is trained, a reward model and a reference; only recipes of PPO declare it."""

    reward_and_value_model: Node | None = None
    value_checkpointer: Node | None = None
    reward_checkpointer: Node | None = None
    ref_policy_checkpointer: Node | None = None
    num_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class ReferenceSettings:
    """What preferences are compared with; recipes whose loss compares with a frozen model declare it."""

    ref_checkpointer: Node | None = None


@dataclass(frozen=True, kw_only=True)
class ReferenceModelSettings:
    """A reference of another size; only recipes that sample declare it."""

    ref_model: Node | None = None


@dataclass(frozen=True, kw_only=True)
class ReferenceCacheSettings:
    """Where what the reference says is kept, if it is computed once."""

    reference_cache: str | None = None


@dataclass(frozen=True, kw_only=True)
class RecipeSettings(
    ModelSettings,
    StepSettings,
    DataSettings,
    OutputSettings,
    MeshSettings,
    ExpertMeshSettings,
    BestValidationSettings,
    SelectiveCheckpointingSettings,
    AdapterSettings,
    VocabularySettings,
    QuantizerSettings,
    TeacherSettings,
    ActorCriticSettings,
    ReferenceSettings,
    ReferenceModelSettings,
    ReferenceCacheSettings,
):
    """Typed values of a recipe's settings; a group that the recipe does not declare has the defaults above.

    Attributes:
        source: the recipe's own settings.
        declared: names of this class that the recipe declares.

    Example:
        >>> settings = torchtune.training.RecipeSettings.of(cfg)  # doctest: +SKIP
    """

    source: Any = None
    declared: frozenset[str] = field(default=frozenset())

    @classmethod
    def of(cls, settings: Any) -> "RecipeSettings":
        """Read a recipe's settings.

        Args:
            settings: an instance of a recipe's ``Settings``. A mapping (such as the ``DictConfig`` of an older recipe)
                or another object may declare any subset of the names.

        Raises:
            RecipeSettingsError: a dataclass declares a part of a group, or a value has another type than declared here.
        """
        if isinstance(settings, cls):
            return settings
        found = {}
        training = (
            item.name for group in (StepSettings, DataSettings, MeshSettings) for item in dataclasses.fields(group)
        )
        # A recipe without steps, data and mesh has no use for most names; an evaluation has batches, too.
        must_be_whole = dataclasses.is_dataclass(settings) and any(
            _declares(settings, name) for name in training if name != "batch_size"
        )
        for group in GROUPS:
            names = [item.name for item in dataclasses.fields(group)]
            values = {name: _value(settings, name) for name in names if _declares(settings, name)}
            if must_be_whole and values and (missing := [n for n in names if n not in values]):
                raise RecipeSettingsError(_missing(settings, group, missing[0]))
            hints = typing.get_type_hints(group)
            for name, value in values.items():
                if not _fits(value, hints[name]):
                    raise RecipeSettingsError(
                        f"{_place(type(settings), name)}: {name} is {value!r}, but torchtune.training reads it as "
                        f"{type_text(hints[name])}: give it that type, or another name."
                    )
            found |= values
        if found.get("reward_and_value_model") is not None:
            found |= _per_micro_batch(found)
        return cls(**found, source=settings, declared=frozenset(found))

    def other_models(self) -> dict[str, tuple[Node | None, "RecipeSettings"]]:
        """The models beside the one that is trained alone: name -> its checkpointer, and the same with it as model.

        ``value`` is trained with it, all others are frozen.
        """
        found: dict[str, tuple[Node | None, RecipeSettings]] = {}
        if self.teacher_model is not None:
            found["teacher"] = self.teacher_checkpointer, self._with(self.teacher_model)
        if self.ref_model is not None:
            found["reference"] = self.ref_checkpointer, self._with(self.ref_model)
        if self.reward_and_value_model is not None:
            found["value"] = self.value_checkpointer, self._with(self.reward_and_value_model)
            found["reward"] = self.reward_checkpointer, found["value"][1]
            found["reference"] = self.ref_policy_checkpointer, self
        return found

    def _with(self, model: Node) -> "RecipeSettings":
        alone = {"teacher_model": None, "reward_and_value_model": None, "ref_model": None}
        return dataclasses.replace(self, model=model, model_converters=[], **alone)

    def resolved_dtype(self) -> str:
        """Return the name of the dtype of weights and activations; null is the best one of the device."""
        return best_dtype(parse_device(self.device)) if self.dtype is None else self.dtype

    def has(self, group: type) -> bool:
        """Whether the recipe declares this group of settings."""
        return any(item.name in self.declared for item in dataclasses.fields(group))

    def can_set(self, name: str) -> bool:
        """Whether a user can set ``name``, or the section in front of its dot, on the command line."""
        first, _, rest = name.partition(".")
        if dataclasses.is_dataclass(self.source):
            known = first in {item.name for item in dataclasses.fields(self.source)}
        else:
            known = _declares(self.source, first)
        return known and (not rest or _value(self.source, first) is not None)


def _per_micro_batch(found: dict[str, Any]) -> dict[str, Any]:
    """Settings of PPO as other recipes mean them: its batch_size is that of a step, and num_steps counts answers."""
    steps = {} if found["num_steps"] is None else {"max_steps_per_epoch": found["num_steps"] // found["batch_size"]}
    return {"batch_size": max(found["batch_size"] // found["gradient_accumulation_steps"], 1), **steps}


# Groups of settings that a recipe declares together.
GROUPS = RecipeSettings.__bases__


def _value(settings: Any, name: str) -> Any:
    return settings.get(name) if isinstance(settings, Mapping) else getattr(settings, name)


def _declares(settings: Any, name: str) -> bool:
    if isinstance(settings, Mapping):
        return settings.get(name) is not None
    return hasattr(settings, name)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a number, text or switch has the declared type; sections of the config were checked when it was read."""
    plain = [member for member in members(hint) if member in (bool, int, float, str, type(None))]
    if len(plain) < len(members(hint)):
        return not isinstance(value, (bool, int, float))
    if isinstance(value, bool) and bool not in plain:
        return False
    return isinstance(value, tuple(plain)) or (isinstance(value, int) and float in plain)


def _missing(settings: Any, group: type, name: str) -> str:
    """The sentence for a name that a recipe's settings lack."""
    from torchtune._recipe_registry import get_all_recipes, settings_of_recipe

    cls, (item,) = type(settings), [item for item in dataclasses.fields(group) if item.name == name]
    kind = getattr(item.type, "__name__", str(item.type)).replace("Node", "Component")
    shipped = {name for recipe in get_all_recipes() for name in settings_of_recipe(recipe)}
    own = [item.name for item in dataclasses.fields(cls) if item.name not in shipped]
    near = difflib.get_close_matches(name, own, n=1, cutoff=0.0)
    renamed = f"if '{near[0]}' is its new name, rename it back, or " if near else ""
    return (
        f"{_place(cls, near[0] if near else None)}: Settings has no '{name}', which the library reads with the other "
        f"settings of {group.__name__}: {renamed}add a property of that name, or, where the recipe does without, "
        f"'{name}: ClassVar[{kind}] = {item.default!r}'."
    )


def _place(cls: type, name: str | None) -> str:
    """File and line of a setting, or of the class."""
    try:
        lines, first = inspect.getsourcelines(cls)
        path = inspect.getsourcefile(cls)
    except (OSError, TypeError):
        return cls.__qualname__
    offsets = [i for i, line in enumerate(lines) if name and re.match(rf"\s+{re.escape(name)}\s*:", line)]
    return f"{path}:{first + (offsets[0] if offsets else 0)}"
