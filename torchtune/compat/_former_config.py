"""The configs of recipes written for the first releases, which parse their own arguments."""

import argparse
from collections.abc import Sequence
from typing import Any

from torchtune.config import Document, apply_overrides, read_document
from torchtune.utils import UserError


class TuneRecipeArgumentParser(argparse.ArgumentParser):
    """Argument parser whose defaults are the settings of the file ``--config``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_argument("--config", type=str, required=True, help="path of a config")

    def parse_known_args(self, *args: Any, **kwargs: Any) -> tuple[argparse.Namespace, list[str]]:
        """Return the settings of the file, and the overrides ``key=value`` and ``~key``.

        Raises:
            UserError: the file cannot be read, or an argument is neither an option nor an override.
        """
        options, overrides = super().parse_known_args(*args, **kwargs)
        for argument in overrides:
            if argument.startswith("-"):
                raise UserError(f"{argument} is not an option of a recipe: settings are written key=value.")
        document = read_document(options.config)
        document.check()
        del options.config
        # Options of the command line take precedence over the file.
        settings = {**document.data, **vars(options)}
        return argparse.Namespace(**settings), overrides


def _merge_yaml_and_cli_args(yaml_args: argparse.Namespace, cli_args: Sequence[str]) -> Any:
    """Return the settings of a file with overrides applied, as a ``DictConfig``.

    Raises:
        ConfigError: an override cannot be applied.
    """
    from omegaconf import OmegaConf

    document = Document(dict(vars(yaml_args)))
    apply_overrides(document, cli_args)
    document.check()
    return OmegaConf.create(document.data)
