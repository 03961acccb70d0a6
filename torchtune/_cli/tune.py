"""Entry point of ``tune``."""

import argparse
import os
import sys
from collections.abc import Sequence

from torchtune._cli.chat import Chat
from torchtune._cli.checks import Checkpoint, Schema, Selfcheck, Validate
from torchtune._cli.data import Data
from torchtune._cli.doctor import Doctor
from torchtune._cli.download import Download
from torchtune._cli.eval import Eval
from torchtune._cli.export import Export
from torchtune._cli.import_config import Import
from torchtune._cli.ls_cp_cat import Cat, Copy, List
from torchtune._cli.report import Compare, Report
from torchtune._cli.run import Estimate, Run
from torchtune._cli.serve import Serve
from torchtune._cli.sweep import Sweep
from torchtune.config import redact_secrets
from torchtune.utils import UserError, explain_file_limits

# In the order of `tune --help`.
SUBCOMMANDS = (
    Download,
    List,
    Copy,
    Data,
    Run,
    Sweep,
    Report,
    Compare,
    Estimate,
    Validate,
    Schema,
    Cat,
    Chat,
    Serve,
    Eval,
    Export,
    Checkpoint,
    Selfcheck,
    Doctor,
    Import,
)


class TuneCLIParser:
    """Parser of ``tune`` and its subcommands."""

    def __init__(self) -> None:
        self._parser = argparse.ArgumentParser(
            prog="tune",
            description="Fine-tune language models: download a model, run a recipe, evaluate the result.",
        )
        self._parser.set_defaults(func=lambda args: self._parser.print_help())
        subparsers = self._parser.add_subparsers(title="subcommands")
        for subcommand in SUBCOMMANDS:
            subcommand(subparsers)

    def parse_args(self, args: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse ``args``, or the command line."""
        namespace, unparsed = self._parser.parse_known_args(args)
        if not unparsed:  # as of `tune run`, which parses its words itself (`takes_tokens`)
            return namespace
        # Commands such as `tune cat` have an argument `overrides`, the settings key=value. argparse fills it up to the
        # next option only: `tune cat CONFIG epochs=2 --sort seed=1` leaves seed=1.
        takes_overrides = hasattr(namespace, "overrides")
        late_overrides = []
        unknown_arguments = []
        for argument in unparsed:
            if takes_overrides and "=" in argument and not argument.startswith("-"):
                late_overrides.append(argument)
            else:
                unknown_arguments.append(argument)
        if unknown_arguments:
            unknown = " ".join(unknown_arguments)
            hint = ""
            # Commands such as `tune validate` take the config as an argument, unlike `tune run`.
            if "--config" in unknown.partition("=")[0].split():
                hint = " (name the config without an option)"
            getattr(namespace, "parser", self._parser).error(f"unrecognized arguments: {unknown}{hint}")
        if late_overrides:
            namespace.overrides = [*namespace.overrides, *late_overrides]
        return namespace

    def run(self, args: argparse.Namespace) -> None:
        """Call ``_run`` of the selected subcommand, in several processes if it takes ``--nproc-per-node``."""
        if not hasattr(args, "nproc_per_node"):
            args.func(args)
            return
        from torchtune._cli._processes import several_processes

        with several_processes(args.nproc_per_node):
            args.func(args)


def main() -> None:
    """Run ``tune``; a user error is printed as one sentence without a traceback, with exit code 2."""
    parser = TuneCLIParser()
    args = parser.parse_args()
    try:
        with explain_file_limits():
            parser.run(args)
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {redact_secrets(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except SyntaxError as error:  # in a user's recipe or module
        print(f"error: {error.filename}, line {error.lineno}: it is not valid Python: {error.msg}.", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of stdout, such as `head`, has exited
        # The interpreter flushes stdout as it ends, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if isinstance(getattr(args.func, "__self__", None), Run):
            raise  # inside a recipe: keep the traceback
        print(f"error: {error.filename or 'a file'}: {error.strerror or error}: choose another path.", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
