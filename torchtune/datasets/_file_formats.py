"""Division of local files into rows, and decoding of their columns: JSON, tables (CSV, TSV) and plain text.

Files may be compressed; their content decides, not their name. Every command and every stream reads such a file here,
so that all of them read the same values. The ``datasets`` package infers a type for each column instead: in a table the
text ``2`` becomes a number and ``NA`` nothing, and in JSON a mapping gets the keys of all other rows.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar, cast

from torchtune.data import DataError
from torchtune.utils import RepeatedKeyError, UserError, check_surrogates, decode_json, object_of_pairs, require

# First bytes of a compressed file -> name of the format.
_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
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
                return 0  # the end of the file
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


def decode_utf8(content: bytes) -> str:
    """Decode bytes of a file as UTF-8, without a byte order mark.

    Raises:
        UserError: they are not UTF-8; the message is only the reason.
    """
    try:
        return content.removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        # A byte order mark, and a zero byte in every ASCII character: a broken line may begin with the mark's bytes.
        if content.startswith((b"\xff\xfe", b"\xfe\xff")) and b"\0" in content:
            raise UserError("the file is UTF-16, not UTF-8: save it as UTF-8") from error
        raise UserError(f"byte {error.start + 1} is not UTF-8: save the file as UTF-8") from error


def parse_json(content: bytes) -> Any:
    """Parse a line, or the content of a whole file, as JSON.

    Raises:
        UserError: the content is not JSON; the message is only the reason.
    """
    text = decode_line(content)
    try:
        value = decode_json(text)
        if _SURROGATE.search(content):  # only such an escape gives text that cannot be encoded
            check_surrogates(value)
        return value
    except RepeatedKeyError as error:
        raise UserError(str(error)) from error
    except json.JSONDecodeError as error:
        zero_byte = text.find("\0")
        if zero_byte >= 0:
            raise UserError(
                f"a zero byte at column {zero_byte + 1}: the file was not written to its end, or is not UTF-8"
            ) from error
        position = f"column {error.colno}"
        if error.lineno > 1:  # the text is a whole file
            position = f"line {error.lineno}, {position}"
        fault = error.msg.removesuffix(" at")  # "Invalid control character at"
        raise UserError(f"no JSON, {fault} at {position}") from error
    except RecursionError as error:
        raise UserError("it is nested too deeply") from error
    except ValueError as error:  # an integer with more digits than Python parses
        raise UserError(f"no JSON, {str(error).partition(';')[0]}") from error


# File suffix -> loader of the datasets package.
LOADERS = {
    ".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet",
    ".arrow": "arrow", ".txt": "text",
}  # fmt: skip
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
# Longest cell of a table in characters.
_LONGEST_CELL = 1 << 30
_CHUNK = 1 << 20
_WHITESPACE = re.compile(r"\s*")
_QUOTED_NAME = re.compile(rb'"(?:[^"]|"")*"([;\t|,])')
_BOM = b"\xef\xbb\xbf"
# Arguments of `datasets.load_dataset` that do not change the rows of a local file.
_WITHOUT_EFFECT = {
    "cache_dir", "download_config", "download_mode", "keep_in_memory", "name", "num_proc", "revision", "save_infos",
    "storage_options", "token", "trust_remote_code", "verification_mode",
}  # fmt: skip


class Line(bytes):
    """Undecoded record of a file; :func:`decode_row` decodes it.

    Attributes:
        format: format of its file.
    """

    format: "FileFormat"

    @classmethod
    def of(cls, record: bytes, format: "FileFormat") -> "Line":
        """Return a record of a file of a format."""
        line = cls(record)
        line.format = format
        return line


class FileFormat:
    """Format of a file: how its bytes are divided into records, and decoded to columns. Records are lines by default.

    Attributes:
        unit: what is counted to name a row, ``line`` or ``row``.
        start: (offset, number of lines) before the first record.
    """

    unit: ClassVar[str] = "line"
    start: tuple[int, int] = (0, 0)

    def open(self, path: str, offset: int = 0) -> IO[bytes]:
        """Open the records of a file, decompressed, at an offset.

        Raises:
            UserError: the file cannot be decompressed, or parsed if it is one JSON value.
        """
        file = open_lines(Path(path))
        if packed_by(Path(path)) is None:
            file.seek(offset)
            return file
        with unpacking(Path(path)):
            # Bytes of a compressed file can only be skipped by decompressing them.
            while offset > 0:
                skipped = file.read(min(offset, _CHUNK))
                if not skipped:
                    break
                offset -= len(skipped)
        return file

    def divide(self, file: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
        """Yield (record, number of lines in it) from the current position of a file on, with blank records."""
        for line in file:
            yield line, 1

    def is_blank(self, record: bytes) -> bool:
        """Return whether a record is no row."""
        return record.isspace()

    def decode(self, record: bytes) -> Any:
        """Return the row of a record; raise :class:`UserError` with the reason if it is broken."""
        raise NotImplementedError


class JsonLines(FileFormat):
    """Format with a JSON object per line."""

    def decode(self, record: bytes) -> Any:
        """See :meth:`FileFormat.decode`."""
        return parse_json(record)


@dataclass(frozen=True)
class JsonArray(JsonLines):
    """Format of a file that holds a list of JSON objects, or JSON objects over several lines each.

    The file is parsed as a whole, and its rows become lines of JSON.

    Args:
        field: key of the list, if the file holds an object; None if it holds the list.
    """

    field: str | None = None
    unit: ClassVar[str] = "row"

    def open(self, path: str, offset: int = 0) -> IO[bytes]:
        """Open the rows of a file as lines; raise :class:`UserError` if it holds no list of rows."""
        with open_lines(Path(path)) as file, unpacking(Path(path)):
            content = file.read()
        try:
            rows = self._rows(content)
        except UserError as error:
            raise UserError(f"{path}: {error}; correct the file.") from error
        # As lines, the rows have offsets, by which they are found again.
        lines = io.BytesIO("".join(f"{json.dumps(row)}\n" for row in rows).encode())
        lines.seek(offset)
        return lines

    def _rows(self, content: bytes) -> Sequence[Any]:
        """Return the rows of a whole file; raise :class:`UserError` with the reason if it holds no list of rows."""
        try:
            value = parse_json(content)
        except UserError:
            # Several objects, each over several lines, are rows as well.
            value = _parse_json_values(decode_utf8(content))
            if len(value) < 2:  # something else is in the file, and the first error says where
                raise
        if self.field is not None:
            if not isinstance(value, dict) or self.field not in value:
                raise UserError(f"it holds no object with the key '{self.field}', which field names")
            value = value[self.field]
        if isinstance(value, dict):
            keys = ", ".join(value)
            raise UserError(
                f"it holds one object ({keys}), not a list of rows; name the key of the list in field, or, if it is a "
                "row, put it in a list"
            )
        if not isinstance(value, list):
            raise UserError(f"it holds one {type(value).__name__}, not a list of rows")
        return value


def _parse_json_values(text: str) -> list[Any]:
    """Return the JSON values of a text, one after the other; an empty list if there is anything else.

    Raises:
        UserError: an object gives a key two values; the message is only the reason.
    """
    decoder = json.JSONDecoder(object_pairs_hook=object_of_pairs)
    values = []
    position = _WHITESPACE.match(text).end()
    try:
        while position < len(text):
            value, position = decoder.raw_decode(text, position)
            values.append(value)
            position = _WHITESPACE.match(text, position).end()
    except RepeatedKeyError as error:
        raise UserError(str(error)) from error
    except (ValueError, RecursionError):
        return []
    return values


@dataclass(frozen=True)
class TextLines(FileFormat):
    """Format with a text per line, column ``text``; blank lines are no rows."""

    def decode(self, record: bytes) -> Any:
        """See :meth:`FileFormat.decode`."""
        return {"text": decode_line(record.split(b"\n", 1)[0])}


@dataclass(frozen=True)
class Table(FileFormat):
    """Format of a table, CSV or TSV: every cell is the text in the file, also ``2.0``, ``NA`` and the empty text.

    Args:
        names: names of the columns.
        dialect: settings of ``csv.reader``, such as the delimiter.
        encoding: encoding of the text; None: UTF-8.
        start: see :class:`FileFormat`.
    """

    names: tuple[str, ...] = ()
    dialect: Mapping[str, Any] = field(default_factory=dict)
    encoding: str | None = None
    start: tuple[int, int] = field(default=(0, 0), compare=False)

    def divide(self, file: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
        """See :meth:`FileFormat.divide`; a record goes on behind a line break in quotes."""
        lines: list[bytes] = []  # that the reader has taken for the current record

        def texts() -> Iterator[str]:
            for line in file:
                lines.append(line)
                # Every byte is a character in Latin-1, and delimiter and quotes are the same in UTF-8.
                yield line.decode("latin-1")

        reader = self._reader(texts())
        while True:
            try:
                next(reader)  # only to know where the record ends: its cells are decoded when it is read
            except StopIteration:
                break
            except csv.Error:
                pass  # raised again, with a reason, when the record is decoded
            if lines:
                yield b"".join(lines), len(lines)
                lines.clear()

    def is_blank(self, record: bytes) -> bool:
        """See :meth:`FileFormat.is_blank`; a line of tabs is a row of empty cells."""
        return not record.strip(b"\r\n")

    def decode(self, record: bytes) -> Any:
        """Return the cells by column; raise :class:`UserError` if their number differs from the header's."""
        cells = self.cells(record)
        if len(cells) != len(self.names):
            problem = f"it has {len(cells)} fields and the header has {len(self.names)}"
            if len(cells) > len(self.names):
                problem += ": put texts with the delimiter in quotes"
            raise UserError(problem)
        return dict(zip(self.names, cells, strict=True))

    def cells(self, record: bytes) -> list[str]:
        """Return the cells of a record; raise :class:`UserError` if it is broken."""
        if b"\0" in record:
            raise UserError("it has a zero byte: the file was not written to its end, or is not UTF-8")
        if self.encoding is None:
            text = decode_utf8(record)
        else:
            try:
                text = record.decode(self.encoding)
            except UnicodeDecodeError as error:
                raise UserError(f"byte {error.start + 1} is not {self.encoding}: correct the encoding") from error
        try:
            # A newline is the only end of a line, as in `divide`; a carriage return in quotes stays.
            rows = list(self._reader(io.StringIO(text, newline="\n")))
        except csv.Error as error:
            raise UserError(_explain_csv_error(error)) from error
        for row in rows:
            if row:  # blank lines before the record belong to it
                return row
        return []

    def _reader(self, lines: Iterable[str]) -> Iterator[list[str]]:
        # Python's limit of 131,072 characters is for the whole process: another library may have set it back.
        csv.field_size_limit(_LONGEST_CELL)
        return csv.reader(lines, **self.dialect, strict=True)


