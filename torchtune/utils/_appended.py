"""Files that are appended to during a run, and restored if they are deleted."""

import os
from pathlib import Path

from torchtune.utils._logging import get_logger


class AppendedFile:
    """File opened for appending. If it is deleted meanwhile, it is created again with its contents and a warning.

    Without this, writes would go to the deleted file, which vanishes with the process: the run would succeed without
    a log.

    Args:
        path: path of the file; missing folders are created.

    Example:
        >>> file = torchtune.utils.AppendedFile(folder / "log.txt")
        >>> file.write(b"step 1\\n")
        7
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.descriptor = self._open()

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)

    def write(self, data: bytes) -> int:
        """Append ``data`` with one system call and return the number of bytes written.

        Raises:
            OSError: nothing was written.
        """
        self.restore()
        return os.write(self.descriptor, data)

    def has_partial_line(self) -> bool:
        """Return whether the last line is incomplete, as after a kill."""
        size = os.fstat(self.descriptor).st_size
        return size > 0 and os.pread(self.descriptor, 1, size - 1) != b"\n"

    def restore(self) -> None:
        """Create the file again if it was deleted."""
        was = os.fstat(self.descriptor)
        try:
            now = os.stat(self.path)
        except FileNotFoundError:
            now = None
        if now is not None and (now.st_dev, now.st_ino) == (was.st_dev, was.st_ino):
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self._open()
        try:
            copied = 0
            while now is None and (part := os.pread(self.descriptor, 2**20, copied)):
                copied += os.write(new, part)
            os.dup2(new, self.descriptor)  # keep the descriptor's number: others may hold it
        finally:
            os.close(new)
        if now is None:
            get_logger().warning(f"{self.path} was removed under the running run: it is made again, with what it held.")

    def close(self) -> None:
        """Close the file, after restoring it if it was deleted."""
        try:
            self.restore()
        finally:
            os.close(self.descriptor)
