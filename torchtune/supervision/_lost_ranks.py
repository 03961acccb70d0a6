"""Lost ranks, and torchrun's agent."""

import os
import platform

from torchtune.supervision._heartbeats import Beat, list_ranks
from torchtune.utils import AGENT_VARIABLE, EXIT_REQUEUE, LostRankError, UserError, place, run_log_path


def machine_name() -> str:
    """Return node rank and host name of this process."""
    return f"machine {os.environ.get('GROUP_RANK', '0')} ({platform.node()})"


def agent_pid() -> int | None:
    """Return the id of the process that started this rank, even if it has died since; None without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    parent = os.getppid()
    agent = int(os.environ.get(AGENT_VARIABLE, "0"))
    if agent == 0 or _process_exists(agent):
        return parent
    return agent  # it has died, so that this process has another parent by now


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
    beat = lost[first]
    ranks = list_ranks(lost)
    machines = sorted({beat.machine for beat in lost.values() if beat.machine})
    if machines:
        ranks += f" on {' and '.join(machines)}"
    ranks = f"{ranks[0].upper()}{ranks[1:]}"
    position = place(beat.step, beat.phase)
    if beat.failed:
        if beat.error:  # a user error
            reason = beat.error
            exit_code = UserError.exit_code
        else:
            reason = f"see {run_log_path(first) or 'its output'}."
            exit_code = 1
        error = LostRankError(f"{ranks} ended with {beat.left}, {position}: {reason}", exit_code)
        # Ranks that fail log their error on their own machine.
        error.is_reported = all(beat.machine == machine_name() for beat in lost.values())
        return error
    verb = "is" if len(lost) == 1 else "are"
    return LostRankError(
        f"{ranks} {verb} gone, last seen {position}: the process or its torchrun agent was killed, or the machine or "
        f"network failed; {_resume_advice()}",
        EXIT_REQUEUE,
    )


def _resume_advice() -> str:
    num_restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    max_restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if num_restarts < max_restarts:
        return "torchrun starts all ranks again, as soon as there are enough machines."
    return "run the same command on all machines with resume_from_checkpoint=True to continue from the last checkpoint."
