"""``tune selfcheck``."""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from torchtune._cli._find_recipe import find_targets
from torchtune._cli.run import parse_command, require_config
from torchtune._cli.subcommand import Subcommand


class Selfcheck(Subcommand):
    """Subcommand that checks a recipe, its config and its data with short runs."""

    name = "selfcheck"
    usage = "tune selfcheck [<recipe>] --config <config> [key=value ...]"
    help = "Check your recipe, config and data with short runs: accumulation, packing, resume, saving, labels"
    description = (
        "Run a recipe for a few steps in several ways that must give the same result, and compare its\n"
        "labels with the conversations. The exit code is 0, or 1 if a check fails."
    )
    epilog = """
        examples:
          $ tune selfcheck --config smol/135M_lora_single_device dataset.data_files=mine.jsonl
          $ tune selfcheck my_recipe.py --config my_config.yaml dtype=bf16
    """
    takes_tokens = True

    def _run(self, args: argparse.Namespace) -> None:
        command = parse_command(args.tokens)
        if command.help or not args.tokens:
            self._parser.print_help()
            return
        config_name = require_config(command, self.name)
        from torchtune._cli._selfchecks import selfcheck

        recipe, config = find_targets(command.recipe, config_name)
        folder, failed = Path(tempfile.mkdtemp(prefix="torchtune-selfcheck-")), 0
        for verdict in selfcheck(recipe, config, command.overrides, folder):
            failed += verdict.state == "failed"
            print(f"{verdict.name:<14}{verdict.state:<13}{verdict.reason}", flush=True)
            if verdict.state == "failed":
                print(f"{'':<14}to see more: {verdict.more}", flush=True)
        if failed:
            print(f"{failed} checks failed; their runs are in {folder}.")
            sys.exit(1)
        shutil.rmtree(folder)
