"""Steps of Adam, AdamW and SGD on bfloat16 weights: against torch, compiled, cut into pieces, resumed."""

import logging

import pytest
import torch
from torch import nn

from torchtune.training import prepare_optimizer
from torchtune.training.optim import _low_precision_optimizer, _rounded_step

OPTIMIZERS = [
    ("AdamW", {"weight_decay": 0.1}),
    ("Adam", {"weight_decay": 0.1}),
    ("Adam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "dampening": 0.3}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
]


@pytest.mark.parametrize(("name", "settings"), OPTIMIZERS)
def test_updates_are_those_of_torch_in_float64(name, settings):
    """Float32 storage, so that nothing is rounded; tolerance: a few float32 roundings of values around 1."""
    torch.manual_seed(0)
    values = torch.randn(200)
    group = torch.optim.__dict__[name]([nn.Parameter(values.clone())], lr=0.01, **settings).param_groups[0]
    rule = _rounded_step.find_update_rule(getattr(torch.optim, name), group)
    states = [torch.zeros(200) for _ in rule.states]
    exact = nn.Parameter(values.double())
    reference = torch.optim.__dict__[name]([exact], lr=0.01, **settings)
    for step in (1, 2, 3):
        grad = torch.randn(200)
        scalars = rule.scalars(group, step if rule.counts_steps else min(step, 2))
        values, states = rule.function(values, grad, states, torch.tensor(scalars).unbind())
        exact.grad = grad.double()
        reference.step()
    assert (values.double() - exact.detach()).abs().max() < 2e-6


def run_steps(make, *, resume_after=None, steps=3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 60), nn.Linear(60, 3)).bfloat16()
    optimizer = prepare_optimizer(make(model.parameters()), model, seed=1)
    for step in range(steps):
        if step == resume_after:
            state = optimizer.state_dict()
            optimizer = prepare_optimizer(make(model.parameters()), model, seed=2)
            optimizer.load_state_dict(state)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    tensors = [parameter.detach() for parameter in model.parameters()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if value.dim()]
    return torch.cat([tensor.flatten() for tensor in tensors])


def make_adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def test_pieces_do_what_the_whole_does_bit_for_bit(monkeypatch):
    expected = run_steps(make_adamw)
    monkeypatch.setattr(_low_precision_optimizer, "rounded_piece_size", lambda device: 100)
    assert torch.equal(run_steps(make_adamw), expected)


def test_resumed_steps_are_equal_bit_for_bit():
    assert torch.equal(run_steps(make_adamw, resume_after=2), run_steps(make_adamw))


def test_weights_that_are_not_contiguous_take_the_same_steps():
    def run(is_transposed):
        torch.manual_seed(0)
        model = nn.Module()
        values = torch.randn(40, 60).bfloat16()
        model.weight = nn.Parameter(values.t().contiguous().t() if is_transposed else values)
        optimizer = prepare_optimizer(make_adamw(model.parameters()), model, seed=1)
        for _ in range(2):
            model.weight.grad = torch.randn(40, 60).bfloat16()
            optimizer.step()
        return model.weight.detach()

    assert not run(True).is_contiguous()
    assert torch.equal(run(True), run(False))


def test_count_of_steps_of_a_loaded_state_stays_on_the_host():
    model = nn.Linear(4, 4).bfloat16()
    optimizer = prepare_optimizer(make_adamw(model.parameters()), model, seed=1)
    model(torch.ones(4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert {state["step"].device.type for state in optimizer.state.values()} == {"cpu"}
    assert {state["step"].item() for state in optimizer.state.values()} == {2.0}


def test_buffer_that_is_saved_as_none_begins_with_the_first_gradient():
    model = nn.Linear(4, 4, bias=False).bfloat16()
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9), model, seed=1)
    state = optimizer.state_dict()
    state["state"] = {"weight": {"momentum_buffer": None}}
    optimizer.load_state_dict(state)
    model.weight.grad = torch.full_like(model.weight, 0.5)
    optimizer.step()
    assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], model.weight.grad)