def _explain_csv_error(error: csv.Error) -> str:
    """Return the reason why a record of a table is broken, for a user who sees the file."""
    message = str(error)
    if "unexpected end" in message:
        return "a cell begins with a quotation mark that is never closed: close it, or double it inside of a text"
    if "expected after" in message:
        return "a text goes on behind its closing quotation mark: double the quotation marks inside of a text"
    if "new-line character" in message:
        return "a line ends with a carriage return alone: save the file with the line ends of Unix or Windows"
    return f"it cannot be read ({message}): save the file again"


def decode_row(row: Any) -> Mapping[str, Any]:
    """Return the columns of a row: a :class:`Line` is decoded, and a mapping is returned unchanged.

    Raises:
        DataError: the line is broken, or the row is no mapping; the message does not name file and line.
    """
    columns = row
    if isinstance(row, Line):
        try:
            columns = row.format.decode(row)
        except UserError as error:
            raise DataError(str(error)) from error
    if not isinstance(columns, Mapping):
        raise DataError(f"a row must be a mapping column -> value, not {type(columns).__name__}")
    return columns


def settings_of(loader: str, kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings with which local files are read, of the arguments of ``datasets.load_dataset``.

    Args:
        loader: ``csv``, ``json`` or ``text``.
        kwargs: the arguments, without ``data_files``, ``data_dir``, ``split`` and ``streaming``.

    Returns:
        the settings; None if JSON or text is to be read in a way that only the ``datasets`` package knows.

    Raises:
        DataError: a table has a setting that is not known, or a value that is not possible.
    """
    settings = {name: value for name, value in kwargs.items() if value is not None and name not in _WITHOUT_EFFECT}
    if loader == "csv":
        return _table_settings(settings)
    supported = set()
    if loader == "json":
        supported = {"field"}
    if settings.keys() - supported:
        return None
    return settings


# Settings of a table that are arguments of `csv.reader`, and all of them.
_DIALECT = ("delimiter", "quotechar", "quoting", "escapechar", "doublequote", "skipinitialspace")
_TABLE_SETTINGS = (*_DIALECT, "column_names", "header", "skiprows", "encoding")


def _table_settings(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Check the settings of a table; raise :class:`DataError` for an unknown one or an impossible value."""
    settings = {_OTHER_NAMES.get(name, name): value for name, value in kwargs.items()}  # pandas has two names for some
    for name, value in _WITHOUT_EFFECT_AT.items():
        if str(settings.get(name)) == str(value):  # a command line may hand over "False"
            del settings[name]
    for name in settings:
        if name not in _TABLE_SETTINGS:
            raise DataError(
                f"{name} is not a setting of tables, where every cell is the text in the file: leave it out. There "
                f"are {', '.join(_TABLE_SETTINGS)}."
            )
    for name in ("delimiter", "quotechar", "escapechar"):
        if name not in settings:
            continue
        value = settings[name]
        if value == "\\t":  # as shells and YAML without quotes hand it over
            settings[name] = value = "\t"
        if not isinstance(value, str) or len(value) != 1 or not value.isascii() or value in "\r\n":
            raise DataError(f"{name} must be one ASCII character, not {value!r}.")
    # Other modes of `csv` convert cells to numbers, or read as 0 does.
    if settings.get("quoting", csv.QUOTE_MINIMAL) not in (csv.QUOTE_MINIMAL, csv.QUOTE_NONE):
        raise DataError(f"quoting must be 0 or, if quotes are plain characters, 3, not {settings['quoting']!r}.")
    for name in ("doublequote", "skipinitialspace"):
        if not isinstance(settings.get(name, True), bool):
            raise DataError(f"{name} must be true or false, not {settings[name]!r}.")
    names = settings.get("column_names")
    if names is not None:
        is_list = isinstance(names, Sequence) and not isinstance(names, str)
        if not is_list or not all(isinstance(name, str) for name in names):
            raise DataError(f"column_names must be a list of names, not {names!r}.")
        settings["column_names"] = _checked_names(list(names))
    if settings.get("header", "infer") not in ("infer", 0):
        raise DataError(f"header must be 0 (the first line has names) or left out, not {settings['header']!r}.")
    skiprows = settings.get("skiprows", 0)
    if not isinstance(skiprows, int) or isinstance(skiprows, bool) or skiprows < 0:
        raise DataError(f"skiprows must be the number of lines before the table, not {skiprows!r}.")
    encoding = settings.pop("encoding", "utf-8")
    if not isinstance(encoding, str):
        raise DataError(f"encoding must be the name of an encoding, such as utf-8, not {encoding!r}.")
    if encoding.lower() in ("utf-8", "utf8", "utf-8-sig"):  # the default, which also takes a byte order mark
        return settings
    # Records are found by the bytes of line ends, delimiters and quotes, which other encodings than UTF-16 share.
    try:
        has_ascii_bytes = 'a,"\n'.encode(encoding) == b'a,"\n'
    except (LookupError, ValueError) as error:  # ValueError: Python's "undefined", or a zero byte
        raise DataError(f"encoding={encoding} is not known: use utf-8, or the name of another encoding.") from error
    if not has_ascii_bytes:
        raise DataError(f"encoding={encoding} cannot be read in lines: save the file as UTF-8.")
    return {**settings, "encoding": encoding}


_OTHER_NAMES = {"sep": "delimiter", "names": "column_names"}
# Settings that change nothing with these values, because every cell is a text.
_WITHOUT_EFFECT_AT = {"keep_default_na": False, "na_filter": False, "dtype": "str", "skip_blank_lines": True}


def _checked_names(names: list[str]) -> tuple[str, ...]:
    """Return the names of columns; a column without a name gets one. Raises :class:`DataError` for equal names."""
    named = tuple(name or f"Unnamed: {number}" for number, name in enumerate(names))
    for number, name in enumerate(named):
        if name in named[:number]:
            raise DataError(f"two columns are named '{name}': give one of them another name.")
    return named


def format_of_file(path: str, loader: str, settings: Mapping[str, Any]) -> FileFormat:
    """Return the format of a local file.

    Args:
        path: path of the file.
        loader: ``csv``, ``json`` or ``text``.
        settings: see :func:`settings_of`.

    Raises:
        DataError: the file cannot be read, is empty, or its header is broken.
    """
    try:
        if loader == "text":
            return TextLines()
        if loader == "json":
            if settings.get("field") is not None or not _has_json_lines(Path(path)):
                return JsonArray(settings.get("field"))
            return JsonLines()
        return _format_of_table(path, settings)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror or error}): correct the path or its rights."
        ) from error
    except DataError:  # a UserError as well, which is complete
        raise
    except UserError as error:
        raise DataError(str(error)) from error


