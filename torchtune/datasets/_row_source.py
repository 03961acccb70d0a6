"""Sources of rows: in memory, or loaded from local files, folders and the Hub."""

import glob
import logging
import socket
import threading
import urllib.request
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from torchtune.data import DataError
from torchtune.datasets._command_modes import check_read_in_preview, limit_to_preview
from torchtune.datasets._data_files import (
    FileRows,
    file_names,
    is_remote_name,
    is_saved,
    local_files,
    resolve_source,
    rows_of_split,
)
from torchtune.datasets._file_formats import LOADERS
from torchtune.datasets._fingerprint import Fingerprint
from torchtune.utils import first_line

# Name of a Hub dataset, folder, file or loader; or rows in memory.
Source = str | Path | Iterable[Mapping[str, Any]]


class TableRows:
    """Rows of a ``datasets.Dataset``, without the nulls that a table adds to nested mappings.

    In a table every mapping of a column has the fields of all others, so that a call of one tool would have the
    arguments of all tools. A field that is null in its row was usually absent; tables cannot tell the difference.

    Args:
        table: a ``datasets.Dataset``.
    """

    def __init__(self, table: Any) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return (without_added_nulls(row) for row in self.table)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return without_added_nulls(self.table[index])

    def select(self, indices: Sequence[int]) -> "TableRows":
        """Return the rows at ``indices``."""
        return type(self)(self.table.select(indices))


class EncodedRows(TableRows):
    """Rows of a ``datasets.Dataset`` in which images stay encoded, as ``{"bytes", "path"}``.

    Args:
        table: a ``datasets.Dataset``.
    """

    def __init__(self, table: Any) -> None:
        super().__init__(table.with_format("arrow"))

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return without_added_nulls(self.table[index].to_pylist()[0])


def without_added_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a table without null fields in nested mappings."""
    return {name: _without_nulls(value) for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    """Return a value without null fields in mappings, at any depth."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


