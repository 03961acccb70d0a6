"""Files of a source: what a name, a folder or the setting ``data_files`` stands for, and the rows of local files."""

import copy
import difflib
import glob
import logging
import os
import shutil
import tempfile
import weakref
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import IO, Any

import numpy as np

from torchtune.data import DataError
from torchtune.datasets._file_formats import (
    LOADERS,
    FileFormat,
    JsonArray,
    Line,
    decode_row,
    format_of_file,
    packed_by,
    settings_of,
    suffix_of,
    unpacking,
)
from torchtune.datasets._row_cache import cache_folder
from torchtune.utils import RemoteFolder, UserError, check_surrogates, first_line, get_logger, log_once

# Protocols that the datasets package reads without fsspec's file systems.
_OWN_PROTOCOLS = ("http://", "https://", "hf://")
# Loaders whose files this library reads itself, by the class of their settings in the datasets package.
_OWN = {"CsvConfig": "csv", "JsonConfig": "json", "TextConfig": "text"}
# Files in a folder that `save_to_disk` of a dataset, or of a dataset with splits, wrote.
_SAVED = ("state.json", "dataset_dict.json")
# Local files with their formats, by split.
LocalFiles = Mapping[str, Sequence[tuple[str, FileFormat]]]
_CHUNK = 1 << 20


def is_remote_name(name: str) -> bool:
    """Return whether a name is a URL, of the web or of an object store."""
    return "://" in name


def file_names(data_files: Any) -> list[str]:
    """Return all files of a ``data_files`` setting, which is None, a file, a list, or a mapping split -> files."""
    if data_files is None:
        return []
    if isinstance(data_files, str | Path):
        return [str(data_files)]
    values = data_files
    if isinstance(data_files, Mapping):
        values = data_files.values()
    names = []
    for value in values:
        names += file_names(value)
    return names


def _missing_path(kind: str, name: str) -> DataError:
    """Return the error for a path that does not exist, with a similar name from the same folder."""
    path = Path(name).expanduser()
    names_in_folder: list[str] = []
    if path.parent.is_dir():
        names_in_folder = sorted(entry.name for entry in path.parent.iterdir())
    similar = difflib.get_close_matches(path.name, names_in_folder, n=1)
    fact = f"There is no {kind} {name}"
    if not path.is_absolute():
        fact += f" (in {Path.cwd()})"
    advice = "correct the path"
    if similar:
        advice += f"; did you mean {path.with_name(similar[0])}"
    return DataError(f"{fact}: {advice}.")


def _check_files(names: Sequence[str]) -> None:
    """Raise :class:`DataError` for a local file or pattern that is missing, empty or a folder."""
    for name in names:
        path = Path(name).expanduser()
        if is_remote_name(name):
            continue
        if path.is_dir():
            raise DataError(f"data_files names the folder {name}: name the files in it, for example {path}/*.jsonl.")
        if path.is_file():
            if path.stat().st_size == 0:
                raise DataError(f"The data file {name} is empty.")
        elif not glob.glob(str(path), recursive=True):
            raise _missing_path("data file", name)


