"""Rows that one process of a machine prepares and all of them use, in this run and in later ones."""

import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from torchtune.data import DataError
from torchtune.datasets._fingerprint import Fingerprint
from torchtune.datasets._parallel import ProcessKilled
from torchtune.datasets._preview import NotRead, is_preview, reads_nothing
from torchtune.datasets._store import TokenStore, Writers, open_store
from torchtune.utils import (
    atomic_directory,
    get_logger,
    log_rank_zero,
    read_json,
    refuse_foreign,
    sign_of_life,
    write_json,
)
from torchtune.utils._files import WriteError, os_errors_of

# (writers by name) -> what else there is to say of the rows, as plain data.
Build = Callable[[Writers], dict[str, Any]]
Prepared = tuple[dict[str, TokenStore], dict[str, Any]]

_META = "meta.json"
_PARTS = "made_of.json"
_CHECKED = "checked.json"
_SAID = {"code": "another version of torchtune or of a package that tokenizes", "data": "other content of the data"}
_FREE = "free space, or choose another --output; nothing is left of what was written"
_STALE = 3600.0  # seconds after which a folder that nobody writes to was left by a process that was killed
_KILLED = (KeyboardInterrupt, ProcessKilled)  # what a preparation goes on after
_OWN_NAME = re.compile(r"(own-\w{8}|run-[0-9a-f]{64}|\.(run-)?[0-9a-f]{64}\.([0-9a-f]{8}\.tmp|part))")
_THIS_PROCESS = uuid.uuid4().hex
_made: Counter[str] = Counter()


def cache_folder() -> Path:
    """Where prepared rows are kept: ``TORCHTUNE_CACHE``, by default ``torchtune`` in the user's cache folder.

    Raises:
        DataError: the folder belongs to another user, may be written to by others, or cannot be made.
        ForeignPathError: a link or a folder above it belongs to another user.
    """
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(os.environ.get("TORCHTUNE_CACHE") or Path(home) / "torchtune").expanduser() / "rows"
    refuse_foreign(folder, "TORCHTUNE_CACHE")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found, may_write = folder.stat(), os.access(folder, os.W_OK | os.X_OK)
    except OSError as error:
        raise DataError(f"Cannot make the folder {folder} for prepared rows ({error.strerror}): {_HINT}.") from error
    if found.st_uid != os.getuid():
        raise DataError(f"The folder {folder} for prepared rows belongs to another user: {_HINT}.")
    if not may_write:
        raise DataError(f"The folder {folder} for prepared rows may not be written to: {_HINT}.")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = f"{stat.S_IMODE(found.st_mode):o}"
        raise DataError(
            f"The folder {folder} for prepared rows may be written to by other users (mode {mode}): take that right "
            f"from them with chmod go-w, or {_HINT}."
        )
    return folder


@contextmanager
def preparing(folder: Path) -> Iterator[None]:
    """Inside the block rows are written to ``folder``, to be read from there by ``prepared``."""
    token = _output.set(folder)
    try:
        yield
    finally:
        _output.reset(token)


def is_preparing() -> bool:
    """Whether this runs in a :func:`preparing` block."""
    return _output.get() is not None


_output: ContextVar[Path | None] = ContextVar("output", default=None)
_HINT = "set the environment variable TORCHTUNE_CACHE to a folder of your own"


