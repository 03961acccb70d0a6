"""A file system for fsspec with faults: ``faulty:///tmp/folder`` is that folder, and the test says what goes wrong."""

import os
from collections.abc import Callable
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem


class FaultyFileSystem(LocalFileSystem):
    """Local files, with a record of the order in which they were written.

    Attributes:
        fault: called with the operation (``read``, ``write``, ``list``) and the path before it; may raise.
        lost_bytes: number of bytes of a written file that the service loses, by the end of its path.
        written: paths of the files, in the order in which they were opened for writing.
    """

    protocol = "faulty"
    cachable = False
    fault: Callable[[str, str], None] = staticmethod(lambda operation, path: None)
    lost_bytes: ClassVar[dict[str, int]] = {}
    written: ClassVar[list[str]] = []

    def __init__(self, **options: Any) -> None:
        super().__init__(auto_mkdir=True, **options)

    @classmethod
    def reset(cls) -> None:
        """Forget the faults."""
        cls.fault = staticmethod(lambda operation, path: None)
        cls.lost_bytes = {}
        cls.written = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(str(path).removeprefix("faulty://"))

    def find(self, path: str, **options: Any) -> Any:
        type(self).fault("list", path)
        return super().find(path, **options)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        is_write = "w" in mode
        type(self).fault("write" if is_write else "read", path)
        if is_write:
            self.written.append(path)
        return super()._open(path, mode, **options)

    def info(self, path: str, **options: Any) -> Any:
        for end, count in self.lost_bytes.items():
            if str(path).endswith(end):
                size = os.path.getsize(path)
                os.truncate(path, size - count)
        return super().info(path, **options)


fsspec.register_implementation("faulty", FaultyFileSystem)
