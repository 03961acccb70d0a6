"""The record of a run: one JSON line for its start, each measurement and its end."""

import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

import torchtune
from torchtune._recipe_registry import CONFIGS, recipe_at
from torchtune.config import redact_secrets, to_dict
from torchtune.reports._probe import describe_data
from torchtune.training.metric_logging import flatten_dict
from torchtune.utils import AppendedFile, explain_os_error, get_logger, valid_json

RECORD = "logs/run.jsonl"


def append_record(output_dir: str | Path, event: str, values: Mapping[str, Any]) -> None:
    """Append an event with its time to the record of a run; if the disk is full, the run goes on without it."""
    path = Path(output_dir) / RECORD
    line = json.dumps(valid_json({"event": event, "time": time.time(), **values}), ensure_ascii=False, default=str)
    try:
        file = AppendedFile(path)
        data = ("\n" * file.has_partial_line() + redact_secrets(line) + "\n").encode("utf-8", "replace")
        while data:
            data = data[file.write(data) :]
        file.close()
    except OSError as error:
        get_logger().warning(str(explain_os_error(error, path)))


def describe_start(recipe: Any, counts: tuple[int, int]) -> dict[str, Any]:
    """Return the facts of a start or resume: command, settings that differ, code, machine, and data.

    Args:
        recipe: recipe after ``setup``.
        counts: trained parameters, and all.
    """
    source = Path(type(recipe).setup.__code__.co_filename)
    device, words = recipe.device, sys.argv[1:] if "--config" in sys.argv else []
    is_cuda = device.type == "cuda"
    config = words[words.index("--config") + 1] if words else None
    return {
        "step": recipe.global_step,
        "total_steps": recipe.total_steps,
        "recipe": recipe_at(source) or str(source),
        "config": config if config is None or not _is_shipped(config) else _shipped_name(config),
        "overrides": words[words.index("--config") + 2 :] if words else [],
        "changed": {} if config is None else dict(_changed_settings(config, recipe.cfg)),
        "parameters": {"trained": counts[0], "all": counts[1]},
        "processes": recipe.dims.world_size,
        "parallel": str(recipe.dims),
        "code": {
            "torchtune": torchtune.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "recipe": hashlib.sha256(source.read_bytes()).hexdigest()[:12] if source.is_file() else None,
        },
        "machine": {
            "host": platform.node(),
            "system": platform.platform(terse=True),
            "device": torch.cuda.get_device_name(device) if is_cuda else device.type,
            "memory_gib": torch.cuda.get_device_properties(device).total_memory / 2**30 if is_cuda else None,
            "cores": os.cpu_count(),
        },
        "data": {
            name: describe_data(loader, getattr(recipe, "tokenizer", None))
            for name, loader in (("dataset", recipe.loader), ("dataset_val", recipe.loader_val))
            if loader is not None
        },
    }


def _is_shipped(config: str) -> bool:
    return Path(config).resolve().is_relative_to(CONFIGS)


def _shipped_name(config: str) -> str:
    return str(Path(config).resolve().relative_to(CONFIGS).with_suffix(""))


def _changed_settings(config: str, settings: Any) -> Iterator[tuple[str, list[Any]]]:
    """Yield (setting, [value in the config file, value of the run]) where they differ."""
    path = Path(config)
    if not path.is_file():
        return
    shipped = flatten_dict(yaml.safe_load(path.read_text(encoding="utf-8")))
    fields = getattr(type(settings), "__dataclass_fields__", {})
    for name, value in flatten_dict(to_dict(settings, redact=True)).items():
        default = fields[name].default if name in fields else None
        before = shipped.get(name, default)
        if before != value and name != "recipe" and "${" not in str(before):
            yield name, [before, value]
