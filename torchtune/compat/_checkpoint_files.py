"""Names and places of the files of a checkpoint, for checkpointers copied from earlier releases."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torchtune.checkpoints import CheckpointError, FormattedCheckpointFiles, get_largest_iter_folder
from torchtune.utils import get_logger

ADAPTER_CONFIG_FNAME = "adapter_config"
ADAPTER_MODEL_FNAME = "adapter_model"
SAFETENSOR_INDEX_FNAME = "model.safetensors.index.json"
TORCH_INDEX_FNAME = "pytorch_model.bin.index.json"
SHARD_FNAME = "model-{cpt_idx}-of-{num_shards}"
RECIPE_STATE_DIRNAME = "recipe_state"
REPO_ID_FNAME = "original_repo_id"
SUFFIXES_TO_NOT_COPY = [
    ".pt",
    ".pth",
    ".bin",
    ".safetensors",
    SAFETENSOR_INDEX_FNAME,
    TORCH_INDEX_FNAME,
    ADAPTER_CONFIG_FNAME,
    ADAPTER_MODEL_FNAME,
]
_RECIPE_STATE_FILE = "recipe_state.pt"


class CheckpointerInterface(Protocol):
    """Interface of checkpointers with complete state dicts."""

    def load_checkpoint(self, **kwargs: Any) -> dict[str, Any]:
        """Return the state dicts by kind, such as ``"model"``."""
        ...

    def save_checkpoint(self, state_dict: dict[str, Any], **kwargs: Any) -> None:
        """Write the state dicts."""
        ...


def get_path(input_dir: Path | str, filename: str, missing_ok: bool = False) -> Path:
    """Return the path of a file in a folder.

    Raises:
        CheckpointError: the folder does not exist, or the file does not and ``missing_ok`` is False.
    """
    folder = Path(input_dir)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: name the one with the checkpoint.")
    path = folder / filename
    if not missing_ok and not path.is_file():
        raise CheckpointError(f"{folder} has no file {filename}: download the checkpoint, or correct the name.")
    return path


def copy_files(
    input_dir: str | Path,
    output_dir: str | Path,
    *,
    ignore_suffixes: Sequence[str] | None = None,
    max_file_size_mb: int = 100,
) -> None:
    """Copy the small files of a checkpoint, such as its tokenizer, to another folder.

    Args:
        input_dir: folder to copy, with its subfolders; hidden files and folders are left out.
        output_dir: folder to copy to; existing files are kept.
        ignore_suffixes: files whose names end with one of these are left out.
        max_file_size_mb: larger files are left out with a warning.
    """
    suffixes = tuple(ignore_suffixes or ())
    for path in sorted(Path(input_dir).rglob("*")):
        relative = path.relative_to(input_dir)
        is_hidden = any(part.startswith(".") for part in relative.parts)
        if is_hidden or not path.is_file() or path.name.endswith(suffixes):
            continue
        if path.stat().st_size > max_file_size_mb * 2**20:
            get_logger().warning(f"{path} is larger than {max_file_size_mb} MiB and is not copied.")
            continue
        target = Path(output_dir) / relative
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)


def check_outdir_not_in_ckptdir(ckpt_dir: Path | str, out_dir: Path | str) -> bool:
    """Return True if ``out_dir`` is not inside ``ckpt_dir``.

    Raises:
        CheckpointError: it is.
    """
    source = Path(ckpt_dir).resolve()
    output = Path(out_dir).resolve()
    if source == output or source in output.parents:
        raise CheckpointError(f"output_dir: {out_dir} is inside the checkpoint's folder {ckpt_dir}: name another one.")
    return True


def get_recipe_checkpoint_path(
    output_dir: Path | str,
    checkpoint_dir: Path | str | None = None,
    recipe_checkpoint: str | None = None,
    should_load_recipe_state: bool = False,
) -> Path | None:
    """Return the path of the training state to resume from, or ``None`` if ``should_load_recipe_state`` is False.

    Args:
        output_dir: folder of the run.
        checkpoint_dir: accepted and ignored.
        recipe_checkpoint: name of the file in ``output_dir``; by default that of the newest epoch.
        should_load_recipe_state: whether the run resumes.

    Raises:
        CheckpointError: there is no such file.
    """
    if not should_load_recipe_state:
        return None
    folder = Path(output_dir)
    newest = get_largest_iter_folder(folder)
    candidates = [folder / RECIPE_STATE_DIRNAME / _RECIPE_STATE_FILE]
    if recipe_checkpoint is not None:
        candidates = [folder / recipe_checkpoint]
    elif newest is not None:
        candidates.insert(0, folder / newest / _RECIPE_STATE_FILE)
    for path in candidates:
        if path.is_file():
            return path
    raise CheckpointError(f"{candidates[-1]} does not exist: set resume_from_checkpoint to False, or correct the path.")


def get_adapter_checkpoint_path(
    output_dir: Path | str,
    adapter_checkpoint: str | None = None,
    should_load_recipe_state: bool = False,
    pattern: str = r"^epoch_(\d+)",
) -> Path | None:
    """Return the path of the adapter to resume from; ``None`` if there is none, or the run does not resume.

    Args:
        output_dir: folder of the run.
        adapter_checkpoint: name of the file in ``output_dir``; by default that of the newest checkpoint.
        should_load_recipe_state: whether the run resumes.
        pattern: regular expression of the names of checkpoints, with one group, the number.
    """
    if not should_load_recipe_state:
        return None
    if adapter_checkpoint is not None:
        return get_path(output_dir, adapter_checkpoint)
    newest = get_largest_iter_folder(output_dir, pattern)
    if newest is None:
        return None
    path = Path(output_dir) / newest / f"{ADAPTER_MODEL_FNAME}.pt"
    return path if path.is_file() else None


def get_model_checkpoint_path(
    checkpoint_files: Sequence[str] | Mapping[str, str],
    checkpoint_dir: Path | str,
    output_dir: Path | str,
    should_load_recipe_state: bool,
    has_adapter_checkpoint: bool,
) -> list[Path]:
    """Return the paths of the weight files, in order.

    Args:
        checkpoint_files: names of the files, or ``filename_format`` and ``max_filename``.
        checkpoint_dir: folder of the model that the run starts from.
        output_dir: folder of the run; a run that resumes without an adapter reads its newest epoch.
        should_load_recipe_state: whether the run resumes.
        has_adapter_checkpoint: whether an adapter is loaded on top of the first model.

    Raises:
        CheckpointError: a file does not exist.
    """
    names = checkpoint_files
    if isinstance(names, Mapping):
        names = FormattedCheckpointFiles.from_dict(names).build_checkpoint_filenames()
    folder = Path(checkpoint_dir)
    if should_load_recipe_state and not has_adapter_checkpoint:
        folder = Path(output_dir) / (get_largest_iter_folder(output_dir) or "")
    return sorted(get_path(folder, name) for name in names)
