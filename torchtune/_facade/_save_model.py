"""Save a model to a folder in Hugging Face's layout."""

import os
import shutil
from pathlib import Path
from typing import Any

from torch import nn

from torchtune._facade._load_model import ORIGINS, unwrap
from torchtune.checkpoints import MARKER, CheckpointError, CheckpointStore, Contents, ModelSource
from torchtune.modules.peft import owned_parameters
from torchtune.training.parallel import Ranks
from torchtune.utils import fsync_directory


def save(
    model: nn.Module,
    path: str | Path,
    *,
    contents: Contents | None = None,
    base: str | Path | None = None,
    tokenizer: Any = None,
    overwrite: bool = False,
) -> Path:
    """Save a model in Hugging Face's layout, with its tokenizer, chat template and generation config.

    ``transformers``, ``peft``, vLLM and :func:`load` read the folder. It is written atomically. In distributed training
    all ranks must call it.

    Args:
        model: from :func:`load`, or from a builder of :mod:`torchtune.models`; with its adapters.
        path: the folder.
        contents: ``"model"``, the weights without adapters; ``"adapter"``, in PEFT's layout, with one more file for
            each other conversion with parameters; ``"merged"``, the weights with the adapter merged in; ``("adapter",
            "merged")``, both. By default the adapter if the model has one, else the model.
        base: folder of the model's original checkpoint, from which small files are copied; by default the checkpoint
            that :func:`load` read.
        tokenizer: tokenizer that trained, which writes its files (:class:`~torchtune.tokenizers.SavableTokenizer`); by
            default the one that :func:`load` returned with the model, or else a copy of the base's files.
        overwrite: replace an existing folder; allowed only for one written by this function or a recipe.

    Returns:
        The folder.

    Raises:
        UserError: a trained parameter would not be saved, the folder is not empty and ``overwrite`` is False, the
            folder is the base's, the base is unknown, or the disk is full.

    Example:
        >>> model, tokenizer = torchtune.load(checkpoint, adapter=torchtune.modules.peft.LoRA(rank=2))
        >>> sorted(file.name for file in torchtune.save(model, folder / "adapter").glob("adapter*"))
        ['adapter_config.json', 'adapter_model.safetensors']
    """
    if not isinstance(model, nn.Module):
        raise CheckpointError(f"model: a {type(model).__name__} cannot be saved: give the model itself.")
    model = unwrap(model)
    path = Path(path).expanduser()
    source = _find_source(model, base)
    if tokenizer is None and base is None:
        tokenizer = ORIGINS[model].tokenizer
    _check_path(path, source.checkpoint_dir, overwrite)
    if contents is None:
        contents = "adapter" if owned_parameters(model) else "model"
    ranks = Ranks(CheckpointError)
    temporary = path.with_name(f".{path.name}.saving")  # the same name on every rank
    store = CheckpointStore({"policy": source}, temporary)
    try:
        written = store.save("epoch_0", model, contents=contents, tokenizer=tokenizer)
        ranks.run_on_rank_0(lambda: _replace_folder(written, path))
    finally:
        store.close()
        ranks.run_on_rank_0(lambda: shutil.rmtree(temporary, ignore_errors=True))
    return path


def _check_path(path: Path, base_folder: Path, overwrite: bool) -> None:
    """Raise if ``path`` overlaps with the base's folder, or holds files that may not be replaced."""
    new = path.resolve()
    base = base_folder.resolve()
    if new == base or new in base.parents or base in new.parents:
        raise CheckpointError(f"path: {path} and the base's folder {base} are inside each other: name another one.")
    is_free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    if is_free:
        return
    if not overwrite:
        raise CheckpointError(f"path: {path} is there already: name a new folder, or give overwrite=True.")
    if not (path / MARKER).is_file():
        raise CheckpointError(
            f"path: {path} is there already, and it was not written by torchtune.save: name a new folder, or delete it "
            "yourself."
        )


def _replace_folder(written: Path, path: Path) -> None:
    """Rename ``written`` to ``path``; at any instant, the old or the new folder is complete."""
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.rename(path, old)
    os.rename(written, path)
    fsync_directory(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _find_source(model: nn.Module, base: str | Path | None) -> ModelSource:
    """Return the checkpoint that the small files come from: the given folder, or the one that was loaded."""
    if base is not None:
        folder = Path(base).expanduser()
        if not folder.is_dir():
            raise CheckpointError(f"base: there is no folder {base}: give the one that the model started from.")
        return ModelSource(folder)
    if model not in ORIGINS:
        raise CheckpointError(
            "base: this model was not made by torchtune.load, so that its tokenizer and chat template are not known: "
            "give the folder that it started from and, if it trained with another one, its tokenizer."
        )
    return ORIGINS[model].source
