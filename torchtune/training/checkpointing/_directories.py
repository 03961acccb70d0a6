"""Directories of checkpoints: which are whole, which one to resume from, which may go."""

import json
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from torchtune.training.checkpointing._errors import CheckpointError
from torchtune.training.checkpointing._state import MODELS, STATE_DIR, STRUCTURE, load_progress
from torchtune.utils import atomic_directory, get_logger, log_once

MARKER = ".complete"
_NAME = re.compile(r"^(epoch|step)_(\d+)$")
# What atomic_directory leaves behind when the process is killed: .NAME.xxxxxxxx.tmp, or, if it was replacing a
# directory of that name, .NAME.xxxxxxxx.old.tmp; and what prune was about to delete: .removed_NAME.xxxxxxxx.tmp
_LEFTOVER = re.compile(r"^\.(?:removed_)?((?:epoch|step)_\d+)\.[0-9a-f]+(\.old)?\.tmp$")
# Of the checkpoints by steps so many are kept by default; those of epochs all.
KEPT_STEPS = 3
# What a run cannot go on from if it is damaged. The rest of a checkpoint (configs, a tokenizer) may well be edited.
_NEEDED = (".safetensors", ".index.json", ".bin", ".pt", f"{STATE_DIR}/{STRUCTURE}", f"{STATE_DIR}/{MODELS}")
_CHUNK = 2**22

# Size of a file and its CRC-32, by its path in the folder. It is the checksum of the standard library: xxhash is five
# times as fast, but a direct dependency, and this one keeps up with disks (1.8 GB/s a core) and is spread over ranks.
Sums = dict[str, tuple[int, int]]


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
    """Complete checkpoints, oldest first. A directory without a marker, or with one that is damaged, does not count."""
    found = []
    for path in _named_directories(output_dir):
        try:
            found.append((_marker(path)["saves"], path.name, path))
        except CheckpointError:
            continue
    return [path for _, _, path in sorted(found)]


def _marker(path: Path) -> dict[str, Any]:
    """What the marker says.

    ``saves``, the how manieth save of the run it was, ``resumable``, ``files``: the bytes of those with tensors, and
    ``crc32``: the checksums of all (older markers do not say).

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    try:
        marker = json.loads((path / MARKER).read_text(encoding="utf-8"))
        files = {_inside(name): int(size) for name, size in marker.get("files", {}).items()}
        sums = {_inside(name): int(text, 16) for name, text in marker.get("crc32", {}).items()}
        return {"saves": int(marker["saves"]), "resumable": bool(marker["resumable"]), "files": files, "crc32": sums}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(
            f"{path / MARKER} was not written by this library or is damaged: delete {path.name} or that file."
        ) from error


def _inside(name: str) -> str:
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ValueError(f"{name} leaves the folder")
    return name


@contextmanager
def new_directory(output_dir: Path, name: str, sums: Mapping[str, tuple[int, int]] | None = None) -> Iterator[Path]:
    """Give a directory that becomes ``output_dir/name``, marked complete, when the block ends without an error.

    Args:
        output_dir: of the run.
        name: ``epoch_N`` or ``step_N``.
        sums: size and checksum of files, as those know who wrote them; filled before the block ends. Others are read.

    Raises:
        CheckpointError: a file is not what was written.
    """
    if not _NAME.match(name):
        raise ValueError(f"'{name}' is no name of a checkpoint: use epoch_N or step_N.")
    earlier = complete_directories(output_dir)
    saves = 1 + (_marker(earlier[-1])["saves"] if earlier else 0)
    with atomic_directory(output_dir / name) as folder:
        yield folder
        sizes = {
            str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()
        }
        known = dict(sums or {})
        for file, (size, _) in known.items():
            if sizes.get(file) != size:
                raise CheckpointError(
                    f"{output_dir / name / file} has {sizes.get(file, 0):,} bytes right after {size:,} were written: "
                    "the file system of output_dir loses data, or is not the same on all machines; choose another."
                )
        crcs = {file: f"{known[file][1] if file in known else checksum(folder / file):08x}" for file in sizes}
        tensors = {file: size for file, size in sizes.items() if file.endswith(_NEEDED)}
        marker = {"saves": saves, "resumable": (folder / STATE_DIR).exists(), "files": tensors, "crc32": crcs}
        (folder / MARKER).write_text(json.dumps(marker))


def checksum(path: Path, progress: Callable[[int], object] = lambda count: None) -> int:
    """CRC-32 of a file; ``progress`` is told how many bytes were read since it was last called."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
            progress(len(chunk))
    return crc


def marked_files(path: Path, *, everything: bool) -> list[str]:
    """The files whose size or checksum the marker of a checkpoint knows; those that a resume needs, or all.

    Raises:
        CheckpointError: the marker is missing or damaged.
    """
    marker = _marker(path)
    return sorted(n for n in marker["files"] | marker["crc32"] if everything or n in marker["files"])


def damage(path: Path, names: list[str], progress: Callable[[int], object] = lambda count: None) -> list[str]:
    """What is wrong with files of a complete checkpoint, a phrase each: they are gone, cut or changed."""
    marker, found = _marker(path), []
    for name in names:
        file, size, crc = path / name, marker["files"].get(name), marker["crc32"].get(name)
        try:
            actual = file.stat().st_size if file.is_file() else None
            if actual is None:
                found.append(f"{file} is missing")
            elif size is not None and actual != size:
                found.append(f"{file} has {actual:,} bytes instead of {size:,}")
            elif crc is not None and (other := checksum(file, progress)) != crc:
                found.append(f"{file} was changed since it was saved (its CRC-32 is {other:08x} instead of {crc:08x})")
        except OSError as error:
            found.append(f"{file} cannot be read ({error.strerror})")
    return found


