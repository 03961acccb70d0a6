"""Checkpoint folders: completion marker, checksums, resume point, pruning."""

import json
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from torchtune.checkpoints._weight_files import CheckpointError
from torchtune.utils import atomic_directory, check_writable_folder, get_logger, log_once

MARKER = ".complete"
STATE_DIR = "state"
STRUCTURE = "state.json"
# File with the run's trained and frozen models, if there are any besides the policy.
MODELS = "models.json"
# File in the run's folder that lists the checkpoints of its best validations.
BEST = "best.json"
_NAME = re.compile(r"^(epoch|step)_(\d+)\Z")
# Number of step_N kept by default; all epoch_N are kept.
KEPT_STEPS = 3
# Files that must be undamaged for a resume. Others, such as configs and tokenizers, may be edited.
_NEEDED_SUFFIXES = (
    ".safetensors",
    ".index.json",
    ".bin",
    ".pt",
    f"{STATE_DIR}/{STRUCTURE}",
    f"{STATE_DIR}/{MODELS}",
)
_CHUNK = 2**22

# Size and CRC-32 of files, by path in the folder. The standard library's CRC-32 is as fast as disks (1.8 GB/s per core)
# and ranks share the work; xxhash is five times as fast, but one more dependency.
Checksums = dict[str, tuple[int, int]]


def named_directories(output_dir: Path) -> list[Path]:
    """Return the folders named ``epoch_N`` or ``step_N``, complete or not."""
    if not output_dir.is_dir():
        return []
    return [path for path in output_dir.iterdir() if _NAME.match(path.name) and path.is_dir()]


def complete_directories(output_dir: Path) -> list[Path]:
    """Return the complete checkpoints (folders with an undamaged marker), oldest first."""
    # By the number of the save: names mix steps and epochs, and clocks of machines differ.
    numbered = []
    for path in named_directories(output_dir):
        try:
            numbered.append((read_marker(path)["saves"], path.name, path))
        except CheckpointError:
            continue
    return [path for _, _, path in sorted(numbered)]


def read_marker(path: Path) -> dict[str, Any]:
    """Read the completion marker.

    ``saves``: number of the save in its run, from 1; ``resumable``; ``files``: sizes of the files that a resume needs;
    ``crc32``: checksums of all files.

    Raises:
        CheckpointError: the marker is missing or damaged.
    """
    try:
        return parse_marker((path / MARKER).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path / MARKER} was not written by this library or is damaged: delete {path.name} or that file."
        ) from error


def parse_marker(content: bytes) -> dict[str, Any]:
    """Parse the content of a completion marker, see :func:`read_marker`. Raises ``ValueError`` if it is damaged."""
    try:
        marker = json.loads(content.decode("utf-8"))
        return {
            "saves": int(marker["saves"]),
            "resumable": bool(marker["resumable"]),
            "files": {check_relative(name): int(size) for name, size in marker["files"].items()},
            "crc32": {check_relative(name): int(text, 16) for name, text in marker["crc32"].items()},
        }
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError("the marker is damaged") from error


def check_relative(name: str) -> str:
    """Return the path of a file of a checkpoint. Raises ``ValueError`` if it leaves the folder."""
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ValueError(f"{name} leaves the folder")
    return name


def is_checkpoint_name(name: str) -> bool:
    """Return whether ``name`` is ``epoch_N`` or ``step_N``."""
    return _NAME.match(name) is not None


def check_name(name: Any) -> None:
    """Raise :class:`CheckpointError` if ``name`` is not ``epoch_N`` or ``step_N``, which a resume finds."""
    if not isinstance(name, str) or not is_checkpoint_name(name):
        raise CheckpointError(
            f"name: {name!r:.60} is not the name of a checkpoint: use epoch_N or step_N; torchtune.save writes into a "
            "folder of any name."
        )


@contextmanager
def new_directory(
    output_dir: Path, name: str, checksums: Checksums | None = None, *, last_save: int = 0
) -> Iterator[Path]:
    """Create a folder that becomes ``output_dir/name``, with a completion marker, if the block succeeds.

    Args:
        output_dir: folder of the run.
        name: ``epoch_N`` or ``step_N``.
        checksums: size and checksum of each file, if known from writing it; the block may add files. Checksums of all
            other files are computed.
        last_save: number of the last save of the run that is known from elsewhere, such as a bucket.

    Raises:
        CheckpointError: the name is not ``epoch_N`` or ``step_N``, or the size of a file differs from the number of
            bytes written.
    """
    check_name(name)
    # Saves are numbered, because the times of files are not comparable across machines, and names are not in order of
    # time.
    earlier = complete_directories(output_dir)
    if earlier:
        last_save = max(last_save, read_marker(earlier[-1])["saves"])
    with atomic_directory(output_dir / name) as folder:
        yield folder
        sizes = {}
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                sizes[str(path.relative_to(folder))] = path.stat().st_size
        # The sizes are those that this rank sees, of the files of all ranks. Shards come from several machines: a file
        # system that is not shared shows here, and not at the resume.
        written = dict(checksums or {})
        for file, (size, _) in written.items():
            if sizes.get(file) != size:
                raise CheckpointError(
                    f"{output_dir / name / file} has {sizes.get(file, 0):,} bytes right after {size:,} were written: "
                    "the file system of output_dir loses data, or is not the same on all machines; choose another."
                )
        crcs = {}
        for file in sizes:
            if file in written:
                _, crc = written[file]
            else:
                crc = checksum(folder / file)
            crcs[file] = f"{crc:08x}"
        marker = {
            "saves": last_save + 1,
            "resumable": (folder / STATE_DIR).exists(),
            "files": {file: size for file, size in sizes.items() if file.endswith(_NEEDED_SUFFIXES)},
            "crc32": crcs,
        }
        (folder / MARKER).write_text(json.dumps(marker))


