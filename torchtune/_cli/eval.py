"""``tune eval``."""

import argparse
import textwrap
from pathlib import Path

from torchtune._cli.subcommand import Subcommand
from torchtune.utils import UserError


class Eval(Subcommand):
    """Subcommand that evaluates a model on rows of a file and on tasks of lm-eval."""

    def __init__(self, subparsers: argparse._SubParsersAction) -> None:
        self._parser = subparsers.add_parser(
            "eval",
            prog="tune eval",
            help="Score the answers of a model to rows of yours, and compare it with another",
            description="Answer every row of a file, score the answers against the right ones, and write each answer\n"
            "to a JSONL file as it ends. The same command after an interruption goes on there.",
            formatter_class=argparse.RawTextHelpFormatter,
            epilog=textwrap.dedent("""\
                scores:
                  exact            the answer is the right one; exact:PATTERN compares what a pattern finds last
                  number           its last number is the right one
                  json             share of the fields of the right JSON object that it has
                  regex:PATTERN    the pattern matches
                  math             its last expression equals the right one (extra math)
                  package.function a function (rows, texts) -> list of numbers, or of None where there is no score

                Without --data and --tasks it measures the perplexity of the run's dataset_val.

                examples:
                  $ tune eval /tmp/run
                  $ tune eval /tmp/run/epoch_2 --data held_out.jsonl --score json --against /tmp/SmolLM2-135M-Instruct
                  $ tune eval /tmp/SmolLM2-135M-Instruct --adapter /tmp/run/step_100 --data held_out.jsonl --score exact
                  $ tune eval /tmp/run/epoch_2 --data held_out.jsonl --perplexity
                  $ tune eval /tmp/run/epoch_2 --tasks hellaswag,arc_easy --limit 100
                """),
        )
        self._add_arguments()
        self._parser.set_defaults(func=self._eval_cmd)

    def _add_arguments(self) -> None:
        add = self._parser.add_argument
        add("model", help="folder of a checkpoint or of a run (its best, or last), or a repository on the hub")
        add("--data", type=Path, help="rows with the right answers: .jsonl, .json, .csv, .parquet …")
        add("--score", action="append", default=[], metavar="NAME", help="how to score answers, see below; repeatable")
        add("--perplexity", action="store_true", help="measure the perplexity of the right answers, or of texts")
        add("--against", help="checkpoint to compare with")
        add("--adapter", help="folder of a LoRA adapter of the model")
        add("--tasks", metavar="NAME,NAME", help="tasks of lm-eval (extra eval); tune_facts needs no download")
        add("--include-path", type=Path, help="folder with tasks of yours, in lm-eval's YAML")
        add("--chat-template", action="store_true", help="ask tasks in the template of the checkpoint")
        add("--prompt", metavar="COLUMN", help="column of the prompt or conversation; found by its name")
        add("--answer", metavar="COLUMN", help="column of the right answer; found by its name")
        add("--system", help="system prompt of conversations without one")
        add("--limit", type=int, help="rows to evaluate on; all of them")
        add("--output", type=Path, default=Path("eval"), help="folder of answers and results (eval)")
        add("--max-new-tokens", type=int, default=256, help="longest answer, in tokens (256)")
        add("--max-sequences", type=int, default=16, help="rows that are answered at a time (16)")
        add("--temperature", type=float, default=0.0, help="randomness; 0 always takes the likeliest token (0)")
        add("--seed", type=int, default=0, help="seed of sampling (0)")
        add("--device", help="cuda, cpu, mps …; by default the best one")
        add("--dtype", choices=["bf16", "fp32"], help="of weights and activations; by default the checkpoint's")

    def _eval_cmd(self, args: argparse.Namespace) -> None:
        least = {"limit": 1, "max_new_tokens": 1, "max_sequences": 1, "temperature": 0, "seed": 0}
        for name, smallest in least.items():
            value = getattr(args, name)
            if value is not None and not value >= smallest:
                raise UserError(f"--{name.replace('_', '-')} is {value}: it must be at least {smallest}.")
        self._check_metrics(args)
        from torchtune._cli._eval_run import checkpoint_of

        args.model = checkpoint_of(args.model)
        if args.tasks:
            from torchtune._cli._eval_tasks import eval_tasks

            eval_tasks(args)
        if args.data or not args.tasks:
            from torchtune._cli._eval_rows import eval_rows

            eval_rows(args)

    @staticmethod
    def _check_metrics(args: argparse.Namespace) -> None:
        if args.data is None and (args.score or (args.perplexity and args.tasks)):
            raise UserError("--score and --perplexity need rows: give them in --data.")
        names = ["prompt", "answer", "system", *([] if args.tasks else ["limit"])]
        if args.data is None and (given := [name for name in names if getattr(args, name) is not None]):
            raise UserError(f"--{given[0]} is of rows: give them in --data.")
        if args.data is not None and not args.score and not args.perplexity:
            raise UserError("nothing is to be measured: add --score exact (or another, see --help), or --perplexity.")
        if not args.tasks and (args.include_path or args.chat_template):
            raise UserError(
                "--include-path and --chat-template go with --tasks: rows are always asked in the template."
            )
