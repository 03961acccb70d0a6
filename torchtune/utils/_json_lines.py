"""JSON lines that a user wrote: how they are read, and what is said of those that cannot be."""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from torchtune.utils._errors import UserError

_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SUFFIXES = (".jsonl", ".ndjson")


def open_lines(path: Path) -> IO[bytes]:
    """A file of lines, unpacked where its content is that of gzip."""
    return cast(IO[bytes], gzip.open(path)) if is_gzip(path) else path.open("rb")


def is_gzip(path: Path) -> bool:
    """Whether a file is packed by gzip, whatever its name is."""
    with path.open("rb") as file:
        return file.read(2) == _GZIP


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line) of the lines that are not empty.

    Raises:
        UserError: a packed file is damaged.
    """
    with open_lines(path) as file:
        try:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    yield number, line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{path} is a damaged gzip file: pack it again.") from error


def has_json_lines(path: Path) -> bool:
    """Whether a file has a JSON value per line: by its suffix, or a ``.json`` file by its first line."""
    if path.name.lower().removesuffix(".gz").endswith(_SUFFIXES):
        return True
    if not path.name.lower().removesuffix(".gz").endswith(".json"):
        return False
    first = next(numbered_lines(path), (1, b""))[1].removeprefix(_BOM).strip()
    if not first.startswith(b"{"):
        return False
    try:
        json_line(first)
    except UserError:
        return False  # one object in several lines
    return True


def text_line(line: bytes) -> str:
    """The text of a line, without its end and the mark of UTF-8 that some editors put first.

    Raises:
        UserError: with the reason alone, it is not UTF-8.
    """
    try:
        return line.removeprefix(_BOM).decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        if line.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise UserError("the file is UTF-16, not UTF-8: save it as UTF-8") from error
        raise UserError(f"byte {error.start + 1} is not UTF-8: save the file as UTF-8") from error


def json_line(line: bytes) -> Any:
    """The JSON value of a line, or of a whole file.

    Raises:
        UserError: with the reason alone, it is none.
    """
    text = text_line(line)
    try:
        value = json.loads(text)
        if _SURROGATE.search(line):
            refuse_halves(value)
        return value
    except json.JSONDecodeError as error:
        if (place := text.find("\0") + 1) > 0:
            reason = f"a zero byte at column {place}: the file was not written to its end, or is not UTF-8"
            raise UserError(reason) from error
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise UserError(f"no JSON, {error.msg} at {line}column {error.colno}") from error
    except RecursionError as error:
        raise UserError("it is nested too deeply") from error
    except ValueError as error:  # an integer of more digits than Python reads
        raise UserError(f"no JSON, {str(error).partition(';')[0]}") from error


def refuse_halves(value: Any) -> None:
    """Look at every text in plain data; what is not plain in it is passed over.

    Raises:
        UserError: with the reason alone, a text holds half of a pair of surrogates, which no encoding has.
    """
    try:
        json.dumps(value, ensure_ascii=False, default=lambda other: None, skipkeys=True).encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):x}"
        raise UserError(f"{half} is half of a character: write both halves, or neither") from error
