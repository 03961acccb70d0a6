"""``tune run … --dry-run --simulate 64xH100``, and ``tune estimate``."""

import shlex
import sys
from typing import Any

from torchtune._cli._target import RecipeTarget
from torchtune._recipe_registry import get_all_recipes
from torchtune.utils import UserError

_GIB = 2**30


def simulate_run(recipe: RecipeTarget, config: Any, overrides: list[str], cluster: str, fit: str | None) -> None:
    """Simulate a step of a recipe and print its memory, work and time; with ``fit``, search for settings that fit.

    Args:
        recipe: the recipe.
        config: path of the config.
        overrides: overrides of its settings.
        cluster: devices, for example ``64xH100``.
        fit: maximum memory per device, for example ``80GiB``, or ``None``.

    Raises:
        UserError: the run does not fit, or cannot be simulated; see ``torchtune.estimate``.
    """
    from torchtune.config import load_and_check, redact_secrets
    from torchtune.estimate import (
        check_simulated,
        describe,
        estimate_run,
        find_fastest,
        parse_cluster,
        parse_memory,
        summary,
    )

    processes, device = parse_cluster(cluster)
    limit = device.memory * _GIB if fit is None else parse_memory(fit)
    if processes > 1 and recipe.registered and not _is_distributed_recipe(recipe.name):
        raise UserError(
            f"--simulate {cluster}: {recipe.name} runs on one device: simulate 1x{cluster.partition('x')[2]}, or use "
            "the recipe and config for several devices."
        )
    main = recipe.load_main()
    settings = load_and_check(config, overrides, main)
    check_simulated(settings)

    def run(settings: Any) -> Any:
        return estimate_run(main, settings, processes, per_machine=device.per_machine)

    if fit is not None:
        print(f"Searching for settings that need at most {limit / _GIB:.1f} GiB per {device.name}:", flush=True)
        found, estimate = find_fastest(
            settings,
            processes,
            device,
            limit,
            lambda more: load_and_check(config, [*overrides, *more], main),
            run,
            lambda line: print(line, flush=True),
        )
        print(f"\nThe fastest that fits:\n{describe(found, limit)}\n", flush=True)
        if found.overrides:
            print(f"Paste: {shlex.join(found.overrides)}\n")
        print(redact_secrets(summary(estimate, device)), flush=True)
        return
    if sys.stderr.isatty():
        print(f"Simulating a step on {cluster} …", file=sys.stderr, flush=True)
    estimate = run(settings)
    print(redact_secrets(summary(estimate, device)), flush=True)
    if estimate.peak > limit:
        raise UserError(
            f"the run does not fit: a device needs {estimate.peak / _GIB:.1f} GiB and has {limit / _GIB:.1f} GiB: "
            f"search for settings that fit with --fit {limit / _GIB:.0f}GiB, or use more or larger devices."
        )


def _is_distributed_recipe(name: str) -> bool:
    return next(recipe.supports_distributed for recipe in get_all_recipes() if recipe.name == name)
