"""``tune report``."""

import argparse
import textwrap

from torchtune._cli.subcommand import Subcommand
from torchtune.utils import UserError


class Report(Subcommand):
    """Subcommand that writes the report of a run anew."""

    def __init__(self, subparsers: argparse._SubParsersAction) -> None:
        self._parser = subparsers.add_parser(
            "report",
            prog="tune report",
            help="Say whether a run has learned, and write its report.html anew",
            description="Print the verdict on a run, and write report.html and report.json into its folder, also if\n"
            "it was killed or is going on. A run that ends by itself has written them.",
            formatter_class=argparse.RawTextHelpFormatter,
            epilog=textwrap.dedent("""\
                examples:
                  $ tune report /tmp/run
                  $ tune report /tmp/run --price-per-hour 2.5
                """),
        )
        self._add_arguments()
        self._parser.set_defaults(func=self._report_cmd)

    def _add_arguments(self) -> None:
        self._parser.add_argument("run", help="output_dir of a run")
        self._parser.add_argument("--price-per-hour", type=float, help="price of an hour of its machines, for the cost")

    def _report_cmd(self, args: argparse.Namespace) -> None:
        if args.price_per_hour is not None and not args.price_per_hour >= 0:
            raise UserError(f"--price-per-hour is {args.price_per_hour}: it must be at least 0.")
        from torchtune.reports import RunFolder, judge, write_report

        run = RunFolder(args.run)
        path = write_report(run, price_per_hour=args.price_per_hour)
        print(f"verdict     {judge(run)}\nreport      {path}")
