"""Check who owns a path: in a world-writable folder, another user may have created it."""

import os
import stat
from pathlib import Path

from torchtune.utils._errors import UserError


class ForeignPathError(UserError):
    """Path that another user of this machine controls."""


def cache_root() -> Path:
    """Return the folder of what the library keeps between runs: ``$TORCHTUNE_CACHE``, or one in the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("TORCHTUNE_CACHE") or Path(home) / "torchtune").expanduser()


def refuse_foreign(path: str | Path, key: str = "") -> None:
    """Raise if a path leads through another user's file, link or folder inside a world-writable folder such as /tmp.

    Names under /tmp are easy to guess. A user who creates ``/tmp/<model>`` first controls the weights and the chat
    template used in training, and may read the outputs. Links along the path are followed and checked, too. Files of
    root are trusted, but root trusts only itself.

    Args:
        path: path of a file or folder, which need not exist.
        key: setting with the path, for the message.

    Raises:
        ForeignPathError: the path, a folder above it or a link along it belongs to another user.
    """
    trusted = {os.geteuid(), 0}
    path_as_written = Path(os.path.abspath(path))
    path_behind_links = Path(os.path.realpath(path))
    for checked in dict.fromkeys((path_as_written, path_behind_links)):
        parent_is_shared = False  # whether every user may write to the parent folder
        for part in [*reversed(checked.parents), checked]:
            try:
                status = os.lstat(part)
            except OSError:  # missing or not readable: opening it raises the error
                break
            if parent_is_shared and status.st_uid not in trusted:
                setting = f"{key}: " if key else ""
                raise ForeignPathError(
                    f"{setting}the {_kind_of(status.st_mode)} {part} belongs to another user of this machine (uid "
                    f"{status.st_uid}), who may have put anything there: use a folder of your own, such as one in your "
                    "home, or remove it."
                )
            parent_is_shared = stat.S_ISDIR(status.st_mode) and bool(status.st_mode & stat.S_IWOTH)


def _kind_of(mode: int) -> str:
    if stat.S_ISLNK(mode):
        return "link"
    if stat.S_ISDIR(mode):
        return "folder"
    return "file"
