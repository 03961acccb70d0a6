"""What ``tune run`` hands to torchrun, and what it makes of how that ends."""

import argparse
import logging
import os
import signal
import sys

from torchtune.utils import UserError

# What a worker ends with after it has said why: a mistake of the user, a run that stood still, or a signal after which
# everything was saved.
_OWN_EXIT_CODES = (2, 75, 76, 130)
# Seconds that workers have to save after SIGTERM before torchrun kills them, unless --shutdown-timeout says otherwise.
# It is also how long workers that hang on one that died keep the group from starting again.
GRACE = 120
# What torchrun runs, and how, is the recipe's affair.
_NOT_OURS = {"module": "--module", "no_python": "--no-python"}


def _parser(usage: str) -> argparse.ArgumentParser:
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.prog, parser.usage = "tune run", usage
    return parser


def count_options(tokens: list[str], usage: str) -> int:
    """How many of ``tokens`` are options of torchrun: its own parser knows which of them take a value."""
    if not tokens or not tokens[0].startswith("-"):
        return 0
    parsed = _parser(usage).parse_args([*tokens, "<end>"])
    for name, option in _NOT_OURS.items():
        if getattr(parsed, name, False):
            raise UserError(f"{option}: a recipe is given by its name or its path alone: leave that option out.")
    return len(tokens) - len(parsed.training_script_args)


def count_processes(options: list[str], *, exactly: bool = False) -> int | None:
    """How many processes torchrun would start at most, as far as that shows without looking at the machine.

    Args:
        options: as given.
        exactly: None where their number may change, or does not show.

    Raises:
        UserError: the number does not show, and not ``exactly``.
    """
    if not options:
        return 1
    args = _parser("").parse_args([*options, "<end>"])
    nodes, each = str(args.nnodes).rpartition(":")[2], str(args.nproc_per_node)
    if exactly and not (len(set(str(args.nnodes).split(":"))) == 1 and nodes.isdigit() and each.isdigit()):
        return None
    if not (nodes.isdigit() and each.isdigit()):
        raise UserError(f"--dry-run needs to know how many processes there are: give numbers, not '{each}'.")
    return int(nodes) * int(each)


def torchrun_arguments(options: list[str], program: list[str]) -> argparse.Namespace:
    """Arguments of torchrun, with defaults that fit the rest.

    - One machine needs no address: it is ``--standalone``.
    - ``--rdzv-endpoint`` without a backend or a rank of this machine means the backend ``c10d``: the machines then
      number themselves, so that the command is the same on all of them.
    - ``--shutdown-timeout`` leaves time to save.

    Args:
        options: as given.
        program: what to run: ``path …`` or ``--module name …``.
    """
    parser = _parser("")
    open_questions = {
        name: parser.get_default(name)
        for name in ("rdzv_backend", "node_rank")
        if f"PET_{name.upper()}" not in os.environ  # where torchrun's options may stand too
    }
    parser.set_defaults(**dict.fromkeys(open_questions))
    args = parser.parse_args([*options, *program])
    if args.rdzv_endpoint and args.rdzv_backend is None and args.node_rank is None:
        args.rdzv_backend = "c10d"
    for name, default in open_questions.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    if not args.rdzv_endpoint and args.nnodes in ("1", "1:1") and args.master_port is None:
        args.standalone = True
    if getattr(args, "shutdown_timeout", 0) is None and "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" not in os.environ:
        args.shutdown_timeout = GRACE
    return args


def _says_more(record: logging.LogRecord) -> bool:
    """Whether torchrun has more to say than that workers end which have said why, and that the others follow."""
    text = record.getMessage()
    return not text.startswith(("Sending process", *(f"failed (exitcode: {code})" for code in _OWN_EXIT_CODES)))


def run(args: argparse.Namespace) -> None:
    """Run torchrun, and end this process unless all workers succeeded.

    Exit codes: 2 after a mistake of the user, 75 if the run was asked to stop and has saved, 76 if it stood still, 130
    after Ctrl-C, else 1.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import run as torchrun

    if args.max_restarts > 0 or len(set(args.nnodes.split(":"))) > 1:
        # A store for each life of the workers, instead of one that still says where those before them could be reached.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(_says_more)
    try:
        torchrun(args)
    except SignalException as error:  # the workers were told, and have saved
        sys.exit(75 if error.sigval == signal.SIGTERM else 128 + error.sigval)
    except ChildFailedError as error:
        # That one process has said why it ends is why another breaks off; either may have been seen first.
        codes = {failure.exitcode for failure in error.failures.values()}
        own = next((code for code in _OWN_EXIT_CODES if code in codes), None)
        if own is None:
            print(error, file=sys.stderr)
        sys.exit(own or 1)
