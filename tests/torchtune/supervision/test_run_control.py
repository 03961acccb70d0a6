"""What the control of a run does before its first step."""

from torchtune.training import ParallelDims, RunControl, Throughput
from torchtune.utils import Activity, watch_activity


def test_the_control_of_a_run_leaves_its_activity_alone(tmp_path):
    """A run that goes on is at a later step, which messages of lost ranks and of full memory name."""
    with watch_activity(Activity(0)):
        throughput = Throughput(step=7)
        RunControl(ParallelDims(), tmp_path)
        assert throughput.activity.step == 7