def prepare(
    fingerprint: Fingerprint, names: Sequence[str], source: str, build: Build, folder: Path | None = None
) -> Prepared:
    """The rows of a fingerprint: those that are there, or those that ``build`` writes.

    One process builds while the others of the machine wait. A fingerprint that is exact is kept for later runs. One
    that is not is shared by the local processes of this run under ``torchrun``, and removed when all have opened it.

    Args:
        fingerprint: what the rows depend on.
        names: the stores.
        source: what the rows are from, for messages.
        build: called once; fills the writers.
        folder: where ``tune data prepare`` has put them; nothing is built then.

    Returns:
        the stores by name, and what ``build`` returned.

    Raises:
        DataError: ``build`` does, or the cache folder cannot be used; ``folder`` has no such rows.
    """
    output = _output.get()
    if folder is not None and output is None:
        return _prepared_before(fingerprint, names, source, folder)
    if output is not None and not fingerprint.is_exact:
        raise DataError(
            f"The rows of {source} cannot be prepared for later runs: a transform or filter that is not of this "
            "library needs an attribute fingerprint, a text that changes when it does."
        )
    root, hint = (
        (cache_folder(), f"{_HINT} on a disk with enough space") if output is None else (_made_folder(output), _FREE)
    )
    key = fingerprint.text if fingerprint.is_exact else _key_of_this_run(fingerprint)
    if key is None or is_preview():
        with tempfile.TemporaryDirectory(dir=root, prefix="own-") as own:
            with _writing(Path(own), hint):
                _write(Path(own), names, build)
            return _found(_open(Path(own), names), own)
    folder = root / key
    if fingerprint.is_exact and _is_checked(folder) and (prepared := _open(folder, names)):
        return prepared
    with _locked(root / f"{key}.lock", source, hint) as is_locked:
        prepared = _open(folder, names, checks=not _is_checked(folder))
        if prepared is None:
            if folder.exists():
                get_logger().warning(f"The prepared rows in {folder} are damaged: they are prepared anew.")
            _remove_left_overs(root, key)
            shutil.rmtree(folder, ignore_errors=True)  # there is none, or it is damaged
            goes_on = output is not None and is_locked
            kept_on = _KILLED if goes_on else ()
            with _writing(folder, hint), atomic_directory(folder, replace=False, kept_on=kept_on) as temporary:
                if output is None:
                    temporary.chmod(0o700)
                _write(temporary, names, build, goes_on)
                write_json(temporary / _PARTS, {**fingerprint.parts, "code": fingerprint.code})
            prepared = _open(folder, names)
        if prepared is not None:
            _mark_checked(folder)
        if not fingerprint.is_exact:
            _leave(folder)
        return _found(prepared, folder)


@contextmanager
def _writing(folder: Path, hint: str) -> Iterator[None]:
    """Inside the block, a failed write raises :class:`DataError`, which says what to do."""
    try:
        with os_errors_of(folder):
            yield
    except WriteError as error:
        raise DataError(f"{error.fact}, where rows are prepared: {hint}.") from error