def checksum(path: Path, progress: Callable[[int], object] = lambda count: None) -> int:
    """Return the CRC-32 of a file; ``progress`` receives the number of bytes read since its last call."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
            progress(len(chunk))
    return crc


def marked_files(path: Path, *, everything: bool) -> list[str]:
    """Return the files in the marker of a checkpoint: all, or only the files that a resume needs.

    Raises:
        CheckpointError: the marker is missing or damaged.
    """
    marker = read_marker(path)
    return sorted(marker["crc32"] if everything else marker["files"])


def damaged_files(path: Path, names: list[str], progress: Callable[[int], object] = lambda count: None) -> list[str]:
    """Compare files of a checkpoint with its marker; return a phrase for each missing or changed file."""
    marker = read_marker(path)
    faults = []
    for name in names:
        file = path / name
        size = marker["files"].get(name)  # None for files that a resume does not need: their checksum tells alone
        crc = marker["crc32"][name]
        try:
            if not file.is_file():
                faults.append(f"{file} is missing")
                continue
            actual_size = file.stat().st_size
            if size is not None and actual_size != size:
                faults.append(f"{file} has {actual_size:,} bytes instead of {size:,}")
                continue
            actual_crc = checksum(file, progress)
            if actual_crc != crc:
                faults.append(
                    f"{file} was changed since it was saved (its CRC-32 is {actual_crc:08x} instead of {crc:08x})"
                )
        except OSError as error:
            faults.append(f"{file} cannot be read ({error.strerror})")
    return faults


def checkpoints_in(folder: Path) -> list[Path]:
    """Return ``[folder]`` if ``folder`` is a checkpoint, otherwise the checkpoints in it, oldest first.

    Raises:
        CheckpointError: there are no checkpoints.

    Example:
        >>> from torchtune.checkpoints import checkpoints_in
        >>> path = torchtune.save(model, folder / "epoch_0", base=checkpoint)
        >>> [path.name for path in checkpoints_in(folder)]
        ['epoch_0']
    """
    if (folder / MARKER).exists():
        return [folder]
    complete = complete_directories(folder)
    marked = [path for path in named_directories(folder) if (path / MARKER).exists()]
    checkpoints = complete + sorted(path for path in marked if path not in complete)
    if not checkpoints:
        reason = "holds no checkpoint" if folder.is_dir() else "is not a folder"
        raise CheckpointError(
            f"{folder} {reason}: give a checkpoint (epoch_N or step_N) that a recipe has saved, or the output_dir of a "
            "run."
        )
    return checkpoints


def verify_checkpoint(folder: Path, progress: Callable[[int], object] = lambda count: None) -> tuple[int, int]:
    """Compare every file of a checkpoint with the size and checksum in its marker.

    Args:
        folder: folder of the checkpoint.
        progress: receives the number of bytes read since its last call.

    Returns:
        Number of files, and their total size in bytes.

    Raises:
        CheckpointError: files are missing, truncated or changed.

    Example:
        >>> from torchtune.checkpoints import verify_checkpoint
        >>> path = torchtune.save(model, folder / "mine", base=checkpoint)
        >>> verify_checkpoint(path)[0] > 0  # files with a checksum
        True
    """
    names = marked_files(folder, everything=True)
    faults = damaged_files(folder, names, progress)
    if faults:
        raise CheckpointError(f"{folder} is damaged: {'; '.join(faults)}.")
    return len(names), sum((folder / name).stat().st_size for name in names)


def newest_of(records: list[dict[str, Any]], names: Collection[str]) -> dict[str, Any] | None:
    """Return the newest record of ``best.json`` with a checkpoint in ``names``; None if there is none."""
    for record in reversed(records):
        if record["checkpoint"] in names:
            return record
    return None


def newest_record(output_dir: Path, records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the newest record of ``best.json`` with a complete checkpoint."""
    return newest_of(records, {path.name for path in complete_directories(output_dir)})


