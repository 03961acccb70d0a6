"""The library's view of a recipe's settings."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import torch

from torchtune import config
from torchtune.modules import text_decoder
from torchtune.training.precision import best_dtype
from torchtune.utils import UserError, is_simulated, parse_device

# Settings that the library reads.
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
# Values of settings that a recipe does not declare; None for all settings not listed.
_DEFAULTS: dict[str, Any] = {
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
# A copied recipe that declares two settings of a group must declare all of them: otherwise the library would silently
# use the default of a renamed setting.
_REQUIRED_TOGETHER = (tuple(_DEFAULTS)[:5], tuple(_DEFAULTS)[5:10])


class RecipeSettingsError(UserError):
    """A setting that the library reads is missing from a recipe's settings."""

    raised_on_all = True


class SettingsView:
    """Read access to a recipe's settings by the names in ``NAMES``, with the recipe's own types and defaults.

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
        >>> view = torchtune.training.SettingsView({"batch_size": 4})
        >>> view.batch_size, view.epochs, view.dataset
        (4, 1, None)
    """

    def __init__(self, source: Any, **changes: Any) -> None:
        self.source = source
        self._changes = changes
        self.declared = frozenset(name for name in NAMES if name in changes or _has_setting(source, name))
        if dataclasses.is_dataclass(source):
            _check_names(source, self.declared)
        if self.reward_and_value_model is not None and "max_steps_per_epoch" not in changes:
            self._changes = self._convert_ppo_settings() | changes

    @classmethod
    def of(cls, settings: Any) -> "SettingsView":
        """Return a view of ``settings``, or ``settings`` itself if it is a view."""
        return settings if isinstance(settings, cls) else cls(settings)

    def __getattr__(self, name: str) -> Any:
        if name not in NAMES:
            raise AttributeError(f"{type(self).__name__} has no '{name}': add it to NAMES.")
        if name in self._changes:
            return self._changes[name]
        if _has_setting(self.source, name):
            return _get_setting(self.source, name)
        return _DEFAULTS.get(name)

    def replace(self, **changes: Any) -> "SettingsView":
        """Return a view of the same settings, with ``changes`` applied."""
        return SettingsView(self.source, **{**self._changes, **changes})

    @property
    def max_seq_len(self) -> int | None:
        """The tokenizer's limit on tokens per row; None without a limit."""
        return None if self.tokenizer is None else self.tokenizer.get("max_seq_len")

    def other_models(self) -> dict[str, tuple[Any, "SettingsView"]]:
        """Map the name of each further model to its checkpointer, and to a view of the settings with only this model.

        The model ``value`` is trained; all others are frozen.
        """
        models: dict[str, tuple[Any, SettingsView]] = {}
        if self.teacher_model is not None:
            models["teacher"] = (self.teacher_checkpointer, self._select_model(self.teacher_model))
        if self.ref_model is not None:
            models["reference"] = (self.ref_checkpointer, self._select_model(self.ref_model))
        if self.reward_and_value_model is not None:  # PPO: reward and value model are of one kind
            reward_and_value = self._select_model(self.reward_and_value_model)
            models["value"] = (self.value_checkpointer, reward_and_value)
            models["reward"] = (self.reward_checkpointer, reward_and_value)
            models["reference"] = (self.ref_policy_checkpointer, self)  # the policy's own architecture
        return models

    def _select_model(self, model: Any) -> "SettingsView":
        """Return a view of the settings in which ``model`` is the only model."""
        return self.replace(
            model=model, model_converters=[], teacher_model=None, reward_and_value_model=None, ref_model=None
        )

    def _convert_ppo_settings(self) -> dict[str, Any]:
        """Return PPO's ``batch_size`` (per step) and ``num_steps`` (in answers) with the meaning of other recipes."""
        max_steps = self.max_steps_per_epoch
        if self.num_steps is not None:
            max_steps = self.num_steps // self.batch_size
        batch_size = max(self.batch_size // self.gradient_accumulation_steps, 1)
        return {"batch_size": batch_size, "max_steps_per_epoch": max_steps}

    def resolved_dtype(self) -> str:
        """Return the name of the dtype of weights and activations; for None, the best dtype of the device."""
        return best_dtype(parse_device(self.device)) if self.dtype is None else self.dtype

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
    return settings.get(name) if isinstance(settings, Mapping) else getattr(settings, name)


def _has_setting(settings: Any, name: str) -> bool:
    if isinstance(settings, Mapping):
        return settings.get(name) is not None
    return hasattr(settings, name)


def _check_names(settings: Any, declared: frozenset[str]) -> None:
    """Raise if a copied recipe lacks a name that the most similar shipped recipe has."""
    absent = []
    for group in _REQUIRED_TOGETHER:
        if len(declared.intersection(group)) > 1:
            absent += [name for name in group if name not in declared]
    if not absent:
        return
    from torchtune._recipe_registry import get_all_recipes, settings_of_recipe

    # A group may hold settings that no recipe of this kind has: the recipe that was copied is the one to compare with.
    field_names = [field.name for field in dataclasses.fields(settings)]
    shipped = [settings_of_recipe(recipe) for recipe in get_all_recipes()]
    nearest = max(shipped, key=lambda names: len(names.intersection(field_names)))
    missing = [name for name in absent if name in nearest]
    if not missing:
        return
    name = missing[0]
    cls = type(settings)
    raise RecipeSettingsError(
        f"{inspect.getsourcefile(cls)}: {cls.__qualname__} has no '{name}', which the library reads: if you renamed "
        "it, rename it back or add a property of that name; where the recipe does without it, add "
        f"'{name}: ClassVar[{type(_DEFAULTS[name]).__name__}] = {_DEFAULTS[name]!r}'."
    )


def context_length(settings: Any) -> int | None:
    """Return the tokens of the longest row that all models of a run read: the smallest ``max_seq_len`` of them.

    The models are built on the meta device, without weights.

    Args:
        settings: settings of a recipe.

    Returns:
        None if no model has a limit, or the run is simulated.

    Example:
        >>> node = {"_component_": "torchtune.models.llama3_2.llama3_2_1b"}
        >>> torchtune.training.context_length({"model": node})
        131072
    """
    if is_simulated():
        return None
    cfg = SettingsView.of(settings)
    nodes = [cfg.model]
    for _, model_settings in cfg.other_models().values():
        nodes.append(model_settings.model)
    if _has_setting(cfg.source, "policy_model"):  # PPO's name of the model
        nodes.append(_get_setting(cfg.source, "policy_model"))
    lengths = []
    with torch.device("meta"):
        for node in nodes:
            if node is not None:
                model = text_decoder(config.instantiate(node))
                lengths.append(getattr(model, "max_seq_len", None))
    return min((length for length in lengths if isinstance(length, int)), default=None)
