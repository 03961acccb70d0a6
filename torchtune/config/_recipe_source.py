"""Read the source file of a recipe: a key of the config that it never reads has no effect, and is reported."""

import ast
import builtins
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from torchtune.config._check import is_note
from torchtune.config._document import Document
from torchtune.config._errors import nearest, suggestion
from torchtune.utils import get_logger, log_once

_ALWAYS_READ = {"recipe", "output_dir"}  # read by the command line and by metric loggers
# Common keys in configs of earlier releases that recipes do not always read by name: some are read elsewhere
# (CheckpointClient) or through a constant (PROFILER_KEY), others not at all.
_FORMER_KEYS = set(
    "apply_chat_template checkpointer compile enable_activation_offloading enable_async_checkpointing fsdp log_level "
    "optimizer_in_bwd profiler resume_from_checkpoint".split()
)
_SHIFTED = ("labels[..., 1:]", "labels[:, 1:]")
_parse_source = functools.lru_cache(maxsize=16)(ast.parse)


def warn_unread(document: Document, keys: Mapping[str, str | None], reader: str = "The recipe") -> None:
    """Log that ``reader`` never reads some keys of the config, each with the nearest name of a setting, if any."""
    texts = []
    for key, name in sorted(keys.items()):
        texts.append(f"{key} ({document.position((key,)).text}{suggestion(name)})")
    if texts:
        message = f"{reader} never reads {', '.join(texts)} of the config, so setting it has no effect."
        log_once(get_logger(), message, level=30)


def check_keys_are_read(
    document: Document,
    recipe_main: Callable[..., Any],
    references: set[str],
    arguments: Collection[str] = (),
    *,
    is_typed: bool,
) -> None:
    """Report every top-level key of ``document`` that the recipe's file does not read and that no reference uses.

    In a recipe without a settings dataclass, a key that its file mentions nowhere, neither as an attribute
    (``cfg.key``) nor as a word in a string, is a mistake, or a note of the user's own, which is only a warning. So is
    a key that is mentioned, but apparently not read from the config, because it may be read indirectly.
    """
    file = inspect.getsourcefile(recipe_main)
    if file is None or not Path(file).is_file():  # of a function defined in an interactive session
        return
    name = Path(file).name
    tree = _parse_source(Path(file).read_text(encoding="utf-8"))
    _check_labels(document, tree, recipe_main.__globals__, name)
    read, mentioned = keys_of(tree)
    used = read | _ALWAYS_READ | references
    if not is_typed:  # configs of earlier releases have keys that the library reads, or nothing any more
        used |= _FORMER_KEYS
    without_effect: dict[str, str | None] = {}
    for key in document.data.keys() - used:
        similar = nearest(str(key), read)
        # The name is right, a setting of the dataclass or a word of the file: no similar one is suggested.
        if is_typed or key in mentioned:
            without_effect[key] = None
        elif is_note(document, key, read, arguments):
            without_effect[key] = similar
        else:
            document.add_mistake((key,), f"is never read by {name}{suggestion(similar)}")
    # Other code may read any key of a config that it receives, so a warning would often be wrong.
    if not _passes_config(tree, recipe_main.__globals__):
        warn_unread(document, without_effect, name)


def _check_labels(document: Document, tree: ast.Module, names: dict[str, Any], name: str) -> None:
    """Report a dataset of this library, which returns shifted labels, in a recipe that shifts labels itself.

    Recipes copied from releases before 0.7 shift labels, except for recipes with ``padded_collate_dpo``.
    """
    datasets = document.data.get("dataset")
    if not isinstance(datasets, list):
        datasets = [datasets]
    paths = [str(node.get("_component_")) for node in datasets if isinstance(node, dict)]
    if "padded_collate_dpo" in names or not any(path.startswith("torchtune.") for path in paths):
        return
    line = _line_of_shift(tree)
    if line is not None:
        reason = f"has labels that are shifted already, and line {line} of {name} shifts them again: remove it"
        document.add_mistake(("dataset",), reason)


@functools.lru_cache(maxsize=16)
def _line_of_shift(tree: ast.Module) -> int | None:
    """Return the first line that shifts labels, if any."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and ast.unparse(node) in _SHIFTED:
            return node.lineno
    return None


@functools.lru_cache(maxsize=16)
def keys_of(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Return the keys that a recipe reads from its config, and all attributes and words in strings.

    The config is a variable named ``cfg``, ``config`` or ``conf``: ``cfg.key``, ``cfg["key"]``, ``cfg.get("key")``,
    ``getattr(cfg, "key")`` and ``"key" in cfg`` read a key, and so does ``self.key`` within the settings dataclass. The
    decorator ``supervision.watched`` reads its timeout.
    """
    read: set[Any] = set()
    mentioned: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef() if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
                for attribute in ast.walk(node):
                    if isinstance(attribute, ast.Attribute) and ast.unparse(attribute.value) == "self":
                        read.add(attribute.attr)
            case ast.FunctionDef() if "supervision.watched" in map(ast.unparse, node.decorator_list):
                read.add("hang_timeout_minutes")
            case ast.Attribute():
                mentioned.add(node.attr)
                if _is_config(node.value):
                    read.add(node.attr)
            case ast.Constant(value=str()):
                mentioned.update(node.value.replace(".", " ").split())
            case (
                ast.Subscript(value=source, slice=ast.Constant(value=key))
                | ast.Compare(left=ast.Constant(value=key), comparators=[source, *_])
                | ast.Call(func=ast.Attribute(value=source, attr="get"), args=[ast.Constant(value=key), *_])
                | ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[source, ast.Constant(value=key), *_])
            ) if _is_config(source):
                read.add(key)
    return read, mentioned


def _passes_config(tree: ast.Module, names: dict[str, Any]) -> bool:
    """Return whether the whole config is passed to code outside this file and the library, which may read any key."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if not any(map(_is_config, arguments)):
            continue
        # The variable at the root of the called expression: `a` in `a.b(…).c(cfg)`.
        function = node.func
        while isinstance(function, ast.Attribute | ast.Call):
            if isinstance(function, ast.Attribute):
                function = function.value
            else:
                function = function.func
        name = getattr(function, "id", "")
        if name in names:
            value = names[name]
            module = getattr(value, "__module__", None) or getattr(value, "__name__", "")
            is_known = module == names["__name__"] or module.partition(".")[0] in ("torchtune", "functools")
        else:
            # Built-ins such as `vars` may read any key; other names are `self`, or variables of the recipe.
            is_known = name in ("getattr", "hasattr") or not hasattr(builtins, name)
        if not is_known:
            return True
    return False


def _is_config(node: Any) -> bool:
    """Return whether an expression is a variable or attribute with a config's name, such as ``self._cfg``."""
    if isinstance(node, ast.Attribute):
        name = node.attr
    else:
        name = getattr(node, "id", "")
    return name.lstrip("_").lower() in ("cfg", "config", "conf")