def resolve_source(source: str, kwargs: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the path and arguments for ``datasets.load_dataset``.

    ``source`` may be a file; its suffix selects the loader. Local ``data_files`` replace a Hub dataset, so that
    ``dataset.data_files=mine.jsonl`` alone is enough.

    Raises:
        DataError: a file or folder is missing or empty, or has an unsupported type.
    """
    kwargs = dict(kwargs)
    source = _plain(source)
    loaders = set(LOADERS.values())
    if kwargs.get("data_files") is not None:
        kwargs["data_files"] = _plain(kwargs["data_files"])
    names = file_names(kwargs.get("data_files"))
    if source in loaders and not names and kwargs.get("data_dir") is not None:
        source = _folder_of_loader(source, str(kwargs.pop("data_dir")))
    if source not in loaders:
        if Path(source).is_dir():
            return source, kwargs  # load_dataset finds the files in it, with data_files as their names
        # A local file, a URL, or a name that can only be a path; other names are files inside the Hub dataset.
        are_own_files = False
        for name in names:
            can_only_be_path = name.startswith(("/", "./", "../"))
            if is_remote_name(name) or Path(name).is_file() or can_only_be_path:
                are_own_files = True  # a mistake in another name is found below
        # A Hub dataset has at most one slash, and never at an end: another name is a path, for the message below.
        has_slash_at_end = source.startswith("/") or source.endswith("/")
        is_path = has_slash_at_end or source.count("/") > 1 or source.startswith((".", "~")) or "\\" in source
        if suffix_of(source) in LOADERS:  # a file, also a remote one, in the place of data_files
            names = [source]
            kwargs["data_files"] = source
            source = LOADERS[suffix_of(source)]
        elif are_own_files:
            _check_files(names)
            loaders_of_names = {LOADERS.get(suffix_of(name)) for name in names}
            if len(loaders_of_names) != 1 or None in loaders_of_names:
                raise DataError(f"data_files {names} must all be of one of the kinds {', '.join(LOADERS)}.")
            get_logger().info(f"Reading {', '.join(names)} instead of {source}.")
            source = loaders_of_names.pop()
        elif Path(source).is_file():
            raise DataError(f"The file {source} is of no kind that is read: use one of {', '.join(LOADERS)}.")
        elif is_path and not is_remote_name(source):
            raise _missing_path("folder or file", source)
    if source in loaders:
        if not names:
            raise DataError(f"source='{source}' needs data_files, the files to read, or data_dir, their folder.")
        _check_files(names)
        if all(suffix_of(name) == ".tsv" for name in names):  # the loader csv expects commas
            kwargs.setdefault("sep", "\t")
    return source, kwargs


def _folder_of_loader(loader: str, data_dir: str) -> str:
    """Return ``data_dir``; raise unless ``loader`` reads its most frequent file type, as the datasets package does."""
    folder = Path(data_dir).expanduser()
    if not folder.is_dir():
        raise _missing_path("folder", data_dir)
    counts: Counter[str] = Counter()
    for path in folder.rglob("*"):
        if path.is_file() and suffix_of(path.name) in LOADERS:
            counts[LOADERS[suffix_of(path.name)]] += 1
    most_frequent = [name for name, count in counts.items() if count == max(counts.values())]
    if most_frequent != [loader]:
        files = ", ".join(f"{count} of {name}" for name, count in sorted(counts.items())) or "none that are read"
        raise DataError(
            f"data_dir={data_dir} is to be read as {loader}, and its files are {files}: name those that are meant with "
            "data_files."
        )
    return str(folder)


def _plain(data_files: Any) -> Any:
    """Convert ``data_files`` to the builtin types that the datasets package expects, with ``~`` expanded.

    Raises:
        DataError: it is of another type, such as a number.
    """
    if isinstance(data_files, str | Path):
        name = str(data_files)
        if is_remote_name(name):
            return name
        return os.path.expanduser(name)
    if isinstance(data_files, Mapping):
        return {str(split): _plain(files) for split, files in data_files.items()}
    if not isinstance(data_files, Iterable):
        raise DataError(
            f"data_files holds {data_files!r}, which is no path: give the path of a file, a list of paths, or the "
            "paths of each split."
        )
    return [_plain(name) for name in data_files]


def plain_files(kwargs: Mapping[str, Any]) -> list[str] | None:
    """Return the local files of a whole split; None if other settings are used, or files are remote."""
    files = kwargs.get("data_files")
    split = kwargs.get("split")
    if isinstance(files, Mapping):
        files = files.get(split)
    elif split not in ("train", None):
        return None
    has_settings = any(kwargs[name] is not None for name in kwargs.keys() - {"split", "data_files", "streaming"})
    if files is None or has_settings or any(map(is_remote_name, file_names(files))):
        return None
    return file_names(files)


def local_files(path: str, kwargs: Mapping[str, Any]) -> LocalFiles | None:
    """Return the files that this library reads itself, with their formats, by split.

    Args:
        path: loader or folder, see :func:`resolve_source`.
        kwargs: arguments of ``datasets.load_dataset``.

    Returns:
        None if the ``datasets`` package is to read the rows.

    Raises:
        DataError: a file cannot be read or fetched, or a table has a setting that is not known.
    """
    settings = {name: value for name, value in kwargs.items() if name not in ("data_files", "split", "streaming")}
    loader = path
    files = kwargs.get("data_files")
    if path not in LOADERS.values():
        loader, files, folder_settings = _files_of_folder(path, kwargs)
        settings = folder_settings | settings
        settings.pop("data_dir", None)  # has selected the files already
    if loader not in _OWN.values() or files is None:  # Parquet, Arrow, a Hub dataset, or a folder without such files
        return None
    # The package streams remote JSON and text as they are; of a table it would infer the types.
    if kwargs.get("streaming") and loader != "csv" and any(map(is_remote_name, file_names(files))):
        return None
    format_settings = settings_of(loader, settings)
    if format_settings is None:  # a setting that only the package knows
        return None
    splits = {"train": files}
    if isinstance(files, Mapping):
        splits = files
    files_of_split = {}
    for split, names in splits.items():
        paths = matching(_downloaded(file_names(names)))
        files_of_split[split] = [(path, format_of_file(path, loader, format_settings)) for path in paths]
    return files_of_split


def _downloaded(names: Sequence[str]) -> list[str]:
    """Return local names of files; remote ones are fetched into the cache of the ``datasets`` package."""
    if not any(map(is_remote_name, names)):
        return list(names)
    import datasets

    paths = []
    try:
        for name in names:
            if not is_remote_name(name):
                paths.append(name)
                continue
            if not name.startswith(_OWN_PROTOCOLS):
                RemoteFolder(name, "data_files")  # raises if the package of the protocol is missing
            paths.append(str(datasets.DownloadManager().download(name)))
    except (UserError, MemoryError):  # not a failure of the network
        raise
    except Exception as error:  # the clients of object stores and of the hub share no base class
        raise DataError(
            f"{', '.join(names)} cannot be fetched ({first_line(error)}): check the address, the credentials, and the "
            "network."
        ) from error
    return paths


def is_saved(folder: str) -> bool:
    """Return whether ``save_to_disk`` of the ``datasets`` package wrote a folder."""
    return any((Path(folder) / name).is_file() for name in _SAVED)


def _files_of_folder(folder: str, kwargs: Mapping[str, Any]) -> tuple[str, dict[str, list[str]] | None, dict[str, Any]]:
    """Return the loader, the files by split, and settings of a local folder, as the ``datasets`` package finds them.

    The files are None if the package is to read the folder, or to give the reason why it cannot.
    """
    if not Path(folder).is_dir() or is_saved(folder):
        return folder, None, {}
    import datasets

    selection = {}
    for name in ("name", "data_files", "data_dir"):
        if kwargs.get(name) is not None:
            selection[name] = kwargs[name]
    try:
        builder = datasets.load_dataset_builder(folder, **selection)
    except (ValueError, OSError, TypeError, datasets.exceptions.DatasetNotFoundError):
        return folder, None, {}  # `load_dataset` gives the reason
    files = builder.config.data_files
    loader = _OWN.get(type(builder.config).__name__, folder)
    if files is None:
        return loader, None, {}
    if not selection:  # a selection leaves out other files on purpose
        _warn_of_unread_files(folder, file_names(files))
    # Settings in the folder's README, and the delimiter of .tsv files; not every loader has each.
    settings = {}
    for name in ("sep", "names", "skiprows", "field"):
        value = getattr(builder.config, name, None)
        if value not in (None, ","):  # not the default
            settings[name] = value
    files_of_split = {}
    for split, names in files.items():
        files_of_split[str(split)] = list(map(str, names))
    return loader, files_of_split, settings


def _warn_of_unread_files(folder: str, names: Sequence[str]) -> None:
    """Log a warning about data files of a folder that no split has: those of another kind, or without a split's name.

    Args:
        folder: the folder.
        names: files of all splits.
    """
    read = {Path(name).resolve() for name in names}
    unread = []
    for path in sorted(Path(folder).rglob("*.*")):
        name = path.relative_to(folder)
        # The package passes over hidden folders, in which caches and exports of editors are kept.
        is_hidden = any(parent.startswith((".", "__")) for parent in name.parts[:-1])
        # Texts are often licenses, and a name that begins with a dot or an underscore is not data.
        is_data = suffix_of(path.name) in LOADERS and suffix_of(path.name) != ".txt" and path.name[0] not in "._"
        if is_data and not is_hidden and path.is_file() and path.resolve() not in read:
            unread.append(str(name))
    if unread:
        examples = ", ".join(unread[:3])
        if len(unread) > 3:
            examples += f" and {len(unread) - 3:,} more"
        log_once(
            get_logger(),
            f"{folder}: a folder is read as files of one kind, and with names of splits if some have them, which "
            f"leaves out {examples}: name the files with data_files to read them.",
            logging.WARNING,
        )


class FileRows:
    """Sequence of the rows of files, which are parsed when they are read; takes 8 bytes of memory per row.

    A compressed file, or one that holds a JSON list, is written to a temporary file without a name, as lines.

    Args:
        files: (path, format) of each file.

    Raises:
        DataError: a file cannot be read; when rows are read: the file has shrunk, or a row is broken.
    """

    def __init__(self, files: Sequence[tuple[str, FileFormat]]) -> None:
        self._files = [_IndexedFile(path, format) for path, format in files]
        # Number of rows before each file, and of all rows.
        self._firsts = [0, *accumulate(len(file.starts) - 1 for file in self._files)]
        # Numbers of the rows that were not filtered out, in all files.
        self._chosen: Sequence[int] | np.ndarray = range(self._firsts[-1])

    def __len__(self) -> int:
        return len(self._chosen)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for number, line in enumerate(self.lines()):
            try:
                yield decode_row(line)
            except DataError as error:
                raise DataError(f"{self.location(number)}: {error}; correct the line.") from error

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        index = range(len(self))[index]
        return next(iter(self.select(range(index, index + 1))))

    def select(self, indices: Sequence[int] | np.ndarray) -> "FileRows":
        """Return the rows at ``indices``."""
        selected = copy.copy(self)
        if isinstance(indices, range):  # a slice, which copies nothing
            selected._chosen = self._chosen[indices.start : indices.stop]
        else:
            selected._chosen = np.asarray(self._chosen)[indices]
        return selected

    def filter(self, keep: Callable[[Mapping[str, Any], int], bool]) -> "FileRows":
        """Return the rows for which ``keep(row, number)`` is true, and broken rows, which are reported when read."""
        kept_rows = []
        for number, line in enumerate(self.lines()):
            try:
                row = decode_row(line)
            except DataError:
                kept_rows.append(number)
                continue
            if keep(row, number):
                kept_rows.append(number)
        return self.select(np.array(kept_rows, np.int64))

    def lines(self) -> Iterator[Line]:
        """Yield the undecoded records of the rows."""
        for number, rows in groupby(self._chosen, self._file_of):
            file = self._files[number]
            for record in file.records(int(row) - self._firsts[number] for row in rows):
                yield Line.of(record, file.format)

    def location(self, index: int) -> str:
        """Return the file, and the line or row in it, of a row, for messages; reads the file up to this row."""
        chosen = int(self._chosen[index])
        number = self._file_of(chosen)
        return self._files[number].location(chosen - self._firsts[number])

    def _file_of(self, number: int) -> int:
        """Return the index of the file of a row, by the row's number in all files."""
        return bisect_right(self._firsts, number) - 1


class _IndexedFile:
    """File with the offsets of its rows.

    Attributes:
        starts: offset of each row, and of the end of the file.
    """

    def __init__(self, path: str, format: FileFormat) -> None:
        self.path = path
        self.format = format
        self._copy: int | None = None  # descriptor of the temporary file
        try:
            # Bytes of such a file cannot be found by an offset, so that it is written out first.
            if isinstance(format, JsonArray) or packed_by(Path(path)) is not None:
                self._copy = _unpacked(path, format)
                weakref.finalize(self, os.close, self._copy)
            self.starts = self._find_starts()
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}): correct the path or its rights.") from error
        except DataError:
            raise
        except UserError as error:
            raise DataError(str(error)) from error

    def _open(self) -> IO[bytes]:
        if self._copy is None:
            return open(self.path, "rb")
        return os.fdopen(os.dup(self._copy), "rb")

    def _find_starts(self) -> array:
        """Read the file once, and return the offset of each row and of the end."""
        offset = self.format.start[0]
        starts = array("q")  # 8 bytes per row, which a list of integers takes five times
        with self._open() as file:
            file.seek(offset)
            for record, _ in self.format.divide(file):
                if not self.format.is_blank(record):
                    starts.append(offset)
                offset += len(record)
        starts.append(offset)
        return starts

    def records(self, rows: Iterable[int]) -> Iterator[bytes]:
        """Yield the bytes of rows; blank lines behind a row belong to it."""
        try:
            with self._open() as file:
                for row in rows:
                    start = self.starts[row]
                    length = self.starts[row + 1] - start
                    # Forked processes share the position of the file: read without moving it.
                    record = _read_at(file.fileno(), start, length)
                    if len(record) < length:
                        refuse_shrunk(self.path, self.starts[-1], os.fstat(file.fileno()).st_size)
                    yield record
        except OSError as error:
            raise DataError(f"{self.path} can no longer be read ({error.strerror}): put it back.") from error

    def location(self, row: int) -> str:
        """Return the path, and the line or row, of a row."""
        # Lines are counted when they are asked for: their numbers would double the memory of the index.
        number = 1
        offset = 0
        start = self.starts[row]
        with self._open() as file:
            while offset < start:
                chunk = _read_at(file.fileno(), offset, min(start - offset, _CHUNK))
                if not chunk:
                    break
                number += chunk.count(b"\n")
                offset += len(chunk)
        return f"{self.path}, {self.format.unit} {number}"


