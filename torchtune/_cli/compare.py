"""``tune compare``."""

import argparse
from pathlib import Path

from torchtune._cli.subcommand import Subcommand


class Compare(Subcommand):
    """Subcommand that compares runs."""

    name = "compare"
    help = "Say what differs between runs, and which is better on the same rows"
    description = (
        "Print the settings, data and code that differ between runs, their losses at the same tokens\n"
        "and time, and whether the rows that all were measured on, or that `tune eval --output RUN/eval` has\n"
        "scored, are better or the same within noise."
    )
    epilog = """
        examples:
          $ tune compare /tmp/run_a /tmp/run_b
          $ tune compare /tmp/run_a /tmp/run_b /tmp/run_c --html comparison.html
    """

    def _add_arguments(self) -> None:
        self._parser.add_argument("runs", nargs="+", help="output_dir of each run; the first is the reference")
        self._parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with the curves")

    def _run(self, args: argparse.Namespace) -> None:
        from torchtune.reports import Comparison, RunFolder

        comparison = Comparison([RunFolder(run) for run in args.runs])
        print(comparison.text())
        if args.html is not None:
            comparison.write(args.html)
            print(f"\npage        {args.html}")
