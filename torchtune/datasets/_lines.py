"""Read the lines of data files, which may be compressed (their content decides, not their name), and their JSON."""

import bz2
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from torchtune.utils import UserError, check_surrogates, require

# First bytes of a compressed file -> name of the format.
_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_CHUNK = 1 << 17
_BOM = b"\xef\xbb\xbf"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def open_lines(path: Path) -> IO[bytes]:
    """Open a file of lines, and decompress it if its content is gzip, bzip2, xz or zstd; its name does not matter.

    Raises:
        UserError: the file is packed by zstd, and the package zstandard is not installed.
    """
    packed = packed_by(path)
    if packed == "gzip":
        return cast(IO[bytes], gzip.open(path))
    if packed == "bzip2":
        return cast(IO[bytes], bz2.open(path))
    if packed == "xz":
        return cast(IO[bytes], lzma.open(path))
    if packed == "zstd":
        zstandard = require("zstandard", extra="zstd", purpose=f"{path}, which is packed by zstd,")
        return io.BufferedReader(_ZstdReader(path.open("rb"), zstandard.ZstdDecompressor().decompressobj))
    return path.open("rb")


class _ZstdReader(io.RawIOBase):
    """Reader of a file of zstd frames. The reader of zstandard ends without an error where a file was cut off.

    Args:
        file: the compressed file.
        decompressor: returns a decompressor of one frame.
    """

    def __init__(self, file: IO[bytes], decompressor: Callable[[], Any]) -> None:
        self._file = file
        self._decompressor = decompressor
        self._frame: Any = None  # decompressor of the current frame; None between frames
        self._next_frame = b""  # compressed bytes that were read beyond the last frame
        self._decompressed = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read decompressed bytes; raise ``EOFError`` if the file ends inside a frame."""
        while not self._decompressed:
            compressed = self._next_frame or self._file.read(_CHUNK)
            self._next_frame = b""
            if not compressed:
                if self._frame is not None:
                    raise EOFError
                return 0
            if self._frame is None:
                self._frame = self._decompressor()
            self._decompressed = memoryview(self._frame.decompress(compressed))
            if self._frame.eof:
                self._next_frame = self._frame.unused_data
                self._frame = None
        count = min(len(buffer), len(self._decompressed))
        buffer[:count] = self._decompressed[:count]
        self._decompressed = self._decompressed[count:]
        return count

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


def packed_by(path: Path) -> str | None:
    """Return what compressed a file, by its first bytes: gzip, bzip2, xz or zstd; None for another file."""
    with path.open("rb") as file:
        first_bytes = file.read(6)
    for magic, name in _MAGIC.items():
        if first_bytes.startswith(magic):
            return name
    return None


@contextmanager
def unpacking(path: Path) -> Iterator[None]:
    """Convert errors of a damaged compressed file inside the block to :class:`UserError`."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise UserError(f"{path} is a damaged {packed_by(path)} file: pack it again.") from error
    except Exception as error:
        # The error of zstandard is a class of that package; bz2 raises a plain OSError without a number.
        is_damage = type(error).__name__ == "ZstdError" or (isinstance(error, OSError) and error.errno is None)
        if not is_damage or packed_by(path) is None:
            raise
        raise UserError(f"{path} is a damaged {packed_by(path)} file: pack it again.") from error


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line) for each line that is not blank.

    Raises:
        UserError: a compressed file is damaged.
    """
    with open_lines(path) as file, unpacking(path):
        for number, line in enumerate(file, 1):
            if not line.isspace():
                yield number, line


def decode_line(line: bytes) -> str:
    """Decode a line as UTF-8, without the line ending and a byte order mark.

    Raises:
        UserError: the line is not UTF-8; the message is only the reason.
    """
    return decode_utf8(line).rstrip("\r\n")


def decode_utf8(text: bytes) -> str:
    """Decode bytes of a file as UTF-8, without a byte order mark.

    Raises:
        UserError: they are not UTF-8; the message is only the reason.
    """
    try:
        return text.removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        if text.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise UserError("the file is UTF-16, not UTF-8: save it as UTF-8") from error
        raise UserError(f"byte {error.start + 1} is not UTF-8: save the file as UTF-8") from error


def parse_json_line(line: bytes) -> Any:
    """Parse a line, or the text of a whole file, as JSON.

    Raises:
        UserError: the line is not JSON; the message is only the reason.
    """
    text = decode_line(line)
    try:
        value = json.loads(text)
        if _SURROGATE.search(line):
            check_surrogates(value)
        return value
    except json.JSONDecodeError as error:
        zero_byte = text.find("\0")
        if zero_byte >= 0:
            raise UserError(
                f"a zero byte at column {zero_byte + 1}: the file was not written to its end, or is not UTF-8"
            ) from error
        position = f"column {error.colno}"
        if error.lineno > 1:  # the text is a whole file
            position = f"line {error.lineno}, {position}"
        raise UserError(f"no JSON, {error.msg} at {position}") from error
    except RecursionError as error:
        raise UserError("it is nested too deeply") from error
    except ValueError as error:  # an integer with more digits than Python parses
        raise UserError(f"no JSON, {str(error).partition(';')[0]}") from error