def _read_at(descriptor: int, start: int, count: int) -> bytes:
    """Return up to ``count`` bytes from an offset; fewer only at the end of the file."""
    record = os.pread(descriptor, count, start)
    while len(record) < count:
        chunk = os.pread(descriptor, count - len(record), start + len(record))
        if not chunk:
            break
        record += chunk
    return record


def _unpacked(path: str, format: FileFormat) -> int:
    """Write the decompressed records of a file to a temporary file without a name, and return its descriptor."""
    with tempfile.TemporaryFile(dir=cache_folder()) as copy:
        with format.open(path) as file, unpacking(Path(path)):
            shutil.copyfileobj(file, copy, _CHUNK)
        copy.flush()
        return os.dup(copy.fileno())  # the file lives until its last descriptor is closed


def refuse_shrunk(path: str, before: int, now: int) -> None:
    """Raise :class:`DataError` for a file that has shrunk from ``before`` to ``now`` bytes."""
    raise DataError(
        f"{path} has shrunk while the run reads it, from {before:,} to {now:,} bytes: put the whole file back and "
        "resume, or start a new run."
    )


def undecoded_records(rows: Any) -> Iterable[Any]:
    """Return an iterable of rows; records of files are undecoded, so that a broken one does not end the iteration."""
    if isinstance(rows, FileRows):
        return rows.lines()
    return rows


