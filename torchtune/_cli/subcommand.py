"""Base class of the subcommands of ``tune``."""

import argparse
from typing import Any


class Subcommand:
    """A subcommand, which adds its parser to ``subparsers`` and sets the parser's default ``func``.

    ``func`` imports heavy modules itself, so that ``tune --help`` stays fast.
    """

    def __init__(self, subparsers: argparse._SubParsersAction) -> None:
        raise TypeError(f"{type(self).__name__} is a base class: derive a subcommand from it.")

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> "Subcommand":
        """Create the subcommand."""
        return cls(*args, **kwargs)

    def _add_arguments(self) -> None:
        """Add this subcommand's arguments to its parser."""