class RowSource:
    """Source of rows, by name or in memory.

    Args:
        source: Hub dataset, folder, file, loader name (``json``, ``csv``, ``parquet`` …), or rows: a
            ``datasets.Dataset`` or any iterable of mappings column -> value.
        filter_fn: function of a row; rows for which it returns False are dropped.
        filter_kwargs: passed to ``datasets.Dataset.filter``.
        on_bad_row: ``stop`` at a row that cannot be trained on, or ``skip`` and list such rows.
        drop_duplicates: drop rows that have the tokens and labels of an earlier row.
        prepared: output folder of ``tune data prepare``; it must have been made from the same rows.
        **kwargs: passed to ``datasets.load_dataset`` (``split``, ``data_files``, ``name`` …).

    Attributes:
        skips: whether rows that cannot be trained on are skipped.
        drops_duplicates: whether duplicates are dropped.
        name: name of the source, for messages.

    Raises:
        DataError: ``source`` is neither a name nor rows, or an argument does not apply to rows in memory.

    Example:
        >>> source = torchtune.datasets.RowSource([{"size": 1}, {"size": 2}], filter_fn=lambda row: row["size"] > 1)
        >>> list(source.rows())
        [{'size': 2}]
    """

    def __init__(
        self,
        source: Source,
        *,
        filter_fn: Callable[..., bool] | None = None,
        filter_kwargs: Mapping[str, Any] | None = None,
        prepared: str | Path | None = None,
        on_bad_row: Literal["stop", "skip"] = "stop",
        drop_duplicates: bool = False,
        **kwargs: Any,
    ) -> None:
        if on_bad_row not in ("stop", "skip"):
            raise DataError(f"on_bad_row must be stop or skip, not '{on_bad_row}'.")
        self.skips = on_bad_row == "skip"
        self.drops_duplicates = drop_duplicates
        # Removed also if they are False or None, which load_dataset or rows in memory would not accept.
        if kwargs.pop("streaming", None):
            raise DataError(
                "streaming=True is not possible here: the rows are tokenized before training; leave it out."
            )
        if kwargs.pop("shuffle_buffer", None) is not None:
            raise DataError("shuffle_buffer is for streaming=True: leave it out, all rows are shuffled.")
        self.prepared: Path | None = None
        if prepared is not None:
            self.prepared = Path(prepared).expanduser()
        self._filter = filter_fn
        self._filter_kwargs = filter_kwargs
        self._kwargs = kwargs.copy()
        self._rows: Any = None  # unfiltered rows in memory, or loaded and filtered rows
        self._is_in_memory = not isinstance(source, str | Path)
        # Rows of a name are loaded when they are needed: a run whose token rows are cached reads none. But the call of
        # `load_rows` is made here: the check of a config follows **kwargs into the calls of a function, not its copies.
        self._load = partial(load_rows, source, filter_fn=filter_fn, filter_kwargs=filter_kwargs, **kwargs)
        if self._is_in_memory:
            self._rows = _rows_in_memory(source, kwargs.copy())  # a generator can be read only once
            self.name = f"the {type(source).__name__} of {len(self._rows)} rows in memory"
        else:
            self._source = str(source)
            self.name = str(kwargs.get("data_files") or source)

    def rows(self, *, encoded_images: bool = False) -> Any:
        """Load the rows at the first call and return them.

        Args:
            encoded_images: leave the images of a ``datasets.Dataset`` as bytes or paths, instead of decoding them.

        Raises:
            DataError: see :func:`load_rows`.
        """
        if self._is_in_memory:
            check_read_in_preview(self.name, is_remote=False)  # a check of settings has no tokenizer
            rows = _filtered(self._rows, self._filter, self._filter_kwargs, self.name)
        else:
            rows = self._loaded()
        is_table = hasattr(rows, "with_format") and hasattr(rows, "features")  # a datasets.Dataset
        if is_table and encoded_images:
            return EncodedRows(rows)
        schema = getattr(getattr(rows, "features", None), "arrow_schema", ())
        has_mappings = any("struct<" in str(field.type) for field in schema)
        if has_mappings:
            return TableRows(rows)
        return rows

    def _loaded(self) -> Any:
        """Load the rows of a named source, once."""
        if self._rows is None:
            self._rows = self._load()
        return self._rows

    def fingerprint(self, depends_on: Mapping[str, Any]) -> Fingerprint:
        """Return the fingerprint of prepared rows, of this source and of what else they depend on.

        Hub datasets are loaded for it, but not local files.

        Args:
            depends_on: name -> value of everything that determines the prepared rows, except the source.

        Raises:
            DataError: a file is missing, or see :func:`load_rows`.
        """
        fingerprint = Fingerprint(depends_on)
        fingerprint.add("filter", [self._filter, self._filter_kwargs])
        if self.skips:
            fingerprint.add("on_bad_row", "skip")
        if not self._is_in_memory and self._add_local_files(fingerprint):
            return fingerprint
        rows = self._rows
        if not self._is_in_memory:
            rows = self._loaded()
        table_fingerprint = getattr(rows, "_fingerprint", None)
        if isinstance(table_fingerprint, str):  # of a datasets.Dataset; covers content and transforms
            fingerprint.add("data", table_fingerprint)
        else:
            fingerprint.add_rows("data", rows)
        return fingerprint

    def _add_local_files(self, fingerprint: Fingerprint) -> bool:
        """Add the content of local files to a fingerprint; return False, and add nothing, for a remote source."""
        path, kwargs = resolve_source(self._source, self._kwargs)
        if path in LOADERS.values():
            loader = path
            files = kwargs.pop("data_files", None)
        else:  # the fingerprint is that of its files, wherever it stands
            loader = "folder"
            files = path
        names = file_names(files)
        for name in names:
            if Path(name).exists():
                continue
            # A Hub dataset, or a file that is missing, for which loading raises.
            if is_remote_name(name) or not glob.glob(name, recursive=True):
                return False
        num_files = None
        if isinstance(files, Mapping):  # which of the files belong to which split
            num_files = {split: len(file_names(files_of_split)) for split, files_of_split in files.items()}
        fingerprint.add_files("data", [loader, kwargs, num_files], names)
        return True


