"""Write files and directories that are either complete or absent, and files of lines that grow; refuse others' paths.

An atomic write makes a temporary file in the same directory, flushes it to disk and renames it to the final name. If
the process dies or the disk is full, the old file stays.
"""

import errno
import functools
import os
import re
import resource
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from torchtune.utils._errors import UserError
from torchtune.utils._logging import get_logger


def fsync_directory(path: str | Path) -> None:
    """Flush renames inside ``path`` to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fsync_tree(root: Path) -> None:
    for directory, _, files in os.walk(root):
        for name in files:
            descriptor = os.open(Path(directory) / name, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        fsync_directory(directory)


class WriteError(UserError):
    """Error of a file that cannot be written.

    Args:
        fact: the file and the reason.
        advice: the remedy.

    Attributes:
        fact: see Args; callers may combine it with better advice.
    """

    def __init__(self, fact: str, advice: str) -> None:
        super().__init__(f"{fact}: {advice}.")
        self.fact = fact


def explain_os_error(error: OSError, path: Path) -> UserError | OSError:
    """Convert an ``OSError`` of a write to ``path`` to an error for the user; unknown errors are returned unchanged."""
    # numpy's error after a partial write has no error number.
    is_partial_write = error.errno is None and str(error).endswith(" written")
    if error.errno in (errno.ENOSPC, errno.EDQUOT) or is_partial_write:
        free = 0.0
        if path.parent.exists():
            free = shutil.disk_usage(path.parent).free / 2**20
        return WriteError(
            f"No space left while writing {path} ({free:.0f} MiB free)",
            "nothing that was saved before is lost; free some space or choose a folder on another disk",
        )
    if error.errno == errno.EFBIG:
        return WriteError(
            f"{path} would become larger than a file may be here (ulimit -f, or what the file system takes)",
            "nothing that was saved before is lost; raise the limit or choose a folder on another disk",
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return UserError(
            f"{path} cannot be opened: too many files are open, and this process may open {limit} (ulimit -n): raise "
            "that limit."
        )
    if error.errno in (errno.EACCES, errno.EROFS):
        return WriteError(f"No permission to write {path}", "choose another folder or change its permissions")
    is_wrong_path = error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
    if is_wrong_path or not path.parent.exists():
        return WriteError(f"{path} cannot be written ({error.strerror})", "choose another path")
    return error


@contextmanager
def convert_os_errors(path: Path) -> Iterator[None]:
    """Context manager that converts each ``OSError`` with :func:`explain_os_error`."""
    try:
        yield
    except OSError as error:
        raise explain_os_error(error, path) from error


@contextmanager
def explain_file_limits() -> Iterator[None]:
    """Context manager that raises :class:`UserError` instead of ``OSError`` if too many files are open.

    Example:
        >>> with torchtune.utils.explain_file_limits():
        ...     (folder / "new").touch()
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise explain_os_error(error, Path(error.filename or "A file")) from error


def check_writable_folder(folder: Path) -> None:
    """Check that new folders can be made in a folder, which need not exist; leave nothing behind.

    Permissions do not tell: root has all of them, but /proc takes no folders. A folder with a random name is made and
    removed, not ``folder`` itself, because other machines may check or begin to use the same folder at the same time.

    Raises:
        OSError: nothing can be made in the folder, or the folder cannot be made.
    """
    folder = folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    for name in folder.relative_to(existing).parts:
        with suppress(FileNotFoundError):
            os.stat(existing / name)  # raises if the name is too long for this file system
    os.rmdir(tempfile.mkdtemp(prefix=".torchtune.", suffix=".tmp", dir=existing))