def _has_json_lines(path: Path) -> bool:
    """Return whether a file has a JSON value per line, by its first lines."""
    lines = (line.removeprefix(_BOM).strip() for _, line in numbered_lines(path))
    first = next(lines, b"{")
    if suffix_of(path.name) in (".jsonl", ".ndjson") and not first.startswith(b"["):
        return True  # a broken first line is one broken row
    try:
        value = parse_json(first)
    except UserError:
        return False  # a value over several lines
    if isinstance(value, list):  # one line is the whole file; of several, each is a row, which is refused later
        return next(lines, None) is not None
    return isinstance(value, dict)


def _format_of_table(path: str, settings: Mapping[str, Any]) -> Table:
    """Return the format of a table: its dialect, the names of its columns, and where its first row begins."""
    dialect = {name: settings[name] for name in _DIALECT if name in settings}
    if "delimiter" not in dialect:
        dialect["delimiter"] = ","
        if suffix_of(path) == ".tsv":
            dialect["delimiter"] = "\t"
    table = Table(dialect=dialect, encoding=settings.get("encoding"))
    names = settings.get("column_names")
    has_header = names is None or "header" in settings  # with column_names alone, the first line is a row, as in pandas
    offset = 0
    with table.open(path) as file, unpacking(Path(path)):
        # Without the byte order mark, a quotation mark behind it still begins a cell.
        if file.read(len(_BOM)) == _BOM:
            offset = len(_BOM)
    num_lines = 0  # before the first row
    with table.open(path, offset) as file, unpacking(Path(path)):
        for _ in range(settings.get("skiprows", 0)):
            offset += len(file.readline())
            num_lines += 1
        records = table.divide(file)
        header = None
        while has_header and header is None:
            record, lines = next(records, (b"", 0))
            if not record:  # the end of the file
                break
            line = f"{path}, line {num_lines + 1}"
            offset += len(record)
            num_lines += lines
            if table.is_blank(record):
                continue
            try:
                header = _checked_names(table.cells(record))
            except UserError as error:
                _check_quoted_delimiter(line, record, dialect["delimiter"], settings)
                raise DataError(f"{line}: {str(error).rstrip('.')}; correct the header.") from error
            _check_delimiter(line, header, settings)
        if names is None:  # names that the user has set replace those of the header
            names = header
    return Table(names or (), dialect, table.encoding, start=(offset, num_lines))