def decoded_rows(rows: Any) -> Iterator[Mapping[str, Any] | DataError]:
    """Yield the columns of each row, or the error with the reason why the row is broken.

    The error is yielded, not raised, so that the rows behind it are read.
    """
    for record in undecoded_records(rows):
        try:
            columns = decode_row(record)
            if not isinstance(record, Line):  # the texts of a line were checked when it was decoded
                _refuse_surrogates(columns)
        except DataError as error:
            yield error
            continue
        yield columns


def _refuse_surrogates(columns: Mapping[str, Any]) -> None:
    """Raise :class:`DataError` if a text of a row in memory has half of a character, which cannot be encoded."""
    try:
        check_surrogates(columns)
    except UserError as error:
        raise DataError(str(error)) from error
    except (ValueError, RecursionError):
        pass  # recursive data: left to the transform


def location_of(rows: Any, index: int) -> str:
    """Return the file and line of a row, for messages; empty for rows that are not those of files."""
    if isinstance(rows, FileRows):
        return rows.location(index)
    return ""


def matching(names: Sequence[str]) -> list[str]:
    """Return the files that match names and glob patterns; names without a match are returned unchanged."""
    paths = []
    for name in names:
        paths += sorted(glob.glob(name, recursive=True)) or [name]
    return paths


def rows_of_split(files: LocalFiles, split: str | None, source: str) -> FileRows:
    """Return the rows of a split, or of parts of splits such as ``train[:10%]``.

    Raises:
        DataError: ``split`` is None, which names no split; there is no such split; or a file cannot be read.
    """
    if split is None:
        raise DataError(f"{source} has the splits {', '.join(files)}: set split to one of them.")
    if split in files:
        return FileRows(files[split])
    import datasets

    # The package reads what the user wrote, such as "train[:10%]+test", and the rows are numbered through all splits.
    sizes = {}
    first_rows = {}
    files_of_all_splits: list[tuple[str, FileFormat]] = []
    for name, files_of_split in files.items():
        first_rows[name] = sum(sizes.values())
        sizes[name] = len(FileRows(files_of_split))
        files_of_all_splits += files_of_split
    if split == "all":
        split = "+".join(files)
    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
    except (ValueError, AssertionError) as error:
        raise DataError(f"Cannot load {source}: {first_line(error)}.") from error
    numbers = [first_rows[part.splitname] + np.arange(part.from_, part.to) for part in parts]
    return FileRows(files_of_all_splits).select(np.concatenate(numbers))
