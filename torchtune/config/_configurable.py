"""Components configured by a dataclass."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from torchtune.config._check import Checker
from torchtune.config._document import Document
from torchtune.config._schema import build_settings, settings_fields


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
        nested.build, nested.to_dict, nested.from_dict = _build, _to_dict, classmethod(_from_dict)


def _build(self: Any, *args: Any, **runtime: Any) -> Any:
    return self._owner(self, *args, **runtime)


def _to_dict(self: Any) -> dict[str, Any]:
    from torchtune.config._save import to_dict

    return to_dict(self)


def _from_dict(cls: type, data: Mapping[str, Any]) -> Any:
    """Build a config from the output of ``to_dict``. Raises ``ConfigError`` with every mistake in ``data``."""
    checker = Checker(Document(dict(data)))
    values = checker.check_fields((), checker.document.data, cls)
    checker.finish()
    return build_settings(cls, values)


def from_node(cls: type, given: Mapping[str, Any], *args: Any) -> Any:
    """Build ``cls`` from keyword arguments: fields of its ``Config``, and runtime arguments for ``__init__``."""
    names = settings_fields(cls.Config)
    config = _from_dict(cls.Config, {key: value for key, value in given.items() if key in names})
    return cls(config, *args, **{key: value for key, value in given.items() if key not in names})
