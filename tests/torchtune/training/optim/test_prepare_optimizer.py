"""Optimizers over bfloat16 weights: right in the mean, bounded in memory, exact on resume."""

import pytest
import torch
from torch import nn

from torchtune.training import prepare_optimizer, setup_optimizer
from torchtune.training.optim import OptimizerStateError
from torchtune.utils import UserError

EVERY_OPTIMIZER = "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD Adafactor Muon".split()
HALF_PRECISIONS = ("stochastic_rounding", "fp32_master")


def make_model(dtype, *, bias=True, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(96, 64, bias=bias), nn.Linear(64, 96, bias=bias)).bfloat16()
    return model.to(dtype)


def take_steps(model, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            grad = torch.randn(parameter.shape, generator=generator) + 0.5
            parameter.grad = grad.bfloat16().to(parameter.dtype)
        optimizer.step()
        optimizer.zero_grad()


def weights(model):
    return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])


KERNELS = [("AdamW", {"fused": is_fused}) for is_fused in (True, False)]


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in EVERY_OPTIMIZER), *KERNELS])
def test_master_weights_take_the_steps_of_float32(name, options):
    cls = getattr(torch.optim, name)
    reference, half = make_model(torch.float32, bias=name != "Muon"), make_model(torch.bfloat16, bias=name != "Muon")
    prepared = prepare_optimizer(cls(half.parameters(), lr=1e-3, **options), half, "fp32_master")
    assert prepared.precision == "fp32_master"
    assert prepared.param_groups[0].items() >= options.items()
    with torch.no_grad():
        for expected, actual in zip(reference.parameters(), half.parameters(), strict=True):
            expected.copy_(prepared.state[actual]["master"])
    plain = cls(reference.parameters(), lr=1e-3)
    take_steps(reference, plain, range(6))
    take_steps(half, prepared, range(6))
    masters = torch.cat([prepared.state[p]["master"].double().flatten() for p in half.parameters()])
    assert (masters - weights(reference)).abs().max() < 1e-6
    assert torch.equal(weights(half), masters.bfloat16().double())


@pytest.mark.parametrize("name", EVERY_OPTIMIZER)
def test_stochastic_rounding_is_float32_in_the_mean(name):
    """Over many roundings the distance to the float32 run shrinks as that of an unbiased estimate does."""
    cls = getattr(torch.optim, name)
    reference = make_model(torch.float32, bias=name != "Muon")
    start = weights(reference)
    take_steps(reference, cls(reference.parameters(), lr=2e-4), range(8))
    moved = weights(reference) - start

    def run(seed):
        half = make_model(torch.bfloat16, bias=name != "Muon")
        optimizer = prepare_optimizer(cls(half.parameters(), lr=2e-4), half, "stochastic_rounding", seed=seed)
        assert optimizer.precision == "stochastic_rounding"
        take_steps(half, optimizer, range(8))
        return weights(half) - start

    runs = torch.stack([run(seed) for seed in range(12)])
    error = runs.mean(0) - moved
    spread = runs.std(0).clamp(min=1e-9) / 12**0.5
    # A t statistic of 11 degrees of freedom has a variance of 11/9; nonlinear states may add a little bias
    assert (error / spread)[runs.std(0) > 1e-6].pow(2).mean() < 1.6
    assert error.mean().abs() < 0.03 * moved.abs().mean() + 4 * spread.mean() / len(moved) ** 0.5


def test_master_weights_start_uniformly_among_values_that_round_to_the_weights():
    model = nn.Linear(300, 300, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.view(-1)[:4] = torch.tensor([0.0, -0.0, 1.0, float("inf")])
    before = model.weight.detach().clone()
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.0), model, "fp32_master", seed=0)
    master = optimizer.state[model.weight]["master"]
    assert torch.equal(master.bfloat16(), before)
    low = master.view(torch.int32).bitwise_and(0xFFFF).view(-1)[4:].double()
    assert low.mean().item() == pytest.approx(2**15, rel=0.02)
    assert low.std().item() == pytest.approx(2**16 / 12**0.5, rel=0.02)
    assert (master.double() - before.double()).view(-1)[4:].mean().abs() < 1e-6


