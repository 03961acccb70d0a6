"""Optimizers by one line of YAML: states of few bits, Muon, groups by pattern."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtune.modules.optim import OptimizerMap
from torchtune.training import (
    GroupedOptimizer,
    MuonWithAdamW,
    get_cosine_schedule_with_warmup,
    prepare_optimizer,
    setup_optimizer,
)
from torchtune.training.optim import _low_precision_optimizer
from torchtune.utils import UserError

FORMATS = {"8bit": 2.04, "4bit": 1.07, "Fp8": 2.04}


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(96, 64), nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 64, bias=False))
    return model.bfloat16().to(dtype)


def give_gradients(model, step):
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * 0.1 + 0.05).to(parameter.dtype)


def take_steps(model, optimizer, steps):
    for step in steps:
        give_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()


def low_bit(name, **options):
    torchao = pytest.importorskip("torchao.optim", reason="the extra quantization is not installed")
    # Few bits round a small second moment to 0, and eps alone then bounds the update: with the default of 1e-8,
    # the last bit of a sum decides whether it is hundreds of times the learning rate.
    settings = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-5}
    return lambda parameters: getattr(torchao, name)(parameters, **settings | options)


@pytest.mark.parametrize("base", ["AdamW", "Adam"])
@pytest.mark.parametrize("kind", FORMATS)
def test_low_bit_steps_follow_torchao(kind, base, monkeypatch):
    """Against torchao itself, with the same float32 weights; a code may differ where a value lies between two."""
    monkeypatch.setattr(_low_precision_optimizer, "piece_size", lambda device: 2048)  # pieces of a parameter
    reference_model, model = make_model(), make_model()
    start = [p.detach().clone() for p in reference_model.parameters()]
    with torch.compiler.set_stance("force_eager"):
        take_steps(reference_model, low_bit(base + kind)(list(reference_model.parameters())), range(4))
    optimizer = setup_optimizer(low_bit(base + kind), model, precision="param_dtype")
    take_steps(model, optimizer, range(4))
    for parameter, reference, before in zip(model.parameters(), reference_model.parameters(), start, strict=True):
        moved = (reference - before).abs().mean()
        assert moved > 1e-3
        assert (parameter - reference).abs().mean() < 1e-4 * moved
    assert optimizer.param_groups[0]["lr"] == 1e-2
    quantized = []
    size = 0
    for name, state in optimizer.state_dict()["state"].items():
        assert all(type(value) is torch.Tensor for value in state.values())
        if "exp_avg codes" in state:
            quantized.append(name)
            tensors = [value for key, value in state.items() if key != "step"]
            size += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert sorted(quantized) == ["0.weight", "1.weight", "3.weight"]
    assert size / sum(model.get_parameter(name).numel() for name in quantized) == pytest.approx(FORMATS[kind], abs=0.01)


@pytest.mark.parametrize("precision", ["stochastic_rounding", "fp32_master"])
def test_low_bit_steps_of_bfloat16_weights_follow_float32(precision):
    reference, half = make_model(), make_model(torch.bfloat16)
    take_steps(reference, setup_optimizer(low_bit("AdamW8bit", lr=1e-3), reference), range(6))
    take_steps(half, setup_optimizer(low_bit("AdamW8bit", lr=1e-3), half, precision=precision), range(6))
    start = make_model()
    for parameter, expected, before in zip(half.parameters(), reference.parameters(), start.parameters(), strict=True):
        if parameter.numel() < 4096:
            continue  # too few to average the rounding
        moved = expected.detach() - before.detach()
        change = parameter.detach().float() - before.detach()
        ratio = (change * moved).sum() / moved.square().sum()
        assert ratio.item() == pytest.approx(1, abs=0.1)  # nothing is rounded away


def test_a_rank_without_elements_steps_and_resumes():
    """Two rows over four ranks: the last ones have none, and the same entries in the checkpoint."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        model = nn.Module()
        layout = {"device_mesh": mesh, "placements": [Shard(0)], "shape": (2, 4096), "stride": (4096, 1)}
        empty = torch.empty(0, 4096, dtype=torch.bfloat16)
        model.weight = nn.Parameter(DTensor.from_local(empty, run_check=False, **layout))
        make = low_bit("AdamW8bit")
        optimizer = prepare_optimizer(make(model.parameters()), model, seed=0)
        for _ in range(2):
            model.weight.grad = DTensor.from_local(empty.clone(), run_check=False, **layout)
            optimizer.step()
        state = optimizer.state_dict()["state"]["weight"]
        assert {key: tuple(value.shape) for key, value in state.items()} == {
            "step": (),
            **{f"{key} codes": (4, 4096) for key in ("exp_avg", "exp_avg_sq")},
            **{f"{key} scale": (4, 16) for key in ("exp_avg", "exp_avg_sq")},
        }
        again = prepare_optimizer(make(model.parameters()), model, seed=0)
        again.load_state_dict(optimizer.state_dict())
        again.step()
        assert again.state[model.weight]["step"] == 3
    finally:
        dist.destroy_process_group()


