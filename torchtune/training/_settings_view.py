"""The settings of a recipe, as the library reads them before and after the recipe's own loop."""

import dataclasses
import difflib
import inspect
import re
from collections.abc import Mapping
from typing import Any

from torchtune.training.precision import best_dtype
from torchtune.utils import UserError
from torchtune.utils._device import parse_device

# Names of the settings that the library reads.
NAMES = frozenset(
    """
    model model_converters tokenizer checkpointer device dtype output_dir resume_from_checkpoint recipe
    dataset dataset_val collate_fn batch_size batch_size_val run_val_every_n_steps epochs max_steps_per_epoch
    gradient_accumulation_steps optimizer optimizer_precision optimizer_in_bwd lr_scheduler loss clip_grad_norm
    enable_activation_checkpointing enable_activation_offloading ac_mode ac_option save_every_n_steps metric_logger
    hang_timeout_minutes keep_best early_stopping_patience save_adapter_weights_only resize_token_embeddings
    data_parallel_replicate_dim data_parallel_shard_dim tensor_parallel_dim tensor_parallel_plan context_parallel_dim
    expert_parallel_dim fsdp_cpu_offload fsdp_reshard_after_forward
    quantizer fake_quant_after_n_steps enable_fp8_training teacher_model teacher_checkpointer teacher_cache
    ref_checkpointer ref_model reference_cache sampler reward_and_value_model value_checkpointer reward_checkpointer
    ref_policy_checkpointer num_steps
    """.split()
)
# What a recipe does that has no such setting; where nothing stands here, it does without: None.
_WITHOUT: dict[str, Any] = {
    "batch_size": 1,
    "gradient_accumulation_steps": 1,
    "epochs": 1,
    "optimizer_in_bwd": False,
    "enable_activation_checkpointing": False,
    "data_parallel_replicate_dim": 1,
    "data_parallel_shard_dim": -1,
    "tensor_parallel_dim": 1,
    "context_parallel_dim": 1,
    "fsdp_cpu_offload": False,
    "expert_parallel_dim": 1,
    "fsdp_reshard_after_forward": True,
    "optimizer_precision": "param_dtype",
    "dtype": "fp32",
    "model_converters": (),
}
# A copied recipe that has some of these has all that the shipped one has: a new name for one would be read as none.
_TOGETHER = (tuple(_WITHOUT)[:5], tuple(_WITHOUT)[5:10])


class RecipeSettingsError(UserError):
    """A recipe's settings lack a name that the library reads, or have a value of another type."""

    told_by_rank_0 = True  # all ranks find the same