def test_state_of_another_random_generator_is_logged(caplog, monkeypatch):
    model = nn.Linear(4, 4).bfloat16()
    optimizer = prepare_optimizer(make_adamw(model.parameters()), model, seed=1)
    state = optimizer.state_dict()
    del state["precision"]["rounding"]
    with caplog.at_level(logging.INFO, "torchtune"):
        optimizer.load_state_dict(state)
    assert "another random generator for stochastic rounding" in caplog.text


@pytest.mark.slow
def test_compiled_steps_are_equal_bit_for_bit(monkeypatch):
    if not _rounded_step.has_cpp_compiler():
        pytest.skip("needs a C++ compiler")
    plain = run_steps(make_adamw)
    step = _rounded_step.CompiledWhenItPays(_rounded_step.step_elements, seconds=0.0)
    monkeypatch.setattr(_rounded_step, "fused_step", step)
    assert torch.equal(run_steps(make_adamw), plain)
    assert step.is_compiled


def test_steps_stay_uncompiled_if_the_compiler_fails(caplog, monkeypatch):
    def fail(function, **settings):
        def compiled(*args):
            raise torch._dynamo.exc.InternalTorchDynamoError("no kernel for this machine")

        return compiled

    plain = run_steps(make_adamw)
    step = _rounded_step.CompiledWhenItPays(_rounded_step.step_elements, seconds=0.0)
    monkeypatch.setattr(_rounded_step, "fused_step", step)
    monkeypatch.setattr(torch, "compile", fail)
    with caplog.at_level(logging.INFO, "torchtune"):
        assert torch.equal(run_steps(make_adamw), plain)
    assert caplog.text.count("stays uncompiled: no kernel for this machine") == 1
    assert not step.is_compiled


def step_many_parameters(monkeypatch, *, compiler, make_optimizer=make_adamw):
    """Two steps of 53 parameters of different sizes in bundles: one compiled function for all of them, or none."""
    monkeypatch.setattr(_rounded_step, "bundled_step", _rounded_step.BundledStep())
    monkeypatch.setattr(_rounded_step.BundledStep, "pays", lambda self, pieces: compiler is not None)
    monkeypatch.setattr(torch, "compile", compiler)
    return step_parameters_twice(make_optimizer)


def step_parameters_twice(make_optimizer):
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(1 + 7 * i % 40).bfloat16()) for i in range(53)])
    optimizer = prepare_optimizer(make_optimizer(model.parameters()), model, seed=1)
    for _ in range(2):
        for parameter in model:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return torch.cat([parameter.detach() for parameter in model])


def test_bundles_of_parameters_are_stepped_like_each_alone(monkeypatch):
    num_pieces = []

    def compile_nothing(function, **settings):
        def compiled(update, weights, *others):
            num_pieces.append(len(weights))
            function(update, weights, *others)

        return compiled

    alone = step_many_parameters(monkeypatch, compiler=None)
    assert torch.equal(step_many_parameters(monkeypatch, compiler=compile_nothing), alone)
    assert set(num_pieces) == {_rounded_step.BUNDLE}  # one size, so that the function is compiled once
    # Three bundles take 51 parameters a step (two have one element), after one of zeros that the compiler sees first.
    assert len(num_pieces) == 2 * 3 + 1


def test_bundles_of_optimizers_with_other_states_are_stepped_in_one_process(monkeypatch):
    """The zeros that fill a bundle have its states: two of AdamW, then one of SGD with momentum, then none."""
    factories = [
        make_adamw,
        lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    ]
    alone = [step_many_parameters(monkeypatch, compiler=None, make_optimizer=factory) for factory in factories]
    step_many_parameters(monkeypatch, compiler=lambda function, **settings: function)
    for factory, expected in zip(factories, alone, strict=True):
        assert torch.equal(step_parameters_twice(factory), expected)


def test_parameters_are_stepped_alone_if_the_compiler_fails_for_bundles(caplog, monkeypatch):
    def fail(function, **settings):
        def compiled(*args):
            raise torch._dynamo.exc.InternalTorchDynamoError("too many arguments")

        return compiled

    alone = step_many_parameters(monkeypatch, compiler=None)
    with caplog.at_level(logging.INFO, "torchtune"):
        assert torch.equal(step_many_parameters(monkeypatch, compiler=fail), alone)
    assert caplog.text.count("not bundled: too many arguments") == 1