def test_muon_steps_matrices_as_torch_does_and_adamw_the_rest():
    model, reference = make_model(), make_model()
    optimizer = setup_optimizer(lambda p: MuonWithAdamW(p, lr=1e-2, weight_decay=0.1), model)
    assert isinstance(optimizer, OptimizerMap)
    assert list(optimizer.optim_map) == ["AdamW", "Muon"]
    embedding, matrix, bias, *norm, last = reference.parameters()
    shared = {"lr": 1e-2, "weight_decay": 0.1}
    adamw = torch.optim.AdamW([embedding, bias, *norm], **shared)
    muon = torch.optim.Muon([matrix, last], **shared, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        give_gradients(reference, step)
        adamw.step()
        muon.step()
    take_steps(model, optimizer, range(3))
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter, expected)


def test_groups_have_their_settings_and_follow_one_schedule():
    model = make_model()
    groups = [
        {"pattern": r"^2\.|bias$", "weight_decay": 0.0},
        {"pattern": "3", "lr_ratio": 16},
        {"pattern": "^1", "optimizer": "torch.optim.SGD", "momentum": 0.9},
    ]
    optimizer = setup_optimizer(lambda p: GroupedOptimizer(p, groups, lr=1e-3, weight_decay=0.1), model)
    schedule = get_cosine_schedule_with_warmup(optimizer, 2, 8)
    names = {parameter: name for name, parameter in model.named_parameters()}
    states = {}
    for group in optimizer.param_groups:
        names_of_group = tuple(names[parameter] for parameter in group["params"])
        states[names_of_group] = (group["initial_lr"], group["weight_decay"])
    assert states == {
        ("1.weight",): (1e-3, 0.1),
        ("0.weight",): (1e-3, 0.1),
        ("1.bias", "2.weight", "2.bias"): (1e-3, 0.0),
        ("3.weight",): (16e-3, 0.1),
    }
    assert isinstance(optimizer.optim_map["SGD"], torch.optim.SGD)
    give_gradients(model, 0)
    optimizer.step()
    schedule.step()
    factors = [group["lr"] / group["initial_lr"] for group in optimizer.param_groups]
    assert factors == pytest.approx([factors[0]] * 4)
    assert 0 < factors[0] < 1


class FixedRate(torch.optim.SGD):
    """An optimizer without a setting ``lr``."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)


def test_lr_ratio_needs_no_default_learning_rate_where_one_is_set():
    group = {"pattern": "bias", "optimizer": "torch.optim.SGD", "lr_ratio": 4}
    optimizer = setup_optimizer(lambda p: GroupedOptimizer(p, [{**group, "lr": 0.5}], FixedRate), make_model())
    assert sorted(group["lr"] for group in optimizer.param_groups) == [0.1, 2.0]
    with pytest.raises(
        UserError, match=r"groups\[0\]\.lr_ratio: FixedRate has no default learning rate: set optimizer"
    ):
        setup_optimizer(lambda p: GroupedOptimizer(p, [group], FixedRate), make_model())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": [{"pattern": "nrm", "lr": 1.0}]}, r"groups\[0\]: the pattern 'nrm' matches no trained parameter"),
        (
            {"groups": [{"pattern": "weight"}, {"pattern": "1.weight"}]},
            r"groups\[1\]: the pattern '1.weight' matches only parameters that an earlier group has",
        ),
        ({"groups": [{"lr": 1.0}]}, r"groups\[0\]: needs a pattern"),
        ({"groups": [{"pattern": "("}]}, r"groups\[0\]\.pattern: '\(' is not a regular expression"),
        ({"groups": [{"pattern": "bias", "weight_decai": 0}]}, "no such setting; did you mean 'weight_decay'"),
        ({"groups": [], "optimizer": "torch.nn.Linear"}, "optimizer: 'torch.nn.Linear' is not an optimizer"),
        ({"groups": [], "learning_rate": 1.0}, "AdamW has no such setting"),
    ],
)
def test_invalid_groups_are_refused_with_their_key(options, message):
    with pytest.raises(UserError, match=message):
        setup_optimizer(lambda parameters: GroupedOptimizer(parameters, **options), make_model())


def test_states_of_another_bit_width_are_refused():
    model = make_model(torch.bfloat16)
    eight = setup_optimizer(low_bit("AdamW8bit"), model)
    take_steps(model, eight, range(1))
    plain = setup_optimizer(lambda p: torch.optim.AdamW(p, lr=1e-2), model)
    with pytest.raises(UserError, match="has 8bit states and this run's has plain ones"):
        plain.load_state_dict(eight.state_dict())
    with pytest.raises(UserError, match="has 8bit states and this run's has 4bit ones"):
        setup_optimizer(low_bit("AdamW4bit"), model).load_state_dict(eight.state_dict())
    with pytest.raises(UserError, match="takes its steps in float32: use stochastic_rounding or fp32_master"):
        setup_optimizer(low_bit("AdamW8bit"), model, precision="param_dtype")
