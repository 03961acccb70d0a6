"""The layer with an adapter: its formula, its gradients, what it keeps, and where it runs."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.devices import DEVICE
from torchtune.modules.conversion import ConversionError
from torchtune.modules.moe import LoRAGroupedExperts
from torchtune.modules.output_projection import ClassifierHead
from torchtune.modules.peft import DoRALinear, LoRALinear

IN, OUT, RANK, ALPHA = 12, 20, 4, 10.0


def make(layer: type[LoRALinear] = LoRALinear, dtype: torch.dtype = torch.float64, **options: object) -> LoRALinear:
    torch.manual_seed(0)
    module = layer(IN, OUT, RANK, ALPHA, **options).to(dtype)
    nn.init.normal_(module.lora_b.weight)
    return module


def formula(module: LoRALinear, x: Tensor) -> Tensor:
    y = x @ module.weight.t() + ALPHA / RANK * (x @ module.lora_a.weight.t() @ module.lora_b.weight.t())
    return y if module.bias is None else y + module.bias


@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("train_base", [False, True])
def test_lora_follows_its_formula_in_float64(use_bias, train_base):
    module = make(use_bias=use_bias)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(train_base or "lora" in name)
    x = torch.randn(2, 5, IN, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 5, OUT, dtype=torch.float64)
    results = []
    for y in (module(x), formula(module, x)):
        inputs = [x, *(parameter for parameter in module.parameters() if parameter.requires_grad)]
        results.append([y, *torch.autograd.grad((y * weights).sum(), inputs)])
    for actual, exact in zip(*results, strict=True):
        torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_stays_near_float64(dtype):
    exact_module = make()
    module = copy.deepcopy(exact_module).to(dtype)
    exact_module = copy.deepcopy(module).double()
    x = torch.randn(64, IN, dtype=dtype, requires_grad=True)
    y = module(x)
    exact = formula(exact_module, x.double())
    tolerance = 2 * torch.finfo(dtype).eps
    assert y.dtype == dtype
    assert (y - exact).norm() <= tolerance * exact.norm()
    y.square().sum().backward()
    exact.square().sum().backward()
    for layer, exact_layer in ((module.lora_a, exact_module.lora_a), (module.lora_b, exact_module.lora_b)):
        assert layer.weight.grad.dtype == dtype
        assert (layer.weight.grad - exact_layer.weight.grad).norm() <= 4 * tolerance * exact_layer.weight.grad.norm()


def kept_bytes(module: nn.Module, x: Tensor) -> int:
    """Bytes kept for the backward pass, parameters aside; a storage that several nodes keep counts once."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    num_kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            num_kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = module(x)
    total = sum(num_kept.values())
    y.sum().backward()
    return total


def test_the_frozen_base_keeps_no_activation():
    rows, width = 50, 4
    x = torch.randn(rows, IN, requires_grad=True)
    plain = nn.Linear(IN, OUT, bias=False).requires_grad_(False)
    assert kept_bytes(plain, x) == 0
    module = make(dtype=torch.float32)
    assert kept_bytes(module, x) == width * rows * (IN + RANK)
    module.lora_a.weight.requires_grad_(False)  # then x is of no use either
    assert kept_bytes(module, x) == width * rows * RANK
    module = make(dtype=torch.float32, dropout=0.5)
    assert kept_bytes(module, x) == width * rows * (IN + RANK) + rows * IN  # one byte per element of the mask


def test_layers_that_share_an_input_keep_it_once():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = make(dtype=torch.float32), make(dtype=torch.float32)

        def forward(self, x: Tensor) -> Tensor:
            return self.q(x) + self.k(x)

    assert kept_bytes(Two(), torch.randn(2, 25, IN, requires_grad=True)) == 4 * 50 * (IN + 2 * RANK)


def test_gradient_of_an_input_that_needs_none_is_not_computed(monkeypatch):
    module = make(dtype=torch.float32)
    x = torch.randn(50, IN)
    with torch.profiler.profile(record_shapes=True) as profile:
        module(x).sum().backward()
    shapes = [event.input_shapes for event in profile.events() if event.name == "aten::mm"]
    assert [[50, OUT], [OUT, IN]] not in shapes
    assert module.lora_a.weight.grad is not None


