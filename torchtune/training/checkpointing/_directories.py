"""Directories of checkpoints: which are whole, which one to resume from, which may go."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torchtune.training.checkpointing._errors import CheckpointError
from torchtune.training.checkpointing._state import STATE_DIR, load_progress
from torchtune.utils import atomic_directory, get_logger

MARKER = ".complete"
_NAME = re.compile(r"^(epoch|step)_(\d+)$")
# What atomic_directory leaves behind when the process is killed: .NAME.xxxxxxxx.tmp, or, if it was replacing a
# directory of that name, .NAME.xxxxxxxx.old.tmp
_LEFTOVER = re.compile(r"^\.((?:epoch|step)_\d+)\.[0-9a-f]+(\.old)?\.tmp$")


@dataclass(frozen=True)
class ResumePoint:
    """A complete checkpoint that training can go on from.

    Attributes:
        path: its directory.
    """

    path: Path

    @cached_property
    def progress(self) -> dict[str, Any]:
        """The plain numbers that the recipe saved, such as seed and global step."""
        return load_progress(self.path)


def _named_directories(output_dir: Path) -> list[Path]:
    if not output_dir.is_dir():
        return []
    return [path for path in output_dir.iterdir() if _NAME.match(path.name) and path.is_dir()]


def complete_directories(output_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first. A directory without a marker does not count."""
    found = [path for path in _named_directories(output_dir) if (path / MARKER).is_file()]
    return sorted(found, key=lambda path: (_marker(path)["saves"], path.name))


def _marker(path: Path) -> dict[str, Any]:
    """What the marker says.

    ``saves``, the how manieth save of the run it was, ``resumable``, and ``files``: the bytes of those with tensors
    (older markers do not say).
    """
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
        files = {str(name): int(size) for name, size in marker.get("files", {}).items()}
        return {"saves": int(marker["saves"]), "resumable": bool(marker["resumable"]), "files": files}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path / MARKER} was not written by this library or is damaged: delete {path.name} or that file."
        ) from error


@contextmanager
def new_directory(output_dir: Path, name: str) -> Iterator[Path]:
    """Give a directory that becomes ``output_dir/name``, marked complete, when the block ends without an error."""
    if not _NAME.match(name):
        raise ValueError(f"'{name}' is no name of a checkpoint: use epoch_N or step_N.")
    earlier = complete_directories(output_dir)
    saves = 1 + (_marker(earlier[-1])["saves"] if earlier else 0)
    with atomic_directory(output_dir / name) as folder:
        yield folder
        files = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*.safetensors"))}
        marker = {"saves": saves, "resumable": (folder / STATE_DIR).exists(), "files": files}
        (folder / MARKER).write_text(json.dumps(marker))


def _check_files(path: Path, others: int) -> None:
    """Compare a complete checkpoint with its marker. Raises ``CheckpointError`` that names what is gone or cut."""
    for name, size in _marker(path)["files"].items():
        file = path / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            fault = "is missing" if found is None else f"has {found:,} bytes instead of {size:,}"
            then = "resumes from the checkpoint before" if others else "begins anew"
            raise CheckpointError(
                f"output_dir: {file} {fault}, although {path.name} was saved whole: bring the file back, or delete the "
                f"folder {path.name}, and the run {then}."
            )


def prune(output_dir: Path, keep: int | None) -> None:
    """Remove the oldest complete checkpoints beyond ``keep``, never the newest. What cannot be removed stays."""
    if keep is None:
        return
    for path in complete_directories(output_dir)[: -max(keep, 1)]:
        try:
            (path / MARKER).unlink()  # from here on it is not complete, whatever happens to the rest
            shutil.rmtree(path)
        except OSError as error:
            get_logger().warning(f"The old checkpoint {path} could not be removed ({error}): delete it yourself.")


def _clear_leftovers(output_dir: Path) -> None:
    """Remove what an interrupted save left behind; put back what it was about to replace."""
    for path in sorted(output_dir.iterdir()):
        match = _LEFTOVER.match(path.name)
        if match is None:
            continue
        if match[2] and (path / MARKER).is_file() and not (output_dir / match[1]).exists():
            os.rename(path, output_dir / match[1])
        else:
            shutil.rmtree(path)


def find_resume_point(output_dir: Path) -> ResumePoint | None:
    """The newest complete checkpoint that carries training state; ``None`` if there is no checkpoint at all.

    What an interrupted save left behind is removed.

    Raises:
        CheckpointError: the run is finished, what there is was not written whole by this library, or is damaged.
    """
    if output_dir.is_dir():
        _clear_leftovers(output_dir)
    complete = complete_directories(output_dir)
    if not complete:
        if unmarked := sorted(path.name for path in _named_directories(output_dir)):
            raise CheckpointError(
                f"output_dir: {output_dir} holds {', '.join(unmarked[:3])} without the marker of a complete "
                "checkpoint, so there is nothing to resume: choose another output_dir (and, to start from these "
                "weights, give that folder as checkpoint_dir)."
            )
        get_logger().warning(f"{output_dir} holds no complete checkpoint: the run starts from the beginning.")
        return None
    if not _marker(complete[-1])["resumable"]:
        raise CheckpointError(
            f"output_dir: the run in {output_dir} is finished ({complete[-1].name}), there is nothing to resume: start "
            f"a new run from that folder, in another output_dir."
        )
    _check_files(complete[-1], len(complete) - 1)
    return ResumePoint(complete[-1])


def check_output_dir(output_dir: Path, checkpoint_dir: Path | None, *, resume: bool) -> None:
    """Refuse an output folder that would overwrite something or cannot be written to.

    Raises:
        CheckpointError: it is, or lies in, ``checkpoint_dir``; it holds a run that is not to be resumed; or the
            operating system does not let it be written to.
    """
    if checkpoint_dir is not None:
        inside, outside = output_dir.resolve(), checkpoint_dir.resolve()
        if inside == outside or outside in inside.parents:
            raise CheckpointError(
                f"output_dir: {output_dir} is inside checkpoint_dir ({checkpoint_dir}): choose a folder outside, so "
                "that the base model stays as it is."
            )
    if output_dir.exists() and not output_dir.is_dir():
        raise CheckpointError(f"output_dir: {output_dir} is a file: choose a folder.")
    for path in (output_dir, *output_dir.parents):
        if path.is_symlink() and not path.exists():
            raise CheckpointError(
                f"output_dir: {path} is a link to {os.readlink(path)}, which is not there: make that folder, or choose "
                "another output_dir."
            )
    held = complete_directories(output_dir) or sorted(_named_directories(output_dir))
    if held and not resume:
        raise CheckpointError(
            f"output_dir: {output_dir} already holds a run ({held[-1].name}): set resume_from_checkpoint=True to go on "
            "with it, or choose another output_dir."
        )
    # found out now, not when the first checkpoint is due
    existing = next(path for path in (output_dir.absolute(), *output_dir.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"output_dir: {output_dir} cannot be made, because {existing} is not a folder that this process may write "
            "to: choose another output_dir."
        )
