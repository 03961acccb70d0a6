"""Call functions in child processes, so that a crash does not end this process."""

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from torchtune.utils import UserError


class CrashedError(UserError):
    """Error of a process that ended without a result."""


def call_in_child_process(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of a module in another process; its user errors are raised here.

    Raises:
        CrashedError: the process crashes, is killed because memory is short, or raises another error.
    """
    # Fork a small process that has imported the module: this takes no time, and there are no threads to lose.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__])
    try:
        with ProcessPoolExecutor(1, context, _end_with_parent) as pool:
            return pool.submit(function, *args).result()
    except BrokenProcessPool as error:
        raise CrashedError("its process crashed, or the machine has not enough memory") from error
    except UserError:
        raise
    except Exception as error:  # for example, of a library that cannot be imported
        raise CrashedError(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error


def _end_with_parent() -> None:
    """Make this process exit when its parent exits, even if the parent is killed."""

    def wait() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
