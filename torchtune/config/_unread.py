"""Keys of a config that would have no effect, and labels that would be shifted twice: read from the recipe's source."""

import ast
import builtins
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torchtune.config._errors import nearest
from torchtune.config._reader import Document
from torchtune.utils import get_logger, log_once

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
_SHIFTED = ("labels[..., 1:]", "labels[:, 1:]")


def check(document: Document, recipe_main: Callable[..., Any], references: set[str], *, is_typed: bool) -> None:
    """Report every top-level key of ``document`` that the recipe's file does not read and no other key refers to.

    A recipe without a settings dataclass refuses a key that its file never mentions: neither as an attribute
    (``cfg.key``) nor as a word of a string, anywhere, so that a key read in a roundabout way is never refused. A key
    that is mentioned, but not where the config is read, gets a warning: the loss of a log is not that of the config.
    """
    file = inspect.getsourcefile(recipe_main)
    if file is None or not Path(file).is_file():
        return
    source = _Source(ast.parse(Path(file).read_text(encoding="utf-8")), recipe_main.__globals__)
    _check_labels(document, source, Path(file).name)
    used = source.read | _ALWAYS | (set() if is_typed else _CARRIED) | {name.partition(".")[0] for name in references}
    without_effect = []
    for key in document.data:
        if key in used or not isinstance(key, str):
            continue
        if is_typed or key in source.mentioned:
            without_effect.append(f"{key} ({document.place((key,)).text})")
            continue
        found = nearest(key, source.read - set(document.data))
        hint = f"; did you mean '{found}'?" if found else ""
        document.add((key,), f"is never read by {Path(file).name}{hint}")
    if without_effect and not source.hands_on:
        message = (
            f"{Path(file).name} never reads {', '.join(without_effect)} of the config, so setting it has no effect."
        )
        log_once(get_logger(), message, level=30)


def _check_labels(document: Document, source: "_Source", name: str) -> None:
    """Note that the recipe shifts the labels of a dataset of this library, which are shifted already."""
    nodes = document.data.get("dataset")
    for node in nodes if isinstance(nodes, list) else [nodes]:
        is_ours = isinstance(node, dict) and str(node.get("_component_")).startswith("torchtune.")
        if is_ours and source.shifts_labels is not None:
            line = f"line {source.shifts_labels} of {name}"
            document.add(("dataset",), f"has labels that are shifted already, and {line} shifts them again: remove it")
            return


class _Source:
    """The keys that a recipe's source reads from its config, which is named ``cfg``, ``config`` or ``conf``.

    Attributes:
        read: keys that are read from the config: ``cfg.key``, ``cfg["key"]``, ``cfg.get("key")``, ``"key" in cfg``,
            and ``self.key`` within the settings dataclass.
        mentioned: names of all attributes, and all words of strings.
        hands_on: whether other code gets the whole config, which may read any key.
        shifts_labels: the line that shifts labels, as recipes copied from releases before 0.7 do; None if none does, or
            the labels are those of ``padded_collate_dpo``, which are not shifted.
    """

    def __init__(self, tree: ast.Module, names: dict[str, Any]) -> None:
        self.read: set[str] = set()
        self.mentioned: set[str] = set()
        self.hands_on = False
        self.shifts_labels: int | None = None
        self._names = names
        own: set[int] = set()  # nodes that stand for the config and are accounted for
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(each) for each in node.decorator_list):
                self.read.update(
                    each.attr
                    for each in ast.walk(node)
                    if isinstance(each, ast.Attribute) and _is_name(each.value, "self")
                )
            own.update(map(id, self._read(node)))
        if "padded_collate_dpo" in names:
            self.shifts_labels = None
        loads = (node for node in ast.walk(tree) if isinstance(getattr(node, "ctx", None), ast.Load))
        self.hands_on = any(_is_config(node) and id(node) not in own for node in loads)

    def _read(self, node: ast.AST) -> Iterable[ast.AST]:
        """Note the keys that ``node`` mentions and reads; return its nodes that stand for the config."""
        if isinstance(node, ast.Attribute):
            self.mentioned.add(node.attr)
            if _is_config(node.value):
                if node.attr != "get":
                    self.read.add(node.attr)
                yield node.value
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            self.mentioned.update(node.value.replace(".", " ").split())
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and _is_config(node.value):
            self.read.add(str(node.slice.value))
            yield node.value
        elif isinstance(node, ast.Subscript) and ast.unparse(node) in _SHIFTED:
            self.shifts_labels = node.lineno
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant) and _is_config(node.comparators[0]):
            self.read.add(str(node.left.value))
            yield node.comparators[0]
        elif isinstance(node, ast.Assign) and all(map(_is_config, node.targets)):
            yield node.value
        elif isinstance(node, ast.Call):
            yield from self._called(node)

    def _called(self, node: ast.Call) -> Iterable[ast.AST]:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        from_config = isinstance(node.func, ast.Attribute) and _is_config(node.func.value) and name == "get"
        key = node.args[0 if from_config else 1 :][:1] if from_config or name in ("getattr", "hasattr") else []
        if key and isinstance(key[0], ast.Constant):
            if from_config or _is_config(node.args[0]):
                self.read.add(str(key[0].value))
                yield node.args[0]
        elif self._is_known(node.func):
            yield from (*node.args, *(keyword.value for keyword in node.keywords))

    def _is_known(self, function: ast.expr) -> bool:
        """Whether a function that gets the config is defined in this file, or in the library."""
        while isinstance(function, ast.Attribute | ast.Call):
            function = function.value if isinstance(function, ast.Attribute) else function.func
        name = getattr(function, "id", "")
        module = getattr(self._names.get(name), "__module__", None) or getattr(self._names.get(name), "__name__", "")
        own = self._names.get("__name__")
        if name in self._names:
            return module == own or module.partition(".")[0] in ("torchtune", "functools")
        return not hasattr(builtins, name)  # a local variable: `self`, or the recipe


def _is_config(node: Any) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name.lstrip("_").lower() in ("cfg", "config", "conf")


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
