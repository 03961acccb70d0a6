"""Entry point of recipes: parse ``recipe.py --config file.yaml key=value`` into checked settings."""

import copy
import dataclasses
import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtune._lazy import former_names
from torchtune._recipe_registry import (
    are_other_methods,
    current_name,
    find_config_file,
    get_all_recipes,
    promises,
    recipe_at,
    settings_of_recipe,
)
from torchtune.config._check import Checker, build_settings
from torchtune.config._document import (
    COMMAND_LINE,
    Document,
    apply_overrides,
    iter_scalars,
    parent_of,
    read_document,
)
from torchtune.config._errors import ConfigError, Mistake
from torchtune.config._recipe_source import check_keys_are_read, warn_unread
from torchtune.config._references import interpolate
from torchtune.config._secrets import escape, redact_secrets
from torchtune.config._settings import describe_settings, settings_fields, settings_of
from torchtune.utils import (
    LOST_RANK,
    ForeignPathError,
    LostRankError,
    UserError,
    explain_file_limits,
    get_logger,
    is_first_to_print,
    log_once,
    note_in_run_log,
    refuse_path_of_other_user,
    was_error_printed,
)

USAGE = "--config FILE_OR_NAME [key=value ...] [~key ...]"


def parse(recipe_main: Callable[[Any], Any]) -> Callable[..., Any]:
    """Decorate a recipe's main function to read its settings from the command line.

    The wrapper reads ``--config X`` (or ``--config=X``) and overrides from ``sys.argv``, checks everything, and exits
    with the recipe's return value. Mistakes are printed without a traceback, with exit code 2. If it is called with
    settings, the wrapper runs the recipe with them and returns.
    """

    @functools.wraps(recipe_main)
    def wrapper(*settings: Any) -> Any:
        """Run the recipe with settings that are given, or with those of the command line, and then exit."""
        if settings:
            return recipe_main(*settings)
        try:
            config_path, overrides = _split_arguments(sys.argv[1:], recipe_main)
            with explain_file_limits():
                cfg = load_and_check(config_path, overrides, recipe_main)
                result = recipe_main(cfg)
        except UserError as error:
            # An error that every rank raises is printed once, by the first rank: torchrun then ends the other ranks.
            is_shared = error.raised_on_all
            message = str(error)
            if is_shared:  # its text may name another file on each rank
                message = type(error).__name__
            if is_first_to_print(message, shared=is_shared):
                print(f"error: {redact_secrets(str(error))}", file=sys.stderr)
            note_in_run_log(redact_secrets(str(error)))
            sys.exit(2)
        except LostRankError as error:
            note_in_run_log(traceback.format_exc().rstrip())
            if not error.is_reported and is_first_to_print(LOST_RANK):
                print(f"error: {error}", file=sys.stderr)
            sys.exit(error.exit_code)
        except RuntimeError:
            if not was_error_printed():
                raise
            # Another process has printed the cause of this error. This one is only logged, so that the cause stays the
            # last thing on the screen.
            note_in_run_log(traceback.format_exc().rstrip())
            sys.exit(1)
        sys.exit(result)

    return wrapper


def _split_arguments(arguments: Sequence[str], recipe_main: Callable[..., Any]) -> tuple[str, list[str]]:
    """Return the value of ``--config`` and the overrides; with ``--help``, print the settings and exit."""
    if "-h" in arguments or "--help" in arguments:
        script = Path(sys.argv[0]).name
        print(f"usage: {script} {USAGE}\n\n{describe_settings(settings_of(recipe_main))}", end="")
        sys.exit(0)
    config = ""
    overrides = []
    tokens = iter(arguments)
    for token in tokens:
        if token == "--config":
            config = next(tokens, "")
        elif token.startswith("--config="):
            config = token.partition("=")[2]
        else:
            overrides.append(token)
    if not config:
        raise ConfigError([Mistake(COMMAND_LINE, "--config", "name a config: --config FILE_OR_NAME")])
    return config, overrides


