"""Code that only watches a run may fail."""

import random
from contextlib import suppress

import numpy as np
import pytest
import torch

from torchtune.utils import LostRankError, ObserverGuard, kept_random_state


def fail(error):
    raise error


def test_the_first_error_is_a_warning_and_later_ones_are_silent(caplog):
    guard = ObserverGuard("metric_logger")
    assert guard.call(lambda: 3) == 3
    assert not guard.has_failed
    assert guard.call(lambda: fail(ConnectionError("the server\nis gone.")), default=5) == 5
    assert guard.call(lambda: fail(ValueError()), default=6) == 6
    assert caplog.messages == ["metric_logger failed (ConnectionError: the server): the run goes on without it."]
    assert guard.call(lambda: 7) == 7, "a server may come back"


def test_an_observer_whose_failures_take_long_is_left_out():
    guard = ObserverGuard("metric_logger", patience=0.0)
    assert guard.call(lambda: 1) == 1
    guard.call(lambda: fail(TimeoutError()))
    assert guard.is_left_out
    assert guard.call(lambda: pytest.fail("it is called again"), default=2) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), LostRankError("rank 1 is gone", 75)])
def test_errors_that_end_a_run_are_raised(error):
    with pytest.raises(type(error)):
        ObserverGuard("progress bar").call(lambda: fail(error))


def draw():
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_random_numbers_are_those_of_a_run_without_observer():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    with suppress(ValueError), kept_random_state():
        first = draw()
        raise ValueError("it fails after it has drawn")
    assert draw() == first
