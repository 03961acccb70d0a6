"""Mixtures of experts against the sum that defines them, and what they cost."""

import pytest
import torch
from torch.nn import functional as F

from tests.work import outermost
from torchtune.models import Description, ModelError, build
from torchtune.models.qwen3_moe import SPEC
from torchtune.modules import FeedForward
from torchtune.modules.conversion import ConversionError
from torchtune.modules.kernels.grouped import RowGroups, grouped_mm
from torchtune.modules.moe import GroupedExperts, MoE, TokenChoiceTopKRouter
from torchtune.modules.moe.experts import clamped_swiglu
from torchtune.modules.peft import LoRA

DIM, HIDDEN, EXPERTS = 16, 24, 6


def make(k: int = 2, shared: bool = False, **router: object) -> MoE:
    torch.manual_seed(0)
    gate = torch.nn.Linear(DIM, EXPERTS, bias=False)
    linears = {"gate_proj": (DIM, HIDDEN), "down_proj": (HIDDEN, DIM), "up_proj": (DIM, HIDDEN)}
    shared_expert = FeedForward(**{name: torch.nn.Linear(*size) for name, size in linears.items()})
    return MoE(
        experts=GroupedExperts(dim=DIM, hidden_dim=HIDDEN, num_experts=EXPERTS),
        router=TokenChoiceTopKRouter(gate=gate, dim=DIM, num_experts=EXPERTS, experts_per_token=k, **router),
        shared_expert=shared_expert if shared else None,
    )


def dense(moe: MoE, x: torch.Tensor, scores: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
    """Every expert on every token, weighted by a matrix of scores that is mostly zero."""
    weights = torch.zeros(len(x), EXPERTS, dtype=x.dtype).scatter(1, selected, scores.to(x.dtype))
    experts = moe.experts
    gate = torch.einsum("td,edh->teh", x, experts.gate_proj)
    up = torch.einsum("td,edh->teh", x, experts.up_proj)
    return torch.einsum("teh,ehd,te->td", F.silu(gate) * up, experts.down_proj, weights)


@pytest.mark.parametrize("k", [1, 2, 6])
@pytest.mark.parametrize("shared", [False, True])
def test_mixture_is_the_weighted_sum_of_all_experts(k, shared):
    moe = make(k, shared, normalize=True).double()
    x = torch.randn(2, 9, DIM, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 9, DIM, dtype=torch.float64)
    leaves = [x, *moe.parameters()]
    out = moe(x)
    gradients = torch.autograd.grad((out * weights).sum(), leaves)
    scores, selected, _ = moe.router(x.flatten(0, 1))
    expected = dense(moe, x.flatten(0, 1), scores, selected).view_as(x)
    if shared:
        expected = expected + moe.shared_expert(x)
    assert torch.allclose(out, expected, rtol=1e-6)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), leaves)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert (gradient - expected_gradient).norm() <= 1e-6 * expected_gradient.norm()


def test_a_selection_bias_changes_who_is_chosen_and_not_the_scores():
    x = torch.randn(50, DIM)
    router = make(2, score_function="sigmoid", selection_bias=True).router
    before, chosen, _ = router(x)
    router.selection_bias.data[4] = 10.0
    scores, selected, counts = router(x)
    assert counts[4] == 50
    assert torch.allclose(scores, router.gate(x).sigmoid().gather(1, selected))
    unchanged = selected == chosen
    assert torch.equal(scores[unchanged], before[unchanged])
    assert not router.selection_bias.requires_grad
    assert router.bfloat16()(x.bfloat16())[0].dtype == torch.float32
    assert router.selection_bias.dtype == torch.bfloat16  # as any parameter, if somebody asks for it


