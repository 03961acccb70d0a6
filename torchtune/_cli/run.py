"""``tune run``: run a recipe in this process, or in several through torchrun, and explain how they end."""

import argparse
import logging
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path

from torchtune._cli._shorthands import expand_shorthands
from torchtune._cli.subcommand import (
    USAGE,
    Command,
    Subcommand,
    count_processes,
    parse_command,
    torchrun_arguments,
)
from torchtune._recipe_registry import (
    RecipeTarget,
    are_other_methods,
    current_name,
    find_config,
    find_recipe,
    get_all_recipes,
    recipe_named_by,
    recipe_of,
    resolve_config,
    resolve_recipe,
)
from torchtune.utils import (
    AGENT_VARIABLE,
    EXIT_REQUEUE,
    GRACE_VARIABLE,
    HANG_EXIT_CODE,
    MACHINES_VARIABLE,
    UserError,
    first_line,
)

# Exit codes of workers that have printed the reason: user error, stalled run, Ctrl-C, and a checkpoint saved after a
# signal, or another machine lost.
_KNOWN_EXIT_CODES = (UserError.exit_code, HANG_EXIT_CODE, 130, EXIT_REQUEUE)
# Seconds that other machines need to find out which rank has failed.
_LINGER = 20


class Run(Subcommand):
    """Subcommand that runs a recipe."""

    name = "run"
    usage = USAGE
    help = "Run a recipe, in this process or in several through torchrun"
    description = "Check a config, then run a recipe with it."
    epilog = """
        options:
          --config CONFIG    name of a config, or a YAML file; <recipe> is optional if the config names it
          --dry-run          check everything, print memory and steps, and stop
          --simulate 8xH100  run a step on simulated devices (`tune estimate --help`), and stop
          --grace SECONDS    time between the signal that stops the run and the kill: how long workers may save, and
                             a checkpoint that takes longer is written more often
          -h, --help         this text; after a recipe, all of its settings
          key=value          change a setting of the config; key.sub=value inside a section
          ~key               remove a setting
          model=MODEL        of the configs any_*: a checkpoint's folder, a hub repository, or a GGUF file
          data=DATA          a file or folder of rows, or a hub dataset; its format is found
        torchrun's options (see `torchrun --help`) precede the recipe and start one process per device.

        examples:
          $ tune run lora_finetune_single_device --config llama3_2/1B_lora_single_device epochs=2
          $ tune run --config any_lora model=HuggingFaceTB/SmolLM2-135M-Instruct data=chats.jsonl
          $ tune run --config llama3_2/1B_lora_single_device optimizer.lr=2e-4 --dry-run
          $ tune run my_recipe.py --config my_config.yaml
          $ tune run lora_finetune_single_device --help
    """
    takes_tokens = True

    def _run(self, args: argparse.Namespace) -> None:
        command = parse_command(args.tokens)
        if command.help and command.recipe is None and command.config is None:
            self._parser.print_help()
            return
        if command.recipe is None and command.config is None:
            self._parser.error("the following arguments are required: recipe, --config")
        if command.config is None and not find_recipe(command.recipe) and find_config(command.recipe):
            command.config = command.recipe  # tune run CONFIG
            command.recipe = None
        # The recipe may be left out if the config names it.
        config = None
        if command.config is not None:
            config = resolve_config(command.config, command.recipe)
        is_config = command.recipe is not None and command.recipe.endswith((".yaml", ".yml"))
        if config is None and is_config:
            self._parser.error(f"The '--config' argument is required: tune run --config {command.recipe}")
        if command.recipe is None:
            recipe = recipe_named_by(config)
        else:
            recipe = resolve_recipe(command.recipe)
            is_former_name = current_name(command.recipe) != command.recipe
            # The check of the config has to know a former name, which may require settings, as qat_* does. A config of
            # another method gets no name, because then this is the error to report.
            if is_former_name and config is not None and not are_other_methods(command.recipe, recipe_of(config) or ""):
                command.overrides.insert(0, f"recipe={command.recipe}")
        if command.help:
            from torchtune.config import describe_settings, settings_of

            print(describe_settings(settings_of(recipe.load_main())), end="")
            return
        if config is None:
            self._parser.error("The '--config' argument is required.")
        # Settings in the place of model=, teacher= and data=, if the command line has any; others are as they are.
        command.overrides = expand_shorthands(config, command.overrides, command.recipe)
        if command.recipe is None:
            recipe = recipe_named_by(config, command.overrides)  # the rows of data= may choose another recipe
        if command.grace is not None:  # for torchrun and the workers
            os.environ[GRACE_VARIABLE] = str(command.grace)
        if command.simulate or command.fit:
            from torchtune._cli.estimate import estimate

            estimate(recipe, config, command)
        elif command.dry_run:
            self._dry_run(recipe, config, command)
        elif command.torchrun:
            self._run_distributed(recipe, config, command)
        else:
            self._check_distributed(recipe, wanted=False)
            run_here(recipe, config, command.overrides)

    def _dry_run(self, recipe: RecipeTarget, config: Path, command: Command) -> None:
        """Print the requirements of a run, and finally the errors that prevent its start."""
        from torchtune._cli.estimate import dry_run
        from torchtune.config import load_and_check

        self._check_distributed(recipe, wanted=bool(command.torchrun))
        main = recipe.load_main()
        dry_run(main, load_and_check(config, command.overrides, main), count_processes(command.torchrun))

    def _run_distributed(self, recipe: RecipeTarget, config: Path, command: Command) -> None:
        """Check the config once, then start one process per device with torchrun."""
        from torchtune.config import load_and_check
        from torchtune.estimate import check_run

        self._check_distributed(recipe, wanted=True)
        settings = load_and_check(config, command.overrides, recipe.load_main())
        processes = count_processes(command.torchrun, exactly=True)
        if processes is not None:
            # Check before the workers start, so that errors are printed once; workers check the rank-dependent
            # settings.
            check_run(settings, processes)
        program = ["--module", recipe.module]
        if recipe.path is not None:
            program = [str(recipe.path)]
        args = torchrun_arguments(command.torchrun, [*program, "--config", str(config), *command.overrides])
        # Workers import from the current directory, too, as a run in this process does.
        paths = (os.environ.get("PYTHONPATH", ""), os.getcwd())
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        print("Running with torchrun...", flush=True)
        _run_torchrun(args)

    def _check_distributed(self, recipe: RecipeTarget, *, wanted: bool) -> None:
        """Refuse several processes for a recipe of one process, and one process for a recipe of several."""
        if not recipe.registered:
            return
        entry = next(entry for entry in get_all_recipes() if entry.name == recipe.name)
        if not entry.groups:  # a user's recipe inside a checkout has no entry in features.yaml
            return
        if wanted and not entry.supports_distributed:
            alternative = ""
            distributed_name = recipe.name.replace("_single_device", "_distributed")
            if distributed_name != recipe.name and find_recipe(distributed_name):
                alternative = f"run {distributed_name}, or "
            self._parser.error(
                f"Recipe {recipe.name} runs in one process and does not support distributed training: {alternative}"
                "remove torchrun's options."
            )
        if entry.supports_distributed and not wanted and "one_device" not in entry.groups:
            self._parser.error(
                f"Recipe {recipe.name} runs in several processes: give their number, for example "
                f"tune run --nproc-per-node 2 {recipe.name} --config ..."
            )