def test_second_moment_with_a_long_memory_does_not_stall():
    """exp_avg_sq grows by 0.1 % of what is missing a step: to nearest, bfloat16 stops long before the end."""

    def second_moment(precision):
        model = nn.Linear(64, 64, bias=False).bfloat16()
        optimizer = prepare_optimizer(torch.optim.Adam(model.parameters(), lr=0.0), model, precision, seed=0)
        for _ in range(1500):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        return next(iter(optimizer.state.values()))["exp_avg_sq"].double().mean().item()

    exact = 1 - 0.999**1500
    assert second_moment("stochastic_rounding") == pytest.approx(exact, rel=0.01)
    assert second_moment("param_dtype") == 0.5 < 0.65 * exact


@pytest.mark.parametrize("name", ["AdamW", "NAdam", "SGD"])
@pytest.mark.parametrize("precision", HALF_PRECISIONS)
def test_pieces_of_a_large_parameter_do_what_the_whole_does(name, precision, monkeypatch):
    """A parameter that is cut into pieces takes the same float32 step; only the draws differ."""
    from torchtune.training.optim import _low_precision_optimizer

    def run():
        torch.manual_seed(0)
        model = make_model(torch.bfloat16)
        kwargs = {"momentum": 0.9} if name == "SGD" else {}
        optimizer = prepare_optimizer(
            getattr(torch.optim, name)(model.parameters(), lr=1e-3, **kwargs), model, precision
        )
        take_steps(model, optimizer, range(3))
        steps = {float(state["step"]) for state in optimizer.state.values() if "step" in state}
        assert steps in ({3.0}, set())
        if precision == "fp32_master":
            return torch.cat([optimizer.state[p]["master"].flatten() for p in model.parameters()])
        return weights(model)

    uninterrupted = run()
    monkeypatch.setattr(_low_precision_optimizer, "piece_size", lambda device: 1000)
    tolerance = 1e-7 if precision == "fp32_master" else 5e-3
    assert (run() - uninterrupted).abs().max() < tolerance


def test_state_dict_is_keyed_by_name_and_kept_small():
    model = make_model(torch.bfloat16)
    optimizer = prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model, "stochastic_rounding", seed=9)
    take_steps(model, optimizer, range(2))
    state = optimizer.state_dict()
    assert list(state["state"]) == [name for name, _ in model.named_parameters()]
    assert state["param_groups"][0]["params"] == [name for name, _ in model.named_parameters()]
    assert state["precision"] == {"mode": "stochastic_rounding", "seed": 9, "step": 2, "rounding": "counter"}
    for name, parameter in model.named_parameters():
        assert {key: value.dtype for key, value in state["state"][name].items()} == {
            "step": torch.float32,
            "exp_avg": torch.bfloat16,
            "exp_avg_sq": torch.bfloat16,
        }
        assert state["state"][name]["exp_avg"].shape == parameter.shape


def test_state_of_a_plain_torch_optimizer_can_be_loaded(caplog):
    model = make_model(torch.bfloat16)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    take_steps(model, plain, range(2))
    for precision in HALF_PRECISIONS:
        optimizer = prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=9.0), model, precision)
        with caplog.at_level("WARNING", logger="torchtune"):
            optimizer.load_state_dict(plain.state_dict())
        assert optimizer.param_groups[0]["lr"] == 1e-3
        assert "param_dtype" in caplog.text
        for parameter in model.parameters():
            assert torch.equal(
                optimizer.state[parameter]["exp_avg_sq"].float(), plain.state[parameter]["exp_avg_sq"].float()
            )
        take_steps(model, optimizer, range(1))


def test_state_of_other_groups_or_names_is_refused():
    model = make_model(torch.bfloat16)
    other_model = nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16))
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    with pytest.raises(OptimizerStateError, match=r"groups of \[2\] parameters and this optimizer of \[4\]"):
        optimizer.load_state_dict(
            prepare_optimizer(torch.optim.SGD(other_model.parameters(), lr=1.0), other_model).state_dict()
        )
    renamed = optimizer.state_dict()
    renamed["param_groups"][0]["params"][0] = "elsewhere.weight"
    with pytest.raises(OptimizerStateError, match=r"about elsewhere\.weight"):
        optimizer.load_state_dict(renamed)


