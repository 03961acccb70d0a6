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

import numpy as np
import torch

import torchtune
from torchtune._recipe_registry import CONFIGS, recipe_at
from torchtune.config import read_document, redact_secrets, to_dict
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, BatchLoader
from torchtune.tokenizers import decode_pieces, document_texts
from torchtune.training import undisturbed_random_state
from torchtune.training.metric_logging import flatten_dict
from torchtune.training.parallel import ParallelDims
from torchtune.utils import append_line, valid_json

RECORD = "logs/run.jsonl"
_SAMPLE_ROWS = 5
_LENGTH_BINS = 24
_MOST_TOKENS = 4000  # of a sample row


def append_record(output_dir: Path, event: str, values: Mapping[str, Any]) -> None:
    """Append an event with its time to the record of a run; if the disk is full, the run goes on without it."""
    record = valid_json({"event": event, "time": time.time(), **values})
    line = json.dumps(record, ensure_ascii=False, default=str)
    append_line(output_dir / RECORD, redact_secrets(line))


def describe_start(settings: Any, recipe_file: str, dims: ParallelDims, device: torch.device) -> dict[str, Any]:
    """Return the code, machine and settings at the start of a process of the run.

    Args:
        settings: settings of the recipe.
        recipe_file: file of the recipe, which may be a copy.
        dims: processes of the run.
        device: device of this process.
    """
    facts: dict[str, Any] = {
        "recipe": recipe_at(recipe_file) or recipe_file,
        "config": None,
        "changed": {},
        "processes": dims.world_size,
        "parallel": str(dims),
        "code": {
            "torchtune": torchtune.__version__,
            "torch": torch.__version__,
            "recipe": hashlib.sha256(Path(recipe_file).read_bytes()).hexdigest()[:12],
        },
        "host": platform.node(),
        "device": device.type,
        "memory_gib": None,
    }
    config = _config_of_command()
    if config is not None:
        facts["config"] = config
        if config.is_relative_to(CONFIGS):  # a shipped config is named as in `tune run --config`
            facts["config"] = str(config.relative_to(CONFIGS).with_suffix(""))
        facts["changed"] = _changed_settings(config, settings)
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
        facts["memory_gib"] = torch.cuda.get_device_properties(device).total_memory / 2**30
    return facts


def _config_of_command() -> Path | None:
    """Return the file given as ``--config`` in the command of this process; None without one."""
    if "--config" not in sys.argv:
        return None
    config = Path(sys.argv[sys.argv.index("--config") + 1]).resolve()
    if not config.is_file():
        return None
    return config


def _changed_settings(config: Path, settings: Any) -> dict[str, list[Any]]:
    """Return setting -> [value in the config file, value of the run], where they differ."""
    in_file = {}
    for field in getattr(settings, "__dataclass_fields__", {}).values():
        if field.default is not dataclasses.MISSING:
            in_file[field.name] = field.default
    in_file |= flatten_dict(read_document(config).data)
    changed = {}
    for name, value in flatten_dict(to_dict(settings, redact=True)).items():
        is_reference = "${" in str(in_file.get(name))
        # Absent, null and empty settings mean the same.
        is_equal = (in_file.get(name) or None) == (value or None)
        if not is_equal and not is_reference:
            changed[name] = [in_file.get(name), value]
    return changed


def describe_layers(model: torch.nn.Module) -> dict[str, str]:
    """Return module type -> number of such modules and dtype of their weights, for modules with weights."""
    counts: Counter[tuple[str, str]] = Counter()
    for module in model.modules():
        weight = next(module.parameters(recurse=False), None)
        if weight is not None:
            counts[type(module).__name__, str(weight.dtype).removeprefix("torch.")] += 1
    return {name: f"{count} in {dtype}" for (name, dtype), count in counts.items()}


def describe_data(loader: BatchLoader, tokenizer: Any) -> dict[str, Any]:
    """Return facts about a loader's data: number of rows, digest, lengths, and samples with their trained tokens."""
    dataset = loader.dataset
    if dataset.is_stream:
        return {}
    rows = dataset
    parts = dataset.row_datasets()
    if dataset.is_packed and len(parts) == 1:  # packs are described by their rows
        rows = parts[0]
    facts: dict[str, Any] = {"rows": len(rows), "examples": len(dataset), "samples": []}
    if dataset.fingerprint is not None:
        facts["digest"] = hashlib.sha256(repr(dataset.fingerprint).encode()).hexdigest()[:16]
    lengths = rows.known_lengths
    if lengths is not None:
        counts, edges = np.histogram(lengths, _LENGTH_BINS)
        facts["tokens"] = int(lengths.sum())
        facts["lengths"] = {"counts": counts.tolist(), "edges": edges.tolist()}
    samples = np.linspace(0, len(rows) - 1, min(_SAMPLE_ROWS, len(rows))).astype(int).tolist()
    with undisturbed_random_state():  # a transform may draw random numbers
        for index in samples:
            facts["samples"] += _describe_row(index, rows[index], tokenizer)
    return facts


def _describe_row(index: int, row: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """Return the texts of a row, in pieces that are trained or not; rows of preference data have several texts."""
    texts = []
    for _, tokens, labels in document_texts(row):
        pieces = decode_pieces(tokens[:_MOST_TOKENS], labels[:_MOST_TOKENS], tokenizer)
        texts.append(
            {
                "row": index,
                "tokens": len(tokens),
                "trained": int((labels != CROSS_ENTROPY_IGNORE_IDX).sum()),
                "pieces": [(text[:_MOST_TOKENS], is_trained) for text, is_trained in pieces],
            }
        )
    return texts