def run_here(recipe: RecipeTarget, config: Path, overrides: list[str]) -> None:
    """Run in this process, as ``python recipe.py --config …`` does; the recipe's decorator checks the config."""
    sys.argv = [str(recipe.path or recipe.module), "--config", str(config), *overrides]
    if recipe.path is not None:
        sys.path.insert(0, str(recipe.path.parent))
        runpy.run_path(str(recipe.path), run_name="__main__")
    else:
        runpy.run_module(recipe.module, run_name="__main__", alter_sys=True)


def _run_torchrun(args: argparse.Namespace) -> None:
    """Run torchrun, and exit the process unless all workers succeed.

    Exit codes: 2 after a user error, 75 if the run saved after a signal or another machine is lost, 76 if the run
    stalled, 130 after Ctrl-C, otherwise 1.

    Raises:
        UserError: an option of torchrun has a wrong value.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import run as torchrun

    counts = args.nnodes.split(":")
    are_numbers = len(counts) <= 2 and all(count.isdigit() for count in counts)
    if not are_numbers or not 0 < int(counts[0]) <= int(counts[-1]):
        raise UserError(
            f"--nnodes {args.nnodes}: give the number of machines, such as 2, or the least and the most, 2:4."
        )
    if args.max_restarts > 0 or len(set(counts)) > 1:
        # A new store for every restart: an old one still has the addresses of the previous workers.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    for module in ("multiprocessing.api", "rendezvous.dynamic_rendezvous"):
        logging.getLogger(f"torch.distributed.elastic.{module}").addFilter(_is_new_information)
    # Workers ask their agent whether it lives, and wait for other machines only if there are some.
    os.environ |= {AGENT_VARIABLE: str(os.getpid()), MACHINES_VARIABLE: args.nnodes}
    try:
        torchrun(args)
    except SignalException as error:  # the workers got the signal and have saved
        if error.sigval == signal.SIGTERM:
            sys.exit(EXIT_REQUEUE)
        sys.exit(128 + error.sigval)
    except ChildFailedError as error:
        # A worker's user error makes others fail; torchrun may report either first.
        worker_codes = [failure.exitcode for failure in error.failures.values()]
        exit_code = next((code for code in _KNOWN_EXIT_CODES if code in worker_codes), 1)
        if exit_code == EXIT_REQUEUE and worker_codes[0] != EXIT_REQUEUE:  # another worker was killed first
            exit_code = 1
        if exit_code == 1:  # no worker has printed the reason
            print(error, file=sys.stderr)
        if args.nnodes not in ("1", "1:1"):
            time.sleep(_LINGER)  # this process may serve the store, which other machines query to find the failed rank
        sys.exit(exit_code)
    except (RendezvousError, DistError) as error:
        sentence, code = _explain_error(error, args)
        print(f"error: {sentence}", file=sys.stderr)
        sys.exit(code)
    except ValueError as error:  # of an option, before there are workers
        raise UserError(f"torchrun refuses an option: {first_line(error)}: see torchrun --help.") from error


def _is_new_information(record: logging.LogRecord) -> bool:
    """Filter out torchrun's log records on failed workers or a closed rendezvous, which repeat a printed error."""
    text = record.getMessage()
    if text.startswith("Sending process") or text.endswith("due to an error of type RendezvousConnectionError."):
        return False
    return not any(text.startswith(f"failed (exitcode: {code})") for code in _KNOWN_EXIT_CODES)


