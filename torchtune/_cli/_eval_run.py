"""Read the best checkpoint and the validation data of a run, for ``tune eval``."""

import sys
from pathlib import Path
from typing import Any

from torchtune._cli.data import read_settings
from torchtune.checkpoints import best_checkpoint, complete_directories
from torchtune.utils import UserError

_SETTINGS = "torchtune_config.yaml"


def checkpoint_of(model: str) -> str:
    """Return the best checkpoint of a run, or its last one, if ``model`` is a run's output folder; else ``model``.

    Raises:
        UserError: the run has no complete checkpoint.
    """
    folder = Path(model).expanduser()
    if not folder.exists() and folder.is_absolute():  # otherwise it may be a repository on the hub
        raise UserError(f"{folder}: there is no such folder: give the folder of a model, a checkpoint or a run.")
    if not (folder / _SETTINGS).is_file() or any(folder.glob("*config.json")):  # a checkpoint also has the settings
        return model
    saved, best = complete_directories(folder), best_checkpoint(folder)
    if not saved:
        raise UserError(f"{folder}: the run has no complete checkpoint: wait for one, or start the run again.")
    found = saved[-1] if best is None else folder / best
    run = "the run, which has not finished" if (saved[-1] / "state").is_dir() else "the run"
    print(f"model       {found}, the {'last' if best is None else 'best'} checkpoint of {run}", file=sys.stderr)
    return str(found)


def validation_data(model: str) -> tuple[Any, int | None]:
    """Return the ``dataset_val`` of a checkpoint's run, and the maximum sequence length.

    Raises:
        UserError: there is no config, or it has no ``dataset_val``.
    """
    from torchtune.training import SettingsView

    path = Path(model).expanduser() / _SETTINGS
    if not path.is_file():
        raise UserError(
            f"there is nothing to measure: {model} is not a checkpoint of a run, so give rows in --data, or --tasks."
        )
    cfg = SettingsView.of(read_settings(str(path), []))
    if cfg.dataset_val is None:
        raise UserError(f"there is nothing to measure: {path} has no dataset_val, so give rows in --data, or --tasks.")
    return cfg.dataset_val, cfg.tokenizer.get("max_seq_len")
