"""A folder that one run at a time writes to, whichever machines see it."""

import atexit
import contextlib
import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchtune.utils._errors import UserError
from torchtune.utils._files import explain_os_error
from torchtune.utils._logging import get_logger

LOCK_NAME = ".run.lock"
# Variables with the id of a job, and how often it was started again: a later life follows on the death of the earlier.
_LIVES = (("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"), ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"))


class FolderLock:
    """A file in a folder that says which process has it.

    A process that was killed leaves its lock behind. Whether its owner lives is known on the same machine by its id
    and the time of its start, and by a launcher that started the same job again. Elsewhere it shows in the time of the
    file's last change, which the owner renews; that of a new file in the same folder is the time now, so that the
    clocks of the machines do not matter.

    Args:
        folder: which.
        beat: seconds after which the owner renews the file.
        patience: seconds without a renewal after which an owner on another machine counts as dead.

    Example:
        >>> lock = torchtune.utils.FolderLock(folder)
        >>> lock.acquire()
        >>> lock.is_held
        True
        >>> lock.release()
    """

    def __init__(self, folder: Path, *, beat: float = 10.0, patience: float = 60.0) -> None:
        self.folder, self.path = folder, folder / LOCK_NAME
        self._beat, self._patience = beat, patience
        self._mine: dict[str, Any] | None = None
        self._lost: str | None = None
        self._made_folder = False
        self._stop = threading.Event()
        self._changing = threading.RLock()

    @property
    def is_held(self) -> bool:
        """Whether this process has it."""
        return self._mine is not None

    def acquire(self) -> None:
        """Take the lock, over from an owner that is dead if need be, and keep it until :meth:`release`.

        Raises:
            UserError: another process has it, or the folder cannot be written to.
        """
        if self._mine is not None:
            return
        self._lost = None
        try:
            self._made_folder = not self.folder.exists()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._mine = self._take()
        except OSError as error:
            raise explain_os_error(error, self.path) from error
        self._clear()
        self._stop = threading.Event()
        threading.Thread(target=self._keep, args=(self._stop,), name="run lock", daemon=True).start()
        atexit.register(self.release)

    def refuse_used(self) -> None:
        """Without taking it: see that no living process of this machine has it.

        Raises:
            UserError: one has.
        """
        with contextlib.suppress(OSError):
            found = _read(self.path)
            if found is not None and _is_here(found[0]) and not _is_dead(found[0]):
                raise self._in_use(found[0])

    @contextmanager
    def held(self) -> Iterator[None]:
        """A block in which the lock is held; afterwards it is as it was before."""
        if self._mine is not None:
            self.check()
            yield
            return
        self.acquire()
        try:
            yield
        finally:
            self.release()

    def check(self) -> None:
        """See that the lock, if it is held, is still there; where somebody removed it, it is made again.

        Raises:
            UserError: another process has taken it.
        """
        with self._changing:
            if self._mine is not None and self._lost is None:
                self._renew()
        if self._lost is not None:
            raise UserError(self._lost)

    def release(self) -> None:
        """Give the lock back; without it, do nothing."""
        self._stop.set()
        with self._changing:
            mine, self._mine = self._mine, None
            atexit.unregister(self.release)
            if mine is None or mine["pid"] != os.getpid():  # a fork holds nothing
                return
            with contextlib.suppress(OSError):
                found = _read(self.path)
                if found is not None and found[0].get("token") == mine["token"]:
                    self.path.unlink()
                if self._made_folder:
                    self.folder.rmdir()  # if nothing was written

    def _keep(self, stop: threading.Event) -> None:
        while not stop.wait(self._beat):
            with self._changing:
                if stop.is_set() or self._lost is not None:
                    return
                with contextlib.suppress(OSError):  # a file server that does not answer may do so at the next beat
                    self._renew()

    def _renew(self) -> None:
        found = _read(self.path)
        if found is None:
            gone = "" if self.folder.is_dir() else ", with everything in it,"
            self.folder.mkdir(parents=True, exist_ok=True)
            get_logger().warning(
                f"output_dir: {self.path if not gone else self.folder} was removed{gone} under the running run, which "
                "goes on and makes it again: what was saved there before is gone unless you have moved it."
            )
            if _create(self.path, self._mine):
                return
            found = _read(self.path)
        if found is not None and found[0].get("token") != self._mine["token"]:
            self._lost = (
                f"output_dir: {self.folder} was taken over by another run ({_describe(found[0])}), so this one must "
                "not write there any more: stop one of them, and give the other an output_dir of its own."
            )
            if not (
                _is_here(found[0]) and found[0]["pid"] == os.getpid()
            ):  # else it was left open, and is no other run
                get_logger().error(self._lost)
            return
        os.utime(self.path)

    def _take(self) -> dict[str, Any]:
        mine = _owner()
        while not _create(self.path, mine):
            found = _read(self.path)
            if found is None:
                continue
            theirs, changed = found
            if _is_dead(theirs) or self._falls_silent(theirs, changed):
                self._remove(theirs)
                continue
            raise self._in_use(theirs)
        return mine

    def _in_use(self, theirs: dict[str, Any]) -> UserError:
        return UserError(
            f"output_dir: {self.folder} is in use by another run ({_describe(theirs)}): wait until it has ended or "
            "stop it, or choose another output_dir."
        )

    def _falls_silent(self, theirs: dict[str, Any], changed: float) -> bool:
        """Whether an owner whose process cannot be seen from here no longer renews its lock."""
        if _is_here(theirs):
            return False
        told = False
        while (left := self._patience - (_now(self.folder) - changed)) > 0:
            if not told:
                told = True
                get_logger().warning(
                    f"output_dir: {self.folder} was locked by a run on another machine ({_describe(theirs)}): seeing "
                    f"for {left:.0f} s whether it still lives."
                )
            time.sleep(min(left, self._beat / 4))
            found = _read(self.path)
            if found is None or found[0].get("token") != theirs.get("token"):
                return True  # it has ended; whoever came first has the lock
            if found[1] != changed:
                return False
        return True

    def _clear(self) -> None:
        """Remove what processes left here that were killed while they took the lock."""
        for aside in self.folder.glob(f"{LOCK_NAME}.{'[0-9a-f]' * 8}"):
            with contextlib.suppress(OSError):
                found = _read(aside)
                if found is None or found[0].get("token") == self._mine["token"]:
                    continue
                if _is_dead(found[0]) or _now(self.folder) - found[1] > self._patience:
                    aside.unlink()

    def _remove(self, theirs: dict[str, Any]) -> None:
        """Remove the lock of a dead owner, not that of another who was quicker to remove it."""
        aside = self.path.with_name(f"{LOCK_NAME}.{uuid.uuid4().hex[:8]}")
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return
        found = _read(aside)
        if found is not None and found[0].get("token") != theirs.get("token"):
            with contextlib.suppress(FileExistsError):
                os.link(aside, self.path)
        aside.unlink(missing_ok=True)


def _read(path: Path) -> tuple[dict[str, Any], float] | None:
    """What a lock says, and when it was last changed; ``None`` if there is none. It is opened: NFS looks again then."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            changed, text = os.fstat(file.fileno()).st_mtime, file.read()
    except FileNotFoundError:
        return None
    try:
        owner = json.loads(text)
    except (ValueError, RecursionError):
        owner = {}
    return owner if isinstance(owner, dict) else {}, changed


def _create(path: Path, owner: dict[str, Any]) -> bool:
    """Make the lock unless there is one; it appears with its contents, or where links are unknown, before them."""
    aside = path.with_name(f"{LOCK_NAME}.{uuid.uuid4().hex[:8]}")
    try:
        aside.write_text(json.dumps(owner) + "\n", encoding="utf-8")
        try:
            os.link(aside, path)
        except FileExistsError:
            return False
        except OSError:
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            except FileExistsError:
                return False
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(json.dumps(owner) + "\n")
        return True
    finally:
        aside.unlink(missing_ok=True)


def _now(folder: Path) -> float:
    """The time by the clock that stamps files in ``folder``."""
    probe = folder / f"{LOCK_NAME}.{uuid.uuid4().hex[:8]}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _owner() -> dict[str, Any]:
    """This process."""
    pid = os.getpid()
    lives = {name: [os.environ[name], int(os.environ.get(count) or 0)] for name, count in _LIVES if name in os.environ}
    return {
        "token": uuid.uuid4().hex,
        "host": platform.node(),
        "machine": _machine(),
        "pid": pid,
        "started": _started(pid),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "lives": lives,
    }


def _machine() -> list[str]:
    """What is equal where process ids mean the same: the boot, and the namespace of ids, which containers have."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return [boot, os.readlink("/proc/self/ns/pid")]
    except OSError:
        return [platform.node()]


def _started(pid: int) -> str | None:
    """When a living process was started, in a form of the machine's; ``None`` if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except (FileNotFoundError, ProcessLookupError):
        pass
    if Path("/proc/self/stat").exists():
        return None
    try:  # a system without /proc
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "unknown"


def _is_here(owner: dict[str, Any]) -> bool:
    return owner.get("machine") == _machine() and isinstance(owner.get("pid"), int)


def _is_dead(owner: dict[str, Any]) -> bool:
    """Whether it is certain that the owner no longer runs, or is this very process."""
    if _is_here(owner):
        started = _started(owner["pid"])
        return started is None or started != owner.get("started") or owner["pid"] == os.getpid()
    lives = owner.get("lives")
    for name, (job, count) in _owner()["lives"].items():
        theirs = lives.get(name) if isinstance(lives, dict) else None
        # "none" is torchrun's id of every job that was given no id.
        if job != "none" and isinstance(theirs, list) and theirs[:1] == [job] and theirs[1:] < [count]:
            return True
    return False


def _describe(owner: dict[str, Any]) -> str:
    if "pid" not in owner:
        return "which does not say who it is"
    return f"process {owner['pid']} on {owner.get('host')}, since {owner.get('since')}"
