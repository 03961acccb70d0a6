"""Checkpoints of a run in an object store: uploaded in the background, and downloaded by a run on a fresh machine.

A checkpoint in the bucket has the files of the local folder, a manifest (``.manifest.json``: size and SHA-256 of every
file) and, written last, the completion marker of the local folder. Without the marker, a checkpoint does not count.
"""

import json
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torchtune.checkpoints._directories import (
    BEST,
    MARKER,
    check_relative,
    complete_directories,
    is_checkpoint_name,
    newest_of,
    outdated_names,
    parse_marker,
    prune,
    read_best_records,
    read_marker,
)
from torchtune.checkpoints._weight_files import CheckpointError
from torchtune.utils import (
    RemoteError,
    RemoteFolder,
    UserError,
    atomic_directory,
    atomic_write,
    first_line,
    get_logger,
    sign_of_life,
)

# Hidden, so that no export carries it along as a file of the model.
MANIFEST = ".manifest.json"
# File of the run that writes to the bucket.
_OWNER = "run.json"
# Seconds between two attempts to upload a checkpoint, and at the end of a run, where only a few are made.
_PAUSE = 60.0
_PAUSE_AT_END = 3.0
_ATTEMPTS_AT_END = 3
# Seconds between two lines about an upload that the end of the run waits for.
_LOG_EVERY = 10.0


class ReplacedError(Exception):
    """Raised in an upload if the run has saved another checkpoint with the name of the one that is uploaded."""


