import copy
import math

import pytest
import torch

from torchtune import training
from torchtune.training import lr_schedulers


def make_optimizer(lr=0.5):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def rates(schedule, steps):
    rates_of_steps = []
    for _ in range(steps):
        rates_of_steps.append(training.get_lr(schedule.optimizer))
        schedule.optimizer.step()
        schedule.step()
    return rates_of_steps


def test_cosine_follows_the_formula():
    warmup, total = 4, 20
    schedule = training.get_cosine_schedule_with_warmup(make_optimizer(), warmup, total)
    for step, rate in enumerate(rates(schedule, total + 3)):
        if step < warmup:
            factor = (step + 1) / (warmup + 1)
        else:
            progress = (step - warmup) / (total - warmup)
            factor = max(0.0, 0.5 * (1 + math.cos(math.pi * 2 * 0.5 * progress)))
        assert rate == pytest.approx(0.5 * factor, abs=1e-12) or (step > total and rate >= 0)


def test_linear_and_constant_follow_the_formula():
    linear = rates(training.get_linear_schedule_with_warmup(make_optimizer(1.0), 2, 6), 8)
    assert linear == pytest.approx([1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25, 0, 0])
    short = rates(training.get_linear_schedule_with_warmup(make_optimizer(1.0), 2, 3), 4)
    assert short == pytest.approx([1 / 3, 2 / 3, 1, 0])
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
    rates_of_run = rates(make(make_optimizer(), warmup, total), total)
    assert min(rates_of_run) > 0
    assert max(rates_of_run) == pytest.approx(0.5)


@pytest.mark.parametrize("make", MAKERS)
def test_warmup_as_long_as_the_run_is_shortened_with_a_warning(make, caplog):
    with caplog.at_level("WARNING"):
        shortened = rates(make(make_optimizer(), 100, 40), 40)
    (message,) = caplog.messages
    assert "a warmup of 100 steps is as long as the run's 40 steps or longer" in message
    assert "warms up for 4 steps instead" in message
    assert shortened == rates(make(make_optimizer(), 4, 40), 40)
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
    last_rates = rates(schedule, 7)
    resumed = make(make_optimizer(), 3, 12)
    if with_optimizer:
        resumed.optimizer.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert rates(resumed, 7) == last_rates


def test_a_tensor_rate_is_set_in_place():
    optimizer = make_optimizer(torch.tensor(0.5))
    schedule = training.get_linear_schedule_with_warmup(optimizer, 0, 10)
    schedule.load_state_dict({**schedule.state_dict(), "last_epoch": 5})
    assert training.get_lr(optimizer) == pytest.approx(0.25)


