"""Files of lines that are appended to during a run."""

import os
from contextlib import closing
from pathlib import Path

from torchtune.utils._atomic_files import explain_os_error
from torchtune.utils._logging import get_logger


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
        while data:
            data = data[os.write(self._descriptor, data) :]

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
