"""Files that grow while a run lives, and outlive that somebody removes them."""

import os
from pathlib import Path

from torchtune.utils._logging import get_logger


class AppendedFile:
    """Appends to a file. Where it was removed, it is made again, with all that it held, and that is said.

    A file that is removed while it is open goes on to take what is written, and vanishes with the process: a run would
    end well and leave nothing.

    Args:
        path: of the file; its folder is made.

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
        """Append, in one write to the end of the file; returns how many bytes the system took.

        Raises:
            OSError: it took none.
        """
        self.restore()
        return os.write(self.descriptor, data)

    def ends_inside_a_line(self) -> bool:
        """Whether a process that was killed has left half a line."""
        size = os.fstat(self.descriptor).st_size
        return size > 0 and os.pread(self.descriptor, 1, size - 1) != b"\n"

    def restore(self) -> None:
        """Make the file again if it is no longer there."""
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
            os.dup2(new, self.descriptor)  # whoever was given the number goes on with it
        finally:
            os.close(new)
        if now is None:
            get_logger().warning(f"{self.path} was removed under the running run: it is made again, with what it held.")

    def close(self) -> None:
        """Close the file, which is there then."""
        try:
            self.restore()
        finally:
            os.close(self.descriptor)