def _rows_in_memory(source: Any, kwargs: Mapping[str, Any]) -> Any:
    """Convert rows in memory to a sequence.

    Args:
        source: a list, a ``datasets.Dataset``, a mapping of splits of the ``datasets`` package, or another iterable.
        kwargs: arguments for ``datasets.load_dataset``, of which only ``split`` may be set.
    """
    settings = sorted(name for name, value in kwargs.items() if name != "split" and value is not None)
    if settings:
        raise DataError(f"{settings[0]} does not go with rows in memory: leave it out.")
    split = kwargs.get("split")
    is_from_datasets_package = type(source).__module__.partition(".")[0] == "datasets"
    if isinstance(source, Mapping):
        if not is_from_datasets_package:
            raise DataError("source is a mapping: rows in memory must be a list of mappings column -> value.")
        if split not in source:
            raise DataError(f"source has the splits {', '.join(source)}: set split to one of them, not {split!r}.")
        return source[split]
    if split not in (None, "train"):  # "train" is the default of the builders
        raise DataError(f"split='{split}' does not go with rows in memory: hand over the rows that are meant.")
    if isinstance(source, list | tuple):
        return source
    is_data_frame = hasattr(source, "columns")  # iterating over it gives the names of its columns
    if hasattr(source, "__len__"):
        if is_from_datasets_package:
            return source
        # By index: such a dataset may have no __iter__, and Python's fallback needs an IndexError at the end.
        if hasattr(source, "__getitem__") and not is_data_frame:
            return [source[index] for index in range(len(source))]
    if not hasattr(source, "__iter__") or is_data_frame:
        raise DataError(
            f"source must be a name, or rows (a list of mappings, a datasets.Dataset), not {type(source).__name__}."
        )
    return list(source)


def _filtered(
    rows: Any, filter_fn: Callable[..., bool] | None, filter_kwargs: Mapping[str, Any] | None, source: str
) -> Any:
    """Return the rows for which ``filter_fn`` is true; raise :class:`DataError` if there are none."""
    if filter_fn is not None:
        if not callable(filter_fn):
            raise DataError(f"filter_fn is {filter_fn!r}, not a function of a row: let a builder of yours pass it.")
        if isinstance(rows, FileRows):
            rows = rows.filter(_filter_of_row(filter_fn, filter_kwargs or {}))
        elif hasattr(rows, "filter"):  # a datasets.Dataset
            rows = rows.filter(filter_fn, **(filter_kwargs or {}))
        else:
            rows = [row for row in rows if filter_fn(row)]
    if hasattr(rows, "__len__") and len(rows) == 0:
        problem = "There are no rows"
        if filter_fn is not None:
            problem = "filter_fn leaves no rows"
        raise DataError(f"{problem} in {source}.")
    return rows


def _filter_of_row(filter_fn: Callable[..., bool], settings: Mapping[str, Any]) -> Callable[[Any, int], bool]:
    """Return a function of (row, number) that calls ``filter_fn`` as ``datasets.Dataset.filter`` does."""
    if settings.get("batched"):
        raise DataError("filter_kwargs: batched=True is not possible for files: let filter_fn take one row.")
    columns = settings.get("input_columns")
    if isinstance(columns, str):
        columns = [columns]
    kwargs = settings.get("fn_kwargs") or {}

    def keep(row: Mapping[str, Any], number: int) -> bool:
        arguments: list[Any] = [row]
        if columns is not None:
            arguments = [row[name] for name in columns]
        if settings.get("with_indices"):
            arguments.append(number)  # the last positional argument
        return filter_fn(*arguments, **kwargs)

    return keep


