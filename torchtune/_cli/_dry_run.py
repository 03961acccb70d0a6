"""``tune run --dry-run``."""

import sys
from collections.abc import Callable
from typing import Any

from torchtune.utils import UserError


def dry_run(settings: Any, processes: int) -> None:
    """Print what a run needs and the errors that would stop it.

    Args:
        settings: checked settings of a recipe.
        processes: number of processes.

    Raises:
        RecipeSettingsError: a name that the library reads is missing, or its value has another type.
        RunError: the run cannot start; everything else is printed first.
    """
    from torchtune.config._secrets import hide
    from torchtune.training import RunError, plan_data, plan_run
    from torchtune.training._settings_view import SettingsView
    from torchtune.training.plan._check_run import find_problems

    settings = SettingsView.of(settings)
    problems = find_problems(settings, processes, thorough=True)

    def show(make: Callable[[], str]) -> None:
        try:
            text = make()
        except UserError as error:
            if str(error) not in problems:
                problems.append(str(error))
        else:
            print(hide(text), flush=True)

    if settings.model is not None:
        show(lambda: plan_run(settings, processes))
    if settings.dataset is not None:
        show(lambda: "\n".join(f"{name:<12}{text}" for name, text in plan_data(settings, processes)))
    if problems:
        sys.stdout.flush()
        raise RunError(problems)
    print("Nothing was found that would keep this run from starting.")