def load_and_check(
    config_path: str | Path, overrides: Sequence[str] = (), recipe: Callable[..., Any] | type | None = None
) -> Any:
    """Load a config and check it against a recipe, before anything else is opened.

    Args:
        config_path: path, or name of a shipped config.
        overrides: ``key=value`` and ``~key`` of the command line.
        recipe: a ``recipe_main`` (wrapped by ``parse`` or not), its settings dataclass, or ``None`` to check only the
            components.

    Returns:
        An instance of the recipe's settings dataclass, or a resolved ``DictConfig`` for an untyped recipe.

    Raises:
        ConfigError: lists every mistake with file and line.
    """
    file = find_config_file(str(config_path))
    if file is None:
        reason = "is neither a file nor a shipped config: see 'tune ls'"
        if Path(config_path).suffix.lower() in (".yaml", ".yml"):
            reason = "there is no such file"
        raise ConfigError([Mistake("", str(config_path), reason)])
    document = read_document(file)
    apply_overrides(document, overrides)
    _expand_home(document)
    if isinstance(document.data.get("recipe"), dict | list):
        document.add_mistake(("recipe",), "must be the name or the path of a recipe")
        document.check()  # now, because the checks below look the name up
    if recipe is None or inspect.isclass(recipe):
        main = None
        cls = recipe
    else:
        main = inspect.unwrap(recipe)
        cls = settings_of(main)
    if not dataclasses.is_dataclass(cls):  # there is no recipe, or its settings are a DictConfig
        return _check_untyped(document, main)
    return _check_typed(document, cls, main)


def _expand_home(document: Document) -> None:
    """Replace ``~`` at the start of every folder: no shell does it in a YAML file or inside of quotation marks."""
    for path, value in list(iter_scalars(document.data)):
        if isinstance(value, str) and value.startswith("~") and str(path[-1]).endswith("_dir"):
            parent_of(document.data, path)[path[-1]] = os.path.expanduser(value)


def _check_typed(document: Document, cls: type, recipe: Callable[..., Any] | None) -> Any:
    """Check a document against the settings dataclass ``cls``; return an instance."""
    fields = settings_fields(cls)
    if recipe is None:
        scope = vars(sys.modules[cls.__module__])
    else:
        scope = recipe.__globals__
    defaults = {name: setting.default for name, setting in fields.items() if not setting.required}
    # Writes the values of references into the document, and returns the top-level keys that others refer to.
    referenced_keys = interpolate(document, defaults)
    _remove_retired(document, cls, fields)  # after the references, which may name a retired setting
    running = recipe_at(scope.get("__file__") or "")  # name of the shipped recipe, None for a user's own
    other_valid_keys = ()
    name = None
    if "recipe" not in fields:  # a config may name its recipe, although the recipe has no such setting
        other_valid_keys = ("recipe",)
        name = document.data.get("recipe", running)

    # The remark comes after the mistakes: all of them may be there because the config is for another recipe.
    # Variables of the user's own, which only references read, say nothing of the recipe.
    data = {key: value for key, value in document.data.items() if key in fields or key not in referenced_keys}
    remark = _explain_wrong_recipe(data, running, fields)
    checker = Checker(document, scope, referenced_keys)
    try:
        values = checker.check_fields((), document.data, cls, other_valid_keys)
        _check_paths(document)
        checker.check_components()  # imports them, and converts their arguments inside `values`
        checker.raise_mistakes()
        if remark:
            # A key that is a setting of the recipe that the remark names is no note of the user's own.
            for key in checker.notes:
                if any(key in settings_of_recipe(shipped) for shipped in get_all_recipes()):
                    document.add_mistake((key,), "there is no such setting")
        document.check()
    except ConfigError as error:
        raise ConfigError(error.errors, remark) from None
    if remark:
        # The config of a recipe with the same method, for another number of devices, may do: the remark is a warning.
        # Another method would train something else than the config says.
        named = data.get("recipe")
        if running is not None and isinstance(named, str) and are_other_methods(running, named):
            raise ConfigError([Mistake(document.position(("recipe",)).text, "recipe", remark)])
        log_once(get_logger(), remark, level=30)

    warn_unread(document, checker.notes)  # keys that nothing reads, tolerated as notes of the user's own
    for key in checker.notes:
        del document.data[key]
    if recipe is not None:
        check_keys_are_read(document, recipe, referenced_keys, is_typed=True)
        document.check()
    settings = build_settings(cls, values)
    if name is not None and hasattr(settings, "__dict__"):  # a dataclass with slots has none
        vars(settings)["recipe"] = name  # save_config writes it
        _check_quantizer(document, settings)  # by the name of the recipe
    if document.environment:
        # save_config writes these values as ${oc.env:…}, and the user's own variables to which they may refer.
        vars(settings)["_from_environment"] = document.environment
        variable_names = referenced_keys - fields.keys()
        vars(settings)["_variables"] = {key: value for key, value in document.data.items() if key in variable_names}
    return settings