# Our schedule, and the name and arguments of the same one in transformers.
SAME_IN_TRANSFORMERS = [
    ("get_cosine_schedule_with_warmup", {}, "cosine", {}),
    ("get_linear_schedule_with_warmup", {}, "linear", {}),
    ("get_constant_schedule_with_warmup", {}, "constant_with_warmup", {}),
    ("get_cosine_schedule_with_warmup", {"min_lr_ratio": 0.1}, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
    ("get_inverse_sqrt_schedule", {"timescale": 7}, "inverse_sqrt", {"timescale": 7}),
    ("get_polynomial_decay_schedule_with_warmup", {}, "polynomial", {}),
    *(
        ("get_polynomial_decay_schedule_with_warmup", options, "polynomial", options)
        for options in ({"lr_end": 0.05, "power": 2.0}, {"lr_end": 0.0, "power": 0.5})
    ),
    *(
        ("get_wsd_schedule", options, "warmup_stable_decay", options)
        for options in (
            {"num_decay_steps": 5},
            {"num_decay_steps": 5, "decay_type": "linear", "min_lr_ratio": 0.2},
            {"num_decay_steps": 6, "decay_type": "1-sqrt"},
            {"num_decay_steps": 0, "decay_type": "linear"},
        )
    ),
]


@pytest.mark.parametrize("warmup", [0, 1, 6])
@pytest.mark.parametrize(("name", "options", "their_name", "their_options"), SAME_IN_TRANSFORMERS)
def test_rates_equal_those_of_transformers_without_its_first_step_at_rate_zero(
    name, options, their_name, their_options, warmup
):
    transformers = pytest.importorskip("transformers")
    total = 20
    own_schedule = getattr(training, name)(
        make_optimizer(), num_warmup_steps=warmup, num_training_steps=total, **options
    )
    # A warmup of W steps here is one of W + 1 steps there, whose first step has the rate 0.
    hf_schedule = transformers.get_scheduler(
        their_name,
        make_optimizer(),
        num_warmup_steps=warmup + 1,
        num_training_steps=total + 1,
        scheduler_specific_kwargs=dict(their_options),
    )
    assert rates(own_schedule, total + 3) == pytest.approx(rates(hf_schedule, total + 4)[1:], rel=1e-12, abs=1e-15)
    hf_schedule = transformers.get_scheduler(
        their_name,
        make_optimizer(),
        num_warmup_steps=warmup,
        num_training_steps=total,
        scheduler_specific_kwargs=dict(their_options),
    )
    own_schedule = getattr(training, name)(
        make_optimizer(), num_warmup_steps=warmup, num_training_steps=total, **options
    )
    assert rates(own_schedule, total)[warmup:] == pytest.approx(rates(hf_schedule, total)[warmup:], rel=1e-12)


def test_timescale_of_the_inverse_square_root_is_the_warmup():
    make = training.get_inverse_sqrt_schedule
    assert rates(make(make_optimizer(1.0), 4), 9)[4:] == pytest.approx([(1 + n / 4) ** -0.5 for n in range(5)])
    assert rates(make(make_optimizer(1.0)), 2) == pytest.approx([1, (1 + 1e-4) ** -0.5])


ALL = [name for name, *_ in SAME_IN_TRANSFORMERS]


@pytest.mark.parametrize("name", sorted(set(ALL)))
def test_warmup_ratio_is_a_rounded_up_part_of_the_run(name):
    make = getattr(training, name)
    by_ratio = make(make_optimizer(), warmup_ratio=0.21, num_training_steps=20)
    by_number = make(make_optimizer(), num_warmup_steps=5, num_training_steps=20)
    assert rates(by_ratio, 20) == rates(by_number, 20)
    with pytest.raises(ValueError, match=r"num_warmup_steps is 3 and warmup_ratio 0\.1: set one of the two"):
        make(make_optimizer(), num_warmup_steps=3, warmup_ratio=0.1, num_training_steps=20)
    with pytest.raises(ValueError, match=r"warmup_ratio is 1\.0: it is a part of the run, from 0 to below 1"):
        make(make_optimizer(), warmup_ratio=1.0, num_training_steps=20)
    with pytest.raises(ValueError, match="num_training_steps"):
        make(make_optimizer(), warmup_ratio=0.1)


def test_decay_of_wsd_is_a_tenth_of_the_run_by_default():
    make = training.get_wsd_schedule
    by_default = rates(make(make_optimizer(), num_training_steps=25), 25)
    assert by_default == rates(make(make_optimizer(), decay_ratio=0.12, num_training_steps=25), 25)
    assert by_default == rates(make(make_optimizer(), num_decay_steps=3, num_training_steps=25), 25)
    assert by_default[22] == 0.5
    assert by_default[23] < 0.5


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("get_wsd_schedule", {"decay_type": "sqrt"}, "decay_type is 'sqrt': it must be one of linear, cosine, 1-sqrt"),
        ("get_wsd_schedule", {"num_decay_steps": 17}, "decay has 17 steps .* 20 steps, and 4 .* at most 16 steps"),
        ("get_wsd_schedule", {"num_decay_steps": 2, "decay_ratio": 0.1}, "set one of the two"),
        ("get_wsd_schedule", {"decay_ratio": 1.5}, "decay_ratio is 1.5"),
        ("get_wsd_schedule", {"min_lr_ratio": -0.1}, "min_lr_ratio is -0.1: .* from 0 to 1"),
        ("get_cosine_schedule_with_warmup", {"min_lr_ratio": 2}, "min_lr_ratio is 2: .* from 0 to 1"),
        ("get_inverse_sqrt_schedule", {"timescale": 0}, "timescale is 0: .* above 0"),
        ("get_polynomial_decay_schedule_with_warmup", {"lr_end": 0.5}, "lr_end is 0.5, and the optimizer's lr 0.5"),
    ],
)
def test_impossible_schedule_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        getattr(training, name)(make_optimizer(), num_warmup_steps=4, num_training_steps=20, **options)


@pytest.mark.parametrize("name", sorted(set(ALL)))
def test_every_schedule_resumes_exactly(name):
    make = getattr(training, name)
    schedule = make(make_optimizer(), num_warmup_steps=2, num_training_steps=12)
    rates(schedule, 5)
    optimizer_state, state = copy.deepcopy((schedule.optimizer.state_dict(), schedule.state_dict()))
    expected = rates(schedule, 7)
    optimizer = make_optimizer()
    optimizer.load_state_dict(optimizer_state)
    resumed = make(optimizer, num_warmup_steps=2, num_training_steps=12)
    resumed.load_state_dict(state)
    assert rates(resumed, 7) == expected
