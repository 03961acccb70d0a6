"""Cache of prepared rows: one process per machine writes them, all processes and later runs map them."""

import hashlib
import json
import os
import re
import shlex
import shutil
import socket
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torchtune.data import DataError
from torchtune.datasets._command_modes import (
    SHARDS,
    NotRead,
    is_preparing,
    is_preview,
    preparation_folder,
    reads_nothing,
)
from torchtune.datasets._fingerprint import Fingerprint
from torchtune.datasets._processes import ProcessKilled
from torchtune.datasets._token_store import PreparedRows, RowWriter, fingerprint_of
from torchtune.utils import (
    FolderLock,
    WriteError,
    atomic_directory,
    cache_root,
    convert_os_errors,
    get_logger,
    read_json,
    refuse_path_of_other_user,
    write_json,
)

_META = "meta.json"
_OTHER_CACHE = "set the environment variable TORCHTUNE_CACHE to a folder of your own"
_STALE = 3600.0  # seconds without writes after which a folder counts as abandoned
_KILLED = (KeyboardInterrupt, ProcessKilled)  # errors after which a preparation can be continued
# Names of the folders that this module makes and that a killed process may leave.
_FOLDER_NAME = re.compile(r"(own-\w{8}|run-[0-9a-f]{64}|\.(run-)?[0-9a-f]{64}\.([0-9a-f]{8}\.tmp|part))")
# Parts of a fingerprint that have a description for users.
_DESCRIPTIONS = {
    "code": "another version of torchtune or of a package that tokenizes",
    "data": "other content of the data",
}
# Fingerprint -> number of datasets of this run with it.
_num_datasets: Counter[str] = Counter()


def cache_path() -> Path:
    """Return ``$TORCHTUNE_CACHE/rows``, by default ``torchtune/rows`` in the user's cache folder."""
    return cache_root() / "rows"


def cache_folder() -> Path:
    """Return :func:`cache_path`, and create it if it is missing.

    Raises:
        DataError: the folder belongs to another user, is writable by others, or cannot be created or written to.
        ForeignPathError: a link or a folder above it belongs to another user.
    """
    folder = cache_path()
    refuse_path_of_other_user(folder, "TORCHTUNE_CACHE")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise DataError(
            f"Cannot make the folder {folder} for prepared rows ({error.strerror}): {_OTHER_CACHE}."
        ) from error
    # Whoever can write to the folder could change what the model is trained on.
    if status.st_uid != os.getuid():
        raise DataError(f"The folder {folder} for prepared rows belongs to another user: {_OTHER_CACHE}.")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = f"{stat.S_IMODE(status.st_mode):o}"
        raise DataError(
            f"The folder {folder} for prepared rows may be written to by other users (mode {mode}): take that right "
            f"from them with chmod go-w, or {_OTHER_CACHE}."
        )
    return folder


@dataclass
class CacheEntry:
    """Entry of the cache inside a :func:`cache_entry` block.

    Attributes:
        rows: the rows, if the cache has them; after the block, also those that the block has written.
        writer: writes the rows if the cache does not have them.
        is_stored: whether the rows are kept. A block that cannot write all of them sets it to False.
    """

    rows: PreparedRows | None = None
    writer: RowWriter | None = None
    is_stored: bool = True