class SettingsView:
    """Read access to a recipe's own settings by the names in ``NAMES``; there is no second set of types or defaults.

    Attributes:
        source: the recipe's own settings.
        declared: names that the recipe has.

    Args:
        source: an instance of a recipe's ``Settings``, or a mapping (the ``DictConfig`` of an older recipe), or another
            object with some of the names.
        changes: values that take the place of the recipe's.

    Raises:
        RecipeSettingsError: a dataclass lacks a name that goes together with others, or a value has another type.

    Example:
        >>> view = torchtune.training.SettingsView({"batch_size": 4})
        >>> view.batch_size, view.epochs, view.dataset
        (4, 1, None)
    """

    def __init__(self, source: Any, **changes: Any) -> None:
        self.source, self._changes = source, changes
        self.declared = frozenset(name for name in NAMES if name in changes or _declares(source, name))
        if dataclasses.is_dataclass(source):
            _check_names(source, self.declared)
        for name in self.declared & _WITHOUT.keys():
            value, kind = getattr(self, name), type(_WITHOUT[name])
            if kind in (int, bool) and type(value) is not kind:
                raise RecipeSettingsError(
                    f"{_place(type(source), name)}: {name} is {value!r}, but torchtune.training reads it as "
                    f"{kind.__name__}: give it that type, or another name."
                )
        if self.reward_and_value_model is not None and "max_steps_per_epoch" not in changes:
            self._changes = self._per_micro_batch() | changes

    @classmethod
    def of(cls, settings: Any) -> "SettingsView":
        """A view of a recipe's settings; a view stays as it is."""
        return settings if isinstance(settings, cls) else cls(settings)

    def __getattr__(self, name: str) -> Any:
        if name not in NAMES:
            raise AttributeError(f"{type(self).__name__} has no '{name}': add it to NAMES.")
        if name in self._changes:
            return self._changes[name]
        return _value(self.source, name) if _declares(self.source, name) else _WITHOUT.get(name)

    def replace(self, **changes: Any) -> "SettingsView":
        """The same settings with other values."""
        return SettingsView(self.source, **{**self._changes, **changes})

    @property
    def max_seq_len(self) -> int | None:
        """Tokens of the longest row, where the tokenizer limits them."""
        return None if self.tokenizer is None else self.tokenizer.get("max_seq_len")

    def other_models(self) -> dict[str, tuple[Any, "SettingsView"]]:
        """The models beside the one that is trained alone: name -> its checkpointer, and the same with it as model.

        ``value`` is trained with it, all others are frozen.
        """
        found: dict[str, tuple[Any, SettingsView]] = {}
        if self.teacher_model is not None:
            found["teacher"] = self.teacher_checkpointer, self._with(self.teacher_model)
        if self.ref_model is not None:
            found["reference"] = self.ref_checkpointer, self._with(self.ref_model)
        if self.reward_and_value_model is not None:
            found["value"] = self.value_checkpointer, self._with(self.reward_and_value_model)
            found["reward"] = self.reward_checkpointer, found["value"][1]
            found["reference"] = self.ref_policy_checkpointer, self
        return found

    def _with(self, model: Any) -> "SettingsView":
        alone = {"teacher_model": None, "reward_and_value_model": None, "ref_model": None}
        return self.replace(model=model, model_converters=[], **alone)

    def _per_micro_batch(self) -> dict[str, Any]:
        """PPO's batch_size is that of a step, its num_steps counts answers: what other recipes call them."""
        steps = {"max_steps_per_epoch": self.max_steps_per_epoch}
        if self.num_steps is not None:
            steps["max_steps_per_epoch"] = self.num_steps // self.batch_size
        return {"batch_size": max(self.batch_size // self.gradient_accumulation_steps, 1), **steps}

    def resolved_dtype(self) -> str:
        """Return the name of the dtype of weights and activations; null is the best one of the device."""
        return best_dtype(parse_device(self.device)) if self.dtype is None else self.dtype

    def can_set(self, name: str) -> bool:
        """Whether a user can set ``name``, or the section in front of its dot, on the command line."""
        first, _, rest = name.partition(".")
        if dataclasses.is_dataclass(self.source):
            known = first in {item.name for item in dataclasses.fields(self.source)}
        else:
            known = _declares(self.source, first)
        return known and (not rest or _value(self.source, first) is not None)


def _value(settings: Any, name: str) -> Any:
    return settings.get(name) if isinstance(settings, Mapping) else getattr(settings, name)


def _declares(settings: Any, name: str) -> bool:
    if isinstance(settings, Mapping):
        return settings.get(name) is not None
    return hasattr(settings, name)


def _check_names(settings: Any, declared: frozenset[str]) -> None:
    """Compare the names of a copied recipe's settings with those of the shipped recipe that has most of them."""
    lacking = [name for names in _TOGETHER if len(declared & {*names}) > 1 for name in names if name not in declared]
    if not lacking:
        return
    from torchtune._recipe_registry import get_all_recipes, settings_of_recipe

    own = [item.name for item in dataclasses.fields(settings)]
    shipped = [settings_of_recipe(recipe) for recipe in get_all_recipes()]
    nearest = max(shipped, key=lambda names: len(names.intersection(own)))
    missing = [name for name in lacking if name in nearest]
    if not missing:
        return
    name, cls = missing[0], type(settings)
    near = difflib.get_close_matches(name, [one for one in own if one not in set().union(*shipped)], n=1, cutoff=0.0)
    renamed = f"if '{near[0]}' is its new name, rename it back, or " if near else ""
    raise RecipeSettingsError(
        f"{_place(cls, near[0] if near else None)}: Settings has no '{name}', which the library reads: {renamed}add a "
        f"property of that name, or, where the recipe does without, "
        f"'{name}: ClassVar[{type(_WITHOUT[name]).__name__}] = {_WITHOUT[name]!r}'."
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