def _check_delimiter(line: str, header: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Raise :class:`DataError` if a header of one column looks like several columns with another delimiter."""
    if len(header) > 1 or "delimiter" in settings:
        return
    for delimiter in (";", "\t", "|", ","):
        if delimiter in header[0]:
            raise DataError(f"{line}: the header is one column, '{header[0]}': set delimiter={delimiter!r}.")


def _check_quoted_delimiter(line: str, record: bytes, delimiter: str, settings: Mapping[str, Any]) -> None:
    """Raise :class:`DataError` if the first name of a broken header is in quotes before another delimiter."""
    quoted_name = _QUOTED_NAME.match(record)
    if quoted_name is None or "delimiter" in settings:
        return
    delimiter_in_file = quoted_name[1].decode()
    if delimiter_in_file != delimiter:
        raise DataError(
            f"{line}: the names of the header are in quotes, with another delimiter: set "
            f"delimiter={delimiter_in_file!r}."
        )


def suffix_of(name: str) -> str:
    """Return the suffix of a file name in lower case, before that of a compressed file."""
    suffixes = [suffix.lower() for suffix in Path(name).suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    if not suffixes:
        return ""
    return suffixes[-1]


def numbered_records(path: str, format: FileFormat) -> Iterator[tuple[int, Line]]:
    """Yield (line or row number from 1, record) of each row of a file.

    Raises:
        UserError: the file cannot be decompressed or, if it is one JSON value, parsed.
    """
    offset, number = format.start
    with format.open(path, offset) as file, unpacking(Path(path)):
        for record, lines in format.divide(file):
            if not format.is_blank(record):
                yield number + 1, Line.of(record, format)
            number += lines


def is_data_file(name: str) -> bool:
    """Return whether a file of this name is read as rows, possibly decompressed."""
    return suffix_of(name) in LOADERS