@contextmanager
def cache_entry(fingerprint: Fingerprint, source: str, prepared: Path | None = None) -> Iterator[CacheEntry]:
    """Context manager of the prepared rows of a fingerprint; if they are missing, the block writes them.

    One process writes while the others of the machine wait. Rows with an exact fingerprint are cached for later runs.
    Other rows are shared by the local ranks of this run under ``torchrun``, and deleted when all have mapped them.

    Args:
        fingerprint: fingerprint of the rows.
        source: name of the source, for messages.
        prepared: output folder of ``tune data prepare`` with the rows; if it is set, nothing is written.

    Raises:
        DataError: the cache folder cannot be used, ``prepared`` has no such rows, or the fingerprint is not exact
            inside a :func:`preparing` block.
    """
    output = preparation_folder()  # None unless `tune data prepare` is writing the rows, whatever `prepared` says
    if prepared is not None and output is None:
        yield CacheEntry(_rows_prepared_before(fingerprint, source, prepared))
        return
    if output is None:
        root = cache_folder()
        advice = f"{_OTHER_CACHE} on a disk with enough space"
    elif fingerprint.is_exact:
        root = _output_folder(output)
        advice = "free space, or choose another --output; nothing is left of what was written"
    else:
        raise DataError(
            f"The rows of {source} cannot be prepared for later runs: a transform or filter that is not of this "
            "library needs an attribute fingerprint, a text that changes when it does."
        )
    if fingerprint.is_exact:
        key = fingerprint.text
    else:
        key = _key_of_this_run(fingerprint)
    if key is None or is_preview():  # rows of this process alone
        entry = CacheEntry()
        with tempfile.TemporaryDirectory(dir=root, prefix="own-") as folder:
            with _explained_writes(Path(folder), advice), _writing(entry, Path(folder), fingerprint):
                yield entry
            if entry.is_stored:
                entry.rows = PreparedRows(Path(folder))  # its files are mapped, and need no names from here on
        return
    if fingerprint.is_exact:  # an earlier run may have written the rows: complete ones are read without the lock
        rows = _open(root / key)
        if rows is not None:
            yield CacheEntry(rows)
            return
    with _locked(root, key, source, advice) as is_locked:
        entry = CacheEntry(_open(root / key))  # another process may have written them meanwhile
        if entry.rows is not None:
            yield entry
        else:
            with _new_folder(root, key, advice, is_locked=is_locked) as folder, _writing(entry, folder, fingerprint):
                yield entry
            if entry.is_stored:
                entry.rows = PreparedRows(root / key)
            else:  # rows with images, of which no tokens are kept
                shutil.rmtree(root / key, ignore_errors=True)
        if entry.rows is not None and not fingerprint.is_exact:  # no later run can use them
            _leave(root / key)


