"""``tune eval``."""

import argparse
from pathlib import Path

from torchtune._cli.subcommand import CHECKPOINT, Subcommand, add_placement, check_least, check_most
from torchtune.utils import UserError


class Eval(Subcommand):
    """Subcommand that evaluates a model on rows of a file and on tasks of lm-eval."""

    name = "eval"
    help = "Score a model's answers to your rows, and compare it with another model"
    description = (
        "Answer every row of a file, compare the answers with the right ones, and write them to a\n"
        "JSONL file. After an interruption, the same command continues."
    )
    epilog = """
        scores:
          exact            the answer equals the right one; exact:PATTERN compares the last match of PATTERN
          number           the last number equals the right one
          json             fraction of the right JSON object's fields in the answer
          regex:PATTERN    the pattern matches
          math             the last expression equals the right one (extra math)
          package.function a function (rows, texts) -> list of numbers; None for rows without a score

        Without --data and --tasks, it measures the perplexity of the run's dataset_val.

        examples:
          $ tune eval /tmp/run
          $ tune eval /tmp/run/epoch_2 --data held_out.jsonl --score json --against /tmp/SmolLM2-135M-Instruct
          $ tune eval /tmp/SmolLM2-135M-Instruct --adapter /tmp/run/step_100 --data held_out.jsonl --score exact
          $ tune eval /tmp/run/epoch_2 --data held_out.jsonl --perplexity
          $ tune eval /tmp/run/epoch_2 --tasks hellaswag,arc_easy --limit 100
    """

    def _add_arguments(self) -> None:
        add = self._parser.add_argument
        add("model", help=CHECKPOINT)
        add("--data", type=Path, help="rows with the right answers: .jsonl, .json, .csv, .parquet …")
        add("--score", action="append", default=[], metavar="NAME", help="score of the answers, see below; repeatable")
        add("--perplexity", action="store_true", help="measure the perplexity of the right answers, or of texts")
        add("--against", help="checkpoint to compare with")
        add("--adapter", help="folder of a LoRA adapter of the model")
        add("--tasks", metavar="NAME,NAME", help="tasks of lm-eval (extra eval); tune_facts needs no download")
        add("--include-path", type=Path, help="folder of your own tasks, in lm-eval's YAML")
        add("--chat-template", action="store_true", help="apply the checkpoint's chat template to tasks")
        add("--prompt", metavar="COLUMN", help="column of the prompt or conversation (default: by its name)")
        add("--answer", metavar="COLUMN", help="column of the right answer (default: by its name)")
        add("--system", help="system prompt of conversations without one")
        add("--limit", type=int, help="maximum number of rows (default: all)")
        add("--output", type=Path, default=Path("eval"), help="folder of answers and results (default: eval)")
        add("--max-new-tokens", type=int, default=256, help="maximum tokens per answer (default: 256)")
        add("--max-sequences", type=int, default=16, help="batch size (default: 16)")
        add("--temperature", type=float, default=0.0, help="randomness; 0 takes the most likely token (default: 0)")
        add("--top-k", type=int, help="sample from the k most likely tokens (default: all)")
        add("--top-p", type=float, help="sample from the most likely tokens up to this probability (default: all)")
        add("--min-p", type=float, help="sample from tokens at least this times as likely as the first (default: all)")
        add("--seed", type=int, default=0, help="seed of sampling (default: 0)")
        add_placement(self._parser)

    def _run(self, args: argparse.Namespace) -> None:
        check_least(args, limit=1, max_new_tokens=1, max_sequences=1, temperature=0, seed=0)
        check_least(args, top_k=0, top_p=0, min_p=0)
        check_most(args, top_p=1, min_p=1)
        self._check_metrics(args)
        from torchtune._cli._find_recipe import find_checkpoint

        args.model = find_checkpoint(args.model)
        args.models = [(args.model, args.adapter)]
        if args.against:
            args.models.insert(0, (args.against, None))  # the first model is the reference
        if args.tasks:
            from torchtune._cli._evaluate import eval_tasks

            eval_tasks(args)
        if args.data or not args.tasks:
            from torchtune._cli._evaluate import eval_rows

            eval_rows(args)

    @staticmethod
    def _check_metrics(args: argparse.Namespace) -> None:
        if args.data is None and (args.score or (args.perplexity and args.tasks)):
            raise UserError("--score and --perplexity need rows: give them in --data.")
        row_options = ["prompt", "answer", "system"]
        if not args.tasks:
            row_options.append("limit")
        for name in row_options:
            if args.data is None and getattr(args, name) is not None:
                raise UserError(f"--{name} needs rows: give them in --data.")
        if args.data is not None and not args.score and not args.perplexity:
            raise UserError("there is nothing to measure: add --score exact (or another, see --help) or --perplexity.")
        if not args.tasks and (args.include_path or args.chat_template):
            raise UserError(
                "--include-path and --chat-template need --tasks: rows of --data always use the chat template."
            )
