import copy
from functools import partial

import pytest
import torch
from torch import nn

from torchtune import training
from torchtune.modules.optim import OptimizerInBackward
from torchtune.utils import UserError

PRECISIONS = ["param_dtype", "stochastic_rounding", "fp32_master"]
adamw = partial(torch.optim.AdamW, lr=1e-2)


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(dtype)


def backward(model, step):
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step)).to(model[0].weight.dtype)
    model(x).float().square().mean().backward()


def train(model, optimizer, schedule, steps):
    rates = []
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        rates.append(training.get_lr(optimizer))
        schedule.step()
    return rates


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_same_steps_and_rates_as_the_optimizer_itself_and_no_gradients_left():
    plain, in_backward = make_model(), make_model()
    optimizers = training.setup_optimizer(adamw, plain), training.setup_optimizer(adamw, in_backward, in_backward=True)
    schedules = [training.get_cosine_schedule_with_warmup(optimizer, 2, 8) for optimizer in optimizers]
    expected = train(plain, optimizers[0], schedules[0], range(6))
    assert train(in_backward, optimizers[1], schedules[1], range(6)) == expected
    assert torch.equal(weights(plain), weights(in_backward))
    backward(in_backward, 7)
    assert all(parameter.grad is None for parameter in in_backward.parameters())


def test_parameters_round_independently():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)).bfloat16()
    for layer in model:
        nn.init.ones_(layer.weight)
    optimizer = training.setup_optimizer(partial(torch.optim.SGD, lr=1e-3), model, in_backward=True)
    for parameter in model.parameters():
        parameter.grad = None
    (model[0].weight.sum() + model[1].weight.sum()).backward()
    assert not torch.equal(model[0].weight, model[1].weight)
    optimizer.remove_hooks()
    model[0].weight.sum().backward()
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("precision", PRECISIONS[1:])
def test_no_tensor_of_a_step_outlives_it(precision):
    """Random bits or float32 gradients, kept by every parameter's optimizer, would outweigh 8-bit states."""
    model = torch.nn.Linear(64, 64).bfloat16()
    factory = partial(torch.optim.SGD, lr=1e-3)
    optimizer = training.setup_optimizer(factory, model, precision=precision, in_backward=True)
    model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
    assert len(optimizer.optim_map) == 2
    for parameter_optimizer in optimizer.optim_map.values():
        attributes = vars(parameter_optimizer)
        assert not any(isinstance(value, torch.Tensor | torch.Generator) for value in attributes.values())
        assert not attributes["_base_optimizer"].state
        for state in attributes["state"].values():
            assert all(value.grad is None for value in state.values())


def test_state_is_keyed_by_name_and_other_names_are_refused():
    model = make_model()
    optimizer = OptimizerInBackward(model.named_parameters(), torch.optim.AdamW, lr=1e-3)
    backward(model, 0)
    state = optimizer.state_dict()
    assert list(state) == [name for name, _ in model.named_parameters()]
    del state["0.bias"]
    with pytest.raises(ValueError, match=r"missing \['0\.bias'\]"):
        optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        OptimizerInBackward([nn.Parameter(torch.ones(1), requires_grad=False)], torch.optim.SGD)
    frozen = make_model().requires_grad_(False)
    with pytest.raises(UserError, match="nothing to train"):
        training.setup_optimizer(adamw, frozen)


def test_wrapper_steps_parameters_by_hooks_and_follows_a_schedule():
    """What copied recipes write by hand."""
    plain, in_backward = make_model(), make_model()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    schedule = training.get_linear_schedule_with_warmup(reference, 2, 10)
    optim_dict = {parameter: torch.optim.AdamW([parameter], lr=1e-2) for parameter in in_backward.parameters()}
    training.register_optim_in_bwd_hooks(in_backward, optim_dict)
    wrapper = training.create_optim_in_bwd_wrapper(in_backward, optim_dict)
    first = next(iter(wrapper.optim_map.values()))
    with pytest.raises(RuntimeError, match="call set_lr_scheduler first"):
        wrapper.step_lr_scheduler()
    with pytest.raises(RuntimeError, match="call set_lr_scheduler first"):
        wrapper.get_last_lr()
    wrapper.set_lr_scheduler(training.get_linear_schedule_with_warmup(first, 2, 10))
    for step in range(5):
        backward(plain, step)
        reference.step()
        reference.zero_grad()
        backward(in_backward, step)
        assert training.get_lr(wrapper) == training.get_lr(reference) == wrapper.get_optim_key("lr")
        schedule.step()
        wrapper.step_lr_scheduler()
        assert wrapper.get_last_lr() == schedule.get_last_lr()[0]
    assert torch.equal(weights(plain), weights(in_backward))
    restored = training.OptimizerInBackwardWrapper(
        {name: torch.optim.AdamW([parameter]) for name, parameter in in_backward.named_parameters()}
    )
    restored.load_state_dict(copy.deepcopy(wrapper.state_dict()))
    assert restored.get_optim_key("lr") == wrapper.get_optim_key("lr")
