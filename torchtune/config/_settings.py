"""Settings of a recipe: annotations and fields of the dataclass, their description as text and as JSON schema.

``SettingsView`` is how checks and reports of the library read the settings of any recipe.
"""

import ast
import dataclasses
import functools
import inspect
import json
import textwrap
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from torchtune.utils import UserError

UNIONS = (Union, types.UnionType)
PLAIN_TYPES = (bool, int, float, str, type(None))


class Component:
    """Annotation of a setting that names a class or function and its arguments.

    In YAML it is a section with a ``_component_`` key, in the settings instance a resolved ``DictConfig`` for
    ``torchtune.config.instantiate``.

    Example:
        >>> from typing import Annotated
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Settings:
        ...     optimizer: Annotated[torchtune.config.Component, torchtune.config.RuntimeArgs("params")]
    """


@dataclass(frozen=True)
class ObjectPath:
    """Annotation of a text that names a class or function: its dotted path, or its name in the recipe's file.

    The check of a config reports a path without an object.

    Attributes:
        required: whether the text must name an object. If not, the check only recognizes the functions and classes of
            the recipe's file; all other texts are unchanged.

    Example:
        >>> from typing import Annotated
        >>> def scored(function: Annotated[str, torchtune.config.ObjectPath()]) -> object:
        ...     return torchtune.config.locate(function)
        >>> scored("math.sqrt")(4.0)
        2.0
    """

    required: bool = True


@dataclass(frozen=True)
class Range:
    """Bounds of a number, as in ``Annotated[int, Range(min=1)]``; ``min`` and ``max`` are inclusive.

    Example:
        >>> torchtune.config.Range(above=0, max=1).holds(0.5)
        True
    """

    min: float | None = None
    max: float | None = None
    above: float | None = None
    below: float | None = None

    def __str__(self) -> str:
        bounds = {">=": self.min, ">": self.above, "<=": self.max, "<": self.below}
        return " and ".join(f"{sign} {bound}" for sign, bound in bounds.items() if bound is not None)

    def holds(self, value: float) -> bool:
        """Return whether ``value`` is within the bounds (NaN never is)."""
        if value != value:  # NaN; math.isnan rejects integers that are longer than a float
            return False
        return (
            (self.min is None or value >= self.min)
            and (self.above is None or value > self.above)
            and (self.max is None or value <= self.max)
            and (self.below is None or value < self.below)
        )


@dataclass(frozen=True, init=False)
class RuntimeArgs:
    """Arguments that the recipe passes besides the YAML's: positional (named for messages) and keyword.

    ``rules`` are bounds on arguments in YAML that the component's signature cannot express.

    Example:
        >>> torchtune.config.RuntimeArgs("params", keywords=("lr",)).keywords
        ('lr',)
    """

    positional: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    rules: Mapping[str, Range] = field(default_factory=dict, hash=False)  # unions hash members; dicts have no hash

    def __init__(
        self, *positional: str, keywords: tuple[str, ...] = (), rules: Mapping[str, Range] | None = None
    ) -> None:
        # A frozen dataclass has no other way to set its fields.
        object.__setattr__(self, "positional", positional)
        object.__setattr__(self, "keywords", keywords)
        object.__setattr__(self, "rules", dict(rules or {}))


# Common types of settings. The recipes pass the tokenizer to a dataset, the parameters to an optimizer, and the
# optimizer, the number of steps and the last epoch to a scheduler.
PositiveInt = Annotated[int, Range(min=1)]
# Steps between two events: their number, a fraction of the run, or the end of every epoch.
StepInterval = PositiveInt | Annotated[float, Range(above=0, below=1)] | Literal["epoch"]
CheckpointerComponent = Annotated[Component, RuntimeArgs(rules={"keep_last_n_checkpoints": Range(min=1)})]
DatasetComponent = Annotated[Component | list[Component], RuntimeArgs("tokenizer")]
OptimizerComponent = Annotated[
    Component, RuntimeArgs("params", rules={"lr": Range(min=0), "weight_decay": Range(min=0)})
]
SchedulerComponent = Annotated[
    Component,
    RuntimeArgs(
        "optimizer",
        keywords=("num_training_steps", "last_epoch"),
        rules={
            "num_warmup_steps": Range(min=0),
            "warmup_ratio": Range(min=0, below=1),
            "min_lr_ratio": Range(min=0, max=1),
            "num_decay_steps": Range(min=0),
            "decay_ratio": Range(min=0, max=1),
        },
    ),
]
LossComponent = Annotated[Component, RuntimeArgs(rules={"num_output_chunks": Range(min=1)})]


