"""Folders of object stores (``s3://bucket/run``) and other file systems of fsspec: read, write, list, fetch once."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tqdm import tqdm

from torchtune.utils._errors import UserError, first_line
from torchtune.utils._files import atomic_directory, cache_root, explain_os_error
from torchtune.utils._folder_lock import FolderLock
from torchtune.utils._heartbeat import sign_of_life
from torchtune.utils._json import write_json

# Bytes in memory at a time. S3 takes at most 10,000 parts: a file may have up to 160 GB.
_CHUNK = 16 * 2**20
# Extra of this library that has the file system of a protocol.
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
# Seconds after which a download that failed for another reason than its data is tried again.
_PAUSES = (1.0, 4.0)


class RemoteError(UserError):
    """Error of an object store: a bucket that is gone, a wrong key, no network."""


@dataclass(frozen=True)
class TransferredFile:
    """Size and SHA-256 of a file, computed while it was sent or received."""

    size: int
    sha256: str


def is_url(path: object) -> bool:
    """Return whether a path names a file system, such as ``s3://bucket/run``."""
    return isinstance(path, str) and "://" in path


class RemoteFolder:
    """A folder of an fsspec file system; names of files are relative to it, with ``/``.

    Args:
        url: such as ``s3://bucket/run``, ``gs://…``, ``hf://owner/name/run``, ``file:///mnt/run``, or a local path.
        key: setting with the URL, for messages.

    Raises:
        RemoteError: the protocol is unknown, the package of its file system is not installed, or it cannot be reached.
    """

    def __init__(self, url: str, key: str) -> None:
        from fsspec import core

        self.url = url.rstrip("/")
        self.key = key
        protocol = url.partition("://")[0] if is_url(url) else "file"
        # Object stores have no folders to be made first, and making one would make a bucket that is gone again.
        options = {"auto_mkdir": True} if protocol in ("file", "local") else {}
        try:
            self._fs, self._path = core.url_to_fs(self.url, **options)
        except ImportError as error:
            remedy = "install that package"
            if protocol in _EXTRAS:
                remedy = f"pip install 'torchtune[{_EXTRAS[protocol]}]'"
            raise RemoteError(
                f"{key}: {url} needs a package that is not installed ({first_line(error)}): {remedy}."
            ) from error
        except ValueError as error:
            raise RemoteError(
                f"{key}: {url} is no path of a file system that is known ({first_line(error)}): write it like "
                "s3://bucket/run."
            ) from error
        except Exception as error:  # a file system that connects at once
            raise RemoteError(
                f"{key}: {url} cannot be opened ({type(error).__name__}: {first_line(error)}): check the address, the "
                "credentials, and the network."
            ) from error
        self._path = self._path.rstrip("/")  # names are appended after a slash

    def __str__(self) -> str:
        return self.url

    @contextmanager
    def _explained(self, action: str) -> Iterator[None]:
        """Raise ``RemoteError`` for whatever the file system raises, which has errors of its own."""
        try:
            yield
        except (UserError, MemoryError):
            raise
        except Exception as error:  # boto, aiohttp and other clients share no base class
            reason = first_line(error)
            remedy = "check that the bucket exists, the credentials, and the network"
            if isinstance(error, PermissionError):
                remedy = "check the credentials and what they may do there"
            elif isinstance(error, FileNotFoundError):
                remedy = "check that the bucket exists"
            raise RemoteError(
                f"{self.key}: {self.url} {action} ({type(error).__name__}: {reason}): {remedy}."
            ) from error

    def is_file(self) -> bool:
        """Return whether the URL is that of a file."""
        with self._explained("cannot be read"):
            return self._fs.isfile(self._path)

    def files(self) -> dict[str, dict[str, Any]]:
        """Return the file system's record of every file (size, tag, …), by name; empty if there are none."""
        with self._explained("cannot be listed"):
            self._fs.invalidate_cache()
            try:
                listing = self._fs.find(self._path, detail=True)
            except FileNotFoundError:
                return {}
        prefix = f"{self._path}/"
        files = {}
        for path, info in listing.items():
            if path.startswith(prefix):  # a URL of a file lists the file itself
                files[path.removeprefix(prefix)] = info
        return files

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if it does not exist."""
        with self._explained(f"cannot be read ({name})"):
            self._fs.invalidate_cache()
            try:
                return self._fs.cat_file(f"{self._path}/{name}")
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Write a small file as a whole."""
        with self._explained(f"cannot be written ({name})"), self._fs.open(f"{self._path}/{name}", "wb") as file:
            file.write(content)

    def upload(self, path: Path, name: str, progress: Callable[[int], object]) -> TransferredFile:
        """Send a local file in chunks.

        Args:
            path: the local file.
            name: its name in this folder.
            progress: receives the number of bytes sent since its last call.

        Raises:
            RemoteError: the file system refuses, or holds another number of bytes afterwards.
        """
        sha256 = hashlib.sha256()
        size = 0
        target = f"{self._path}/{name}"
        with path.open("rb") as source, self._explained(f"does not take {name}"):
            with self._fs.open(target, "wb", block_size=_CHUNK) as file:
                while chunk := source.read(_CHUNK):  # a shard may be larger than the free memory
                    file.write(chunk)
                    sha256.update(chunk)
                    size += len(chunk)
                    progress(len(chunk))
            self._fs.invalidate_cache()  # the answer must come from the service
            held = self._fs.info(target)["size"]
        if held != size:
            raise RemoteError(
                f"{self.key}: {self.url} holds {held:,} bytes of {name} right after {size:,} were sent: its service "
                "loses data."
            )
        return TransferredFile(size, sha256.hexdigest())

    def download(self, name: str, path: Path, progress: Callable[[int], object]) -> TransferredFile:
        """Receive a file in chunks.

        Args:
            name: name of the file in this folder.
            path: local file to write; missing folders are created.
            progress: receives the number of bytes received since its last call.

        Raises:
            FileNotFoundError: the file does not exist.
            RemoteError: the file system refuses, or the connection ends, three times.
            UserError: the disk is full or not writable.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        for pause in _PAUSES:
            try:
                return self._download(name, path, progress)
            except RemoteError:
                time.sleep(pause)
        return self._download(name, path, progress)

    def _download(self, name: str, path: Path, progress: Callable[[int], object]) -> TransferredFile:
        """Receive a file without a second attempt; see :meth:`download`, which repeats the call after a RemoteError.

        Errors of the local disk become a :class:`UserError`, after which there is no second attempt.
        """
        sha256 = hashlib.sha256()
        size = 0
        source = f"{self._path}/{name}"
        try:
            file = path.open("wb")
        except OSError as error:
            raise explain_os_error(error, path) from error
        with file:
            for chunk in self._chunks(source, name):
                try:
                    file.write(chunk)
                except OSError as error:
                    raise explain_os_error(error, path) from error
                sha256.update(chunk)
                size += len(chunk)
                progress(len(chunk))
        return TransferredFile(size, sha256.hexdigest())

    def _chunks(self, source: str, name: str) -> Iterator[bytes]:
        missing: FileNotFoundError | None = None
        with self._explained(f"cannot be read ({name})"):
            try:
                # Read once from the front: nothing is kept, and nothing is read ahead.
                with self._fs.open(source, "rb", block_size=_CHUNK, cache_type="none") as file:
                    while chunk := file.read(_CHUNK):
                        yield chunk
            except FileNotFoundError as error:
                missing = error
        if missing is not None:
            raise missing

    def remove_folder(self, name: str, first: str) -> None:
        """Delete a folder in this one, if it exists, and before the rest of it the file ``first``."""
        with self._explained(f"does not delete {name}"):
            self._fs.invalidate_cache()
            for path in (f"{self._path}/{name}/{first}", f"{self._path}/{name}"):
                try:
                    self._fs.rm(path, recursive=True)
                except FileNotFoundError:
                    continue


def local_path(path: str | Path, key: str) -> Path:
    """Return a local path: ``path`` itself, or a folder of the cache with the files of a URL.

    The URL of a file, such as ``s3://bucket/model/tokenizer.json``, stands for the file in its fetched folder.

    The files are fetched once, with a progress bar. When the object store holds other files later, they are fetched
    again. Several processes fetch one after another, so that all but the first find the files.

    Args:
        path: a local path, or a URL such as ``s3://bucket/model``.
        key: setting with the path, for messages.

    Raises:
        RemoteError: there are no files, or they cannot be fetched.
        UserError: the disk is full.
    """
    if not is_url(path):
        return Path(path)
    remote = RemoteFolder(str(path), key)
    digest = hashlib.sha256(remote.url.encode()).hexdigest()[:12]
    folder = cache_root() / "buckets" / f"{PurePosixPath(remote.url).name}-{digest}"
    if remote.is_file():
        parent, _, name = remote.url.rpartition("/")
        return local_path(parent, key) / name
    record = folder.with_name(f"{folder.name}.json")  # name -> size and version of each object that the folder holds
    lock = FolderLock(folder.parent, name=f".{folder.name}.lock", key=key)
    with lock.held(waiting=f"Waiting until another process has fetched {remote}."):
        listing = remote.files()
        # A name that ends with a slash is a placeholder for an empty folder.
        versions = {name: _version(info) for name, info in listing.items() if not name.endswith("/")}
        if not versions:
            raise RemoteError(f"{key}: {remote} holds no files: correct the path, and check that the bucket exists.")
        fetched_versions = None
        with suppress(OSError, ValueError):  # nothing is fetched yet, or the record is damaged
            fetched_versions = json.loads(record.read_text(encoding="utf-8"))
        if not folder.is_dir() or fetched_versions != versions:
            record.unlink(missing_ok=True)  # a fetch that is interrupted leaves no record, and is repeated
            _fetch(remote, listing, list(versions), folder)
            write_json(record, versions)
    return folder


def _version(info: dict[str, Any]) -> list[Any]:
    """Return size and tag (or time) of an object, which change when it is replaced."""
    for key in ("ETag", "etag", "md5Hash", "mtime", "LastModified"):  # each file system has one of them
        if info.get(key):
            return [info["size"], str(info[key])]
    return [info["size"], str(None)]


def _fetch(remote: RemoteFolder, listing: dict[str, dict[str, Any]], names: list[str], folder: Path) -> None:
    """Download the files of a folder; the new folder replaces an older one when it is complete."""
    total = sum(listing[name]["size"] for name in names)
    bar = tqdm(total=total, desc=f"Fetching {remote}", unit="B", unit_scale=True, disable=None)

    def progress(count: int) -> None:
        bar.update(count)
        sign_of_life()  # the watchdog of a run waits for it as well

    with closing(bar), atomic_directory(folder) as temporary:
        for name in names:
            if ".." in PurePosixPath(name).parts:
                raise RemoteError(f"{remote.key}: {remote} has a file {name}, which leaves the folder: rename it.")
            try:
                received = remote.download(name, temporary / name, progress)
            except FileNotFoundError as error:
                raise RemoteError(
                    f"{remote.key}: {remote} lost {name} while it was fetched: try again when nobody writes to it."
                ) from error
            if received.size != listing[name]["size"]:
                raise RemoteError(
                    f"{remote.key}: {remote} gave {received.size:,} of {listing[name]['size']:,} bytes of {name}: try "
                    "again when nobody writes to it."
                )