class DamagedUploadError(CheckpointError):
    """Checkpoint in a bucket with a missing, half-written or changed file."""


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A checkpoint in the bucket that has its completion marker.

    Attributes:
        name: ``epoch_N`` or ``step_N``.
        saves: number of the save in its run.
        resumable: whether it has the training state.
        marker: content of its marker.
    """

    name: str
    saves: int
    resumable: bool
    marker: bytes


class Bucket:
    """The checkpoints of a run in an object store.

    Args:
        url: folder of the run, such as ``s3://bucket/run``; see :class:`~torchtune.utils.RemoteFolder`.

    Attributes:
        last_save: largest number of a save in the bucket that is known, so that later saves count on.

    Raises:
        UserError: the protocol is unknown, or a package is missing.
    """

    def __init__(self, url: str) -> None:
        self.folder = RemoteFolder(url, "checkpointer.upload")
        self.last_save = 0
        self._owner: str | None = None

    def __str__(self) -> str:
        return self.folder.url

    def claim(self) -> None:
        """Write which run uploads from now on; an earlier run then stops uploading.

        Raises:
            RemoteError: the bucket does not exist, or cannot be written to.
        """
        self._owner = uuid.uuid4().hex
        content = {"run": self._owner, "since": time.strftime("%Y-%m-%d %H:%M:%S %Z")}
        self.folder.write(_OWNER, json.dumps(content).encode())

    def _check_owner(self) -> None:
        """Raise ``CheckpointError`` if another run has claimed the bucket since."""
        if self._owner is None:
            self.claim()
        content = self.folder.read(_OWNER)
        try:
            owner = json.loads(content or b"{}")
        except ValueError:  # the other run is writing it, or was killed
            owner = {"run": None}
        if owner.get("run", self._owner) != self._owner:
            raise CheckpointError(
                f"checkpointer.upload: another run uploads to {self} since {owner.get('since')}: stop one of the two, "
                "or give each run a folder of its own."
            )

    def complete(self) -> list[RemoteCheckpoint]:
        """Return the checkpoints with a marker, oldest first, and update ``last_save``.

        A damaged marker is only logged: a resume may take an older checkpoint.

        Raises:
            RemoteError: the bucket cannot be listed.
        """
        checkpoints = []
        for name, files in self._folders().items():
            if MARKER not in files:
                continue
            content = self.folder.read(f"{name}/{MARKER}") or b""  # deleted since it was listed: counts as damaged
            try:
                marker = parse_marker(content)
            except ValueError:
                get_logger().error(
                    f"checkpointer.upload: {self}/{name}/{MARKER} is damaged: {name} does not count as a checkpoint."
                )
                continue
            checkpoints.append(RemoteCheckpoint(name, marker["saves"], marker["resumable"], content))
        checkpoints.sort(key=lambda checkpoint: (checkpoint.saves, checkpoint.name))
        self.last_save = max([self.last_save, *(checkpoint.saves for checkpoint in checkpoints)])
        return checkpoints

    def _folders(self) -> dict[str, list[str]]:
        """Return the files of each checkpoint, complete or not, relative to it."""
        folders: dict[str, list[str]] = {}
        for path in self.folder.files():
            name, _, file = path.partition("/")
            if file and is_checkpoint_name(name):
                folders.setdefault(name, []).append(file)
        return folders

    def upload(self, path: Path, progress: "UploadProgress") -> None:
        """Upload a complete local checkpoint; an earlier one with its name, complete or not, is replaced.

        Args:
            path: folder of the checkpoint.
            progress: counts the bytes.

        Raises:
            RemoteError: the object store refuses.
            CheckpointError: another run has claimed the bucket.
            ReplacedError: the folder holds another checkpoint by now; the upload has no marker and does not count.
        """
        self._check_owner()
        marker = (path / MARKER).read_bytes()
        names = sorted(parse_marker(marker)["crc32"])  # all files but the marker itself
        total = sum((path / name).stat().st_size for name in names)
        progress.start(path.name, total)
        # Its marker first: a kill in between must not leave a checkpoint that seems complete.
        self.folder.remove_folder(path.name, first=MARKER)
        manifest = {}
        for name in names:
            sent = self.folder.upload(path / name, f"{path.name}/{name}", progress.add)
            manifest[name] = {"size": sent.size, "sha256": sent.sha256}
        content = json.dumps({"files": manifest}, indent=1).encode()
        self.folder.write(f"{path.name}/{MANIFEST}", content)
        if (path / MARKER).read_bytes() != marker:  # the files may be of two saves
            raise ReplacedError
        # Last: from here on, the checkpoint is complete.
        self.folder.write(f"{path.name}/{MARKER}", marker)

    def download(self, checkpoint: RemoteCheckpoint, output_dir: Path) -> None:
        """Download a checkpoint into ``output_dir``, where it appears when it is whole and its checksums are right.

        Raises:
            DamagedUploadError: a file is missing, half-written or changed.
            RemoteError: the object store cannot be read.
            UserError: the disk is full.
        """
        name = checkpoint.name
        manifest = self._read_manifest(name)
        total = sum(size for size, _ in manifest.values())
        get_logger().info(f"Downloading {self}/{name} ({total / 1e9:.2f} GB).")
        with atomic_directory(output_dir / name) as folder:
            for file, (size, sha256) in manifest.items():
                try:
                    received = self.folder.download(f"{name}/{file}", folder / file, lambda count: sign_of_life())
                except FileNotFoundError as error:
                    raise DamagedUploadError(f"{self}/{name}/{file} is missing") from error
                if received.size != size:
                    raise DamagedUploadError(f"{self}/{name}/{file} has {received.size:,} bytes instead of {size:,}")
                if received.sha256 != sha256:
                    raise DamagedUploadError(f"{self}/{name}/{file} was changed since it was uploaded (its SHA-256)")
            (folder / MARKER).write_bytes(checkpoint.marker)  # not in the manifest, which is written before it

    def _read_manifest(self, name: str) -> dict[str, tuple[int, str]]:
        """Return size and SHA-256 of every file of a checkpoint."""
        content = self.folder.read(f"{name}/{MANIFEST}")
        if content is None:
            raise DamagedUploadError(f"{self}/{name}/{MANIFEST} is missing")
        files = {}
        try:
            for file, facts in json.loads(content)["files"].items():
                files[check_relative(file)] = (int(facts["size"]), str(facts["sha256"]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedUploadError(f"{self}/{name}/{MANIFEST} is damaged") from error
        return files

    def download_best(self, checkpoints: Mapping[str, RemoteCheckpoint], output_dir: Path) -> None:
        """Download the list of best validations, and the best checkpoint, unless ``output_dir`` has a list."""
        if (output_dir / BEST).exists():
            return
        content = self.folder.read(BEST)
        if content is None:
            return
        with atomic_write(output_dir / BEST) as file:
            file.write(content)
        best = newest_of(read_best_records(output_dir), checkpoints)
        if best is None or (output_dir / best["checkpoint"]).exists():
            return
        try:
            self.download(checkpoints[best["checkpoint"]], output_dir)
        except DamagedUploadError as error:
            get_logger().warning(f"The best checkpoint so far is not here, its copy is damaged: {error}.")

    def prune(self, output_dir: Path, keep: int | None) -> None:
        """Remove old checkpoints by the rule of the local folder, and leftovers of killed uploads.

        Args:
            output_dir: the local folder, which lists the best checkpoints.
            keep: see :func:`torchtune.checkpoints._directories.outdated_names`.

        Raises:
            RemoteError: the object store refuses.
            CheckpointError: the list of the best checkpoints is damaged.
        """
        names = [checkpoint.name for checkpoint in self.complete()]
        outdated = set(outdated_names(names, keep))
        best = newest_of(read_best_records(output_dir), names)
        if best is not None:
            outdated.discard(best["checkpoint"])
        for name, files in self._folders().items():
            if name in outdated or MARKER not in files:
                self.folder.remove_folder(name, first=MARKER)


class UploadProgress:
    """Bytes of the checkpoint that is being uploaded, for messages; written by one thread, read by another."""

    def __init__(self) -> None:
        self.name = ""
        self.total = 0
        self.sent = 0

    def start(self, name: str, total: int) -> None:
        """Begin with a checkpoint."""
        self.name = name
        self.total = total
        self.sent = 0

    def add(self, count: int) -> None:
        """Count bytes that were sent."""
        self.sent += count


class Uploader:
    """Uploads the checkpoints of a run in one background thread, the newest first. On rank 0 only.

    An upload that fails is tried again, at the latest when the next checkpoint is saved and at the end of the run.
    Checkpoints that are removed locally before their turn are not uploaded.

    Args:
        bucket: the checkpoints in the object store.
        output_dir: the local folder.

    Attributes:
        keep: number of checkpoints to keep, here and there; None for the default.
    """

    def __init__(self, bucket: Bucket, output_dir: Path) -> None:
        self._bucket = bucket
        self._output_dir = output_dir
        self.keep: int | None = None
        self._pending: list[Path] = []  # oldest first
        self._progress = UploadProgress()
        self._uploading: Path | None = None
        self._saved_again: set[Path] = set()  # saved under the same name while it was uploaded, so uploaded once more
        self._is_closing = False
        self._failures: dict[str, str] = {}  # name of a checkpoint -> why its last upload failed
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, path: Path) -> None:
        """Upload a complete checkpoint in the background, and remove old local ones, but not one that is underway."""
        with self._changed:
            self._pending = [pending for pending in self._pending if pending != path]
            self._pending.append(path)
            if path == self._uploading:
                self._saved_again.add(path)
            prune(self._output_dir, self.keep, underway=self._uploading)
            self._changed.notify_all()
        if self._thread is None:
            # A daemon, so that a second Ctrl-C ends the process.
            self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
            self._thread.start()

    def add_missing(self, checkpoints: list[RemoteCheckpoint]) -> None:
        """Upload the local checkpoints that a killed run has not uploaded, as far as the bucket would keep them.

        Args:
            checkpoints: the complete checkpoints in the bucket.
        """
        saves = {checkpoint.name: checkpoint.saves for checkpoint in checkpoints}
        uploaded = set(saves)
        for path in complete_directories(self._output_dir):
            saves[path.name] = read_marker(path)["saves"]
        names = sorted(saves, key=lambda name: (saves[name], name))  # oldest first
        outdated = outdated_names(names, self.keep)
        for name in names:
            if name not in uploaded and name not in outdated:
                self.add(self._output_dir / name)

    def _run(self) -> None:
        """Upload pending checkpoints until the run ends and none is left; the thread's function."""
        attempts = 0  # that failed one after another at the end of the run
        while True:
            with self._changed:
                # Checkpoints that were pruned locally since are not uploaded.
                self._pending = [path for path in self._pending if (path / MARKER).exists()]
                while not self._pending and not self._is_closing:
                    self._changed.wait()
                if not self._pending:
                    return
                path = self._uploading = self._pending[-1]  # the newest, which a resume needs
                self._saved_again.discard(path)
                number_pending = len(self._pending)
            failure = self._upload(path)
            with self._changed:
                self._uploading = None
                if failure is None:
                    attempts = 0
                    self._failures.pop(path.name, None)
                    if path not in self._saved_again:
                        self._pending.remove(path)
                    continue
                self._failures[path.name] = failure
                if self._is_closing:
                    attempts += 1
                    if attempts >= _ATTEMPTS_AT_END:
                        return
                    self._changed.wait(_PAUSE_AT_END)
                    continue
                get_logger().warning(
                    f"{path.name} is saved in {path.parent}, but not uploaded yet, training goes on, and it is tried "
                    f"again: {failure}"
                )
                # A checkpoint that was added since the upload began, or the end of the run, ends the pause.
                self._changed.wait_for(
                    lambda count=number_pending: self._is_closing or len(self._pending) != count, _PAUSE
                )

    def _upload(self, path: Path) -> str | None:
        """Upload a checkpoint, the list of the best and then remove old ones; return why it failed, None if not.

        A checkpoint that is saved again meanwhile has not failed: it is uploaded once more.
        """
        start = time.monotonic()
        try:
            self._bucket.upload(path, self._progress)
            if (self._output_dir / BEST).is_file():
                self._bucket.folder.write(BEST, (self._output_dir / BEST).read_bytes())
        except ReplacedError:
            return None
        except (UserError, OSError, ValueError) as error:  # an error of a local file, too
            return first_line(error)
        get_logger().info(f"{path.name} was uploaded to {self._bucket} in {time.monotonic() - start:.1f} s.")
        try:
            self._bucket.prune(self._output_dir, self.keep)
        except UserError as error:
            get_logger().warning(f"Old checkpoints in {self._bucket} were not removed: {error}")
        return None

    def finish(self) -> Iterator[None]:
        """Wait for the uploads; yield every 0.2 seconds, with a line in the log every ten seconds.

        The caller runs a collective at each yield, so that the timeouts of the other ranks, which wait for this one,
        start anew.

        Raises:
            RemoteError: the last checkpoint of a finished run could not be uploaded; of another run, this is logged.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is None:
            return
        logged = time.monotonic()
        while self._thread.is_alive():
            self._thread.join(0.2)
            yield
            if self._thread.is_alive() and time.monotonic() - logged > _LOG_EVERY:
                logged = time.monotonic()
                progress = self._progress
                get_logger().info(
                    f"Uploading {progress.name} to {self._bucket}: {progress.sent / 1e9:.2f} of "
                    f"{progress.total / 1e9:.2f} GB, {len(self._pending)} checkpoints left."
                )
        self._thread = None  # close may be called twice: the second call returns at once
        if not self._pending:
            return
        # The thread has ended with checkpoints left: the upload failed too often, or an unknown error ended the thread.
        newest = self._pending[-1]
        names = ", ".join(path.name for path in self._pending)
        text = (
            f"{names} could not be uploaded to {self._bucket}, and nothing is lost as long as {newest.parent} exists: "
            f"{self._failures.get(newest.name, 'the upload ended')}"
        )
        # The last checkpoint of a finished run has no training state: with one, the run was stopped. It ends as it
        # would without the failure, so that its scheduler starts it again.
        if read_marker(newest)["resumable"]:
            get_logger().error(text)
            return
        raise RemoteError(text)
