"""Directories of checkpoints: which are whole, which one to resume from, which may go."""

import json
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


@dataclass(frozen=True)
class ResumePoint:
    """A complete checkpoint that training can go on from.

    Attributes:
        path: its directory.
    """

    path: Path

    @cached_property
    def progress(self) -> dict[str, Any]:
        """The plain numbers that the recipe saved: seed, global step and so on."""
        return load_progress(self.path)


def complete_directories(output_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first. A directory without a marker does not count."""
    if not output_dir.is_dir():
        return []
    found = [path for path in output_dir.iterdir() if _NAME.match(path.name) and (path / MARKER).is_file()]
    return sorted(found, key=lambda path: (_marker(path)["saves"], path.name))


def _marker(path: Path) -> dict[str, Any]:
    return json.loads((path / MARKER).read_text())


@contextmanager
def new_directory(output_dir: Path, name: str) -> Iterator[Path]:
    """Give a directory that becomes ``output_dir/name``, marked complete, when the block ends without an error."""
    if not _NAME.match(name):
        raise ValueError(f"'{name}' is no name of a checkpoint: use epoch_N or step_N.")
    earlier = complete_directories(output_dir)
    saves = 1 + (_marker(earlier[-1])["saves"] if earlier else 0)
    with atomic_directory(output_dir / name) as folder:
        yield folder
        (folder / MARKER).write_text(json.dumps({"saves": saves, "resumable": (folder / STATE_DIR).exists()}))


def prune(output_dir: Path, keep: int | None) -> None:
    """Remove the oldest complete checkpoints beyond ``keep``, never the newest."""
    if keep is None:
        return
    for path in complete_directories(output_dir)[: -max(keep, 1)]:
        (path / MARKER).unlink()  # from here on it is not complete, whatever happens to the rest
        shutil.rmtree(path)


def find_resume_point(output_dir: Path) -> ResumePoint | None:
    """The newest complete checkpoint that carries training state; ``None`` if there is no checkpoint at all.

    What an interrupted save left behind is removed.

    Raises:
        CheckpointError: the run is finished.
    """
    for path in output_dir.glob(".*.tmp") if output_dir.is_dir() else ():
        if _NAME.match(path.name.split(".")[1]):
            shutil.rmtree(path)
    complete = complete_directories(output_dir)
    if not complete:
        get_logger().warning(f"{output_dir} holds no complete checkpoint: the run starts from the beginning.")
        return None
    if not _marker(complete[-1])["resumable"]:
        raise CheckpointError(
            f"output_dir: the run in {output_dir} is finished ({complete[-1].name}), there is nothing to resume: start "
            f"a new run from that folder, in another output_dir."
        )
    return ResumePoint(complete[-1])


def check_output_dir(output_dir: Path, checkpoint_dir: Path | None, *, resume: bool) -> None:
    """Refuse an output folder that would overwrite something.

    Raises:
        CheckpointError: it is, or lies in, ``checkpoint_dir``; or it holds a run that is not to be resumed.
    """
    if checkpoint_dir is not None:
        inside, outside = output_dir.resolve(), checkpoint_dir.resolve()
        if inside == outside or outside in inside.parents:
            raise CheckpointError(
                f"output_dir: {output_dir} is inside checkpoint_dir ({checkpoint_dir}): choose a folder outside, so "
                "that the base model stays as it is."
            )
    held = complete_directories(output_dir)
    if held and not resume:
        raise CheckpointError(
            f"output_dir: {output_dir} already holds a run ({held[-1].name}): set resume_from_checkpoint=True to go on "
            "with it, or choose another output_dir."
        )
