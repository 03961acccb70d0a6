"""Check a config against the recipe that runs it: the recipe that it names, and the keys that the recipe reads."""

import ast
import builtins
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from torchtune.config._document import Document
from torchtune.config._errors import MISSPELT, MISSPELT_ARGUMENT, nearest, suggestion
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


def is_note(document: Document, key: str, settings: Collection[str], arguments: Collection[str]) -> bool:
    """Return whether a top-level key that nothing reads is a note of the user's own, and not a mistake.

    Configs hold names of runs, comments and paths besides settings. A key on the command line is typed to have an
    effect. A number or a switch is rarely a note: it is a mistake if its name resembles a setting's (``num_epochs``)
    or is an argument's (``lr``). Any other value is a mistake only if its name is a setting's with a wrong letter or
    two (``ouput_dir``, but neither ``model_dir`` nor ``checkpoint_dir``, which is an argument's).

    Args:
        document: the config.
        key: a key of the config.
        settings: names of the recipe's settings.
        arguments: names of the settings and of the arguments of the components in the config.
    """
    if document.position((key,)).raw is not None:
        return False
    if isinstance(document.data[key], bool | int | float):
        is_argument = key in arguments or nearest(key, arguments, MISSPELT_ARGUMENT) is not None
        return not is_argument and nearest(key, settings) is None
    return key in arguments or nearest(key, settings, MISSPELT) is None


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
    if file is None or not Path(file).is_file():
        return
    name = Path(file).name
    tree = _parse_source(Path(file).read_text(encoding="utf-8"))
    _check_labels(document, tree, recipe_main.__globals__, name)
    read, mentioned = keys_of(tree)
    used = read | _ALWAYS_READ | references
    if not is_typed:
        used |= _FORMER_KEYS
    without_effect: dict[str, str | None] = {}
    for key in document.data.keys() - used:
        similar = nearest(str(key), read)
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
            is_known = name in ("getattr", "hasattr") or not hasattr(builtins, name)  # `self`, or the recipe
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


def recipe_name_of(data: Mapping[str, Any], scope: Mapping[str, Any]) -> Any:
    """Return the config's ``recipe:``, or the name of the running shipped recipe if the config has no such key."""
    if "recipe" in data:
        return data["recipe"]
    return _running_recipe(scope)


def _running_recipe(scope: Mapping[str, Any]) -> str | None:
    """Return the name of the shipped recipe whose globals are ``scope``, or ``None`` for any other file."""
    from torchtune._recipe_registry import recipe_at

    return recipe_at(scope.get("__file__") or "")


def is_setting(key: str) -> bool:
    """Return whether a shipped recipe has a setting of this name."""
    from torchtune._recipe_registry import get_all_recipes, settings_of_recipe

    return any(key in settings_of_recipe(recipe) for recipe in get_all_recipes())


def is_other_method(data: Mapping[str, Any], scope: Mapping[str, Any]) -> bool:
    """Return whether the config names a recipe of another training method than the shipped recipe that runs it."""
    from torchtune._recipe_registry import are_other_methods

    running = _running_recipe(scope)
    named = data.get("recipe")
    return running is not None and isinstance(named, str) and are_other_methods(running, named)


def explain_wrong_recipe(
    data: Mapping[str, Any], scope: Mapping[str, Any], setting_names: Collection[str]
) -> str | None:
    """Return a sentence that names the right recipe if the config is for another recipe, otherwise ``None``.

    A shipped recipe compares the config's ``recipe:`` with its own name. Otherwise the keys decide: if this recipe
    lacks some keys, the sentence names shipped recipes that have all of them, preferably with the same method.

    Args:
        data: the config.
        scope: globals of the recipe.
        setting_names: names of the recipe's settings.
    """
    from torchtune._recipe_registry import current_name, get_all_recipes, settings_of_recipe

    running = _running_recipe(scope)
    named = data.get("recipe")
    if isinstance(named, str):
        named = current_name(named)
    shipped = {recipe.name: recipe for recipe in get_all_recipes()}
    if running is not None and named in shipped:
        if named == running:
            return None
        advice = "`tune run --config` alone runs the right one."
        return f"The config is for the recipe {named}, and this is {running}: {advice}"

    keys = data.keys() - {"recipe"}
    if keys <= set(setting_names):
        return None
    candidates = [name for name, recipe in shipped.items() if keys <= settings_of_recipe(recipe).keys()]
    if running is not None:
        # Prefer the same method for another number of devices.
        method = shipped[running].method
        of_same_method = [name for name in candidates if shipped[name].method == method]
        if of_same_method:
            candidates = of_same_method
    if not candidates:
        return None
    names = " or ".join(candidates)
    return f"The config fits the recipe {names}: name it after `tune run`, or in the config as `recipe:`."
