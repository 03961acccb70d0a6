"""Whose a folder is: what lies where everybody may write is trusted only if nobody else put it there."""

import os
import stat
from pathlib import Path

from torchtune.utils._errors import UserError


class ForeignPathError(UserError):
    """A path that another user of this machine controls."""


def refuse_foreign(path: str | Path, key: str = "") -> None:
    """Refuse a path through a folder that everybody may write to, such as /tmp, to what another user put there.

    Names under /tmp are guessed easily. Who makes ``/tmp/<model>`` first, as a folder or a link, decides which weights
    and which chat template are trained with, and may read what is written there. A path is also refused where a link
    on its way leads to such a place. Files of root are trusted, except that root trusts no other user either.

    Args:
        path: of a file or folder; what does not exist belongs to nobody.
        key: setting that the path is from, for the message.

    Raises:
        ForeignPathError: it, a folder above it or a link on the way belongs to another user.
    """
    trusted = {os.geteuid(), 0}
    for whole in {os.path.abspath(path): None, os.path.realpath(path): None}:
        shared = False  # whether everybody may write to the folder above
        for part in [*reversed(Path(whole).parents), Path(whole)]:
            try:
                status = os.lstat(part)
            except OSError:  # not there, or not to be looked at: whatever opens it says so
                break
            if shared and status.st_uid not in trusted:
                kind = "link" if stat.S_ISLNK(status.st_mode) else "folder" if stat.S_ISDIR(status.st_mode) else "file"
                raise ForeignPathError(
                    f"{f'{key}: ' if key else ''}the {kind} {part} belongs to another user of this machine (uid "
                    f"{status.st_uid}), who may have put anything there: use a folder of your own, such as one in your "
                    "home, or remove it."
                )
            shared = stat.S_ISDIR(status.st_mode) and bool(status.st_mode & stat.S_IWOTH)
