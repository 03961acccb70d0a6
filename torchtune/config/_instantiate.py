"""Instantiate components from config nodes, and components that a dataclass configures."""

import dataclasses
import inspect
import sys
import traceback
from collections.abc import Mapping
from typing import Any, ClassVar

from omegaconf import DictConfig, OmegaConf

from torchtune.config._check import Checker, build_settings
from torchtune.config._components import as_written, locate
from torchtune.config._document import Document, is_component
from torchtune.config._errors import ArgumentError, InstantiationError
from torchtune.config._references import texts_with_references
from torchtune.config._save import to_dict
from torchtune.config._settings import is_configurable, settings_fields, takes_component
from torchtune.utils import UserError


def instantiate(
    config: Mapping[str, Any] | DictConfig | None,
    *args: Any,
    caller_globals: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Instantiate the component that a config node describes.

    Args:
        config: a mapping with ``_component_`` and arguments. Nested components, in lists too, are instantiated first,
            except for parameters annotated with :class:`Component`, which receive the nodes.
        *args: positional arguments of the outermost component.
        caller_globals: namespace for a path without dots; by default the caller's module. In checked settings, names
            in the recipe's file are found without it.
        **kwargs: arguments that override arguments in ``config``; any objects, passed without a copy.

    Returns:
        The object, or ``None`` if ``config`` is ``None``.

    Raises:
        ValueError: ``config`` is not a mapping.
        InstantiationError: ``_component_`` is missing or cannot be found, or a path given to it cannot be opened.
        ArgumentError: the component raised a ``ValueError``; a subclass of ``ValueError``.

    Example:
        >>> node = {"_component_": "torch.nn.Linear", "in_features": 2, "out_features": 3}
        >>> torchtune.config.instantiate(node).weight.shape
        torch.Size([3, 2])
    """
    if config is None:
        return None
    if not isinstance(config, (dict, DictConfig)):
        raise ValueError(f"instantiate takes a mapping with a _component_ key, not {type(config).__name__}.")
    if "_component_" not in config:
        raise InstantiationError(f"instantiate needs a _component_ key: this node has {sorted(map(str, config))}")
    if caller_globals is None:
        caller_globals = sys._getframe(1).f_globals
    # Only OmegaConf resolves references, but it is slow and copies what it holds: a dict without references skips it.
    if isinstance(config, dict) and texts_with_references(config):
        config = OmegaConf.create(config, flags={"allow_objects": True})
    if isinstance(config, DictConfig):
        config = OmegaConf.to_container(config, resolve=True)
    return _create(_merge(config, kwargs), args, caller_globals)


def _merge(node: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Update ``node`` with ``extra``: mappings are merged, other values replaced without a copy."""
    merged = dict(node)
    for key, value in extra.items():
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True)
        if type(merged.get(key)) is dict and type(value) is dict:
            value = _merge(merged[key], value)
        merged[key] = value
    return merged


def _create(node: dict[str, Any], args: tuple[Any, ...], caller_globals: dict[str, Any]) -> Any:
    """Call the component of ``node``, with ``args`` first."""
    path = node["_component_"]
    component = locate(path, caller_globals)
    name = as_written(path)
    values = {key: value for key, value in node.items() if key != "_component_"}
    if is_configurable(component):  # its Config checks the arguments again, and converts them
        return from_node(component, values, *args)
    if not callable(component):
        raise InstantiationError(f"'{name}' is a {type(component).__name__}, not a class or function")
    arguments = {}
    for key, value in values.items():
        items: list[Any] = [value]
        if type(value) is dict:
            items += value.values()
        elif type(value) is list:
            items += value
        # Reading the annotations takes long, and most arguments hold no component.
        if any(map(is_component, items)) and takes_component(_annotation(component, key)):
            arguments[key] = value  # the component instantiates these nodes itself
        else:
            arguments[key] = _build_nested(value, caller_globals)
    try:
        return component(*args, **arguments)
    except ValueError as error:
        # An error of code that the component calls is likely not about the arguments, and keeps its traceback.
        if isinstance(error, UserError) or not _is_raised_by(component, error):
            raise
        raise ArgumentError(f"{name}: {error}") from error
    except OSError as error:
        if error.filename is None:  # not about a path
            raise
        raise InstantiationError(f"{name}: {error.filename}: {error.strerror}: choose another path.") from error


