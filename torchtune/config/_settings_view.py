"""Read access to the settings of any recipe, for the checks and reports of the library."""

import ast
import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from torchtune.utils import UserError

# Names of the settings that the library reads, without types or defaults, which are the recipe's: any other attribute
# of a view is a spelling mistake of the library, and would else be taken for a feature that the recipe lacks.
NAMES = frozenset(
    """
    model model_converters tokenizer checkpointer device dtype output_dir resume_from_checkpoint recipe
    dataset dataset_val collate_fn batch_size batch_size_val run_val_every_n_steps epochs max_steps_per_epoch
    max_steps
    gradient_accumulation_steps optimizer optimizer_precision optimizer_in_bwd lr_scheduler loss clip_grad_norm
    enable_activation_checkpointing enable_activation_offloading ac_mode ac_option save_every_n_steps metric_logger
    hang_timeout_minutes keep_best early_stopping_patience scores save_adapter_weights_only resize_token_embeddings
    data_parallel_replicate_dim data_parallel_shard_dim tensor_parallel_dim tensor_parallel_plan context_parallel_dim
    expert_parallel_dim fsdp_cpu_offload fsdp_reshard_after_forward
    quantizer fake_quant_after_n_steps enable_fp8_training teacher_model teacher_checkpointer teacher_cache
    ref_checkpointer ref_model reference_cache sampler reward_and_value_model value_checkpointer reward_checkpointer
    ref_policy_checkpointer policy_model num_steps
    """.split()
)
# A copied recipe that declares two settings of a group must declare all of them: the library takes a setting that is
# not declared for a feature that the recipe lacks, so a renamed setting would be ignored silently.
_DECLARED_TOGETHER = (
    (
        "batch_size",
        "gradient_accumulation_steps",
        "epochs",
        "optimizer_in_bwd",
        "enable_activation_checkpointing",
    ),
    (
        "data_parallel_replicate_dim",
        "data_parallel_shard_dim",
        "tensor_parallel_dim",
        "context_parallel_dim",
        "fsdp_cpu_offload",
    ),
)


class RecipeSettingsError(UserError):
    """A setting that the library reads is missing from a recipe's settings."""

    raised_on_all = True


class SettingsView:
    """Read access to a recipe's settings by the names in ``NAMES``, with the recipe's own types and defaults.

    A setting that the recipe does not declare is None: the recipe lacks the feature.

    Attributes:
        source: the recipe's own settings.
        declared: names that the recipe declares.

    Args:
        source: an instance of a recipe's ``Settings``, a mapping (``DictConfig`` of an older recipe), or another object
            with some of the names as attributes.
        changes: values that override the recipe's.

    Raises:
        RecipeSettingsError: a dataclass lacks a name that belongs to a group.

    Example:
        >>> view = torchtune.config.SettingsView({"batch_size": 4})
        >>> view.batch_size, view.dataset, sorted(view.declared)
        (4, None, ['batch_size'])
    """

    def __init__(self, source: Any, **changes: Any) -> None:
        self.source = source
        self._changes = changes
        self.declared = frozenset(name for name in NAMES if name in changes or _has_setting(source, name))
        if dataclasses.is_dataclass(source):
            _check_names(source, self.declared)

    @classmethod
    def of(cls, settings: Any) -> "SettingsView":
        """Return a view of ``settings``, or ``settings`` itself if it is a view."""
        if isinstance(settings, cls):
            return settings
        return cls(settings)

    def __getattr__(self, name: str) -> Any:
        if name not in NAMES:
            raise AttributeError(f"{type(self).__name__} has no '{name}': add it to NAMES.")
        if name in self._changes:
            return self._changes[name]
        if name not in self.declared:
            return None
        return _get_setting(self.source, name)

    def replace(self, **changes: Any) -> "SettingsView":
        """Return a view of the same settings, with ``changes`` applied."""
        return SettingsView(self.source, **{**self._changes, **changes})

    @property
    def max_seq_len(self) -> int | None:
        """The tokenizer's limit on tokens per row; None without a limit."""
        if self.tokenizer is None:
            return None
        return self.tokenizer.get("max_seq_len")

    def can_set(self, name: str) -> bool:
        """Return whether the command line can set ``name``; ``a.b`` also needs a section ``a``."""
        setting, _, path_in_section = name.partition(".")
        if dataclasses.is_dataclass(self.source):
            exists = setting in {field.name for field in dataclasses.fields(self.source)}
        else:
            exists = _has_setting(self.source, setting)
        if not exists:
            return False
        return not path_in_section or _get_setting(self.source, setting) is not None


def _get_setting(settings: Any, name: str) -> Any:
    """Return a setting of a mapping or an object."""
    if isinstance(settings, Mapping):
        return settings.get(name)
    return getattr(settings, name)


def _has_setting(settings: Any, name: str) -> bool:
    """Return whether a mapping or an object has a setting; null in a mapping is none."""
    if isinstance(settings, Mapping):
        return settings.get(name) is not None
    return hasattr(settings, name)


def _check_names(settings: Any, declared: frozenset[str]) -> None:
    """Raise if a copied recipe lacks a name that the most similar shipped recipe has."""
    absent = []
    for group in _DECLARED_TOGETHER:
        if len(declared.intersection(group)) > 1:
            absent += [name for name in group if name not in declared]
    if not absent:
        return
    from torchtune._recipe_registry import get_all_recipes, settings_of_recipe

    # A group may hold settings that no recipe of this kind has: the recipe that was copied is the one to compare with.
    field_names = {field.name for field in dataclasses.fields(settings)}
    shipped = [settings_of_recipe(recipe) for recipe in get_all_recipes()]
    nearest = max(shipped, key=lambda defaults: len(field_names & defaults.keys()))
    missing = [name for name in absent if name in nearest]
    if not missing:
        return
    name = missing[0]
    cls = type(settings)
    default = ast.literal_eval(nearest[name])
    raise RecipeSettingsError(
        f"{inspect.getsourcefile(cls)}: {cls.__qualname__} has no '{name}', which the library reads: if you renamed "
        "it, rename it back or add a property of that name; where the recipe does without it, add "
        f"'{name}: ClassVar[{type(default).__name__}] = {default!r}'."
    )