def test_dropout_is_on_the_adapter_alone_and_right_on_average():
    module = make(dropout=0.25)
    x = torch.randn(3, IN, dtype=torch.float64)
    module.eval()
    torch.testing.assert_close(module(x), formula(module, x))
    module.train()
    torch.manual_seed(1)
    many = module(x.expand(20_000, 3, IN))
    base = F.linear(x, module.weight)
    spread = (many - base).std(0) / math.sqrt(20_000)
    assert ((many.mean(0) - formula(module, x)).abs() <= 5 * spread).all()
    torch.manual_seed(2)
    y = module(x)
    torch.manual_seed(2)
    mask = torch.empty(x.shape, dtype=torch.bool).bernoulli_(0.75)
    expected = base + formula(module, x * mask / 0.75) - F.linear(x * mask / 0.75, module.weight)
    torch.testing.assert_close(y, expected)
    module.dropout.p = 1.0
    torch.testing.assert_close(module(x), base)


# Dynamo instantiates an autograd function while it traces one, which autograd itself warns about.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("layer", [LoRALinear, DoRALinear])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_activation_checkpointing_and_compile_change_nothing(layer, dropout):
    module = make(layer, dtype=torch.float32, dropout=dropout)
    x = torch.randn(2, 5, IN, requires_grad=True)

    def run(function: nn.Module) -> list[Tensor]:
        torch.manual_seed(3)
        y = function(x)
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return [y, *torch.autograd.grad(y.square().sum(), [x, *parameters])]

    plain = run(module)
    for actual, exact in zip(run(lambda x: checkpoint(module, x, use_reentrant=False)), plain, strict=True):
        assert torch.equal(actual, exact)
    if dropout == 0.0:  # under compile, other random numbers are drawn
        for actual, exact in zip(run(torch.compile(module, backend="aot_eager", fullgraph=True)), plain, strict=True):
            torch.testing.assert_close(actual, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layer", [LoRALinear, DoRALinear])
def test_a_fresh_adapter_changes_nothing(layer):
    with torch.device("meta"):
        module = layer(IN, OUT, RANK, ALPHA)
    module.to_empty(device=DEVICE)
    nn.init.normal_(module.weight)
    module.initialize_parameters()
    x = torch.randn(3, IN)
    torch.testing.assert_close(module(x), F.linear(x, module.weight))
    assert module.lora_a.weight.abs().max() <= 1 / math.sqrt(IN) + 1e-6
    assert module.lora_a.weight.std() > 0
    assert not module.lora_b.weight.any()
    assert module.adapter_params()[:2] == ["lora_a.weight", "lora_b.weight"]


@pytest.mark.parametrize(
    "new_module",
    [
        partial(LoRALinear, IN, OUT, RANK, ALPHA),
        partial(DoRALinear, IN, OUT, RANK, ALPHA),
        partial(LoRAGroupedExperts, dim=IN, hidden_dim=OUT, rank=RANK, alpha=ALPHA, num_experts=2),
        partial(ClassifierHead, IN, 1),
    ],
    ids=lambda new_module: new_module.func.__name__,
)
def test_a_seed_gives_the_same_start_on_every_device(new_module):
    starts = []
    for device in ("cpu", DEVICE):
        with torch.device("meta"):
            module = new_module()
        module.to_empty(device=device)
        for parameter in module.parameters():
            nn.init.ones_(parameter)
        torch.manual_seed(3)
        module.initialize_parameters()
        starts.append({name: parameter.cpu() for name, parameter in module.named_parameters()})
    for name, value in starts[0].items():
        assert torch.equal(starts[1][name], value), name


def test_lora_linear_has_the_keys_dtype_and_trained_parameters_of_adapters():
    linear = nn.Linear(IN, OUT, dtype=torch.bfloat16)
    module = LoRALinear.from_linear(linear, rank=RANK, alpha=ALPHA)
    assert set(module.state_dict()) == {"weight", "bias", "lora_a.weight", "lora_b.weight"}
    assert module.weight is linear.weight
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    assert [name for name, p in module.named_parameters() if p.requires_grad] == ["lora_a.weight", "lora_b.weight"]
    fresh = LoRALinear(IN, OUT, RANK, ALPHA, use_bias=True)
    assert {name: p.shape for name, p in fresh.named_parameters()} == {n: p.shape for n, p in module.named_parameters()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize_base": True, "block_size": 7}, "block_size is 7, give an even number"),
        ({"quantize_base": True, "groups": 2}, "groups: no option of an NF4 weight"),
        ({"quantize_base": True}, f"block size 64 does not divide {IN}"),
        ({"rank": 0}, "rank is 0"),
        ({"dropout": 1.5}, "dropout is 1.5"),
        ({"block_size": 64}, "block_size: options of the quantized base"),
    ],
)
def test_wrong_options_of_a_lora_layer_are_refused(options, message):
    with pytest.raises(ConversionError, match=message):
        LoRALinear(**{"in_dim": IN, "out_dim": OUT, "rank": RANK, "alpha": ALPHA, **options})
