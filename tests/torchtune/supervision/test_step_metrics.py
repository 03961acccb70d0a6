"""Metrics of a step: means over its micro-batches, of values that ranks know from the start or log first."""

import torch

from torchtune.supervision import StepMetrics
from torchtune.training import ParallelDims

ONE_PROCESS = ParallelDims()


def total_of_step(metrics):
    """Return the metrics of the step of one process."""
    sums = [float(value) for value in metrics.sums_and_counts()]
    new_sums = []
    if metrics.has_new_names:
        new_sums = metrics.new_sums(ONE_PROCESS)
    return metrics.total([*sums, *new_sums])


def test_means_are_over_all_micro_batches_of_a_step():
    metrics = StepMetrics(["accuracy", "entropy"])
    for loss, accuracy in ((0.5, (3.0, 4)), (0.25, (torch.tensor(1.0), torch.tensor(4)))):
        metrics.add_loss(torch.tensor(loss))
        metrics.log_mean({"accuracy": accuracy, "reward": (2.0, 1)})
    assert metrics.has_new_names
    assert total_of_step(metrics) == {"loss": 0.75, "accuracy": 0.5, "reward": 2.0}
    # The next step begins anew, and knows the name that was new.
    metrics.add_loss(torch.tensor(3.0))
    metrics.log_mean({"reward": (6.0, 4)})
    assert not metrics.has_new_names
    assert total_of_step(metrics) == {"loss": 3.0, "reward": 1.5}
    assert total_of_step(metrics) == {"loss": 0.0}, "a step without a micro-batch"


def test_values_of_a_validation_have_their_prefix_and_leave_the_step_alone():
    metrics = StepMetrics(["accuracy"])
    metrics.log_mean({"accuracy": (1.0, 1)})
    with metrics.validation() as means:
        metrics.log_mean({"accuracy": (1.0, 4)})
        means.add({"loss": (8.0, 2)})
        means.add({"loss": (0.0, 2), "entropy": (0.0, 0)})
    assert means.over(ONE_PROCESS) == {"val_accuracy": 0.25, "val_loss": 2.0}
    assert total_of_step(metrics) == {"loss": 0.0, "accuracy": 1.0}


def test_history_has_the_first_and_the_last_value():
    metrics = StepMetrics()
    for step, loss in ((3, 4.0), (4, 3.0), (5, 2.0)):
        metrics.record(step, {"loss": loss, "lr": 0.1})
    assert metrics.history == {"loss": ((3, 4.0), (5, 2.0))}
