import copy
import math

import pytest
import torch

from torchtune import training
from torchtune.training import lr_schedulers


def make_optimizer(lr=0.5):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def rates(schedule, steps):
    seen = []
    for _ in range(steps):
        seen.append(training.get_lr(schedule.optimizer))
        schedule.optimizer.step()
        schedule.step()
    return seen


def test_cosine_follows_the_formula():
    warmup, total = 4, 20
    schedule = training.get_cosine_schedule_with_warmup(make_optimizer(), warmup, total)
    for step, rate in enumerate(rates(schedule, total + 3)):
        progress = (step - warmup) / (total - warmup)
        factor = (
            (step + 1) / (warmup + 1) if step < warmup else max(0.0, 0.5 * (1 + math.cos(math.pi * 2 * 0.5 * progress)))
        )
        assert rate == pytest.approx(0.5 * factor, abs=1e-12) or (step > total and rate >= 0)


def test_linear_and_constant_follow_the_formula():
    linear = rates(training.get_linear_schedule_with_warmup(make_optimizer(1.0), 2, 6), 8)
    assert linear == pytest.approx([1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25, 0, 0])
    constant = rates(training.get_constant_schedule_with_warmup(make_optimizer(1.0), 2, num_training_steps=6), 5)
    assert constant == pytest.approx([1 / 3, 2 / 3, 1, 1, 1])
    assert rates(training.get_constant_schedule_with_warmup(make_optimizer(1.0), 0), 2) == [1, 1]


MAKERS = (
    lr_schedulers.get_cosine_schedule_with_warmup,
    lr_schedulers.get_linear_schedule_with_warmup,
    lr_schedulers.get_constant_schedule_with_warmup,
)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (1, 1), (1, 2), (5, 12), (11, 12), (12, 12), (100, 12), (9, 9)])
def test_every_step_of_a_run_trains_and_one_has_the_full_rate(make, warmup, total):
    seen = rates(make(make_optimizer(), warmup, total), total)
    assert min(seen) > 0
    assert max(seen) == pytest.approx(0.5)


@pytest.mark.parametrize("make", MAKERS)
def test_warmup_as_long_as_the_run_is_shortened_with_a_warning(make, caplog):
    with caplog.at_level("WARNING"):
        seen = rates(make(make_optimizer(), 100, 40), 40)
    (message,) = caplog.messages
    assert "a warmup of 100 steps is as long as the run's 40 steps or longer" in message
    assert "warms up for 4 steps instead" in message
    assert seen == rates(make(make_optimizer(), 4, 40), 40)
    caplog.clear()
    make(make_optimizer(), 39, 40)
    assert not caplog.messages


@pytest.mark.parametrize("with_optimizer", [True, False])
@pytest.mark.parametrize(
    "make", [lr_schedulers.get_cosine_schedule_with_warmup, lr_schedulers.get_linear_schedule_with_warmup]
)
def test_a_resumed_schedule_continues_exactly(make, with_optimizer):
    schedule = make(make_optimizer(), 3, 12)
    rates(schedule, 5)
    saved = copy.deepcopy((schedule.optimizer.state_dict(), schedule.state_dict()))
    rest = rates(schedule, 7)
    resumed = make(make_optimizer(), 3, 12)
    if with_optimizer:
        resumed.optimizer.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert rates(resumed, 7) == rest


def test_a_tensor_rate_is_set_in_place():
    optimizer = make_optimizer(torch.tensor(0.5))
    schedule = training.get_linear_schedule_with_warmup(optimizer, 0, 10)
    schedule.load_state_dict({**schedule.state_dict(), "last_epoch": 5})
    assert training.get_lr(optimizer) == pytest.approx(0.25)
