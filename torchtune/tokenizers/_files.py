"""Files of tokenizers and of their chat templates: reading, copying and replacing them.

Error messages name the file and the remedy.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from torchtune.data import DataError
from torchtune.utils import RepeatedKeyError, decode_json, local_path, write_json

# File of a checkpoint whose tokenizer could not write its files; it says why.
MISSING_TOKENIZER = "TOKENIZER_MISSING.md"
# Names and prefixes of the files that make up a tokenizer in a Hugging Face folder, and its templates.
_TOKENIZER_FILES = (
    "tokenizer",
    "tekken",
    "chat_template",
    "special_tokens_map",
    "added_tokens",
    "vocab.",
    "merges.txt",
    "spiece.model",
    "sentencepiece",
)
_TEMPLATE_FOLDER = "additional_chat_templates"
# Folder of Meta's own files in a repository of the hub.
_META_FOLDER = "original"


def existing_file(path: str | Path, what: str) -> Path:
    """Return ``path``; raise :class:`DataError` if it is missing, a folder or empty."""
    path = local_path(path, what).expanduser()
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
    text = read_text(path, what)
    try:
        content = decode_json(text)
    except RepeatedKeyError as error:
        raise DataError(f"{what} {path}: {error}.") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{what} {path} is broken at line {error.lineno} ({error.msg}): download it again.") from error
    except RecursionError as error:
        raise DataError(f"{what} {path} is broken (it is nested too deeply): download it again.") from error
    except ValueError as error:  # a number of too many digits
        raise DataError(f"{what} {path} is broken ({error}): download it again.") from error
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


def template_sources(folder: Path, config: Mapping[str, Any], chosen: str | None) -> dict[str, str]:
    """Return name -> source of the templates: the chosen template, files next to the tokenizer, or its config."""
    if chosen is not None:
        if not isinstance(chosen, str):
            raise DataError(
                f"chat_template is a {type(chosen).__name__}: give the path of a Jinja file or the text of a template."
            )
        is_text = "{" in chosen or "\n" in chosen  # every template has one of both, and a path has neither
        if not is_text and not os.path.isfile(os.path.expanduser(chosen)):  # False for a path that is too long, too
            raise DataError(
                f"There is no file {chosen!r:.200}: chat_template is the path of a Jinja file or the text of a "
                "template; leave it out for the checkpoint's own."
            )
        if not is_text:
            chosen = read_text(chosen, "chat template")
        return {"default": chosen}
    # From the oldest place to the newest, each of which replaces those before.
    sources = _published_templates(folder / "tokenizer_config.json", config.get("chat_template"))
    template_json = folder / "chat_template.json"
    if template_json.is_file():
        content = read_json(template_json, "chat template")
        if "chat_template" in content:
            sources = _published_templates(template_json, content["chat_template"])
    if (folder / "chat_template.jinja").is_file():
        sources["default"] = read_text(folder / "chat_template.jinja", "chat template")
    for path in sorted((folder / _TEMPLATE_FOLDER).glob("*.jinja")):
        sources[path.stem] = read_text(path, "chat template")
    return sources


def _published_templates(file: Path, content: Any) -> dict[str, str]:
    """Return name -> source of the ``chat_template`` of a JSON file: a text, texts by name, or named texts."""
    if content is None:
        return {}
    if isinstance(content, str):
        return {"default": content}
    broken = DataError(
        f"{file}: chat_template is neither a text nor a list of texts, each with name and template: download the "
        "file again."
    )
    if isinstance(content, Mapping):
        entries = list(content.items())
    elif isinstance(content, list) and all(isinstance(entry, Mapping) for entry in content):
        entries = [(entry.get("name"), entry.get("template")) for entry in content]
    else:
        raise broken
    for name, source in entries:
        if not isinstance(name, str) or not isinstance(source, str):
            raise broken
    return dict(entries)


def replace_template(folder: Path, source: str) -> None:
    """Write a chat template into the folder of a tokenizer, in the place of all published ones.

    It stands where the published one did: in ``chat_template.jinja`` if that was a file of its own, otherwise in
    ``tokenizer_config.json``.
    """
    # A template that stayed in another place would be read instead of this one.
    additional = folder / _TEMPLATE_FOLDER
    candidates = [folder / "chat_template.jinja", folder / "chat_template.json", *additional.glob("*.jinja")]
    template_files = [path for path in candidates if path.is_file()]
    for path in template_files:
        path.unlink()
    if additional.is_dir() and not any(additional.iterdir()):  # it may hold files of the user
        additional.rmdir()
    config_path = folder / "tokenizer_config.json"
    config = {}
    if config_path.is_file():
        config = read_json(config_path, config_path.name)
    config.pop("chat_template", None)
    if template_files:
        (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    else:
        config["chat_template"] = source
    write_json(config_path, config)


def is_tokenizer_file(relative: PurePath) -> bool:
    """Return whether a file belongs to the tokenizer, by its path relative to the folder of a checkpoint."""
    if relative.parts[0] in (_TEMPLATE_FOLDER, MISSING_TOKENIZER):
        return True
    parts = relative.parts
    if parts[0] == _META_FOLDER:
        parts = parts[1:]
    if len(parts) != 1:
        return False
    return parts[0].startswith(_TOKENIZER_FILES) or parts[0].endswith(".tiktoken")


class PublishedFiles:
    """Files of a tokenizer in the folder from which it was read, which checkpoints get copies of.

    Args:
        path: file of the vocabulary, for example ``tokenizer.json``.

    Attributes:
        path: see Args, absolute.

    Example:
        >>> files = torchtune.tokenizers.PublishedFiles(checkpoint / "tokenizer.json")
        >>> files.copy(folder)
        >>> (folder / "tokenizer.json").is_file(), files.is_unchanged
        (True, True)
    """

    def __init__(self, path: str | Path) -> None:
        self.path = local_path(path, "tokenizer.path").expanduser().absolute()
        self._modified = self._modification_time()

    def fingerprint_parts(self) -> list[Any]:
        """Return nothing: tokens depend on the contents of the files, not on their folder."""
        return []

    def _modification_time(self) -> int | None:
        if not self.path.is_file():
            return None
        return self.path.stat().st_mtime_ns

    @property
    def is_unchanged(self) -> bool:
        """Whether the vocabulary file still has the contents that were read."""
        return self._modified is not None and self._modification_time() == self._modified

    def copy(self, folder: Path) -> None:
        """Copy the vocabulary, the tokenizer's other files and the chat templates into ``folder``."""
        source = self.path.parent
        if source.name == _META_FOLDER:
            source = source.parent
        paths = [*source.glob("*"), *source.glob(f"{_META_FOLDER}/*"), *source.glob(f"{_TEMPLATE_FOLDER}/*.jinja")]
        paths = [path for path in paths if is_tokenizer_file(path.relative_to(source))]
        for path in (*paths, self.path):
            if path.is_file():
                target = folder / path.relative_to(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)


