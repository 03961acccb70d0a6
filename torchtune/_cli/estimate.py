"""Simulations for ``tune run --dry-run`` and ``tune estimate``: the needs of a run before it starts."""

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torchtune._recipe_registry import RecipeTarget, get_all_recipes
from torchtune.utils import UserError

_GIB = 2**30


def dry_run(main: Callable[[Any], Any], settings: Any, processes: int) -> None:
    """Print the requirements of a run, and the errors that would stop it.

    Args:
        main: ``recipe_main`` of the recipe.
        settings: its checked settings.
        processes: number of processes.

    Raises:
        RecipeSettingsError: a setting that the library reads is missing or has another type.
        RunError: the run cannot start; raised after everything else is printed.
    """
    from torchtune.config import SettingsView, redact_secrets
    from torchtune.estimate import RunError, find_problems, measure_data, plan_run

    view = SettingsView.of(settings)
    problems = find_problems(view, processes, thorough=True)

    def attempt(make: Callable[[], Any]) -> Any:
        """Return the result of ``make``; record a user error as a problem and return None."""
        try:
            return make()
        except UserError as error:
            if str(error) not in problems:  # find_problems or an earlier step may have found it
                problems.append(str(error))
        return None

    def show(make: Callable[[], str]) -> None:
        """Print the text that ``make`` returns, unless it fails."""
        text = attempt(make)
        if text is not None:
            print(redact_secrets(text), flush=True)

    # The data first: the length of the longest row decides the memory.
    data = None
    if view.dataset is not None:
        data = attempt(lambda: measure_data(view, processes))
    length = None
    # A sample may miss the longest row. If there is a limit, None stands for rows of that length.
    if data is not None and (data.train.exact or view.max_seq_len is None):
        length = data.train.longest
    if view.model is not None:
        show(lambda: plan_run(view, processes, length))
        if view.optimizer is not None:
            show(lambda: _memory(main, settings, processes, length))
    if data is not None:
        show(lambda: "\n".join(f"{name:<12}{text}" for name, text in data.lines))
    if problems:
        sys.stdout.flush()  # before the error, which goes to stderr
        raise RunError(problems)
    print("The run can start: no problem was found.")


def _memory(main: Callable[[Any], Any], settings: Any, processes: int, length: int | None) -> str:
    """Return the memory of a simulated step; of the weights alone if the recipe cannot be simulated."""
    from torchtune.estimate import memory, weights_memory

    estimate, reason = estimate_or_reason(main, settings, processes, length)
    if estimate is None:
        return f"memory      {weights_memory(settings)}; {reason}"
    return memory(estimate)


def estimate_or_reason(
    main: Callable[[Any], Any], settings: Any, processes: int, length: int | None = None
) -> tuple[Any, str]:
    """Return the estimate of a run, or None and the reason why its recipe cannot be simulated.

    Args:
        main: ``recipe_main`` of the recipe.
        settings: its checked settings.
        processes: number of processes.
        length: tokens of the longest row of the data; by default from the settings.

    Raises:
        UserError: the run itself would raise it.
    """
    from torchtune.estimate import SimulationError, estimate_run

    try:
        return estimate_run(main, settings, processes, length=length), ""
    except SimulationError as error:
        return None, str(error).removesuffix(": use --dry-run.")
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  (a user's recipe that may still run)
        return None, f"the recipe cannot be simulated: {type(error).__name__}: {error}"


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
    from torchtune.estimate import estimate_run, parse_cluster, parse_memory, simulated_kind, summary

    processes, device = parse_cluster(cluster)
    limit = device.memory * _GIB
    if fit is not None:
        limit = parse_memory(fit)
    if processes > 1 and recipe.registered:
        entry = next(entry for entry in get_all_recipes() if entry.name == recipe.name)
        if not entry.supports_distributed:
            raise UserError(
                f"--simulate {cluster}: {recipe.name} runs on one device: simulate 1x{cluster.partition('x')[2]}, or "
                "use the recipe and config for several devices."
            )
    main = recipe.load_main()
    settings = load_and_check(config, overrides, main)
    simulated_kind(settings)  # raises if the run cannot be simulated

    def load(candidate: Sequence[str]) -> Any:
        """Return the settings with the overrides of a candidate."""
        return load_and_check(config, [*overrides, *candidate], main)

    def run(settings: Any) -> Any:
        """Simulate a step with some settings."""
        return estimate_run(main, settings, processes, per_machine=device.per_machine)

    if fit is not None:
        _print_fastest(settings, processes, device, limit, load, run)
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


def _print_fastest(
    settings: Any,
    processes: int,
    device: Any,
    limit: float,
    load: Callable[[Sequence[str]], Any],
    run: Callable[[Any], Any],
) -> None:
    """Search for the fastest settings that fit, and print them with their estimate.

    Args:
        settings: initial settings.
        processes: number of processes.
        device: accelerator of each process.
        limit: memory of a device in bytes.
        load: returns checked settings with overrides.
        run: simulates settings.
    """
    from torchtune.config import redact_secrets
    from torchtune.estimate import describe, find_fastest, summary

    def report(line: str) -> None:
        """Print a candidate as soon as it is simulated: the search takes minutes."""
        print(line, flush=True)

    report(f"Searching for settings that need at most {limit / _GIB:.1f} GiB per {device.name}:")
    fastest, estimate = find_fastest(settings, processes, device, limit, load, run, report)
    report(f"\nThe fastest that fits:\n{describe(fastest, limit)}\n")
    if fastest.overrides:
        print(f"Paste: {shlex.join(fastest.overrides)}\n")
    report(redact_secrets(summary(estimate, device)))
