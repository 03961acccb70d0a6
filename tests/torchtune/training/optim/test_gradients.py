"""Clipping and scaling of gradients; the loss of a float16 model is scaled, and the scale taken out again."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from torchtune import supervision, training
from torchtune.supervision import StepGuard
from torchtune.training import LossScaler
from torchtune.utils import UserError

SGD = partial(torch.optim.SGD, lr=0.5)


def make_model(dtype: torch.dtype = torch.float16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8, dtype=dtype), nn.LayerNorm(8, dtype=torch.float32))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: LossScaler, grad: float) -> torch.Tensor:
    """A step with the same gradient for every element; returns the clipped norm."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, grad * scaler.factor)
    norm = training.clip_grad_norm_(model.parameters(), 1.0, scaler.factor)
    optimizer.step()
    return norm


def test_gradients_too_small_for_float16_arrive():
    """1e-8 is zero in float16; scaled by 65,536 it is not, and the norm and the update are those without a scale."""
    model = make_model()
    for parameter in model[0].parameters():
        nn.init.zeros_(parameter)
    optimizer = training.setup_optimizer(SGD, model)
    wide = copy.deepcopy(model).float()
    scaler = LossScaler(optimizer, torch.float16)
    assert scaler.factor == 65536.0
    norm = step(model, optimizer, scaler, 1e-8)
    expected = step(wide, training.setup_optimizer(SGD, wide), LossScaler(optimizer, torch.float32), 1e-8)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-3)
    for parameter in model[0].parameters():
        assert optimizer.state[parameter]["master"].mean().item() == pytest.approx(-0.5e-8, rel=1e-2)
    for narrow, second in zip(model[1].parameters(), wide[1].parameters(), strict=True):
        torch.testing.assert_close(narrow, second)


def test_the_norm_is_clipped_in_every_dtype():
    model = make_model()
    optimizer = training.setup_optimizer(SGD, model)
    scaler = LossScaler(optimizer, torch.float16)
    scaler.load_state_dict({"factor": 1024.0, "good_steps": 0})
    norm = step(model, optimizer, scaler, 2.0)
    assert norm.item() == pytest.approx(2.0 * (8 * 8 + 3 * 8) ** 0.5, rel=1e-3)
    for parameter in model.parameters():
        scale = 1024.0 if parameter.dtype == torch.float16 else 1.0
        assert parameter.grad.float().mean().item() == pytest.approx(scale * 2.0 / norm.item(), rel=1e-3)


def test_an_overflow_halves_the_scale_and_many_good_steps_double_it():
    scaler = LossScaler(training.setup_optimizer(SGD, make_model()), torch.float16)
    scaler.update(has_overflowed=True)
    for _ in range(scaler.STEPS_TO_DOUBLE - 1):
        scaler.update(has_overflowed=False)
    resumed = LossScaler(training.setup_optimizer(SGD, make_model()), torch.float16)
    resumed.load_state_dict(scaler.state_dict())
    for loss_scaler in (scaler, resumed):
        assert loss_scaler.factor == 32768.0
        loss_scaler.update(has_overflowed=False)
        assert loss_scaler.factor == 65536.0


def test_the_scale_on_the_device_follows_the_host(monkeypatch):
    """Overflows, losses that are not finite, and a run of good steps: the factor and the count to the bit."""
    monkeypatch.setattr(LossScaler, "STEPS_TO_DOUBLE", 3)
    by_host, by_device = (LossScaler(training.setup_optimizer(SGD, make_model()), torch.float16) for _ in range(2))
    outcomes = ["overflow"] * 18 + ["good", "good", "bad loss", "good", "good", "overflow"] + ["good"] * 8
    for outcome in outcomes:
        if outcome != "bad loss":
            by_host.update(has_overflowed=outcome == "overflow")
        by_device.update_on_device(
            is_bad=torch.tensor(outcome != "good"), loss_is_finite=torch.tensor(outcome != "bad loss")
        )
        assert isinstance(by_device.factor, torch.Tensor)
        assert by_device.factor.item() == by_host.factor
        # The host learns of the step later, and goes on to the same factor.
        if outcome != "bad loss":
            by_device.update(has_overflowed=outcome == "overflow", was_decided_by_device=True)
        assert by_device.state_dict() == by_host.state_dict()
    assert by_host.factor == 4.0
    loss = torch.tensor(2.0)
    assert torch.equal(by_device.scale(loss), by_host.scale(loss))
    # Another step that the host decides.
    for scaler in (by_host, by_device):
        scaler.update(has_overflowed=True)
    assert by_device.factor == by_host.factor == 2.0


