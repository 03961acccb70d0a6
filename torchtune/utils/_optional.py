"""Optional packages."""

import importlib
from types import ModuleType

from torchtune.utils._errors import UserError


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
