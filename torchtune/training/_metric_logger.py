"""Interface and base class of the metric loggers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

import numpy as np
import torch
import yaml

from torchtune.utils import require

if TYPE_CHECKING:
    from omegaconf import DictConfig

Scalar: TypeAlias = torch.Tensor | np.ndarray | int | float


def to_number(data: Scalar) -> int | float:
    return data.item() if hasattr(data, "item") else data


def save_config(config: "DictConfig") -> Path:
    """Write the resolved config to ``{config.output_dir}/torchtune_config.yaml`` and return the path."""
    from torchtune.config import save_config as write_config

    path = Path(config.output_dir) / "torchtune_config.yaml"
    write_config(config, path)
    return path


def flatten_dict(d: dict[str, Any], *, sep: str = ".", parent_key: str = "") -> dict[str, Any]:
    """Flatten nested dicts; keys become paths: ``{"a": {"b": 1}}`` -> ``{"a.b": 1}``.

    Example:
        >>> torchtune.training.metric_logging.flatten_dict({"a": {"b": 1}})
        {'a.b': 1}
    """
    flat: dict[str, Any] = {}
    for key, value in d.items():
        path = f"{parent_key}{sep}{key}" if parent_key else str(key)
        if isinstance(value, Mapping) and value:
            flat.update(flatten_dict(dict(value), sep=sep, parent_key=path))
        else:
            flat[path] = value
    return flat


class MetricLoggerInterface(Protocol):
    """Interface of a metric logger."""

    def log(self, name: str, data: Scalar, step: int) -> None:
        """Log one scalar.

        Args:
            name: name of the metric.
            data: its value.
            step: number of the optimizer step.
        """
        self.log_dict({name: data}, step)

    def log_config(self, config: "DictConfig") -> None:
        """Log the resolved config, and write it to ``{config.output_dir}/torchtune_config.yaml``."""
        save_config(config)

    def log_dict(self, payload: Mapping[str, Scalar], step: int) -> None:
        """Log several scalars of one step."""

    def log_answers(self, answers: Sequence[Mapping[str, Any]], step: int) -> None:
        """Log sampled answers (rows of ``rollouts.jsonl``); does nothing by default."""

    def close(self) -> None:
        """Write pending metrics, and close files and connections."""


class TrackingLogger(MetricLoggerInterface):
    """Base class of loggers that need an optional package; they log on rank 0 only."""

    _package: ClassVar[str]
    _extra: ClassVar[str]
    _run: Any = None  # the package's object that logs; None on other ranks and after closing

    @classmethod
    def check_installed(cls) -> ModuleType:
        """Return the imported package. Raises ``UserError`` if it is not installed."""
        return require(cls._package, extra=cls._extra, purpose=cls.__name__)

    @classmethod
    def check_ready(cls, settings: Mapping[str, Any]) -> None:
        """Check before a run that the logger can start with these arguments of its constructor.

        Raises:
            UserError: the package is not installed, or its account is not set up on this machine.
        """
        cls.check_installed()

    def log_dict(self, payload: Mapping[str, Scalar], step: int) -> None:
        """Log several scalars of one step."""
        if self._run is not None:
            self._send({name: to_number(data) for name, data in payload.items()}, step)

    def log_config(self, config: "DictConfig") -> None:
        """Log the resolved config, and write it to ``{config.output_dir}/torchtune_config.yaml``."""
        if self._run is not None:
            path = save_config(config)
            self._send_config(yaml.safe_load(path.read_text(encoding="utf-8")), path)

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._finish()
            self._run = None

    def _send(self, numbers: dict[str, int | float], step: int) -> None:
        raise NotImplementedError

    def _send_config(self, settings: dict[str, Any], path: Path) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        self._run.finish()