@contextmanager
def atomic_write(path: str | Path, mode: str = "wb", *, private: bool = False) -> Iterator[IO[Any]]:
    """Open a temporary file that replaces ``path`` when the block ends without an error.

    Args:
        path: path of the file; missing directories are created.
        mode: ``"wb"`` or ``"w"`` (UTF-8).
        private: restrict permissions to the owner (mode 0600), also for the temporary file.

    Raises:
        UserError: the disk is full, or there is no permission to write.

    Example:
        >>> with torchtune.utils.atomic_write(folder / "a.txt", "w") as file:
        ...     _ = file.write("whole or not at all")
        >>> (folder / "a.txt").read_text()
        'whole or not at all'
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        permissions = 0o600 if private else 0o666
        encoding = None if "b" in mode else "utf-8"
        opener = functools.partial(os.open, mode=permissions)  # from the start, not after the first bytes
        with open(temporary, mode, encoding=encoding, opener=opener) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_directory(path.parent)
    except OSError as error:
        raise explain_os_error(error, path) from error
    finally:
        # After the rename, the temporary file is missing. Its folder may be a file, as the error above explains.
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(
    path: str | Path, replace: bool = True, keep_on: tuple[type[BaseException], ...] = ()
) -> Iterator[Path]:
    """Create a temporary directory that is renamed to ``path`` when the block ends without an error.

    All files are flushed to disk before the rename.

    Args:
        path: path of the directory.
        replace: replace an existing directory; otherwise it stays, and the temporary one is deleted.
        keep_on: errors after which the temporary directory is kept (as after a kill), so that the next call with
            ``keep_on`` continues in it; only one process at a time may make such a call. By default, every call has a
            new temporary directory.

    Raises:
        UserError: the disk is full, or there is no permission to write.

    Example:
        >>> with torchtune.utils.atomic_directory(folder / "new") as temporary:
        ...     _ = (temporary / "a.txt").write_text("one")
        >>> (folder / "new" / "a.txt").exists()
        True
    """
    path = Path(path)
    if keep_on:
        temporary = path.with_name(f".{path.name}.part")
    else:
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    is_kept = False
    try:
        temporary.mkdir(parents=True, exist_ok=bool(keep_on))
        try:
            yield temporary
        except keep_on:
            is_kept = True
            raise
        # Before the rename: a file system may write the rename before the bytes of the files.
        _fsync_tree(temporary)
        # A rename does not replace a directory with files. After a kill between the two renames, clear_leftovers
        # restores the old directory.
        replaced = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.old.tmp")
        if replace and path.exists():
            os.rename(path, replaced)
        try:
            os.rename(temporary, path)
        except OSError as error:
            # Without `replace`, an existing directory stays.
            if replace or error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        fsync_directory(path.parent)
        with suppress(FileNotFoundError):  # nothing was replaced
            os.rename(replaced, temporary)  # deleted below; must not be restored in part after a kill
    except OSError as error:
        raise explain_os_error(error, path) from error
    finally:
        if not is_kept:
            shutil.rmtree(temporary, ignore_errors=True)


def clear_leftovers(path: Path) -> None:
    """Delete leftovers of killed calls of :func:`atomic_directory` beside ``path``, and restore a moved folder.

    Call it only while holding a lock, because a running call has folders with the same names.
    """
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}(\.old)?\.tmp")
    for leftover in sorted(path.parent.iterdir()):
        match = pattern.fullmatch(leftover.name)
        if match is None:
            continue
        is_former_folder = match[1] is not None
        if is_former_folder and not path.exists():
            os.rename(leftover, path)
        else:
            shutil.rmtree(leftover)


class AppendedFile:
    """File opened for appending lines; if a killed process left the last line incomplete, a line break is added first.

    Args:
        path: path of the file; missing folders are created.

    Example:
        >>> file = torchtune.utils.AppendedFile(folder / "log.txt")
        >>> file.write_line("step 1")
        >>> file.close()
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            self.write_line("")

    def write_line(self, line: str) -> None:
        """Append a line, or several with line breaks between them."""
        data = f"{line}\n".encode("utf-8", "replace")
        while data:  # a write may be partial
            num_written = os.write(self._descriptor, data)
            data = data[num_written:]

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def append_line(path: Path, line: str) -> None:
    """Append a line to a file; if it cannot be written, log a warning and go on.

    Example:
        >>> torchtune.utils.append_line(folder / "skipped.jsonl", "{}")
    """
    try:
        with closing(AppendedFile(path)) as file:
            file.write_line(line)
    except OSError as error:
        get_logger().warning(str(explain_os_error(error, path)))


class ForeignPathError(UserError):
    """Path that another user of this machine controls."""


def cache_root() -> Path:
    """Return the folder of the library's caches: ``$TORCHTUNE_CACHE``, or ``torchtune`` in the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("TORCHTUNE_CACHE") or Path(home) / "torchtune").expanduser()


def refuse_path_of_other_user(path: str | Path, key: str = "") -> None:
    """Raise if a path leads through another user's file, link or folder inside a world-writable folder such as /tmp.

    Names under /tmp are easy to guess. A user who creates ``/tmp/<model>`` first controls the weights and the chat
    template used in training, and may read the outputs. Links along the path are followed and checked, too. Files of
    root are trusted, but root trusts only itself.

    Args:
        path: path of a file or folder, which need not exist.
        key: setting with the path, for the message.

    Raises:
        ForeignPathError: the path, a folder above it or a link along it belongs to another user.
    """
    trusted = {os.geteuid(), 0}
    path_as_written = Path(os.path.abspath(path))
    path_behind_links = Path(os.path.realpath(path))
    for checked in dict.fromkeys((path_as_written, path_behind_links)):  # often equal, and then checked once
        parent_is_shared = False  # whether every user may write to the parent folder
        for part in [*reversed(checked.parents), checked]:
            try:
                status = os.lstat(part)
            except OSError:  # missing or not readable: opening it raises the error
                break
            if parent_is_shared and status.st_uid not in trusted:
                setting = f"{key}: " if key else ""
                raise ForeignPathError(
                    f"{setting}the {_kind_of(status.st_mode)} {part} belongs to another user of this machine (uid "
                    f"{status.st_uid}), who may have put anything there: use a folder of your own, such as one in your "
                    "home, or remove it."
                )
            parent_is_shared = stat.S_ISDIR(status.st_mode) and bool(status.st_mode & stat.S_IWOTH)


def _kind_of(mode: int) -> str:
    """Return the word for the kind of a path, given the mode in its status."""
    if stat.S_ISLNK(mode):
        return "link"
    if stat.S_ISDIR(mode):
        return "folder"
    return "file"
