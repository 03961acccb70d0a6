"""Folders of runs as a recipe leaves them, written by hand."""

import json
from pathlib import Path
from typing import Any

import yaml

SETTINGS: dict[str, Any] = {
    "recipe": "lora_finetune_single_device",
    "checkpointer": {"checkpoint_dir": "/models/base"},
    "dataset": {"_component_": "torchtune.datasets.chat_dataset", "source": "owner/chats"},
    "loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"},
    "metric_logger": {
        "_component_": "torchtune.training.metric_logging.DiskLogger",
        "log_dir": "/elsewhere/logs",  # the folder was moved
        "output_fmt": "jsonl",
    },
}
START = {"event": "start", "time": 100.0, "step": 0, "total_steps": 20, "host": "a", "recipe": SETTINGS["recipe"]}

ROWS = {f"row{i}": 2.0 + i / 10 for i in range(8)}  # their values


def lines(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def measured(when: str, values: dict[str, float | None], **more: Any) -> dict[str, Any]:
    facts = {"what": "loss", "on": "dataset_val", "answers": []}
    return {"event": "measured", "time": 101.0, "when": when, "step": 0, **facts, "values": values, **more}


def ended(state: str = "has finished", step: int = 20, **more: Any) -> dict[str, Any]:
    return {"event": "end", "time": 200.0, "step": step, "state": state, "seconds": 90.0, "changed": True, **more}


def write_run(folder: Path, events: list[dict[str, Any]], metrics: list[dict[str, Any]] = (), **settings: Any) -> Path:
    """Write the folder of a run with these events and lines of metrics."""
    (folder / "logs").mkdir(parents=True)
    (folder / "torchtune_config.yaml").write_text(yaml.safe_dump(SETTINGS | settings))
    (folder / "logs" / "run.jsonl").write_text(lines(events))
    (folder / "logs" / "log.jsonl").write_text(lines(list(metrics)))
    return folder


def write_best(run: Path, step: int, value: float, metric: str = "val_loss") -> dict[str, Any]:
    """Write the best checkpoint of a run, empty but complete, and return its record."""
    record = {"checkpoint": f"step_{step}", "step": step, "value": value}
    (run / f"step_{step}").mkdir()
    marker = {"saves": 1, "resumable": False, "files": {}, "crc32": {}}
    (run / f"step_{step}" / ".complete").write_text(json.dumps(marker))
    (run / "best.json").write_text(json.dumps({"keep_best": metric, "best": [record]}))
    return {"metric": metric, **record}
