"""Ranks that are gone, and the process that started them."""

import os
import platform

from torchtune.training.supervise._heartbeats import Beat, list_ranks
from torchtune.training.supervise._run_control import EXIT_REQUEUE
from torchtune.utils import AGENT_VARIABLE, LostRankError, place, run_log_path


def machine() -> str:
    """Node rank and host name of this process."""
    return f"machine {os.environ.get('GROUP_RANK', '0')} ({platform.node()})"


def agent_pid() -> int | None:
    """The process that started this rank, also if it has died since; None without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    parent, told = os.getppid(), int(os.environ.get(AGENT_VARIABLE, "0"))
    return parent if told == 0 or _exists(told) else told


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def is_connection_error(error: BaseException | None) -> bool:
    """Whether a collective or the store failed: an error of torch, or of gloo, which has no class for them."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def explain_loss(lost: dict[int, Beat] | None, address: str) -> LostRankError:
    """The error for ranks that are gone or failed.

    Args:
        lost: their last beats; None if the store does not answer.
        address: of the store.
    """
    if lost is None:
        return LostRankError(
            f"Machine 0, which serves the store of all ranks at {address}, does not answer: rank 0 or its torchrun "
            f"agent was killed, or the machine or network failed; {_advice()}",
            EXIT_REQUEUE,
        )
    first = min(lost)
    beat, log = lost[first], run_log_path(first)
    machines = " and ".join(sorted({other.machine for other in lost.values() if other.machine}))
    who = list_ranks(lost) + (f" on {machines}" if machines else "")
    who = f"{who[0].upper()}{who[1:]}"
    spot = place(beat.step, beat.phase)
    if beat.failed:
        reason = beat.words or f"see {log or 'its output'}."
        error = LostRankError(f"{who} ended with {beat.left}, {spot}: {reason}", 2 if beat.words else 1)
        error.is_told = all(other.machine == machine() for other in lost.values())  # there, they say it themselves
        return error
    verb = "is" if len(lost) == 1 else "are"
    return LostRankError(
        f"{who} {verb} gone, last seen {spot}: the process or its torchrun agent was killed, or the machine or network "
        f"failed; {_advice()}",
        EXIT_REQUEUE,
    )


def _advice() -> str:
    restarts = [int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS")]
    if restarts[0] < restarts[1]:
        return "torchrun starts all ranks again, as soon as there are enough machines."
    return "run the same command on all machines with resume_from_checkpoint=True to continue from the last checkpoint."