def checkpoints_in(folder: Path) -> list[Path]:
    """The folder, if it is a checkpoint, else those that lie in it, oldest first.

    Raises:
        CheckpointError: there are none.
    """
    if (folder / MARKER).exists():
        return [folder]
    named = _named_directories(folder)
    complete = complete_directories(folder)
    found = complete + sorted(path for path in named if path not in complete and (path / MARKER).exists())
    if not found:
        what = "holds no checkpoint" if folder.is_dir() else "is no folder"
        raise CheckpointError(
            f"{folder} {what}: give a checkpoint (epoch_N or step_N) that a recipe has saved, or the output_dir of a "
            "run."
        )
    return found


def verify_checkpoint(folder: Path, progress: Callable[[int], object] = lambda count: None) -> tuple[int, int]:
    """Read every file of a checkpoint, and compare it with what the save has noted.

    Args:
        folder: of the checkpoint.
        progress: is told now and then how many bytes were read since the last time.

    Returns:
        the number of files, and their bytes.

    Raises:
        CheckpointError: files are missing, cut or changed, or there are no checksums to compare with.
    """
    names = marked_files(folder, everything=True)
    if faults := damage(folder, names, progress):
        raise CheckpointError(f"{folder} is damaged: {'; '.join(faults)}.")
    if not _marker(folder)["crc32"]:
        raise CheckpointError(
            f"{folder} was saved without checksums, by an earlier release: the sizes of its files are right, more "
            "cannot be told."
        )
    return len(names), sum((folder / name).stat().st_size for name in names)


def prune(output_dir: Path, keep: int | None) -> None:
    """Remove the oldest complete checkpoints beyond ``keep``, never the newest. What cannot be removed stays.

    Args:
        output_dir: of the run.
        keep: how many; ``None`` for all of epochs and the last three of steps, but for those that an earlier release
            of the library wrote, which kept them all.
    """
    complete = complete_directories(output_dir)
    if keep is None:
        by_steps = [path for path in complete if path.name.startswith("step_") and _marker(path)["crc32"]]
        gone = [path for path in by_steps[:-KEPT_STEPS] if path != complete[-1]]
    else:
        gone = complete[: -max(keep, 1)]
    for path in gone:
        if keep is None:
            log_once(
                get_logger(),
                f"Of the checkpoints by steps the last {KEPT_STEPS} are kept, older ones are removed: "
                "checkpointer.keep_last_n_checkpoints changes how many.",
            )
        try:
            aside = path.with_name(f".removed_{path.name}.{uuid.uuid4().hex[:8]}.tmp")
            os.rename(path, aside)  # from here on it is not there, whatever happens to the rest
            shutil.rmtree(aside)
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


def resume_candidates(output_dir: Path) -> list[Path]:
    """Complete checkpoints that a run may go on from, newest first; none if it starts from the beginning.

    What an interrupted save left behind is removed.

    Raises:
        CheckpointError: what there is was not written whole by this library.
    """
    if output_dir.is_dir():
        _clear_leftovers(output_dir)
    complete = complete_directories(output_dir)
    broken = [path for path in _named_directories(output_dir) if (path / MARKER).exists() and path not in complete]
    for path in sorted(broken):
        if not complete:
            _marker(path)  # raises
        get_logger().error(f"output_dir: {path / MARKER} is damaged: {path.name} does not count as a checkpoint.")
    if not complete:
        if unmarked := sorted(path.name for path in _named_directories(output_dir)):
            raise CheckpointError(
                f"output_dir: {output_dir} holds {', '.join(unmarked[:3])} without the marker of a complete "
                "checkpoint, so there is nothing to resume: choose another output_dir (and, to start from these "
                "weights, give that folder as checkpoint_dir)."
            )
        get_logger().warning(f"{output_dir} holds no complete checkpoint: the run starts from the beginning.")
    return complete[::-1]


def resume_point(path: Path) -> ResumePoint:
    """A complete checkpoint that is whole. Raises ``CheckpointError`` if its run is finished."""
    if not _marker(path)["resumable"]:
        raise CheckpointError(
            f"output_dir: the run in {path.parent} is finished ({path.name}), there is nothing to resume: start "
            f"a new run from that folder, in another output_dir."
        )
    return ResumePoint(path)


def refuse_damaged(path: Path, faults: list[str], left: list[Path]) -> None:
    """Say what is wrong with a checkpoint, and which one takes its place.

    Raises:
        CheckpointError: there is no other.
    """
    more = f", and {len(faults) - 1} more files are damaged" if len(faults) > 1 else ""
    what = f"output_dir: {faults[0]}{more}, although {path.name} was saved whole"
    if not left:
        raise CheckpointError(
            f"{what}, and there is no checkpoint before it to go on from: bring the file back, or delete the folder "
            f"{path.name}, and the run begins anew."
        )
    get_logger().error(
        f"{what}: the run goes on from the checkpoint before, {left[0].name}, if that is whole, and repeats what was "
        "trained since."
    )


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
