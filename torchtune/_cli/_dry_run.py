"""``tune run --dry-run``."""

import sys
from collections.abc import Callable
from typing import Any

from torchtune.utils import UserError


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
    from torchtune.config import redact_secrets
    from torchtune.estimate import find_problems
    from torchtune.training import RunError, SettingsView, plan_data, plan_run

    view = SettingsView.of(settings)
    problems = find_problems(view, processes, thorough=True)

    def show(make: Callable[[], str]) -> None:
        try:
            text = make()
        except UserError as error:
            if str(error) not in problems:
                problems.append(str(error))
        else:
            print(redact_secrets(text), flush=True)

    if view.model is not None:
        show(lambda: plan_run(view, processes))
        if view.optimizer is not None:
            show(lambda: _memory(main, settings, processes))
    if view.dataset is not None:
        show(lambda: "\n".join(f"{name:<12}{text}" for name, text in plan_data(view, processes)))
    if problems:
        sys.stdout.flush()
        raise RunError(problems)
    print("The run can start: no problem was found.")


def _memory(main: Callable[[Any], Any], settings: Any, processes: int) -> str:
    from torchtune.estimate import memory, weights_memory
    from torchtune.training import SettingsView

    estimate, reason = estimate_or_reason(main, settings, processes)
    if estimate is None:
        return f"memory      {weights_memory(SettingsView.of(settings))}; {reason}"
    return memory(estimate)


def estimate_or_reason(main: Callable[[Any], Any], settings: Any, processes: int) -> tuple[Any, str]:
    """Return the estimate of a run, or None and the reason why its recipe cannot be simulated.

    Raises:
        UserError: the run itself would raise it.
    """
    from torchtune.estimate import SimulationError, estimate_run

    try:
        return estimate_run(main, settings, processes), ""
    except SimulationError as error:
        return None, str(error).removesuffix(": use --dry-run.")
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  (a user's recipe that may still run)
        return None, f"the recipe cannot be simulated: {type(error).__name__}: {error}"