def test_optimizer_of_float32_weights_or_param_dtype_is_returned_unchanged():
    model = make_model(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert all(prepare_optimizer(optimizer, model, p) is optimizer for p in (*HALF_PRECISIONS, "param_dtype"))
    half = make_model(torch.bfloat16)
    optimizer = torch.optim.SGD(half.parameters(), lr=1.0)
    assert prepare_optimizer(optimizer, half, "param_dtype") is optimizer


@pytest.mark.parametrize("precision", HALF_PRECISIONS)
def test_float32_weights_beside_bfloat16_weights_step_in_place(precision):
    model, reference = make_model(torch.bfloat16), make_model(torch.float32)
    model[1].float()
    optimizer = prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model, precision)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    take_steps(model, optimizer, range(3))
    # the same gradients reach both
    take_steps(reference, plain, range(3))
    assert optimizer.state[model[1].weight]["exp_avg"].dtype == torch.float32
    assert (model[1].weight - reference[1].weight).abs().max() < 2e-5


def test_groups_have_their_rates_and_parameters_without_gradient_do_not_move():
    model = make_model(torch.bfloat16)
    groups = [{"params": model[0].parameters(), "lr": 1e-2}, {"params": model[1].parameters(), "lr": 0.0}]
    optimizer = prepare_optimizer(torch.optim.AdamW(groups, weight_decay=0.0), model, seed=0)
    before = weights(model)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    model[1].weight.grad = torch.ones_like(model[1].weight)
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1.0
    optimizer.step()
    moved = weights(model) != before
    sizes = [p.numel() for p in model.parameters()]
    parts = [part.any().item() for part in moved.split(sizes)]
    assert parts == [True, False, False, False]
    assert model[0].bias not in optimizer.state


def test_closure_hooks_and_added_groups_work_as_in_torch():
    model = make_model(torch.bfloat16)
    plain = torch.optim.SGD([model[0].weight], lr=1e-2)
    calls = []
    plain.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer = prepare_optimizer(plain, model, "fp32_master")
    optimizer.add_param_group({"params": [model[1].weight]})

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 96, dtype=torch.bfloat16)).float().square().mean()
        loss.backward()
        return loss

    before = model[1].weight.clone()
    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses[-1] < losses[0]
    assert calls == ["post"] * 5
    assert not torch.equal(before, model[1].weight)


@pytest.mark.parametrize(
    ("make", "precision", "message"),
    [
        (lambda p: torch.optim.LBFGS(p), "stochastic_rounding", "LBFGS evaluates the loss many times"),
        (lambda p: torch.optim.LBFGS(p), "param_dtype", "many times a step: use another optimizer"),
        (lambda p: torch.optim.SparseAdam([*p]), "param_dtype", "SparseAdam takes sparse gradients only"),
        (lambda p: torch.optim.SGD(p, lr=1.0), "bfloat", "'bfloat' is not known: use one of stochastic_rounding"),
        (lambda p: nn.Identity(), "param_dtype", "Identity has no param_groups: make it a torch.optim.Optimizer"),
    ],
)
def test_unsupported_optimizers_and_precisions_are_refused(make, precision, message):
    model = make_model(torch.bfloat16)
    with pytest.raises(UserError, match=message):
        prepare_optimizer(make(model.parameters()), model, precision)


def test_an_optimizer_that_leaves_parameters_out_is_refused():
    model = make_model(torch.bfloat16)
    with pytest.raises(UserError, match=r"SGD leaves out '0\.bias' and \d more, which would never change"):
        setup_optimizer(lambda parameters: torch.optim.SGD(parameters[:1], lr=1.0), model)
    with pytest.raises(UserError, match="factory: it must be a function that builds an optimizer"):
        setup_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)


def test_float16_weights_have_float32_master_weights():
    half = make_model(torch.float16)
    assert prepare_optimizer(torch.optim.SGD(half.parameters(), lr=1.0), half).precision == "fp32_master"


def test_sparse_gradients_and_parameters_of_another_model_are_refused():
    with pytest.raises(ValueError, match="parameters that the model lacks"):
        prepare_optimizer(torch.optim.SGD(make_model(torch.bfloat16).parameters(), lr=1.0), make_model(torch.bfloat16))
    model = nn.Sequential(nn.Embedding(4, 4, sparse=True, dtype=torch.bfloat16))
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(UserError, match=r"gradient of 0\.weight is sparse"):
        optimizer.step()


def test_counter_in_a_group_advances_once_a_step():
    """Some keep what they count in the group: every batch of parameters starts from it, and it moves once a step."""

    class Counting(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1, "k": 0})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad * group["lr"] * (group["k"] + 1))
                group["k"] += 1

    model = make_model(torch.bfloat16)
    optimizer = prepare_optimizer(Counting(model.parameters()), model)
    take_steps(model, optimizer, range(3))
    assert optimizer.param_groups[0]["k"] == 3
