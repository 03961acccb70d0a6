"""Reading of tokenizer files, with error messages that name the file and the remedy."""

import json
import re
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
        message = f"{what} {path} is not a text file (byte {error.start}): download it again."
        raise broken_file(path, "text", message) from error


def read_json(path: str | Path, what: str) -> Any:
    """Read a JSON file; raise :class:`DataError` if it is missing or broken."""
    try:
        return json.loads(read_text(path, what))
    except json.JSONDecodeError as error:
        message = f"{what} {path} is broken at line {error.lineno} ({error.msg}): download it again."
        raise broken_file(path, "JSON", message) from error


def parse_hf_tokenizer_json(tokenizer_json_path: str) -> dict[str, int]:
    """Return the added tokens of a Hugging Face ``tokenizer.json``, as text -> id.

    Raises:
        DataError: the file is missing, broken or has no ``added_tokens``.
    """
    content = read_json(tokenizer_json_path, "tokenizer file")
    if not isinstance(content, dict) or "added_tokens" not in content:
        message = f"tokenizer file {tokenizer_json_path} has no 'added_tokens': it is not a tokenizer.json."
        raise broken_file(tokenizer_json_path, "a tokenizer.json", message)
    return {token["content"]: token["id"] for token in content["added_tokens"]}


# Kind of file -> name in messages, and the tokenizer that reads it.
_KINDS = {
    "tokenizer.json": ("a tokenizer.json", "read it with torchtune.tokenizers.hf_tokenizer"),
    "tekken.json": ("a tekken.json", "read it with torchtune.models.mistral.mistral_instruct_tokenizer"),
    "vocab.json": ("a vocab.json", "qwen2_tokenizer or phi4_tokenizer reads it, together with merges.txt"),
    "merges": ("a merges.txt", "qwen2_tokenizer or phi4_tokenizer reads it, together with vocab.json"),
    "ranks": ("a file of tiktoken's ranks", "read it with llama3_tokenizer"),
    "pieces": ("a SentencePiece model", "read it with the family's own tokenizer, such as llama2_tokenizer"),
    "pointer": ("a pointer of Git LFS", "fetch the file itself, with git lfs pull or tune download"),
}


def _kind_of(path: Path) -> str | None:
    """Guess a tokenizer file's kind (a key of ``_KINDS``) from its content."""
    with path.open("rb") as file:
        head = file.read(200)
    if head.startswith(b"version https://git-lfs"):
        return "pointer"
    if head.lstrip().startswith(b"{"):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            return None
        if "added_tokens" in content or "model" in content:
            return "tokenizer.json"
        if "config" in content and "vocab" in content:
            return "tekken.json"
        return "vocab.json" if content and all(isinstance(value, int) for value in content.values()) else None
    line = head.split(b"\n")[0]
    if re.fullmatch(rb"[A-Za-z0-9+/]+=* \d+", line):
        return "ranks"
    if line.startswith(b"#version") or re.fullmatch(rb"[^\x00-\x20]+ [^\x00-\x20]+", line):
        return "merges"
    # Protobuf: field 1 is a message with a piece (field 1) and its score (field 2, a float).
    return "pieces" if re.match(rb"\n.\n.[^\x00]*?\x15", head, re.DOTALL) else None


def broken_file(path: str | Path, wanted: str, message: str) -> DataError:
    """Return an error that names another tokenizer's file if ``path`` is one, else ``message``."""
    name, advice = _KINDS.get(_kind_of(Path(path).expanduser()) or "", (wanted, ""))
    if name == wanted:
        return DataError(message)
    return DataError(f"tokenizer file {path} is {name}, not {wanted}: {advice}.")
