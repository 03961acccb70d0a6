"""``tune run … --dry-run --simulate 64xH100``, and ``tune estimate``."""

import itertools
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchtune._cli._target import RecipeTarget
from torchtune._recipe_registry import get_all_recipes
from torchtune.utils import UserError

_GIB = 2**30


def simulate_run(recipe: RecipeTarget, config: Any, overrides: list[str], cluster: str, fit: str | None) -> None:
    """Print what two simulated steps of a recipe take; with ``fit``, the fastest settings that need no more.

    Args:
        recipe: to run.
        config: path of the config.
        overrides: of its settings.
        cluster: devices, for example ``64xH100``.
        fit: memory of a device, for example ``80GiB``, or None.

    Raises:
        UserError: it does not fit, or cannot be simulated; see ``torchtune.training.simulate``.
    """
    from torchtune.config import load_and_check
    from torchtune.config._secrets import hide
    from torchtune.training.simulate._cluster import simulated_cluster
    from torchtune.training.simulate._devices import parse_cluster, parse_memory
    from torchtune.training.simulate._fit import describe, find_fastest
    from torchtune.training.simulate._observer import Observer
    from torchtune.training.simulate._report import peak_bytes, summary
    from torchtune.training.simulate._simulate import check_simulated, simulate
    from torchtune.utils import simulated

    processes, device = parse_cluster(cluster)
    limit = device.memory * _GIB if fit is None else parse_memory(fit)
    if processes > 1 and recipe.registered and not _runs_on_many(recipe.name):
        raise UserError(
            f"--simulate {cluster}: {recipe.name} runs on one device: simulate 1x{cluster.partition('x')[2]}, or take "
            "the recipe and config without _single_device."
        )
    main = recipe.load_main()
    settings = load_and_check(config, overrides, main)
    check_simulated(settings)

    def run(settings: Any, layers: int | None = None, micro_batches: int | None = None) -> Any:
        observer, machine = Observer(), device.per_machine
        with _progress(observer):
            return simulate(
                main,
                settings,
                processes,
                per_machine=machine,
                observer=observer,
                layers=layers,
                micro_batches=micro_batches,
            )

    if fit is not None:
        print(f"Searching settings that need at most {limit / _GIB:.1f} GiB of each {device.name}:", flush=True)
        with simulated(), simulated_cluster(processes, device.per_machine):
            found, simulation = find_fastest(
                settings,
                processes,
                device,
                limit,
                lambda more: load_and_check(config, [*overrides, *more], main),
                lambda settings, layers: run(settings, layers, micro_batches=2),
                lambda line: print(line, flush=True),
            )
        print(f"\nThe fastest that fits, simulated whole:\n{describe(found, limit)}\n", flush=True)
        if found.overrides:
            print(f"Paste: {shlex.join(found.overrides)}\n")
        print(hide(summary(simulation, device)), flush=True)
        return
    simulation = run(settings)
    print(hide(summary(simulation, device)), flush=True)
    needed = peak_bytes(simulation)
    if needed > limit:
        raise UserError(
            f"the run does not fit: a device needs {needed / _GIB:.1f} of {limit / _GIB:.1f} GiB: search settings that "
            f"fit with --fit {limit / _GIB:.0f}GiB, or take more or larger devices."
        )


def _runs_on_many(name: str) -> bool:
    return next(recipe.supports_distributed for recipe in get_all_recipes() if recipe.name == name)


@contextmanager
def _progress(observer: Any) -> Iterator[None]:
    """Show on a terminal where a simulation is."""
    out = sys.stderr
    if not out.isatty():
        yield
        return
    done, start = threading.Event(), time.monotonic()

    def draw() -> None:
        for mark in itertools.cycle("|/-\\"):
            step, phase = observer.step + 1, observer.ledger.phase
            out.write(f"\r\x1b[K{mark} simulating step {step} of 2, {phase}, {time.monotonic() - start:.0f} s")
            out.flush()
            if done.wait(0.2):
                break
        out.write("\r\x1b[K")
        out.flush()

    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
