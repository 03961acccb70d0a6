"""Interface of the metric loggers, and the config as they log it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch

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


def plain_config(config: Any) -> dict[str, Any]:
    """Return the settings as plain containers, as saved (resolved, secrets redacted)."""
    import yaml

    return yaml.safe_load(save_config(config).read_text(encoding="utf-8"))


class MetricLoggerInterface(Protocol):
    """Interface of a metric logger."""

    def log(self, name: str, data: Scalar, step: int) -> None:
        """Log one scalar.

        Args:
            name: name of the metric.
            data: its value.
            step: number of the optimizer step.
        """

    def log_config(self, config: "DictConfig") -> None:
        """Log the resolved config, and write it to ``{config.output_dir}/torchtune_config.yaml``."""

    def log_dict(self, payload: Mapping[str, Scalar], step: int) -> None:
        """Log several scalars of one step."""

    def log_answers(self, answers: Sequence[Mapping[str, Any]], step: int) -> None:
        """Log sampled answers, rows of ``rollouts.jsonl``; does nothing in a logger that shows no conversations."""

    def close(self) -> None:
        """Write pending metrics, and close files and connections."""