@dataclass(frozen=True)
class Setting:
    """Type and default of one field of a settings dataclass."""

    annotation: Any
    required: bool
    default: Any


@functools.cache
def settings_fields(cls: type) -> dict[str, Setting]:
    """Return the fields of a settings dataclass by name, with evaluated annotations."""
    hints = typing.get_type_hints(cls, include_extras=True)
    settings = {}
    for item in dataclasses.fields(cls):
        if not item.init:
            continue
        annotation = hints[item.name]
        if item.default_factory is not dataclasses.MISSING:
            settings[item.name] = Setting(annotation, False, item.default_factory())
        elif item.default is not dataclasses.MISSING:
            settings[item.name] = Setting(annotation, False, item.default)
        else:
            settings[item.name] = Setting(annotation, True, None)
    return settings


def settings_of(recipe_main: Callable[..., Any]) -> type:
    """Return the annotated type of a recipe's argument: a settings dataclass, or ``DictConfig`` by default."""
    function = inspect.unwrap(recipe_main)
    parameters = list(inspect.signature(function).parameters)
    if parameters:
        annotation = typing.get_type_hints(function).get(parameters[0])
        if dataclasses.is_dataclass(annotation):
            return annotation
    from omegaconf import DictConfig

    return DictConfig


def split_annotated(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Split ``Annotated[int, Range(min=1)]`` into ``(int, (Range(min=1),))``."""
    if get_origin(annotation) is Annotated:
        return get_args(annotation)[0], annotation.__metadata__
    return annotation, ()


def union_members(annotation: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union, or a tuple of the type itself.

    An annotated union inside a union, as in ``DatasetComponent | None``, is flattened: each alternative gets the
    annotations.
    """
    if get_origin(annotation) not in UNIONS:
        return (annotation,)
    alternatives: list[Any] = []
    for member in get_args(annotation):
        base, extras = split_annotated(member)
        if extras:
            alternatives += [Annotated[(alternative, *extras)] for alternative in union_members(base)]
        else:
            alternatives.append(member)
    return tuple(alternatives)


_TYPE_NAMES = {type(None): "null", Any: "anything", Component: "component", dict: "mapping", list: "list"}


def takes_component(annotation: Any) -> bool:
    """Return whether an annotation contains :class:`Component`, at any depth."""
    return annotation is Component or any(map(takes_component, get_args(annotation)))


def type_text(annotation: Any) -> str:
    """Describe an annotation: ``list[int] | None`` -> ``"list of int or null"``."""
    base, extras = split_annotated(annotation)
    if extras:
        bounds = [f" {extra}" for extra in extras if isinstance(extra, Range)]
        return type_text(base) + "".join(bounds)
    origin = get_origin(base)
    args = get_args(base)
    if origin in UNIONS:
        alternatives = [type_text(member) for member in args]
        return ", ".join(alternatives[:-1]) + f" or {alternatives[-1]}"
    if origin is Literal:
        choices = []
        for choice in args:
            choices.append("null" if choice is None else str(choice))
        return "one of " + ", ".join(choices)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"mapping of {type_text(args[0])} to {type_text(args[1])}"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return "list of " + type_text(args[0])
    if base in _TYPE_NAMES:
        return _TYPE_NAMES[base]
    return getattr(base, "__name__", str(base))


def is_configurable(target: Any) -> bool:
    """Return whether ``target`` is a class with a nested ``Config`` dataclass that builds it."""
    if not isinstance(target, type):
        return False
    nested = getattr(target, "Config", None)
    return dataclasses.is_dataclass(nested) and callable(getattr(nested, "build", None))


def field_comments(cls: type) -> dict[str, str]:
    """Return the ``#`` comment directly above each field of ``cls``, read from its source."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return {}
    lines = source.splitlines()
    comments = {}
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            end = node.lineno - 1  # index of the field's own line
            start = end
            while start > 0 and lines[start - 1].lstrip().startswith("#"):
                start -= 1
            block = [line.strip().lstrip("#").strip() for line in lines[start:end]]
            comments[node.target.id] = " ".join(line for line in block if line)
    return comments


def describe_settings(settings_cls: Callable[..., Any]) -> str:
    """Return a recipe's settings as ``--help`` text; takes the settings dataclass or the ``recipe_main``."""
    if inspect.isfunction(settings_cls):
        settings_cls = settings_of(settings_cls)
    if not dataclasses.is_dataclass(settings_cls):
        return "This recipe declares no settings: read its file for the keys that it takes.\n"
    comments = field_comments(settings_cls)
    doc = settings_cls.__doc__ or ""
    generated = doc.startswith(f"{settings_cls.__name__}(")  # the docstring that @dataclass generates
    lines = []
    if doc and not generated:
        lines = [inspect.cleandoc(doc).splitlines()[0], ""]
    for name, setting in settings_fields(settings_cls).items():
        default = setting.default
        if default is None or isinstance(default, bool | list | dict):
            default = json.dumps(default)  # as YAML writes it
        remark = "required" if setting.required else f"default: {default}"
        lines.append(f"  {name}: {type_text(setting.annotation)} ({remark})")
        if comments.get(name):
            lines.extend(textwrap.wrap(comments[name], 110, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return "\n".join(lines) + "\n"


_JSON_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_JSON_DEFAULTS = (bool, int, float, str, list, dict, type(None))  # types of defaults that JSON can write
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
# A reference to another setting, such as ${output_dir}/logs, may stand for a value of any type.
_JSON_REFERENCE = {"type": "string", "pattern": r"\$\{.+\}"}


def json_schema(settings_cls: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a recipe's settings.

    The schema describes a config before its references (``${output_dir}``) are resolved. Further keys at the top are
    allowed, because other keys may refer to them.

    Args:
        settings_cls: the settings dataclass, or the ``recipe_main`` that takes it.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Settings:
        ...     # Passes over the data.
        ...     epochs: int = 1
        >>> torchtune.config.json_schema(Settings)["properties"]["epochs"]["default"]
        1
    """
    if inspect.isfunction(settings_cls):
        settings_cls = settings_of(settings_cls)
    schema: dict[str, Any] = {"$schema": _JSON_DIALECT, "type": "object"}
    if not dataclasses.is_dataclass(settings_cls):  # a recipe that declares no settings takes any
        return schema
    return {**schema, **_schema_of_fields(settings_cls)}


def _schema_of_fields(settings_cls: type) -> dict[str, Any]:
    """Return the schema of a mapping with the fields of a settings dataclass."""
    comments = field_comments(settings_cls)
    properties = {}
    required = []
    for name, setting in settings_fields(settings_cls).items():
        properties[name] = _schema_of(setting.annotation)
        if comments.get(name):
            properties[name]["description"] = comments[name]
        if setting.required:
            required.append(name)
        elif isinstance(setting.default, _JSON_DEFAULTS):  # a nested settings dataclass has defaults of its own
            properties[name]["default"] = setting.default
    return {"type": "object", "properties": properties, "required": required}


def _schema_of(annotation: Any) -> dict[str, Any]:
    """Return the schema of a setting's values; a reference to another setting is allowed for all types."""
    alternatives = _alternatives(annotation)
    if {"type": "string"} not in alternatives:
        alternatives.append(_JSON_REFERENCE)
    return {"anyOf": alternatives}


def _alternatives(annotation: Any) -> list[dict[str, Any]]:
    """Return the schemas of the alternatives of an annotation, one if it is no union."""
    base, extras = split_annotated(annotation)
    origin = get_origin(base)
    args = get_args(base)
    if origin in UNIONS:
        alternatives = []
        for member in args:
            alternatives += _alternatives(member)
    elif origin is Literal:
        alternatives = [{"enum": list(args)}]
    elif base is Component:
        alternatives = [
            {
                "type": "object",
                "properties": {"_component_": {"type": "string", "description": "Path of a class or function."}},
                "required": ["_component_"],
            }
        ]
    elif dataclasses.is_dataclass(base):
        alternatives = [_schema_of_fields(base)]
    elif _is_generic(origin, base, Mapping):
        values = _schema_of(args[1]) if len(args) == 2 else True  # True: any
        alternatives = [{"type": "object", "additionalProperties": values}]
    elif _is_generic(origin, base, Sequence) and base is not str:
        items = _schema_of(args[0]) if args else True
        alternatives = [{"type": "array", "items": items}]
    elif base in _JSON_TYPES:
        alternatives = [{"type": _JSON_TYPES[base]}]
    else:  # Any, and classes that convert themselves
        alternatives = [{}]
    bounds = _bounds(extras)
    for alternative in alternatives:
        if alternative.get("type") in ("integer", "number"):
            alternative.update(bounds)
    return alternatives


def _is_generic(origin: Any, base: Any, kind: type) -> bool:
    """Return whether an annotation is a ``kind``, with or without types of its members."""
    annotated = base if origin is None else origin
    return isinstance(annotated, type) and issubclass(annotated, kind)


def _bounds(extras: Sequence[Any]) -> dict[str, float]:
    """Return the keywords for the bounds of a number."""
    keywords = {"min": "minimum", "above": "exclusiveMinimum", "max": "maximum", "below": "exclusiveMaximum"}
    bounds = {}
    for extra in extras:
        if not isinstance(extra, Range):
            continue
        for name, keyword in keywords.items():
            limit = getattr(extra, name)
            if limit is not None:
                bounds[keyword] = limit
    return bounds


# Names of the settings that the library reads, without types or defaults, which are the recipe's: any other attribute
# of a view is a spelling mistake of the library, and would else be taken for a feature that the recipe lacks.
KNOWN_SETTINGS = frozenset(
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
    """Read access to a recipe's settings by the names in ``KNOWN_SETTINGS``, with the recipe's own types and defaults.

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
        self.declared = frozenset(name for name in KNOWN_SETTINGS if name in changes or _has_setting(source, name))
        if dataclasses.is_dataclass(source):
            _check_names(source, self.declared)

    @classmethod
    def of(cls, settings: Any) -> "SettingsView":
        """Return a view of ``settings``, or ``settings`` itself if it is a view."""
        if isinstance(settings, cls):
            return settings
        return cls(settings)

    def __getattr__(self, name: str) -> Any:
        if name not in KNOWN_SETTINGS:
            raise AttributeError(f"{type(self).__name__} has no '{name}': add it to KNOWN_SETTINGS.")
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
    """Raise if a copied recipe lacks a name that the most similar shipped recipe has.

    The library takes a setting that is not declared for a feature that the recipe lacks, so it would silently ignore a
    setting that the user has renamed.

    Args:
        settings: instance of the settings dataclass.
        declared: names that the library reads and ``settings`` has.
    """
    absent = []
    for group in _DECLARED_TOGETHER:
        if len(declared.intersection(group)) > 1:  # the recipe has the feature, and so needs all of the group
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
    default = ast.literal_eval(nearest[name])  # as the source writes it
    raise RecipeSettingsError(
        f"{inspect.getsourcefile(cls)}: {cls.__qualname__} has no '{name}', which the library reads: if you renamed "
        "it, rename it back or add a property of that name; where the recipe does without it, add "
        f"'{name}: ClassVar[{type(default).__name__}] = {default!r}'."
    )
