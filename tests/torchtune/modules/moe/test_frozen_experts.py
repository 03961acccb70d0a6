"""Frozen experts with and without adapters: their gradients are those of merged weights, and few tensors are kept."""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.devices import random_state
from torchtune.modules.kernels.grouped import RowGroups, repeat_by_group
from torchtune.modules.low_precision.formats import NF4, Int8
from torchtune.modules.low_precision.layers import QuantizedExperts
from torchtune.modules.moe import (
    ClampedExperts,
    GroupedExperts,
    LoRAGroupedExperts,
    MoE,
    TokenChoiceTopKRouter,
    UngatedExperts,
    frozen_experts,
)
from torchtune.training import set_activation_checkpointing

DIM, HIDDEN, EXPERTS, CHOSEN, TOKENS, RANK = 16, 24, 6, 2, 15, 3
CLASSES = [GroupedExperts, ClampedExperts, UngatedExperts]
FORMATS = {"plain": None, "nf4": NF4, "int8": Int8}


def make_mixture(
    experts_class: type[GroupedExperts] = GroupedExperts,
    weight_format: type | None = None,
    *,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> MoE:
    """A mixture with adapters of its frozen experts, of which nobody chooses the last."""
    torch.manual_seed(0)
    experts = experts_class(dim=DIM, hidden_dim=HIDDEN, num_experts=EXPERTS).to(dtype)
    for name, parameter in experts.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    if weight_format is not None:
        options = {"block_size": 8} if weight_format is NF4 else {}
        experts = QuantizedExperts.from_experts(experts, weight_format(dtype, **options))
    experts = LoRAGroupedExperts.from_experts(experts, rank=RANK, alpha=5, dropout=dropout)
    for name in experts.adapter_params():
        nn.init.normal_(getattr(experts, name), std=0.3)
    router = TokenChoiceTopKRouter(
        gate=nn.Linear(DIM, EXPERTS), dim=DIM, num_experts=EXPERTS, experts_per_token=CHOSEN, normalize=True
    )
    nn.init.constant_(router.gate.bias[-1:], -1e3)
    return MoE(experts=experts, router=router.to(dtype))


def trained_parameters(mixture: MoE) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in mixture.named_parameters() if parameter.requires_grad}