def _is_raised_by(component: Any, error: ValueError) -> bool:
    """Return whether the module of the component or of a base class raised the error, so likely about arguments."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    raising_module = frames[-1].f_globals.get("__name__")
    classes = getattr(component, "__mro__", [component])
    return raising_module in [getattr(cls, "__module__", None) for cls in classes]


def _annotation(component: Any, key: str) -> Any:
    """Return the annotation of an argument; ``Any`` if the signature does not say."""
    try:
        parameter = inspect.signature(component, eval_str=True).parameters.get(key)
    except (TypeError, ValueError, NameError):  # no signature, or names that exist for type checkers only
        return Any
    if parameter is None:
        return Any
    return parameter.annotation


def _build_nested(value: Any, caller_globals: dict[str, Any]) -> Any:
    """Instantiate the components inside ``value``; return ``value`` itself if there are none."""
    if type(value) is dict:
        if "_component_" in value:
            return _create(value, (), caller_globals)
        mapping = {key: _build_nested(item, caller_globals) for key, item in value.items()}
        if all(mapping[key] is item for key, item in value.items()):
            return value
        return mapping
    if type(value) is list:
        items = [_build_nested(item, caller_globals) for item in value]
        if all(built is item for built, item in zip(items, value, strict=True)):
            return value
        return items
    return value


class Configurable:
    """Base class with a nested dataclass ``Config``, which builds instances by ``Config.build(**runtime)``.

    The nested class needs no base class; it receives the methods ``build``, ``to_dict`` and ``from_dict``. ``__init__``
    takes the config first, then the runtime arguments::

        class Sampler(Configurable):
            @dataclass(kw_only=True)
            class Config:
                # Sampling temperature; 0 is greedy.
                temperature: Annotated[float, Range(min=0)] = 1.0

            def __init__(self, config: Config, *, vocab_size: int) -> None: ...

        Sampler.Config(temperature=0.5).build(vocab_size=32)

    In YAML, ``_component_`` names the class and the other keys are the fields of ``Config``; types, ranges, ``check()``
    and any ``ValueError`` of ``__post_init__`` are part of validation.

    Example:
        >>> from dataclasses import dataclass
        >>> class Scaler(torchtune.config.Configurable):
        ...     @dataclass
        ...     class Config:
        ...         factor: float = 2.0
        ...     def __init__(self, config):
        ...         self.factor = config.factor
        ...
        >>> Scaler.Config(factor=3.0).build().factor
        3.0
    """

    Config: ClassVar[type]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        nested = cls.__dict__.get("Config")
        if nested is None:
            return  # the inherited Config builds the parent class
        if not dataclasses.is_dataclass(nested):
            raise TypeError(f"{cls.__qualname__}.Config must be a dataclass.")
        nested._owner = cls
        nested.build = _build
        nested.to_dict = to_dict
        nested.from_dict = classmethod(_from_dict)


def _build(self: Any, *args: Any, **runtime: Any) -> Any:
    """Build the class that this ``Config`` configures."""
    return self._owner(self, *args, **runtime)


def _from_dict(cls: type, data: Mapping[str, Any]) -> Any:
    """Build a config from the output of ``to_dict``. Raises ``ConfigError`` with every mistake in ``data``."""
    checker = Checker(Document(dict(data)))
    values = checker.check_fields((), checker.document.data, cls)
    checker.check_components()
    checker.raise_mistakes()
    return build_settings(cls, values)


def from_node(cls: type, arguments: Mapping[str, Any], *args: Any) -> Any:
    """Build ``cls`` from keyword arguments: fields of its ``Config``, and runtime arguments for ``__init__``."""
    names = settings_fields(cls.Config)
    settings = {key: value for key, value in arguments.items() if key in names}
    runtime = {key: value for key, value in arguments.items() if key not in names}
    return cls(_from_dict(cls.Config, settings), *args, **runtime)
