"""Check who owns a path: in a world-writable folder, another user may have created it."""

import os
import stat
from pathlib import Path

from torchtune.utils._errors import UserError


class ForeignPathError(UserError):
    """Path that another user of this machine controls."""


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
    for whole in {os.path.abspath(path): None, os.path.realpath(path): None}:
        shared = False  # whether the parent folder is world-writable
        for part in [*reversed(Path(whole).parents), Path(whole)]:
            try:
                status = os.lstat(part)
            except OSError:  # missing or not readable: opening it raises the error
                break
            if shared and status.st_uid not in trusted:
                kind = "link" if stat.S_ISLNK(status.st_mode) else "folder" if stat.S_ISDIR(status.st_mode) else "file"
                raise ForeignPathError(
                    f"{f'{key}: ' if key else ''}the {kind} {part} belongs to another user of this machine (uid "
                    f"{status.st_uid}), who may have put anything there: use a folder of your own, such as one in your "
                    "home, or remove it."
                )
            shared = stat.S_ISDIR(status.st_mode) and bool(status.st_mode & stat.S_IWOTH)
