"""Installed packages: optional ones, and the version of torch."""

import importlib
import logging
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType

from torchtune.utils._errors import UserError

# Logger -> prefix of its messages about kernels for other hardware, logged at every import.
_HIDDEN = {
    "torchao": "Failed to load ",
    "torch.utils._pytree": "<enum '",
}


@contextmanager
def hide_import_warnings(module: str) -> Iterator[None]:
    """Context manager for importing ``module`` that hides torchao's messages about unavailable kernels."""
    if module.partition(".")[0] != "torchao":
        yield
        return
    with ExitStack() as stack:
        for name, prefix in _HIDDEN.items():
            logger = logging.getLogger(name)

            def should_log(record: logging.LogRecord, prefix: str = prefix) -> bool:
                return not record.getMessage().startswith(prefix)

            logger.addFilter(should_log)
            stack.callback(logger.removeFilter, should_log)
        yield


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import an optional package.

    Args:
        module: dotted module to import, for example ``"wandb"``.
        extra: extra of this library that installs it.
        purpose: the feature that needs it, as the subject of the message, for example ``"WandBLogger"``.

    Raises:
        UserError: the package is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        top = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != top:
            raise  # a dependency of the installed package is missing
        raise UserError(
            f"{purpose} needs the package '{top}', which is not installed: pip install 'torchtune[{extra}]'."
        ) from error


def torch_version_ge(version: str) -> bool:
    """Return whether the installed torch is at least ``version`` (numbers only; ``2.13.0+cpu`` counts as 2.13.0).

    Example:
        >>> torchtune.utils.torch_version_ge("2.0.0")
        True
    """
    from importlib.metadata import version as installed

    def numbers(text: str) -> tuple[int, ...]:
        release = text.partition("+")[0]  # without the build, such as cpu or cu130
        return tuple(int(number) for number in re.findall(r"\d+", release)[:3])

    return numbers(installed("torch")) >= numbers(version)
