"""Locks on folders, so that only one process at a time writes to a folder."""

import atexit
import errno
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from torchtune.utils._errors import UserError
from torchtune.utils._files import WriteError, explain_os_error
from torchtune.utils._heartbeat import sign_of_life
from torchtune.utils._logging import get_logger, log_once

# Seconds to retry before raising: another rank may be checking the lock, or a killed owner's child may be exiting.
_PATIENCE = 3.0
_held: dict[Path, "FolderLock"] = {}  # locks of this process; a new lock on a folder releases an old one


class FolderLock:
    """A lock on a folder, in a file that names its owner.

    The operating system releases the lock when the process ends. Whether it works across machines depends on their
    file system; if a file system does not support locks, a warning is logged.

    Args:
        folder: folder to lock; created if it is missing.
        name: name of the lock file; locks with different names in a folder are independent.
        key: setting that contains the folder, for messages.

    Example:
        >>> lock = torchtune.utils.FolderLock(folder)
        >>> lock.acquire()
        >>> lock.is_held
        True
        >>> lock.release()
    """

    def __init__(self, folder: Path, *, name: str = ".run.lock", key: str = "output_dir") -> None:
        self.folder = folder
        self.path = folder / name
        self._key = key
        self._lock: FileLock | None = None
        self._pid = 0  # the process that holds the lock
        self._owner_text = ""  # content of the lock file that this process wrote
        self._created_folder = False

    @property
    def is_held(self) -> bool:
        """Whether this process holds the lock; a fork of the owner does not."""
        return self._pid == os.getpid()

    def acquire(self, waiting: str | None = None) -> None:
        """Take the lock and keep it until :meth:`release`, or until the process ends.

        Args:
            waiting: wait while another process holds the lock, and log this text after ten seconds. By default, raise.

        Raises:
            UserError: another process holds the lock, or the lock file is a link or a folder, or cannot be written.
        """
        if self.is_held:
            return
        # A second run of this process, as in a notebook, takes over the folder of the first. A caller that waits, such
        # as another thread, leaves the lock to its owner.
        if waiting is None and self.path in _held:
            _held[self.path].release()
        start = time.monotonic()

        def should_cancel() -> bool:
            """Return False: the lock is waited for, and the watchdog is told so."""
            sign_of_life()
            if time.monotonic() - start > 10:
                log_once(get_logger(), waiting)
            return False

        # A lock of the process, which any of its threads may release. A soft lock would outlive a killed owner.
        self._lock = FileLock(self.path, thread_local=False, fallback_to_soft=False, on_acquired=self._write_owner)
        self._created_folder = not self.folder.exists()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Other ranks hold the lock for a moment to check it, and a child of a killed owner until it has exited.
            self._lock.acquire(_PATIENCE if waiting is None else -1, poll_interval=0.1, cancel_check=should_cancel)
        except Timeout:
            raise UserError(
                f"{self._key}: {self.folder} is in use by another run ({self._describe_owner()}): wait until it has "
                f"ended or stop it, or choose another {self._key}."
            ) from None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR):
                fact = f"The lock {self.path} cannot be opened ({error.strerror})"
                raise WriteError(fact, "remove it, or choose another folder") from error
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise explain_os_error(error, self.path) from error
            # Without locks the run goes on as if it held one.
            get_logger().warning(
                f"{self._key}: the file system of {self.folder} has no locks ({error.strerror}): make sure that no "
                "other run uses the folder."
            )
        self._pid = os.getpid()
        _held[self.path] = self
        atexit.register(self.release)

    def _write_owner(self, descriptor: int) -> None:
        owner = {
            "host": platform.node(),
            "pid": os.getpid(),
            "program": Path(sys.argv[0]).name,
            "since": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        }
        self._owner_text = json.dumps(owner)
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, self._owner_text.encode())
        except OSError:  # the disk is full
            self.path.unlink()
            raise

    def check_unused(self) -> None:
        """Raise ``UserError`` if another process has the lock."""
        if not self.is_held and os.path.exists(self.path):
            with suppress(OSError), self.held():
                pass

    @contextmanager
    def held(self, waiting: str | None = None) -> Iterator[bool]:
        """Hold the lock inside the block, see :meth:`acquire`; yield whether the file system supports locks."""
        was_held = self.is_held
        self.acquire(waiting)
        try:
            yield self._lock.is_locked
        finally:
            if not was_held:
                self.release()

    def release(self) -> None:
        """Release the lock; do nothing if it is not held."""
        atexit.unregister(self.release)
        if not self.is_held:
            return
        self._pid = 0
        _held.pop(self.path, None)
        with suppress(OSError):
            if self._read_lock() == self._owner_text:
                self.path.unlink()  # before the lock is released, so that waiting processes see the removal
            if self._created_folder:
                self.folder.rmdir()  # if nothing was written
        self._lock.release()

    def _read_lock(self) -> str:
        try:
            return self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def _describe_owner(self) -> str:
        try:
            owner = json.loads(self._read_lock())
            return f"process {owner['pid']} on {owner['host']}, since {owner['since']}, {owner['program']}"
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return "which does not say who it is"