def gradients_by_merged_weights(mixture: MoE, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients by the formula: every expert with the weight W + (alpha / rank) A B, for every token."""
    experts = mixture.experts
    merged = {}
    for name in experts.matrix_shapes():
        weight = experts.stored_weight(name)
        full = weight if isinstance(weight, torch.Tensor) else weight.full()
        part = name.removesuffix("_proj")
        delta = getattr(experts, f"lora_{part}_a") @ getattr(experts, f"lora_{part}_b")
        merged[name] = full.detach() + 5 / RANK * delta

    def project(name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
        out = rows @ merged[name][expert]
        bias = getattr(experts, f"{name}_bias", None)
        return out if bias is None else out + bias[expert]

    outputs = []
    for expert in range(EXPERTS):
        projected = [project(name, expert, x) for name in experts.input_matrices]
        outputs.append(project("down_proj", expert, experts.activate(*projected)))
    scores, selected, _ = mixture.router(x)
    weights = torch.zeros(TOKENS, EXPERTS, dtype=x.dtype).scatter(1, selected, scores.to(x.dtype))
    total = torch.einsum("te,etd->td", weights, torch.stack(outputs))
    return [total, *torch.autograd.grad(total, [x, *trained_parameters(mixture).values()], grad)]


@pytest.mark.parametrize("experts_per_group", [2, EXPERTS])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("weight_format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("experts_class", CLASSES)
def test_gradients_are_those_of_merged_weights(
    experts_class, weight_format, recomputes, experts_per_group, monkeypatch
):
    mixture = make_mixture(experts_class, weight_format)
    decoded_bytes = sum(8 * math.prod(shape[1:]) for shape in mixture.experts.matrix_shapes().values())
    monkeypatch.setattr(frozen_experts, "_BYTES_PER_GROUP", experts_per_group * decoded_bytes)
    mixture.experts.recomputes = recomputes
    x = torch.randn(1, TOKENS, DIM, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(1, TOKENS, DIM, dtype=torch.float64)
    out = mixture(x)
    gradients = torch.autograd.grad(out, [x, *trained_parameters(mixture).values()], grad)
    rows = x.detach()[0].requires_grad_()
    expected_out, expected_x, *expected = gradients_by_merged_weights(mixture, rows, grad[0])
    torch.testing.assert_close(out[0], expected_out, rtol=1e-6, atol=1e-8)  # scores are float32
    torch.testing.assert_close(gradients[0][0], expected_x, rtol=1e-5, atol=1e-6)
    for name, gradient, expected_gradient in zip(trained_parameters(mixture), gradients[1:], expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-6, msg=name)


def test_experts_without_tokens_selection_compute_the_same():
    """Rows sorted by expert, as expert parallelism sends them."""
    experts = make_mixture().experts
    counts = torch.tensor([4, 0, 3, 1, 0, 2])
    rows = torch.randn(10, DIM, dtype=torch.float64, requires_grad=True)
    leaves = [rows, *(getattr(experts, name) for name in experts.adapter_params())]
    groups = RowGroups.of(counts)
    projected = [experts.project(name, rows, groups) for name in experts.input_matrices]
    expected = experts.project("down_proj", experts.activate(*projected), groups)
    out = experts(rows, counts)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    for gradient, expected_gradient in zip(
        torch.autograd.grad(out, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True
    ):
        torch.testing.assert_close(gradient, expected_gradient)
    assert experts(rows[:0], torch.zeros_like(counts)).shape == (0, DIM)


class LargeTensors(TorchDispatchMode):
    """Records results with as many elements as the matrices of several experts."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements
        self.made: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        results = out if isinstance(out, tuple | list) else [out]
        for tensor, declared in zip(results, func._schema.returns, strict=False):
            is_new = declared.alias_info is None
            if isinstance(tensor, torch.Tensor) and is_new and tensor.numel() >= self.elements:
                self.made.append(f"{func} {tuple(tensor.shape)}")
        return out


@pytest.mark.parametrize("weight_format", FORMATS.values(), ids=FORMATS)
def test_no_tensor_is_as_large_as_the_matrices_of_all_experts(weight_format, monkeypatch):
    """Neither a delta nor a gradient ``[e, m, n]`` is made, and no decoded weight of more than a group."""
    mixture = make_mixture(GroupedExperts, weight_format)
    monkeypatch.setattr(frozen_experts, "_BYTES_PER_GROUP", 2 * 3 * 8 * DIM * HIDDEN)
    x = torch.randn(1, 4, DIM, dtype=torch.float64, requires_grad=True)
    decoded_experts = EXPERTS if weight_format is None else 3
    with LargeTensors(decoded_experts * DIM * HIDDEN) as large:
        mixture(x).sum().backward()
    assert large.made == []


class SavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """Counts the elements of what is saved, but for parameters."""

    def __init__(self) -> None:
        self.elements = 0
        super().__init__(self.count, lambda tensor: tensor)

    def count(self, tensor: torch.Tensor) -> torch.Tensor:
        is_parameter = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        if not is_parameter:
            self.elements += tensor.numel()
        return tensor


@pytest.mark.parametrize("kind", ["plain", "recomputed", "nf4"])
def test_experts_save_their_inputs(kind):
    mixture = make_mixture(weight_format=NF4 if kind == "nf4" else None)
    mixture.experts.recomputes = kind == "recomputed"
    x = torch.randn(TOKENS, DIM, dtype=torch.float64, requires_grad=True)
    scores, selected, counts = mixture.router(x)
    selection = frozen_experts.Selection(scores, selected.flatten().argsort())
    saved = SavedTensors()
    with saved:
        mixture.experts(x, counts, selection)
    inputs = x.numel() + 2 * TOKENS * CHOSEN + EXPERTS
    projected = 2 * TOKENS * CHOSEN * HIDDEN if kind == "plain" else 0
    assert saved.elements == inputs + projected


def test_checkpointing_computes_the_experts_twice_and_not_three_times():
    mixture = make_mixture()
    layer = nn.Sequential(nn.Linear(DIM, DIM, dtype=torch.float64), mixture)
    x = torch.randn(1, TOKENS, DIM, dtype=torch.float64)
    layer(x).sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in trained_parameters(mixture).items()}
    mixture.zero_grad()
    set_activation_checkpointing(layer, lambda module, *_: module is layer)
    calls = []
    activate = mixture.experts.activate
    mixture.experts.activate = lambda *projected: calls.append(len(projected)) or activate(*projected)
    layer(x).sum().backward()
    assert len(calls) == 2  # in the forward pass, and for the gradients
    for name, parameter in trained_parameters(mixture).items():
        torch.testing.assert_close(parameter.grad, expected[name])


@pytest.mark.parametrize("recomputes", [False, True])
def test_dropout_has_the_same_masks_in_the_backward_pass(recomputes):
    mixture = make_mixture(dropout=0.5, dtype=torch.float32).train()
    mixture.experts.recomputes = recomputes
    x = torch.randn(1, TOKENS, DIM, requires_grad=True)
    weight = mixture.experts.lora_down_b

    def compute() -> torch.Tensor:
        torch.manual_seed(3)
        return mixture(x).square().sum()

    loss = compute()
    (gradient,) = torch.autograd.grad(loss, weight)
    state = random_state()
    direction = torch.randn_like(weight, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        weight += 1e-3 * direction
        above = compute()
        weight -= 2e-3 * direction
        below = compute()
        weight += 1e-3 * direction
    assert (above - below).item() / 2e-3 == pytest.approx((gradient * direction).sum().item(), rel=2e-2)
    compute().backward()
    assert torch.equal(random_state(), state), "the backward pass leaves the random numbers as they were"


def test_gradients_of_biases_are_summed_in_float32():
    counts = torch.tensor([1024, 3])
    bias = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    repeat_by_group(bias, RowGroups.of(counts), 1027).sum().backward()
    assert bias.grad.flatten().tolist() == [1024, 3]  # bfloat16 would stop at 256
