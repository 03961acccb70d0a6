"""Keys that a recipe without a settings dataclass never reads."""

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtune.config._errors import nearest
from torchtune.config._reader import Document

_ALWAYS = {"recipe", "output_dir"}  # read by the command line and by metric loggers
# Configs of earlier releases carry these keys although the recipes beside them do not mention all of them: some are
# read by what the recipe hands the config to (CheckpointClient) or by a constant's name (PROFILER_KEY), some by nobody.
_CARRIED = {
    "apply_chat_template",
    "checkpointer",
    "compile",
    "enable_activation_offloading",
    "enable_async_checkpointing",
    "fsdp",
    "log_level",
    "optimizer_in_bwd",
    "profiler",
    "resume_from_checkpoint",
}


def check(document: Document, recipe_main: Callable[..., Any], references: set[str]) -> None:
    """Note every top-level key that the recipe's file does not mention and no other key refers to.

    A mention is an attribute (``cfg.key``) or the word in a string (``cfg["key"]``, ``cfg.get("key")``) anywhere in
    the file, so that a key read in a roundabout way is never refused.
    """
    file = inspect.getsourcefile(recipe_main)
    if file is None or not Path(file).is_file():
        return
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    mentioned, read = _words(tree)
    used = mentioned | _ALWAYS | _CARRIED | {name.partition(".")[0] for name in references}
    for key in document.data:
        if key not in used:
            found = nearest(str(key), read - set(document.data))
            hint = f"; did you mean '{found}'?" if found else ""
            document.add((key,), f"is never read by {Path(file).name}{hint}")


def _words(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Every attribute and every word of a string; and those that are read from something named cfg or config."""
    mentioned: set[str] = set()
    read: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            mentioned.add(node.attr)
            if _is_config(node.value) and node.attr != "get":
                read.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            mentioned.update(node.value.replace(".", " ").split())
        if isinstance(node, ast.Subscript) and _is_config(node.value) and isinstance(node.slice, ast.Constant):
            read.add(str(node.slice.value))
        got = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get"
        if got and _is_config(node.func.value) and node.args and isinstance(node.args[0], ast.Constant):
            read.add(str(node.args[0].value))
    return mentioned, read


def _is_config(node: Any) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name.lstrip("_").lower() in ("cfg", "config", "conf")