def _explain_wrong_recipe(data: Mapping[str, Any], running: str | None, setting_names: Collection[str]) -> str | None:
    """Return a sentence that names the right recipe if the config is for another recipe, otherwise ``None``.

    A shipped recipe compares the config's ``recipe:`` with its own name. Otherwise the keys decide: if this recipe
    lacks some keys, the sentence names shipped recipes that have all of them, preferably with the same method.

    Args:
        data: the config.
        running: name of the recipe, if it is a shipped one.
        setting_names: names of the recipe's settings.
    """
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


def _remove_retired(document: Document, cls: type, fields: Collection[str]) -> None:
    """Remove settings of earlier releases (``cls.retired``: name -> what replaces it), each with a warning."""
    for key, replacement in getattr(cls, "retired", {}).items():
        if key in document.data and key not in fields:
            position = document.position((key,)).text
            log_once(get_logger(), f"{position}: '{key}' has no effect any more: {replacement}.", level=30)
            del document.data[key]


def _check_quantizer(document: Document, settings: Any) -> None:
    """Require a quantizer if the recipe's name promises quantization-aware training."""
    if "quantizer" in promises(settings.recipe) and getattr(settings, "quantizer", None) is None:
        document.add_mistake(
            ("quantizer",),
            f"is missing, and {settings.recipe} trains for a quantized model: name a quantizer, such as "
            "torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer",
        )
        document.check()


def _check_paths(document: Document) -> None:
    """Add a mistake for every folder without a name, and for every path in the config that another user controls."""
    for path, value in iter_scalars(document.data):
        names = [key for key in path if isinstance(key, str)]
        if not isinstance(value, str) or not names:
            continue
        name = names[-1]  # of a list of paths, the name of the list
        if value == "" and name.endswith("_dir"):
            document.add_mistake(path, "is empty: name a folder")
        if name.endswith(("dir", "path", "file")) and os.sep in value:
            try:
                refuse_path_of_other_user(value)
            except (ForeignPathError, ValueError) as error:  # ValueError: not a path
                document.add_mistake(path, str(error))


def _check_untyped(document: Document, recipe: Callable[..., Any] | None) -> Any:
    """Check the components of a document, and that the recipe reads every key; return a ``DictConfig``."""
    from omegaconf import OmegaConf

    # Writes the values of references into the document, and returns the top-level keys that others refer to.
    referenced_keys = interpolate(document, {})
    scope = {} if recipe is None else recipe.__globals__
    checker = Checker(document, scope)
    checker.visit_components((), document.data)
    checker.check_components()
    _check_paths(document)
    if recipe is not None:
        check_keys_are_read(document, recipe, referenced_keys, checker.accepted_names, is_typed=False)
    checker.raise_mistakes()
    document.data = escape(document.data)  # OmegaConf would interpolate resolved values again
    for path, (text, _) in document.environment.items():
        # Keep the reference: a saved config must not contain the value.
        document.set(path, text, document.position(path))
    return OmegaConf.create(document.data)


def validate(cfg: Any) -> None:
    """Check every component of a config against its signature, except for arguments that a recipe may pass.

    Raises:
        ConfigError: lists every mistake.
    """
    from omegaconf import OmegaConf

    if OmegaConf.is_config(cfg):
        data = OmegaConf.to_container(cfg, resolve=False)
    else:
        data = copy.deepcopy(dict(cfg))
    document = Document(data)
    interpolate(document, {})
    checker = Checker(document)
    checker.visit_components((), document.data)
    checker.check_components()
    checker.raise_mistakes()


__getattr__ = former_names(__name__)