def test_a_scale_on_the_device_is_taken_out_of_gradients():
    results = []
    for factor in (1024.0, torch.tensor(1024.0)):
        model = make_model()
        optimizer = training.setup_optimizer(SGD, model)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 2048.0)
        optimizer.loss_scale = factor
        norm = training.clip_grad_norm_(model.parameters(), 1.0, factor)
        optimizer.step()
        results.append([norm, *model.parameters()])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_a_doubled_scale_begins_with_the_next_gradients(monkeypatch, tmp_path):
    """The step that doubles it still has gradients with the scale before."""
    weights = []
    for steps_to_double in (1, 2):
        monkeypatch.setattr(LossScaler, "STEPS_TO_DOUBLE", steps_to_double)
        model = make_model()
        optimizer = training.setup_optimizer(SGD, model)
        scaler = LossScaler(optimizer, torch.float16)
        guard = StepGuard(supervision.StepMetrics(), Loader(), training.ParallelDims(), tmp_path, 2, scaler=scaler)
        scaler.load_state_dict({"factor": 16.0, "good_steps": 0})
        scaler.scale(model[0](torch.ones(1, 8, dtype=torch.float16)).float().sum()).backward()
        norm = training.clip_grad_norm_(model.parameters(), None, scaler.factor)
        assert guard.accepts(1, {"loss": 1.0, "grad_norm": norm})
        optimizer.step()
        weights.append(list(model.parameters()))
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_have_no_scale(dtype):
    scaler = LossScaler(training.setup_optimizer(SGD, make_model(dtype)), dtype)
    loss = torch.tensor(2.0)
    assert scaler.scale(loss) is loss
    scaler.update(has_overflowed=True)
    assert (scaler.factor, scaler.state_dict()) == (1.0, {})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"in_backward": True}, "optimizer_in_bwd: dtype fp16 must see all gradients"),
        ({"precision": "param_dtype"}, "optimizer_precision: param_dtype would step in fp16"),
    ],
)
def test_optimizers_that_cannot_use_a_scale_are_refused(options, said):
    optimizer = training.setup_optimizer(SGD, make_model(), **options)
    with pytest.raises(UserError, match=said):
        LossScaler(optimizer, torch.float16)


class Loader:
    """Knows no rows."""

    rank, epoch = 0, 0

    def rows(self, parts, step_indices):
        return []


def test_steps_that_need_a_smaller_scale_do_not_end_the_run(tmp_path, caplog):
    """Sixteen overflows bring the scale to 1; those after them count, and so does a loss that is not finite."""
    scaler = LossScaler(training.setup_optimizer(SGD, make_model()), torch.float16)
    guard = StepGuard(supervision.StepMetrics(), Loader(), training.ParallelDims(), tmp_path, 2, scaler=scaler)
    overflow = {"loss": 1.0, "grad_norm": float("inf")}
    for number in range(16):
        assert not guard.accepts(number, overflow)
    assert (scaler.factor, guard.num_skipped) == (1.0, 16)
    assert (
        "its gradient overflows fp16; the loss scale is 32768 from now on"
        in (tmp_path / "skipped_steps.jsonl").read_text()
    )
    assert not guard.accepts(16, overflow)
    assert guard.accepts(17, {"loss": 1.0, "grad_norm": 1.0})
    assert not guard.accepts(18, {"loss": float("nan"), "grad_norm": 1.0})
    with pytest.raises(supervision.SkippedStepsError, match="2 steps in a row"):
        guard.accepts(19, overflow)


def test_plain_gradients_are_clipped_as_torch_does():
    first, second = (torch.nn.Linear(3, 3) for _ in range(2))
    second.load_state_dict(first.state_dict())
    for model in (first, second):
        (model(torch.ones(2, 3)) * 100).sum().backward()
    norm = training.clip_grad_norm_(first.parameters(), 1.0)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(second.parameters(), 1.0))
    assert torch.equal(first.weight.grad, second.weight.grad)


@pytest.mark.parametrize("foreach", [None, False])
def test_gradients_are_scaled_in_their_dtype(foreach):
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2).bfloat16()), nn.Parameter(torch.ones(1))]
    parameters[0].grad = torch.full((3,), 4.0)
    parameters[1].grad = torch.full((2,), 2.0).bfloat16()
    training.scale_grads_(parameters, torch.tensor(0.5), foreach=foreach)
    assert parameters[0].grad.tolist() == [2.0] * 3
    assert parameters[1].grad.tolist() == [1.0] * 2
    assert parameters[2].grad is None
    training.scale_grads_(parameters[0], torch.tensor(2.0))
    assert parameters[0].grad.tolist() == [4.0] * 3