def _output_folder(folder: Path) -> Path:
    """Return the output folder of a preparation, and create it if it is missing."""
    refuse_path_of_other_user(folder, "--output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"Cannot make the folder {folder} ({error.strerror}): choose another --output.") from error
    return folder


@contextmanager
def _new_folder(root: Path, key: str, advice: str, *, is_locked: bool) -> Iterator[Path]:
    """Context manager of the folder of an entry that is missing or damaged, which gets its name at the end.

    Args:
        root: folder of the cache, or output folder of a preparation.
        key: name of the entry.
        advice: what to do if the rows cannot be written.
        is_locked: whether no other process writes the entry.
    """
    folder = root / key
    if folder.exists():
        get_logger().warning(f"The prepared rows in {folder} are damaged: they are prepared anew.")
    _remove_abandoned(root, key)
    shutil.rmtree(folder, ignore_errors=True)
    # Only `tune data prepare` goes on where a killed process stopped, and only if no other one can.
    keep_on: tuple[type[BaseException], ...] = ()
    if is_preparing() and is_locked:
        keep_on = _KILLED
    with _explained_writes(folder, advice), atomic_directory(folder, replace=False, keep_on=keep_on) as temporary:
        if not is_preparing():  # the rows of a user are not for others
            temporary.chmod(0o700)
        yield temporary


@contextmanager
def _writing(entry: CacheEntry, folder: Path, fingerprint: Fingerprint) -> Iterator[None]:
    """Let the block write the rows of an entry, and then write what they were made of.

    The latter file is the last one: a folder without it counts as damaged.
    """
    with closing(RowWriter(folder)) as writer:
        entry.writer = writer
        yield
    if entry.is_stored:
        meta = {"fingerprint": fingerprint_of(writer.sums), "made_of": fingerprint.made_of}
        write_json(folder / _META, meta)


@contextmanager
def _explained_writes(folder: Path, advice: str) -> Iterator[None]:
    """Convert failed writes inside the block to :class:`DataError` with advice."""
    try:
        with convert_os_errors(folder):
            yield
    except WriteError as error:
        raise DataError(f"{error.fact}, where rows are prepared: {advice}.") from error


def _rows_prepared_before(fingerprint: Fingerprint, source: str, root: Path) -> PreparedRows:
    """Return the rows in an output folder of ``tune data prepare``; raise with the differences if they do not match."""
    if not root.is_dir():
        raise DataError(f"There is no folder {root} with prepared rows: write it with tune data prepare.")
    if reads_nothing():  # a check of the config: without a tokenizer, the fingerprint is another one
        raise NotRead(f"{root} is there")
    folder = root / fingerprint.text
    rows = _open(folder)
    if rows is not None:
        return rows
    if folder.is_dir():
        raise DataError(f"The rows in {root} are damaged: prepare them again with tune data prepare.")
    metas = [read_json(path, DataError) for path in sorted(root.glob(f"[!.]*/{_META}"))]
    if not metas and (root / SHARDS).is_dir():
        raise DataError(f"The rows in {root} are shards: join them with tune data merge {shlex.quote(str(root))}.")
    if not metas:
        raise DataError(f"There are no prepared rows in {root}: write them with tune data prepare.")
    # A folder holds the rows of several datasets: those with the fewest differences are the ones that are meant.
    differences = min((fingerprint.differences(meta.get("made_of", {})) for meta in metas), key=len)
    raise DataError(
        f"The rows in {root} do not fit {source} as it is read now, they were made with "
        f"{describe_differences(differences)}: prepare them again with tune data prepare, or set that back."
    )


def describe_differences(differences: Sequence[str]) -> str:
    """Return the first differences of two fingerprints for a message, such as "another tokenizer.max_seq_len"."""
    # Private attributes depend on public ones, which say more.
    public = [name for name in differences if "._" not in name]
    descriptions = [_DESCRIPTIONS.get(name, f"another {name}") for name in (public or differences)[:5]]
    return " and ".join(descriptions) or "other settings"


def _key_of_this_run(fingerprint: Fingerprint) -> str | None:
    """Return a cache key for the local ranks of this attempt of a run; None if they cannot share rows.

    Ranks find the same key because all create the same datasets in the same order.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if not fingerprint.is_shared or run_id is None or _local_processes() == 1:
        return None
    text = fingerprint.text
    _num_datasets[text] += 1
    parts = [
        run_id,
        os.environ.get("TORCHELASTIC_RESTART_COUNT"),
        os.environ.get("MASTER_PORT"),
        socket.gethostname(),
        os.getppid(),  # torchrun's process
        text,
        _num_datasets[text],
    ]
    return "run-" + hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _local_processes() -> int:
    """Return the number of ranks of this run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _open(folder: Path) -> PreparedRows | None:
    """Return the prepared rows of a folder; None if they are missing or damaged."""
    try:
        fingerprint = json.loads((folder / _META).read_text())["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    rows = PreparedRows(folder)
    if rows.fingerprint != fingerprint:
        return None
    return rows


def _leave(folder: Path) -> None:
    """Record that this process has mapped the rows of a run; the last local rank deletes their folder."""
    (folder / f"opened-{os.getpid()}").touch()
    if len(list(folder.glob("opened-*"))) >= _local_processes():
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(root: Path, key: str) -> None:
    """Delete abandoned folders of killed processes.

    Only folders named by this module are deleted: ``tune data prepare`` may write to a folder that also holds runs.
    """
    for path in root.iterdir():
        if not _FOLDER_NAME.fullmatch(path.name) or path.name == f".{key}.part" or path.is_symlink():
            continue
        # The time of a folder does not change while one of its files grows.
        last_write = 0.0
        for entry in (path, *path.glob("*")):
            with suppress(FileNotFoundError):  # another process deletes it as well
                last_write = max(last_write, entry.stat().st_mtime)
        if path.is_dir() and time.time() - last_write > _STALE:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _locked(root: Path, key: str, source: str, advice: str) -> Iterator[bool]:
    """Hold the lock of a cache entry inside the block; yield whether the file system supports locks.

    Local rank 0 goes first, because only its messages are shown. Without locks, two processes may do the same work; the
    folder that is completed first is used.

    Raises:
        DataError: the path of the lock file is a link or a folder.
    """
    lock = FolderLock(root, name=f"{key}.lock", key="TORCHTUNE_CACHE")
    if os.environ.get("LOCAL_RANK", "0") != "0" and not lock.path.exists():
        time.sleep(0.5)  # until rank 0 holds the lock
    with ExitStack() as stack:
        waiting = f"Another process of this machine prepares {source}: waiting for it."
        try:
            is_locked = stack.enter_context(lock.held(waiting))
        except WriteError as error:
            raise DataError(f"{error.fact}: remove it, or {advice}.") from error
        yield is_locked
