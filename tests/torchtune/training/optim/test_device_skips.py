"""An optimizer leaves out a step by a flag of the device, as if it had not been called."""

import pytest
import torch
from torch import nn

from tests.devices import DEVICE
from torchtune.modules.conversion import Conversion, ConversionReport, Phase, apply_conversions
from torchtune.training import DeviceSkips, setup_optimizer
from torchtune.training.optim import _gradients

BAD_STEPS = (1, 3, 4)  # the first step makes states


@pytest.fixture
def skips_on_cpu(monkeypatch):
    """The kernels of a CPU read the flag, too; a run on a CPU has no use for it."""
    monkeypatch.setattr(_gradients, "_DEVICES_AHEAD", {"cpu", "cuda"})


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 1)).to(dtype)


def give_gradients(model, step, is_bad):
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        grad = torch.randn(parameter.shape, generator=generator).to(parameter)
        parameter.grad = grad * float("nan") if is_bad else grad


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01, fused=True)


def adagrad(parameters):
    return torch.optim.Adagrad(parameters, lr=0.01, fused=True)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01, fused=True)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, dampening=0.3, fused=True)


def muon(parameters):
    return torch.optim.Muon([parameter for parameter in parameters if parameter.dim() == 2])


NEEDS_ADAGRAD = pytest.mark.skipif(
    DEVICE == "cuda" and torch.__version__ < "2.13", reason="torch has no fused Adagrad for CUDA"
)


@pytest.mark.parametrize(
    ("factory", "dtype", "precision"),
    [
        (adamw, torch.float32, "param_dtype"),
        pytest.param(adagrad, torch.float32, "param_dtype", marks=NEEDS_ADAGRAD),
        (sgd, torch.float32, "param_dtype"),
        (momentum, torch.float32, "param_dtype"),
        (adam, torch.bfloat16, "param_dtype"),
        (adamw, torch.bfloat16, "stochastic_rounding"),
        (adam, torch.bfloat16, "stochastic_rounding"),
        (sgd, torch.bfloat16, "stochastic_rounding"),
        (momentum, torch.bfloat16, "stochastic_rounding"),
        (adamw, torch.bfloat16, "fp32_master"),
        (momentum, torch.bfloat16, "fp32_master"),
    ],
)
def test_skipped_step_is_one_that_was_not_taken(factory, dtype, precision, skips_on_cpu):
    model, reference = make_model(dtype), make_model(dtype)
    optimizer = setup_optimizer(factory, model, precision)
    reference_optimizer = setup_optimizer(factory, reference, precision)
    skips = DeviceSkips(optimizer, model)
    assert skips.is_supported
    for step in range(1, 7):
        is_bad = step in BAD_STEPS
        give_gradients(model, step, is_bad)
        skips.prepare(torch.tensor(is_bad))
        optimizer.step()
        skips.finish(was_bad=is_bad)
        if not is_bad:
            give_gradients(reference, step, is_bad)
            reference_optimizer.step()
    for parameter, reference_parameter in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter, reference_parameter)
    state = optimizer.state_dict()
    reference_state = reference_optimizer.state_dict()
    torch.testing.assert_close(state["state"], reference_state["state"], rtol=0, atol=0)
    assert state.get("precision") == reference_state.get("precision")


def test_optimizer_steps_without_a_flag_after_the_last_decision(skips_on_cpu):
    model = make_model()
    optimizer = setup_optimizer(adamw, model)
    skips = DeviceSkips(optimizer, model)
    skips.prepare(torch.tensor(True))
    skips.finish(was_bad=True)
    before = model[0].weight.clone()
    give_gradients(model, 1, is_bad=False)
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


def test_resumed_optimizer_has_the_kernels_of_the_saved_run(skips_on_cpu):
    model = make_model()
    saved = setup_optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=0.01), model)
    optimizer = setup_optimizer(adamw, model)
    skips = DeviceSkips(optimizer, model)
    optimizer.load_state_dict(saved.state_dict())
    assert not skips.is_supported


class WithPostHook(Conversion):
    """Does something after each step."""

    phase = Phase.KERNEL

    def convert(self, model):
        return ConversionReport("WithPostHook", [])

    def post_optimizer_hook(self, model):
        """Nothing, but it could."""


@pytest.mark.parametrize(
    ("factory", "options"),
    [
        (lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True), {"precision": "param_dtype"}),
        (lambda parameters: torch.optim.RMSprop(parameters, lr=0.01), {}),
        (adamw, {"in_backward": True}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_host_decides_where_a_kernel_takes_every_step(factory, options, dtype, skips_on_cpu):
    model = make_model(dtype)
    assert not DeviceSkips(setup_optimizer(factory, model, **options), model).is_supported


def test_host_decides_for_matrices_that_are_stepped_whole(skips_on_cpu):
    model = nn.Sequential(nn.Linear(8, 8, bias=False)).bfloat16()
    assert not DeviceSkips(setup_optimizer(muon, model), model).is_supported


def test_host_decides_for_low_bit_states(skips_on_cpu):
    torchao = pytest.importorskip("torchao.optim", reason="the extra quantization is not installed")
    model = make_model()
    optimizer = setup_optimizer(lambda parameters: torchao.AdamW8bit(parameters, lr=0.01), model)
    assert not DeviceSkips(optimizer, model).is_supported


def test_host_decides_where_a_conversion_acts_after_steps(skips_on_cpu):
    model = make_model()
    optimizer = setup_optimizer(adamw, model)
    assert DeviceSkips(optimizer, model).is_supported
    apply_conversions(model, [WithPostHook()])
    assert not DeviceSkips(optimizer, model).is_supported
