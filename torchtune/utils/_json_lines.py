"""Read JSON lines written by a user, with messages for invalid lines."""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from torchtune.utils._user_error import UserError

_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SUFFIXES = (".jsonl", ".ndjson")


def open_lines(path: Path) -> IO[bytes]:
    """Open a file of lines, and decompress it if its content is gzip."""
    return cast(IO[bytes], gzip.open(path)) if is_gzip(path) else path.open("rb")


def is_gzip(path: Path) -> bool:
    """Return whether a file's content is gzip; its name does not matter."""
    with path.open("rb") as file:
        return file.read(2) == _GZIP


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line) for each line that is not blank.

    Raises:
        UserError: a gzip file is damaged.
    """
    with open_lines(path) as file:
        try:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    yield number, line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{path} is a damaged gzip file: pack it again.") from error


def has_json_lines(path: Path) -> bool:
    """Return whether a file has a JSON value per line: by its suffix, or for ``.json`` by its first line."""
    if path.name.lower().removesuffix(".gz").endswith(_SUFFIXES):
        return True
    if not path.name.lower().removesuffix(".gz").endswith(".json"):
        return False
    first = next(numbered_lines(path), (1, b""))[1].removeprefix(_BOM).strip()
    if not first.startswith(b"{"):
        return False
    try:
        parse_json_line(first)
    except UserError:
        return False  # one object on several lines
    return True


def decode_line(line: bytes) -> str:
    """Decode a line as UTF-8, without the line ending and a byte order mark.

    Raises:
        UserError: the line is not UTF-8; the message is only the reason.
    """
    try:
        return line.removeprefix(_BOM).decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        if line.startswith((b"\xff\xfe", b"\xfe\xff")):
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
        if (place := text.find("\0") + 1) > 0:
            reason = f"a zero byte at column {place}: the file was not written to its end, or is not UTF-8"
            raise UserError(reason) from error
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise UserError(f"no JSON, {error.msg} at {line}column {error.colno}") from error
    except RecursionError as error:
        raise UserError("it is nested too deeply") from error
    except ValueError as error:  # an integer with more digits than Python parses
        raise UserError(f"no JSON, {str(error).partition(';')[0]}") from error


def check_surrogates(value: Any) -> None:
    """Check every text in plain data for lone surrogates; other objects are skipped.

    Raises:
        UserError: a text has half of a surrogate pair, which cannot be encoded; the message is only the reason.
    """
    try:
        json.dumps(value, ensure_ascii=False, default=lambda other: None, skipkeys=True).encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):x}"
        raise UserError(f"{half} is half of a character: write both halves, or neither") from error
