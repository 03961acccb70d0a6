"""``tune estimate``."""

import argparse

from torchtune._cli._find_recipe import find_targets
from torchtune._cli.run import Command, estimate, parse_command, require_config
from torchtune._cli.subcommand import Subcommand


class Estimate(Subcommand):
    """Subcommand that simulates a step of a recipe on any devices."""

    name = "estimate"
    usage = "tune estimate [<recipe>] --config <config> --simulate 8xH100 [--fit 80GiB] [key=value ...]"
    help = "Simulate a step of a recipe on any number of devices: memory, time, cost"
    description = (
        "Run a step of a recipe on a simulated cluster, without weights, data and devices.\n"
        "The same as tune run --dry-run --simulate."
    )
    epilog = """
        options:
          --simulate NxDEVICE  H100, H200, B200, A100, L40S, RTX4090, RTX5090 or MI300X; without N, one
          --fit MEMORY         search for the fastest settings that fit in this memory, for example 80GiB

        examples:
          $ tune estimate --config llama3_1/8B_full --simulate 8xH100
          $ tune estimate my_recipe.py --config my_config.yaml --simulate RTX4090 --fit 24GB
    """
    takes_tokens = True

    def _run(self, args: argparse.Namespace) -> None:
        command: Command = parse_command(args.tokens)
        if command.help or not args.tokens:
            self._parser.print_help()
            return
        config = require_config(command, self.name, "--simulate 8xH100")
        estimate(*find_targets(command.recipe, config), command)