def read_best_records(output_dir: Path) -> list[dict[str, Any]]:
    """Return the records of ``best.json``, the newest last: ``checkpoint``, ``step``, ``value`` and ``metric``.

    ``metric`` is the setting ``keep_best``. Empty without the file.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        best = json.loads((output_dir / BEST).read_text(encoding="utf-8"))
        records = []
        for record in best["best"]:
            records.append({"metric": best.get("keep_best"), "checkpoint": record["checkpoint"], **record})
        return records
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{output_dir / BEST} is damaged, so that no old checkpoint is removed: delete it if none of the best is "
            "to be kept."
        ) from error


def best_record(output_dir: Path) -> dict[str, Any] | None:
    """Return the record of the best complete checkpoint, see :func:`read_best_records`; None if there is none.

    Raises:
        CheckpointError: ``best.json`` is damaged.
    """
    return newest_record(output_dir, read_best_records(output_dir))


def best_checkpoint(output_dir: Path) -> str | None:
    """Return the name of the best complete checkpoint. Raises ``CheckpointError`` if ``best.json`` is damaged."""
    record = best_record(output_dir)
    return None if record is None else record["checkpoint"]


def outdated_names(names: list[str], keep: int | None) -> list[str]:
    """Return the checkpoints beyond ``keep``; the best of ``best.json`` may be among them, the newest never is.

    Args:
        names: names of the complete checkpoints, oldest first.
        keep: number of checkpoints to keep. None keeps all ``epoch_N`` and the last three ``step_N``.
    """
    if keep is not None:
        return names[: -max(keep, 1)]
    by_steps = [name for name in names if name.startswith("step_")]
    return [name for name in by_steps[:-KEPT_STEPS] if name != names[-1]]


def prune(output_dir: Path, keep: int | None, *, underway: Path | None = None) -> None:
    """Delete the oldest complete checkpoints beyond ``keep``, but never the newest or the best of ``best.json``.

    Failures to delete are logged.

    Args:
        output_dir: folder of the run.
        keep: see :func:`outdated_names`.
        underway: a checkpoint that is being uploaded, which stays until the next call.
    """
    names = [path.name for path in complete_directories(output_dir)]
    outdated = [output_dir / name for name in outdated_names(names, keep)]
    if not outdated:
        return
    try:
        best = best_checkpoint(output_dir)
    except CheckpointError as error:
        get_logger().warning(str(error))
        return  # any of them may be the best
    for path in outdated:
        if path.name == best or path == underway:
            continue
        if keep is None:  # the user has not asked for it
            log_once(
                get_logger(),
                f"Of the checkpoints by steps the last {KEPT_STEPS} are kept, older ones are removed: "
                "checkpointer.keep_last_n_checkpoints changes how many.",
            )
        try:
            # Renamed first, so that it is removed for all readers even if rmtree is interrupted; a resume deletes
            # leftovers with names of this form.
            removed = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
            os.rename(path, removed)
            shutil.rmtree(removed)
        except OSError as error:
            get_logger().warning(f"The old checkpoint {path} could not be removed ({error}): delete it yourself.")


def check_output_dir(output_dir: Path, checkpoint_dir: Path | None, *, resume: bool) -> None:
    """Check that the output folder is writable and that saving does not overwrite anything.

    Raises:
        CheckpointError: ``output_dir`` is ``checkpoint_dir`` or inside it, is not writable, or holds a run while
            ``resume`` is False.
    """
    if checkpoint_dir is not None:
        resolved = output_dir.resolve()
        if checkpoint_dir.resolve() in (resolved, *resolved.parents):
            raise CheckpointError(
                f"output_dir: {output_dir} is inside checkpoint_dir ({checkpoint_dir}): choose a folder outside, so "
                "that the base model stays as it is."
            )
    if os.path.exists(output_dir) and not os.path.isdir(output_dir):
        raise CheckpointError(f"output_dir: {output_dir} is a file: choose a folder.")
    # A link without a target does not exist, and making the folder would fail with a message about something else.
    for path in (output_dir, *output_dir.parents):
        if os.path.islink(path) and not os.path.exists(path):
            raise CheckpointError(
                f"output_dir: {path} is a link to {os.readlink(path)}, which is not there: make that folder, or choose "
                "another output_dir."
            )
    try:  # now rather than at the first save
        check_writable_folder(output_dir)
    except OSError as error:
        raise CheckpointError(
            f"output_dir: no folder can be made in {output_dir} ({error.strerror}): choose another output_dir."
        ) from error
    # An incomplete checkpoint counts, too: nothing is overwritten.
    checkpoints = complete_directories(output_dir) or sorted(named_directories(output_dir))
    if checkpoints and not resume:
        raise CheckpointError(
            f"output_dir: {output_dir} already holds a run ({checkpoints[-1].name}): set resume_from_checkpoint=True "
            "to go on with it, or choose another output_dir."
        )
