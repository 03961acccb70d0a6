"""Tokenizer files and generation settings of a checkpoint, written by the tokenizer that trained."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torchtune.checkpoints._load_weights import read_json
from torchtune.tokenizers import MISSING_TOKENIZER, SavableTokenizer, end_of_turn_ids
from torchtune.utils import get_logger, write_json

GENERATION_CONFIG = "generation_config.json"
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def check_savable_tokenizer(tokenizer: Any) -> None:
    """Log a warning before a run if its tokenizer cannot write its files."""
    with TemporaryDirectory() as folder:
        reason = _write_files(tokenizer, Path(folder))
    if reason is not None:
        get_logger().warning(
            f"tokenizer: {reason}, so checkpoints will hold no tokenizer: give it a method save_files(folder), which "
            "writes tokenizer.json and tokenizer_config.json."
        )


def save_tokenizer(tokenizer: Any, folders: Sequence[Path], source: Path) -> None:
    """Write the files of a tokenizer into folders of a checkpoint.

    If it cannot write them, ``TOKENIZER_MISSING.md`` says so in each folder: the source's tokenizer may be another one.

    Args:
        tokenizer: tokenizer that trained.
        folders: existing folders without tokenizer files.
        source: folder of the base weights.
    """
    # Written aside, because a tokenizer that fails may have written some of its files.
    with TemporaryDirectory(dir=folders[0]) as name:
        aside = Path(name)
        reason = _write_files(tokenizer, aside)
        if reason is None:
            files = [path.relative_to(aside) for path in aside.rglob("*") if path.is_file()]
            for folder in folders:
                for file in files:
                    (folder / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(aside / file, folder / file)
            return
    get_logger().warning(f"The checkpoint holds no tokenizer, {MISSING_TOKENIZER} in it says more: {reason}.")
    for folder in folders:
        (folder / MISSING_TOKENIZER).write_text(
            f"""This checkpoint holds no tokenizer: {reason}.

The tokenizer files of {source} are not copied, because the model may have been trained with other tokens or another
chat template. If they are those that trained, copy them here. For checkpoints with a tokenizer, give the class a
method `save_files(folder)`, which writes `tokenizer.json` and `tokenizer_config.json`.
""",
            encoding="utf-8",
        )


def _write_files(tokenizer: Any, folder: Path) -> str | None:
    """Write the tokenizer's files; return the reason if it cannot."""
    kind = f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}"
    if not isinstance(tokenizer, SavableTokenizer):
        return f"the tokenizer {kind} has no method save_files"
    try:
        tokenizer.save_files(folder)
    except OSError:
        raise  # the disk is full or not writable
    except Exception as error:  # noqa: BLE001 - code of a user's own must not cost a checkpoint
        return f"the tokenizer {kind} raised {type(error).__name__} in save_files ({error})"
    return None


def add_stop_tokens(tokenizer: Any, folder: Path) -> None:
    """Add the tokens that end a turn to ``eos_token_id`` of the folder's ``generation_config.json``.

    ``transformers`` and vLLM stop at any token of this list. A missing file is created with the token ids of
    ``config.json``, from which ``transformers`` takes them otherwise.

    Args:
        tokenizer: tokenizer that trained.
        folder: folder of a model in a checkpoint, with its ``config.json``.
    """
    path = folder / GENERATION_CONFIG
    if path.is_file():
        settings = read_json(path)
    else:
        config = read_json(folder / "config.json")
        config = {**config, **config.get("text_config", {})}
        settings = {name: config[name] for name in _TOKEN_IDS if config.get(name) is not None}
    published = settings.get("eos_token_id")
    published = published if isinstance(published, list) else [] if published is None else [published]
    stops = list(dict.fromkeys([*published, *end_of_turn_ids(tokenizer)]))
    if stops and (stops != published or not path.is_file()):
        settings["eos_token_id"] = stops if stops[1:] else stops[0]
        write_json(path, settings)