def load_rows(
    source: str,
    *,
    filter_fn: Callable[..., bool] | None = None,
    filter_kwargs: Mapping[str, Any] | None = None,
    **load_dataset_kwargs: Any,
) -> Any:
    """Load rows with the ``datasets`` package, and filter them if ``filter_fn`` is set.

    Args:
        source: Hub dataset, folder, file, or loader name (``json``, ``csv``, ``parquet`` …).
        filter_fn: function of a row; rows for which it returns False are dropped.
        filter_kwargs: passed to ``datasets.Dataset.filter``.
        **load_dataset_kwargs: passed to ``datasets.load_dataset`` (``split``, ``data_files``, ``name`` …).

    Returns:
        a sequence of at least one row, usually a ``datasets.Dataset``; with ``streaming``, an unfiltered
        ``datasets.IterableDataset``.

    Raises:
        DataError: the source cannot be found, reached or read, has no such split, or has no rows.
    """
    path, kwargs = resolve_source(source, load_dataset_kwargs)
    names: list[str] = []
    # A file has already become a loader name with data_files; what is left and is no folder is of the Hub.
    is_remote = not Path(path).is_dir()
    if path in LOADERS.values():
        names = file_names(kwargs.get("data_files"))
        is_remote = any(map(is_remote_name, names))
    # A preview reads only the first local rows.
    check_read_in_preview(source, is_remote=is_remote)
    name = ", ".join(names) or source
    split = kwargs.get("split")
    if kwargs.get("streaming"):  # the stream filters its rows itself, as it reads them
        return _load_with_package(path, kwargs, name, source, load_dataset_kwargs)
    files = local_files(path, kwargs)
    if files is not None:  # files that are read without the package
        rows = rows_of_split(files, split, name)
    else:
        rows = _load_with_package(path, kwargs, name, source, load_dataset_kwargs)
    name_with_split = name
    if split is not None:
        name_with_split = f"{name} (split {split})"
    return limit_to_preview(_filtered(rows, filter_fn, filter_kwargs, name_with_split))


def _load_with_package(
    path: str, kwargs: Mapping[str, Any], name: str, source: str, load_dataset_kwargs: Mapping[str, Any]
) -> Any:
    """Load rows with the ``datasets`` package, and explain its errors.

    Args:
        path: path for ``datasets.load_dataset``, see :func:`resolve_source`.
        kwargs: its other arguments.
        name: names of the files, or the source, for messages.
        source: the source as the user named it, for messages.
        load_dataset_kwargs: arguments as the user named them, for messages.

    Raises:
        DataError: see :func:`load_rows`.
    """
    import datasets

    is_on_hub = path not in LOADERS.values() and not Path(path).is_dir()
    try:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            stack.enter_context(_reported_once())
            # The package leaves files open.
            warnings.simplefilter("ignore", ResourceWarning)
            if is_on_hub:
                stack.enter_context(without_waiting_for_the_hub())
            if is_saved(path):
                rows = _saved_rows(path, kwargs)
            else:
                rows = datasets.load_dataset(path, **kwargs)
    except datasets.exceptions.DatasetNotFoundError as error:
        if "gated" in str(error):
            raise DataError(
                f"Dataset '{source}' is gated: ask for access on its page of the hub, then set HF_TOKEN to a token of "
                "that account, or log in with 'hf auth login'."
            ) from error
        raise DataError(
            f"There is no dataset '{source}' on the hub (or it is gated), and no such folder or file here: correct "
            "the source, log in with 'hf auth login', or give the path of a .json, .jsonl, .csv or .parquet file."
        ) from error
    except (ConnectionError, FileNotFoundError) as error:
        files = ", ".join(file_names(load_dataset_kwargs.get("data_files")))
        hint = ""
        if files:
            hint = f", and there is no data file {files} in {Path.cwd()}"
        status = _hub_status(error)
        if status is not None:
            answer = f"status {status}"
            if status == 429:
                answer += ", because it limits the number of requests"
            raise DataError(
                f"Dataset '{source}' cannot be fetched: the hub answers with {answer}: try again in some minutes, set "
                "HF_TOKEN, or give a local file with dataset.data_files."
            ) from error
        if isinstance(error, FileNotFoundError):
            if Path(path).is_dir() and not files:
                raise DataError(
                    f"{name}: the folder has no data files: put .jsonl, .json, .csv or .parquet files there, or give "
                    "another path."
                ) from error
            raise DataError(f"{name} cannot be found: {first_line(error)}{hint}.") from error
        raise DataError(
            f"Dataset '{source}' cannot be fetched: the hub cannot be reached{hint}; check the network, or give a "
            "local file with dataset.data_files."
        ) from error
    except datasets.exceptions.DatasetGenerationError as error:
        reason = first_line(error.__cause__ or error)
        raise DataError(f"Cannot read the data file {name}: {reason}.") from error
    except RuntimeError as error:
        if "script" not in str(error):  # an error of the package that has no advice
            raise
        raise DataError(
            f"Dataset '{source}' is made by a script, which is not run: set dataset.revision=refs/convert/parquet, if "
            "the hub has converted it, or name its files with dataset.data_files."
        ) from error
    except (EOFError, zlib.error, StopIteration) as error:  # StopIteration: a second read of a file that failed before
        raise DataError(f"Cannot load {name}: a file is not packed to its end, pack it again.") from error
    except (ValueError, TypeError, OSError) as error:
        if "corresponds to no data" in str(error):
            raise DataError(f"There are no rows in {name} (split {kwargs.get('split')}).") from error
        raise DataError(f"Cannot load {name}: {first_line(error)}.") from error
    if isinstance(rows, dict):  # without split, the package returns all of them by name
        raise DataError(f"{name} has the splits {', '.join(rows)}: set split to one of them.")
    return rows