def _made_folder(folder: Path) -> Path:
    refuse_foreign(folder, "--output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"Cannot make the folder {folder} ({error.strerror}): choose another --output.") from error
    return folder


def _prepared_before(fingerprint: Fingerprint, names: Sequence[str], source: str, root: Path) -> Prepared:
    """The rows in a folder of ``tune data prepare``. Raises :class:`DataError` where it has others, and says how."""
    if not root.is_dir():
        raise DataError(f"There is no folder {root} with prepared rows: write it with tune data prepare.")
    if reads_nothing():
        raise NotRead(f"{root} is there")
    folder = root / fingerprint.text
    # The folder may be one that cannot be written to, so no mark tells the other processes of this machine. They need
    # none: where the first one finds damage, the run ends.
    if prepared := _open(folder, names, checks=os.environ.get("LOCAL_RANK", "0") == "0"):
        return prepared
    if folder.is_dir():
        raise DataError(f"The rows in {root} are damaged: prepare them again with tune data prepare.")
    found = [_differences(fingerprint, path) for path in sorted(root.glob(f"[!.]*/{_PARTS}"))]
    if not found:
        raise DataError(f"There are no prepared rows in {root}: write them with tune data prepare.")
    changed = min(found, key=len)
    public = [name for name in changed if "._" not in name] or changed  # what a private one holds follows from these
    said = [_SAID.get(name, f"another {name}") for name in public[:5]]
    what = " and ".join(said) or "other settings"
    raise DataError(
        f"The rows in {root} do not fit {source} as it is read now, they were made with {what}: prepare them again "
        "with tune data prepare, or set that back."
    )


def _differences(fingerprint: Fingerprint, path: Path) -> list[str]:
    return fingerprint.differences({name: str(value) for name, value in read_json(path, DataError).items()})


def _found(prepared: Prepared | None, folder: Any) -> Prepared:
    if prepared is None:
        raise DataError(f"The rows that were just prepared in {folder} cannot be read: {_HINT}.")
    return prepared


def _key_of_this_run(fingerprint: Fingerprint) -> str | None:
    """What only the local processes of this attempt of a run share; None for a process on its own.

    All of them make the same datasets in the same order.
    """
    run = _this_run()
    if not fingerprint.is_shared or len(run) == 1:
        return None
    text = fingerprint.text
    _made[text] += 1
    parts = [*run, text, _made[text]]
    return "run-" + hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _this_run() -> list[Any]:
    """Values that the local processes of this attempt of a run have in common; one value for a process on its own."""
    run = [os.environ.get(name) for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")]
    if run[0] is None or _local_processes() == 1:
        return [_THIS_PROCESS]
    return [*run, socket.gethostname(), os.getppid()]


def _local_processes() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _write(folder: Path, names: Sequence[str], build: Build, goes_on: bool = False) -> None:
    writers = Writers(folder, names, goes_on)
    try:
        info = build(writers)
        meta = writers.finish()
    finally:
        writers.close()
    write_json(folder / _META, {"stores": meta, "info": info})


def _open(folder: Path, names: Sequence[str], checks: bool = False) -> Prepared | None:
    """The rows that were prepared in a folder; None where there are none, or they are damaged.

    Args:
        folder: with their files.
        names: the stores.
        checks: compare the content of the files with its checksum; by default their sizes alone.
    """
    try:
        meta = json.loads((folder / _META).read_text())
        stores = {name: open_store(folder, name, meta["stores"][name], checks) for name in names}
        if None not in stores.values():
            return stores, meta["info"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    return None


def _state(folder: Path) -> dict[str, Any]:
    """This run, and the files of a folder as they are now."""
    files = {path.name: path.stat() for path in sorted(folder.iterdir()) if path.name != _CHECKED}
    rows = {name: [found.st_size, found.st_mtime_ns] for name, found in files.items() if not name.startswith("opened-")}
    return {"run": _this_run(), "files": rows}


def _is_checked(folder: Path) -> bool:
    """Whether a process of this run has compared the rows of a folder with their checksum, or has written them."""
    try:
        return json.loads((folder / _CHECKED).read_text()) == _state(folder)
    except (OSError, ValueError, RecursionError):
        return False


def _mark_checked(folder: Path) -> None:
    if not _is_checked(folder):
        write_json(folder / _CHECKED, _state(folder))


def _leave(folder: Path) -> None:
    """Note that this process has mapped the rows of a run; the last one removes their folder."""
    (folder / f"opened-{os.getpid()}").touch()
    if len(list(folder.glob("opened-*"))) >= _local_processes():
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_name(f"{folder.name}.lock").unlink(missing_ok=True)


def _remove_left_overs(root: Path, key: str) -> None:
    """Remove what killed processes have left of rows, of runs, and of preparations that nobody went on with.

    Other folders stay, whatever their names: ``tune data prepare`` may write to one that holds the user's runs.
    """
    for path in root.iterdir():
        if not _OWN_NAME.fullmatch(path.name) or path.name == f".{key}.part" or path.is_symlink():
            continue
        newest = max((entry.stat().st_mtime for entry in [path, *path.glob("*")] if entry.exists()), default=0.0)
        if path.is_dir() and time.time() - newest > _STALE:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _locked(path: Path, source: str, hint: str) -> Iterator[bool]:
    """Hold the lock of a file, and say whether there is one.

    The system gives it back when a process ends, however it ends. Local rank 0 comes first, because its messages are
    the ones that are read. Where a file system has no locks, two processes may do the same work, and the folder of the
    first one counts.

    Raises:
        DataError: a link or a folder has the name of the file.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0" and not path.exists():
        time.sleep(0.5)
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise DataError(f"The lock {path} cannot be opened ({error.strerror}): remove it, or {hint}.") from error
    try:
        started, told, is_locked = time.monotonic(), False, True
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
                sign_of_life()
            except OSError:  # no locks here
                is_locked = False
                break
            if not told and time.monotonic() - started > 10:
                log_rank_zero(get_logger(), f"Another process of this machine prepares {source}: waiting for it.")
                told = True
        yield is_locked
    finally:
        os.close(file)
