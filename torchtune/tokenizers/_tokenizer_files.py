"""Reading of tokenizer files, with error messages that name the file and the remedy."""

import json
from pathlib import Path
from typing import Any

from torchtune.data import DataError


def existing_file(path: str | Path, what: str) -> Path:
    """Return ``path``; raise :class:`DataError` if it is missing, a folder or empty."""
    path = Path(path).expanduser()
    if path.is_dir():
        raise DataError(f"{what} {path} is a folder: name the file in it.")
    if not path.is_file():
        raise DataError(f"There is no {what} {path}: download the checkpoint with its tokenizer, or correct the path.")
    if path.stat().st_size == 0:
        raise DataError(f"{what} {path} is empty: download it again.")
    return path


def read_text(path: str | Path, what: str) -> str:
    """Read a UTF-8 file; raise :class:`DataError` if it is missing or not text."""
    path = existing_file(path, what)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{what} {path} is not a text file (byte {error.start}): download it again.") from error


def read_json(path: str | Path, what: str) -> dict[str, Any]:
    """Read a JSON object from a file; raise :class:`DataError` if it is missing or broken."""
    try:
        content = json.loads(read_text(path, what))
    except json.JSONDecodeError as error:
        raise DataError(f"{what} {path} is broken at line {error.lineno} ({error.msg}): download it again.") from error
    if not isinstance(content, dict):
        raise DataError(f"{what} {path} holds no JSON object: download it again.")
    return content


def parse_hf_tokenizer_json(tokenizer_json_path: str) -> dict[str, int]:
    """Return the added tokens of a Hugging Face ``tokenizer.json``, as text -> id.

    Raises:
        DataError: the file is missing, broken or has no ``added_tokens``.
    """
    content = read_json(tokenizer_json_path, "tokenizer file")
    if "added_tokens" not in content:
        raise DataError(f"tokenizer file {tokenizer_json_path} has no 'added_tokens': it is not a tokenizer.json.")
    return {token["content"]: token["id"] for token in content["added_tokens"]}