def _hub_status(error: BaseException) -> int | None:
    """Return the status of an answer of the hub that caused an error; None if it did not answer."""
    cause: BaseException | None = error
    while cause is not None:
        # Errors of huggingface_hub have the answer.
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status is not None:
            return int(status)
        cause = cause.__cause__ or cause.__context__
    return None


def _saved_rows(folder: str, kwargs: Mapping[str, Any]) -> Any:
    """Return the rows that ``save_to_disk`` of the ``datasets`` package wrote to a folder.

    ``load_dataset`` does not read such a folder; without a ``split``, all splits are returned by name, as it does.
    """
    import datasets

    settings = [name for name, value in kwargs.items() if value is not None and name not in ("split", "streaming")]
    if settings:
        raise DataError(f"{settings[0]} does not go with {folder}, which save_to_disk wrote: leave it out.")
    saved = datasets.load_from_disk(folder)
    split = kwargs.get("split")
    if not isinstance(saved, Mapping):
        saved = {"train": saved}
    if split is None:
        return saved
    name = split.partition("[")[0]  # "train[:10%]" is a slice of "train"
    if name not in saved:
        raise DataError(f"{folder} has the splits {', '.join(saved)}: set split to one of them, not '{split}'.")
    rows = saved[name]
    if split != name:
        slices = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(rows)})
        rows = rows.select(range(slices[0].from_, slices[0].to))
    if kwargs.get("streaming"):
        return rows.to_iterable_dataset()
    return rows


@contextmanager
def _reported_once() -> Iterator[None]:
    """Silence the error logs of the datasets package's loaders, which raise these errors as well."""
    log = logging.getLogger("datasets.packaged_modules")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def without_waiting_for_the_hub() -> Iterator[None]:
    """Set the datasets package offline inside the block if the Hub does not answer within seconds.

    The package would otherwise retry for 25 to 40 seconds before it fails.
    """
    import datasets

    is_offline = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = is_offline or not _hub_answers(datasets.config.HF_ENDPOINT)
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = is_offline


def _hub_answers(endpoint: str, seconds: float = 5.0) -> bool:
    """Return whether a connection to the Hub can be opened within some seconds.

    True behind a proxy, because only the proxy can reach the Hub.
    """
    if urllib.request.getproxies():
        return True
    address = urlsplit(endpoint)
    port = address.port
    if port is None and address.scheme == "http":
        port = 80
    elif port is None:
        port = 443
    answers = threading.Event()

    def connect() -> None:
        with suppress(OSError):  # no connection: the event is not set
            socket.create_connection((address.hostname or "", port), timeout=seconds).close()
            answers.set()

    thread = threading.Thread(target=connect, daemon=True)  # name resolution has no timeout
    thread.start()
    thread.join(seconds)
    return answers.is_set()
