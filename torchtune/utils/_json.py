"""Read JSON files of downloaded checkpoints."""

import json
from pathlib import Path
from typing import Any

from torchtune.utils._user_error import UserError

_MAX_BYTES = 64 * 2**20  # the index of the largest published models has 9 MB


def read_json(path: Path, error: type[UserError] = UserError) -> dict[str, Any]:
    """Read a JSON object from a file.

    Args:
        path: the file.
        error: class of the error to raise.

    Raises:
        UserError: (of class ``error``) the file is missing, unreadable, larger than 64 MiB, or not a JSON object.

    Example:
        >>> torchtune.utils.write_json(folder / "a.json", {"a": 1})
        >>> torchtune.utils.read_json(folder / "a.json")
        {'a': 1}
    """
    try:
        size = path.stat().st_size
        if not path.is_file() or size > _MAX_BYTES:
            what = f"has {size:,} bytes" if path.is_file() else "is no file"
            raise error(f"{path} {what}, where a few lines of JSON are expected: download it again.")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as caught:
        raise error(f"There is no file {path}: download it, or correct the path.") from caught
    except (OSError, ValueError, RecursionError) as caught:
        reason = "it is nested too deeply" if isinstance(caught, RecursionError) else str(caught).rstrip(".")
        if isinstance(caught, error):
            raise
        raise error(f"{path} is not valid JSON ({reason}): download it again.") from caught
    if not isinstance(value, dict):
        raise error(f"{path} holds a {type(value).__name__} where an object is expected: download it again.")
    return value