class SavesPublishedFiles:
    """Mixin of tokenizers that read a published vocabulary and never change it.

    Attributes:
        published: the files that were read; a subclass sets it.
    """

    published: PublishedFiles

    def save_files(self, folder: str | Path) -> None:
        """Copy the files of the tokenizer, as published, into the folder of a checkpoint.

        Raises:
            DataError: the vocabulary is no longer there, or has changed since it was read.
        """
        if not self.published.is_unchanged:
            raise DataError(f"tokenizer file {self.published.path} is gone or was changed while the run went on")
        self.published.copy(Path(folder))


def missing_new_tokens(tokenizer: Any, folder: Path) -> list[str]:
    """Return the tokens that the config adds (``new_tokens``) and that a checkpoint does not have with the same ids.

    Args:
        tokenizer: tokenizer of the run; one without ``new_tokens`` has none.
        folder: folder of the checkpoint, with a ``tokenizer.json``; without this file, all tokens are missing.
    """
    new_tokens = list(getattr(tokenizer, "new_tokens", ()))
    file = folder / "tokenizer.json"
    if not new_tokens or not file.is_file():
        return new_tokens
    content = read_json(file, "tokenizer file")
    model = content.get("model") or {}
    ids: dict[str, int] = {}
    if isinstance(model.get("vocab"), dict):  # new tokens are never in the list of a Unigram model
        ids = dict(model["vocab"])
    for token in content.get("added_tokens") or ():
        ids[token["content"]] = token["id"]
    first_id = tokenizer.vocab_size - len(new_tokens)
    return [token for token_id, token in enumerate(new_tokens, first_id) if ids.get(token) != token_id]


def explain_unknown_tokens(tokenizer: Any, folder: Path, model: str) -> str | None:
    """Return why a frozen model, which learns no tokens, cannot be used with a tokenizer; None if it can.

    Args:
        tokenizer: tokenizer of the run.
        folder: folder of the model's checkpoint.
        model: what the model is, for the message.
    """
    missing = missing_new_tokens(tokenizer, folder)
    if not missing:
        return None
    return (
        f"the {model} does not know {', '.join(missing)} of tokenizer.add_tokens, and {folder} has no such tokens with "
        f"the same ids: take a {model} that was trained with them, or leave them out."
    )
