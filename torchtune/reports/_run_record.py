"""The record of a run: one JSON line for its start, each measurement and its end."""

import dataclasses
import hashlib
import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import torchtune
from torchtune._recipe_registry import CONFIGS, recipe_at
from torchtune.config import read_document, redact_secrets, to_dict
from torchtune.training.metric_logging import flatten_dict
from torchtune.utils import append_line, valid_json

RECORD = "logs/run.jsonl"


def append_record(output_dir: Path, event: str, values: Mapping[str, Any]) -> None:
    """Append an event with its time to the record of a run; if the disk is full, the run goes on without it."""
    line = json.dumps(valid_json({"event": event, "time": time.time(), **values}), ensure_ascii=False, default=str)
    append_line(output_dir / RECORD, redact_secrets(line))


def describe_start(recipe: Any) -> dict[str, Any]:
    """Return step, code, machine and settings at the start of a process of the run."""
    source, is_cuda = Path(type(recipe).setup.__code__.co_filename), recipe.device.type == "cuda"
    config = Path(sys.argv[sys.argv.index("--config") + 1]).resolve() if "--config" in sys.argv else None
    config = None if config is None or not config.is_file() else config
    shipped = config is not None and config.is_relative_to(CONFIGS)
    return {
        "step": recipe.global_step,
        "total_steps": recipe.total_steps,
        "recipe": recipe_at(source) or str(source),
        "config": str(config.relative_to(CONFIGS).with_suffix("")) if shipped else config,
        "changed": {} if config is None else _changed_settings(config, recipe.cfg),
        "processes": recipe.dims.world_size,
        "parallel": str(recipe.dims),
        "code": {
            "torchtune": torchtune.__version__,
            "torch": torch.__version__,
            "recipe": hashlib.sha256(source.read_bytes()).hexdigest()[:12],
        },
        "host": platform.node(),
        "device": torch.cuda.get_device_name(recipe.device) if is_cuda else recipe.device.type,
        "memory_gib": torch.cuda.get_device_properties(recipe.device).total_memory / 2**30 if is_cuda else None,
    }


def describe_layers(model: torch.nn.Module) -> dict[str, str]:
    """Return module type -> number of such modules and dtype of their weights, for modules with weights."""
    weights = ((type(module).__name__, next(module.parameters(recurse=False), None)) for module in model.modules())
    found = Counter((name, str(one.dtype).removeprefix("torch.")) for name, one in weights if one is not None)
    return {name: f"{count} in {dtype}" for (name, dtype), count in found.items()}


def _changed_settings(config: Path, settings: Any) -> dict[str, list[Any]]:
    """Return setting -> [value in the config file, value of the run], where they differ."""
    fields = getattr(settings, "__dataclass_fields__", {}).items()
    defaults = {name: field.default for name, field in fields if field.default is not dataclasses.MISSING}
    before = {**defaults, **flatten_dict(read_document(config).data)}
    now = flatten_dict(to_dict(settings, redact=True))
    return {
        name: [before.get(name), value]
        for name, value in now.items()
        if (before.get(name) or None) != (value or None) and "${" not in str(before.get(name))
    }
