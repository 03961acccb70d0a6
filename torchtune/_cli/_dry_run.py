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
    from torchtune.estimate import find_problems, measure_data
    from torchtune.training import RunError, SettingsView, plan_run

    view = SettingsView.of(settings)
    problems = find_problems(view, processes, thorough=True)

    def attempt(make: Callable[[], Any]) -> Any:
        """Return the result of ``make``; record a user error as a problem and return None."""
        try:
            return make()
        except UserError as error:
            if str(error) not in problems:
                problems.append(str(error))
        return None

    def show(make: Callable[[], str]) -> None:
        text = attempt(make)
        if text is not None:
            print(redact_secrets(text), flush=True)

    data = attempt(lambda: measure_data(view, processes)) if view.dataset is not None else None
    # The rows of a sample say nothing about the longest row, if there is a limit.
    is_known = data is not None and (data.train.exact or view.max_seq_len is None)
    length = data.train.longest if is_known else None
    if view.model is not None:
        show(lambda: plan_run(view, processes, length))
        if view.optimizer is not None:
            show(lambda: _memory(main, settings, processes, length))
    if data is not None:
        show(lambda: "\n".join(f"{name:<12}{text}" for name, text in data.lines))
    if problems:
        sys.stdout.flush()
        raise RunError(problems)
    print("The run can start: no problem was found.")


def _memory(main: Callable[[Any], Any], settings: Any, processes: int, length: int | None) -> str:
    from torchtune.estimate import memory, weights_memory
    from torchtune.training import SettingsView

    estimate, reason = estimate_or_reason(main, settings, processes, length)
    if estimate is None:
        return f"memory      {weights_memory(SettingsView.of(settings))}; {reason}"
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
