"""Optional packages."""

import importlib
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType

from torchtune.utils._errors import UserError

# Logger of a package -> how its messages begin that tell of kernels for other machines whenever it is imported.
_NOISE = {"torchao": "Failed to load ", "torch.utils._pytree": "<enum 'KernelPreference'> is an Enum subclass"}


@contextmanager
def without_noise(module: str) -> Iterator[None]:
    """A block that imports ``module``, without what torchao logs of kernels that this machine lacks."""
    with ExitStack() as stack:
        for name, start in _NOISE.items() if module.partition(".")[0] == "torchao" else ():
            logger = logging.getLogger(name)

            def is_news(record: logging.LogRecord, start: str = start) -> bool:
                return not record.getMessage().startswith(start)

            logger.addFilter(is_news)
            stack.callback(logger.removeFilter, is_news)
        yield


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import an optional package.

    Args:
        module: dotted module to import, for example ``"wandb"``.
        extra: name of the extra of this library that installs it.
        purpose: what needs it, as the subject of the error, for example ``"WandBLogger"``.

    Raises:
        UserError: the package is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        top = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != top:
            raise  # the package is there but one of its own needs is not: that is not ours to explain
        raise UserError(
            f"{purpose} needs the package '{top}', which is not installed: pip install 'torchtune[{extra}]'."
        ) from error
