"""Files that are appended to during a run."""

import os
from pathlib import Path


class AppendedFile:
    """File opened for appending.

    Args:
        path: path of the file; missing folders are created.

    Example:
        >>> file = torchtune.utils.AppendedFile(folder / "log.txt")
        >>> file.write(b"step 1\\n")
        7
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)

    def write(self, data: bytes) -> int:
        """Append ``data`` with one system call and return the number of bytes written.

        Raises:
            OSError: nothing was written.
        """
        return os.write(self.descriptor, data)

    def has_partial_line(self) -> bool:
        """Return whether the last line is incomplete, as after a kill."""
        size = os.fstat(self.descriptor).st_size
        return size > 0 and os.pread(self.descriptor, 1, size - 1) != b"\n"

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)
