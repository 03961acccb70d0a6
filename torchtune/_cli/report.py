"""``tune report`` and ``tune compare``."""

import argparse
import math
from pathlib import Path
from typing import Any

from torchtune._cli.subcommand import Subcommand, check_least
from torchtune.utils import UserError


class Report(Subcommand):
    """Subcommand that writes the report of a run anew."""

    name = "report"
    help = "Say whether a run has learned, and write its report.html anew"
    description = (
        "Print the verdict on a run, and write report.html and report.json into its folder, also if\n"
        "it was killed or is going on. A run that ends by itself has written them."
    )
    epilog = """
        examples:
          $ tune report /tmp/run
          $ tune report /tmp/run --price-per-hour 2.5
    """

    def _add_arguments(self) -> None:
        self._parser.add_argument("run", help="output_dir of a run")
        self._parser.add_argument("--price-per-hour", type=float, help="price per hour of its machines, for the cost")

    def _run(self, args: argparse.Namespace) -> None:
        check_least(args, price_per_hour=0)
        from torchtune.reports import RunFolder, judge, write_report

        run = RunFolder(args.run)
        estimate, reason = _estimate(run)
        gib = None
        if estimate is not None:
            gib = estimate.peak / 2**30
        path = write_report(run, price_per_hour=args.price_per_hour, estimated_gib=gib)
        print(f"verdict     {judge(run)}\nreport      {path}")
        if reason:
            print(f"memory      without an estimate: {reason}")


def _estimate(run: Any) -> tuple[Any, str]:
    """Simulate a step of a run for the memory of a device; return None and the reason if that is impossible."""
    from torchtune._cli.estimate import estimate_or_reason
    from torchtune._recipe_registry import resolve_recipe
    from torchtune.config import load_and_check
    from torchtune.reports import SETTINGS

    # The run has recorded the lengths of its rows as a histogram, whose last edge is the longest.
    data = run.start.get("data", {}).get("dataset", {})
    edges = data.get("lengths", {}).get("edges", [0])
    longest = edges[-1]
    tokenizer = run.settings.get("tokenizer") or {}
    overrides = []
    # The rows of the simulated step have max_seq_len tokens.
    if longest and not tokenizer.get("max_seq_len"):
        overrides.append(f"tokenizer.max_seq_len={math.ceil(longest)}")
    try:
        main = resolve_recipe(run.recipe).load_main()
        settings = load_and_check(run.path / SETTINGS, overrides, main)
        return estimate_or_reason(main, settings, run.start.get("processes") or 1)
    except (UserError, ImportError) as error:  # for example, the model has been deleted
        return None, str(error)


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