def _explain_error(error: Exception, args: argparse.Namespace) -> tuple[str, int]:
    """Return a message on a failed rendezvous, and the exit code."""
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

    address = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}"
    if isinstance(error, RendezvousClosedError):
        return f"the run at {address} has ended on another machine: see the error in its output.", 1
    cause = first_line(error.__cause__ or error)
    is_missing_machine = isinstance(error, RendezvousTimeoutError)
    waiting_option = "join_timeout"
    if args.rdzv_backend == "static" and args.node_rank == 0:
        # The first machine serves the store itself: the others have not connected, "1/2 clients joined".
        is_missing_machine = is_missing_machine or "clients joined" in cause
        waiting_option = "timeout"
    if is_missing_machine:
        return (
            f"fewer machines than --nnodes {args.nnodes} connected to {address} in time: run the same command, with "
            f"the same --nnodes, on all machines; --rdzv-conf {waiting_option}=SECONDS waits longer.",
            EXIT_REQUEUE,
        )
    # torch has one class for both errors; only after workers have run, the traceback has one of these frames.
    frames = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    if frames & {"num_nodes_waiting", "_restart_workers"}:
        return (
            f"{address} has stopped answering, because its machine or its command has ended ({cause}): run the same "
            "command on all machines with resume_from_checkpoint=True to continue from the last checkpoint.",
            EXIT_REQUEUE,
        )
    return (
        f"{address} cannot be reached ({cause}): give the address of the first machine with a free port, and start the "
        "command there.",
        2,
    )
