"""Find config keys that the recipe's source never reads, and labels that it shifts a second time."""

import ast
import builtins
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torchtune.config._errors import nearest
from torchtune.config._reader import Document
from torchtune.utils import get_logger, log_once

_ALWAYS_READ = {"recipe", "output_dir"}  # read by the command line and by metric loggers
# Common keys of earlier releases' configs that their recipes do not all read by name: some are read elsewhere
# (CheckpointClient) or through a constant (PROFILER_KEY), some not at all.
_FORMER_KEYS = {
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
    """Report every top-level key of ``document`` that the recipe's file does not read and that no reference uses.

    In a recipe without a settings dataclass, a key that its file mentions nowhere, neither as an attribute
    (``cfg.key``) nor as a word in a string, is a mistake. A key that is mentioned, but apparently not read from the
    config, is only a warning, because it may be read indirectly.
    """
    file = inspect.getsourcefile(recipe_main)
    if file is None or not Path(file).is_file():
        return
    source = _Source(ast.parse(Path(file).read_text(encoding="utf-8")), recipe_main.__globals__)
    _check_labels(document, source, Path(file).name)
    used = (
        source.read
        | _ALWAYS_READ
        | (set() if is_typed else _FORMER_KEYS)
        | {name.partition(".")[0] for name in references}
    )
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
    if without_effect and not source.passes_config:
        message = (
            f"{Path(file).name} never reads {', '.join(without_effect)} of the config, so setting it has no effect."
        )
        log_once(get_logger(), message, level=30)


def _check_labels(document: Document, source: "_Source", name: str) -> None:
    """Report a dataset of this library, with labels shifted already, in a recipe that shifts labels again."""
    nodes = document.data.get("dataset")
    for node in nodes if isinstance(nodes, list) else [nodes]:
        is_ours = isinstance(node, dict) and str(node.get("_component_")).startswith("torchtune.")
        if is_ours and source.shifts_labels is not None:
            line = f"line {source.shifts_labels} of {name}"
            document.add(("dataset",), f"has labels that are shifted already, and {line} shifts them again: remove it")
            return


class _Source:
    """Keys that a recipe's source reads from its config, a variable named ``cfg``, ``config`` or ``conf``.

    Attributes:
        read: keys read from the config: ``cfg.key``, ``cfg["key"]``, ``cfg.get("key")``, ``"key" in cfg``,
            and ``self.key`` within the settings dataclass.
        mentioned: names of all attributes, and all words in strings.
        passes_config: whether the whole config is passed to other code, which may read any key.
        shifts_labels: the line that shifts labels, as in recipes copied from releases before 0.7. ``None`` if there is
            none, or if the recipe uses ``padded_collate_dpo``, which does not shift labels.
    """

    def __init__(self, tree: ast.Module, names: dict[str, Any]) -> None:
        self.read: set[str] = set()
        self.mentioned: set[str] = set()
        self.passes_config = False
        self.shifts_labels: int | None = None
        self._names = names
        own: set[int] = set()  # config nodes with a known use
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(each) for each in node.decorator_list):
                self.read.update(
                    each.attr
                    for each in ast.walk(node)
                    if isinstance(each, ast.Attribute) and _is_name(each.value, "self")
                )
            own.update(map(id, self._record_reads(node)))
        if "padded_collate_dpo" in names:
            self.shifts_labels = None
        loads = (node for node in ast.walk(tree) if isinstance(getattr(node, "ctx", None), ast.Load))
        self.passes_config = any(_is_config(node) and id(node) not in own for node in loads)

    def _record_reads(self, node: ast.AST) -> Iterable[ast.AST]:
        """Record the keys that ``node`` mentions and reads; yield the config nodes in it, by identity."""
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
            yield from self._record_call(node)

    def _record_call(self, node: ast.Call) -> Iterable[ast.AST]:
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
        """Return whether a function that receives the config is defined in this file or in the library."""
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
