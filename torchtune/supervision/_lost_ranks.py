"""Lost ranks, and torchrun's agent."""

import os
import platform

from torchtune.supervision._heartbeats import Beat, list_ranks
from torchtune.supervision._run_control import EXIT_REQUEUE
from torchtune.utils import AGENT_VARIABLE, LostRankError, place, run_log_path


def machine_name() -> str:
    """Return node rank and host name of this process."""
    return f"machine {os.environ.get('GROUP_RANK', '0')} ({platform.node()})"


def agent_pid() -> int | None:
    """Return the id of the process that started this rank, even if it has died since; None without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    parent, agent = os.getppid(), int(os.environ.get(AGENT_VARIABLE, "0"))
    return parent if agent == 0 or _process_exists(agent) else agent


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def is_connection_error(error: BaseException | None) -> bool:
    """Return whether a collective or the store failed: an error of torch, or of gloo, which has no error class."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def lost_rank_error(lost: dict[int, Beat] | None, address: str) -> LostRankError:
    """Return the error for ranks that are gone or failed.

    Args:
        lost: last beats of these ranks; None if the store does not answer.
        address: address of the store.
    """
    if lost is None:
        return LostRankError(
            f"Machine 0, which serves the store of all ranks at {address}, does not answer: rank 0 or its torchrun "
            f"agent was killed, or the machine or network failed; {_resume_advice()}",
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
        error.is_reported = all(other.machine == machine_name() for other in lost.values())  # lost ranks log the error
        return error
    verb = "is" if len(lost) == 1 else "are"
    return LostRankError(
        f"{who} {verb} gone, last seen {spot}: the process or its torchrun agent was killed, or the machine or network "
        f"failed; {_resume_advice()}",
        EXIT_REQUEUE,
    )


def _resume_advice() -> str:
    restarts = [int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS")]
    if restarts[0] < restarts[1]:
        return "torchrun starts all ranks again, as soon as there are enough machines."
    return "run the same command on all machines with resume_from_checkpoint=True to continue from the last checkpoint."
