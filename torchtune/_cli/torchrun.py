"""torchrun for ``tune run``: its options, its defaults here, and how its workers end."""

import argparse
import logging
import math
import os
import re
import signal
import sys
import time
import traceback

from torchtune.utils import (
    AGENT_VARIABLE,
    EXIT_REQUEUE,
    GRACE_VARIABLE,
    HANG_EXIT_CODE,
    MACHINES_VARIABLE,
    UserError,
    first_line,
)

# Default of --shutdown-timeout: seconds between SIGTERM and SIGKILL, for workers to save. It also delays a restart if
# workers hang in a collective with a dead rank.
SHUTDOWN_TIMEOUT = 120
# Exit codes of workers that have printed the reason: user error, stalled run, Ctrl-C, and a checkpoint saved after a
# signal, or another machine lost.
_KNOWN_EXIT_CODES = (UserError.exit_code, HANG_EXIT_CODE, 130, EXIT_REQUEUE)
# Seconds that other machines need to find out which rank has failed.
_LINGER = 20


def torchrun_parser(usage: str = "") -> argparse.ArgumentParser:
    """Return the parser of torchrun, with the name of our command."""
    # Read when torch is imported. In this process, `tune run` explains connections that fail, in place of C++ stack
    # traces; workers show errors, such as NCCL's, without traces of what they only warn about.
    is_default = "TORCH_CPP_LOG_LEVEL" not in os.environ
    if is_default:
        os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    from torch.distributed.run import get_args_parser

    if is_default:
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    parser = get_args_parser()
    parser.prog = "tune run"
    parser.usage = usage
    return parser


def is_torchrun_option(token: str) -> bool:
    """Return whether ``token`` is an option of torchrun, with or without its value."""
    # From the help text, because argparse has no public list of a parser's options.
    options = re.findall(r"(?<!\S)--?[a-z][\w-]*", torchrun_parser().format_help())
    if not token.startswith("--") and token[:2] in options:  # a short option may be joined with its value
        return True
    # argparse takes the beginning of an option for the option, and torchrun underscores for dashes.
    name = token.partition("=")[0].replace("_", "-")
    return any(option.startswith(name) for option in options)


def count_processes(options: list[str], *, exactly: bool = False) -> int | None:
    """Return the maximum number of processes that torchrun would start.

    Args:
        options: torchrun's options from the command line.
        exactly: return ``None`` if the number may change or is not a number.

    Raises:
        UserError: the number is unknown, and ``exactly`` is False.
    """
    if not options:
        return 1
    args = torchrun_parser().parse_args([*options, "<end>"])
    machines = str(args.nnodes).split(":")  # MIN:MAX, or a number
    per_machine = str(args.nproc_per_node)  # or gpu, cpu, auto …
    are_numbers = machines[-1].isdigit() and per_machine.isdigit()
    if exactly and not (are_numbers and len(set(machines)) == 1):
        return None
    if not are_numbers:
        raise UserError(f"--dry-run needs the number of processes: give numbers, not '{per_machine}'.")
    return int(machines[-1]) * int(per_machine)


def torchrun_arguments(options: list[str], program: list[str]) -> argparse.Namespace:
    """Parse torchrun's options, with the following defaults:

    - ``--standalone`` on one machine.
    - The backend ``c10d`` for ``--rdzv-endpoint`` without a backend or node rank: it assigns node ranks, so that the
      command is the same on all machines.
    - A ``--shutdown-timeout`` that is long enough to save, or the grace period of ``tune run --grace``.

    Args:
        options: torchrun's options from the command line.
        program: ``path …`` or ``--module name …``.
    """
    parser = torchrun_parser()
    # Without their defaults, these are None unless the command line sets them.
    unset_defaults = {}
    for name in ("rdzv_backend", "node_rank", "master_port"):
        if f"PET_{name.upper()}" not in os.environ:  # torchrun also reads its options from such variables
            unset_defaults[name] = parser.get_default(name)
    parser.set_defaults(**dict.fromkeys(unset_defaults))
    args = parser.parse_args([*options, *program])
    if args.rdzv_endpoint and args.rdzv_backend is None and args.node_rank is None:
        args.rdzv_backend = "c10d"
    if not args.rdzv_endpoint and args.nnodes in ("1", "1:1") and args.master_port is None:
        args.standalone = True
    for name, default in unset_defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    # A release of torch may lack the option, as 0 stands for.
    if getattr(args, "shutdown_timeout", 0) is None and "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" not in os.environ:
        args.shutdown_timeout = math.ceil(float(os.environ.get(GRACE_VARIABLE, SHUTDOWN_TIMEOUT)))
    return args


def run_torchrun(args: argparse.Namespace) -> None:
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