def test_small_scores_are_normalised_as_lfm2_does():
    from transformers import Lfm2MoeConfig
    from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter

    router = make(2, score_function="sigmoid", normalize=True, sum_eps=1e-6, scale=1.5).router
    config = Lfm2MoeConfig(num_experts=EXPERTS, num_experts_per_tok=2, hidden_size=DIM, routed_scaling_factor=1.5)
    config.use_expert_bias = False
    reference = Lfm2MoeTopKRouter(config)
    reference.weight.data = router.gate.weight.data = -torch.rand(EXPERTS, DIM)
    x = torch.rand(50, DIM) * torch.linspace(0, 5, 50)[:, None]  # for sums of scores from 1e-9 to 1
    _, expected, selected = reference(x)
    assert expected.sum(-1).min() < 1.2
    scores, chosen, _ = router(x)
    assert torch.equal(chosen, selected)
    assert torch.allclose(scores, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_grouped_kernel_and_the_loop_are_equal(dtype):
    torch.manual_seed(0)
    counts = torch.tensor([5, 0, 8, 3, 0])
    x, weight = torch.randn(16, DIM, dtype=dtype), torch.randn(5, DIM, HIDDEN, dtype=dtype)
    grad = torch.randn(16, HIDDEN, dtype=dtype)
    results = []
    for kernel in (False, True):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        out = grouped_mm(*leaves, RowGroups.of(counts), kernel=kernel)
        results.append((out, *torch.autograd.grad(out, leaves, grad)))
    for actual, expected in zip(*results, strict=True):
        assert torch.allclose(actual, expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)
    assert not results[0][2][[1, 4]].any()


def test_clamped_activation_has_the_gradient_of_its_formula():
    torch.manual_seed(0)
    gate_up = (4 * torch.randn(6, 10, dtype=torch.float64)).requires_grad_()
    grad = torch.randn(6, 5, dtype=torch.float64)
    # Columns alternate between gate and up; some values are clamped, some are not.
    gate = gate_up[:, 0::2].clamp(max=3.0)
    up = gate_up[:, 1::2].clamp(-3.0, 3.0)
    expected = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    out = clamped_swiglu(gate_up, limit=3.0)
    torch.testing.assert_close(out, expected)
    (expected_grad,) = torch.autograd.grad(expected, gate_up, grad)
    assert (expected_grad == 0).any()
    assert (expected_grad != 0).any()
    torch.testing.assert_close(torch.autograd.grad(out, gate_up, grad)[0], expected_grad)


@pytest.mark.parametrize("eps", [0.0, 0.5])
def test_normalized_scores_have_the_gradient_of_their_formula(eps):
    torch.manual_seed(0)
    tokens = torch.randn(5, DIM, dtype=torch.float64)
    router = make(k=3, normalize=True, sum_eps=eps, score_function="sigmoid").router.double()
    scores, selected, counts = router(tokens)
    chosen = router.gate(tokens).float().sigmoid().gather(-1, selected)
    expected = chosen / (chosen.sum(-1, keepdim=True) + eps)
    torch.testing.assert_close(scores, expected)
    assert counts.tolist() == torch.bincount(selected.flatten(), minlength=EXPERTS).tolist()
    grad = torch.randn(5, 3)
    gradients = [torch.autograd.grad(value, router.gate.weight, grad)[0] for value in (scores, expected)]
    torch.testing.assert_close(*gradients, atol=1e-7, rtol=1e-5)


def test_experts_that_no_token_chose_cost_nothing():
    moe = make(2).requires_grad_(False)
    x = torch.randn(1, 64, DIM)
    moe.experts.gate_proj[5] = float("nan")  # and would show if they were computed
    moe.router.gate.weight[5] = 0.0
    moe.router.gate.bias = torch.nn.Parameter(torch.tensor([0.0] * 5 + [-1e9]), requires_grad=False)
    with torch.profiler.profile(with_flops=True) as profile:
        out = moe(x)
    assert out.isfinite().all()
    # Products of no rows have no operations.
    products = [event for event in outermost(profile.events(), "aten::mm") if event.flops]
    assert sum(event.flops for event in products) == 2 * 64 * 2 * 3 * DIM * HIDDEN
    assert len(products) <= 3 * 5


def test_frozen_experts_get_no_gradient_and_a_compiled_layer_is_one_graph():
    moe = make(2)
    moe.experts.requires_grad_(False)
    x = torch.randn(1, 20, DIM, requires_grad=True)
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=True)
    (expected,) = torch.autograd.grad(moe(x).square().sum(), x)
    (gradient,) = torch.autograd.grad(compiled(x).square().sum(), x)
    assert torch.allclose(gradient, expected, rtol=1e-5, atol=1e-6)
    assert moe.experts.gate_proj.grad is None


def test_adapters_that_experts_cannot_have_are_refused():
    sizes = {"vocab_size": 20, "num_layers": 1, "embed_dim": 16, "intermediate_dim": 8, "max_seq_len": 8}
    experts = {"num_experts": 2, "experts_per_token": 1, "expert_dim": 8}
    with torch.device("meta"):
        model = build(Description(**sizes, num_heads=2, num_kv_heads=2, **experts), SPEC)
    with pytest.raises(ConversionError, match=r"experts of 'layers.0.mlp.experts' have no adapter with magnitudes"):
        LoRA(apply_to_mlp=True, use_dora=True).convert(model)
    with pytest.raises(ModelError, match=r"'layers.0.mlp.router.gate' is a router"):
        LoRA(target_modules=["gate"]).convert(model)
