"""Balancing of experts: its loss is that of transformers, its gradient the loss's, in every way of training."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from torchtune.models import Description, build
from torchtune.models.qwen3_moe import SPEC
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.modules.conversion import (
    ConversionError,
    apply_conversions,
    run_post_optimizer_hooks,
    run_pre_optimizer_hooks,
)
from torchtune.modules.loss import LinearCrossEntropyLoss, setup_loss
from torchtune.modules.moe import (
    BalancingLoss,
    ExpertLoad,
    LossFreeBalancing,
    TokenChoiceTopKRouter,
    load_balancing_loss,
    tokens_per_expert,
)
from torchtune.supervision import Throughput
from torchtune.training import compile_model, set_activation_checkpointing

SMALL = Description(
    vocab_size=40,
    num_layers=3,
    embed_dim=16,
    intermediate_dim=24,
    max_seq_len=32,
    num_heads=2,
    num_kv_heads=2,
    num_experts=5,
    experts_per_token=2,
    expert_dim=8,
    expertless_layers=(1,),
    router_balance=0.5,
)
TOKENS = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(0))


def make(*conversions: Any, **changes: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    model = build(replace(SMALL, **changes), SPEC)
    apply_conversions(model, list(conversions))
    return model


def routers(model: torch.nn.Module) -> list[TokenChoiceTopKRouter]:
    return [module for module in model.modules() if isinstance(module, TokenChoiceTopKRouter)]


def assert_equal_gradients(model: torch.nn.Module, reference: torch.nn.Module) -> None:
    reference_parameters = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        expected = reference_parameters[name].grad
        assert (parameter.grad - expected).norm() <= 1e-4 * expected.norm(), name


def logits_of_routers(model: torch.nn.Module) -> list[torch.Tensor]:
    """Filled by every forward pass that follows."""
    logits: list[torch.Tensor] = []
    for router in routers(model):
        router.gate.register_forward_hook(lambda module, inputs, output: logits.append(output))
    return logits


def test_loss_equals_that_of_transformers():
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    torch.manual_seed(0)
    logits = [torch.randn(30, 6, requires_grad=True) for _ in range(3)]
    counts = [layer.topk(2).indices.flatten().bincount(minlength=6) for layer in logits]
    loss = load_balancing_loss([layer.softmax(-1) for layer in logits], counts)
    reference = load_balancing_loss_func(tuple(logits), 6, 2)
    assert torch.allclose(loss, reference, rtol=1e-6)
    gradients = torch.autograd.grad(loss, logits)
    reference_gradients = torch.autograd.grad(reference, logits)
    for gradient, expected in zip(gradients, reference_gradients, strict=True):
        assert torch.allclose(gradient, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("how", ["plain", "recomputed", "compiled", "compiled and recomputed"])
def test_gradient_is_that_of_loss_and_balancing_loss(how):
    """Two batches that weigh differently, as recipes sum them."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    reference, model = make(), make(BalancingLoss())
    router_logits = logits_of_routers(reference)
    expected = torch.zeros(())
    for row, weight in zip(TOKENS.split(1), (0.25, 0.75), strict=True):
        router_logits.clear()
        loss = F.cross_entropy(reference(row).flatten(0, 1), row.flatten())
        balancing_loss = load_balancing_loss_func(tuple(router_logits), 5, 2)
        loss = (loss + 0.5 * balancing_loss) * weight
        loss.backward()
        expected += loss.detach()
    loss_fn = LinearCrossEntropyLoss()
    loss_fn.set_model_output(model)
    if "recomputed" in how:
        set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    if "compiled" in how:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")
            compile_model(model)
    total = torch.zeros(())
    losses = []
    for row, weight in zip(TOKENS.split(1), (0.25, 0.75), strict=True):
        losses.append(loss_fn(model(row), row) * weight)
    for loss in losses:  # forward passes may be ahead of backward passes
        loss.backward()
        total += loss.detach()
    assert torch.allclose(total, expected, rtol=1e-5)
    assert_equal_gradients(model, reference)
    assert all(count.sum() == 2 * 24 for count in tokens_per_expert(model).values())
    with torch.no_grad():  # validation has the plain loss
        row = TOKENS[:1]
        plain_loss = F.cross_entropy(reference(row)[0], row[0])
        assert torch.allclose(loss_fn(model.eval()(row), row), plain_loss, rtol=1e-5)


@pytest.mark.parametrize("loss", [LinearCrossEntropyLoss(), torch.nn.CrossEntropyLoss()], ids=["linear", "module"])
def test_balancing_loss_weighs_as_the_labels_of_a_batch_do(loss):
    """Micro-batches of 12, 5 and no labels: the balancing loss of each counts as often."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    reference, model = make(), make(BalancingLoss())
    router_logits = logits_of_routers(reference)
    loss_fn = setup_loss(loss, model)
    labels_of_rows = {12: TOKENS[:1], 5: TOKENS[1:2], 0: TOKENS[:1].flip(1)}
    labels_of_step = sum(labels_of_rows)
    expected = total = 0.0
    for count, row in labels_of_rows.items():
        labels = row.masked_fill(torch.arange(row.numel())[None] >= count, -100)
        router_logits.clear()
        logits = reference(row).flatten(0, 1)
        loss_sum = F.cross_entropy(logits, labels.flatten(), reduction="sum")
        loss_sum = loss_sum + count * 0.5 * load_balancing_loss_func(tuple(router_logits), 5, 2)
        (loss_sum / labels_of_step).backward()
        expected += loss_sum.item()

        loss_sum, num_labels = loss_fn.sum_and_count(model(row, output="hidden"), labels, model.output)
        assert int(num_labels) == count
        (loss_sum / labels_of_step).backward()
        total += loss_sum.item()
    assert total == pytest.approx(expected, rel=1e-5)
    assert_equal_gradients(model, reference)


def test_recipes_tell_the_load_without_a_line_of_their_own():
    model = make()
    throughput = Throughput(model=model)
    model(TOKENS)
    counts = torch.stack(list(tokens_per_expert(model).values())).float()
    load = counts / counts.mean(dim=1, keepdim=True)
    metrics = throughput.metrics()
    assert metrics["expert_load_max"] == pytest.approx(load.max().item())
    assert metrics["expert_load_min"] == pytest.approx(load.min().item())
    assert "expert_load_max" not in Throughput(model=torch.nn.Linear(2, 2)).metrics()


def test_tokens_of_a_skipped_step_do_not_move_biases_later():
    """Steps as recipes make them: the hooks around the optimizer, of which a skipped step has the first alone."""
    model = make(LossFreeBalancing(0.01), router_selection_bias=True, router_scores="sigmoid")
    skipped, taken = torch.randint(0, int(TOKENS.max()) + 1, (2, 8, 16), generator=torch.Generator().manual_seed(4))
    moved_otherwise = False
    for is_taken, tokens in ((True, taken[:2]), (False, skipped), (False, skipped), (True, taken[2:])):
        before = [(path, total.clone()) for path, total in tokens_per_expert(model).items()]
        biases = copy.deepcopy([router.selection_bias.detach() for router in routers(model)])
        model(tokens)
        run_pre_optimizer_hooks(model)
        if is_taken:
            run_post_optimizer_hooks(model)
        now = tokens_per_expert(model)
        for old, (path, total) in zip(biases, now.items(), strict=True):
            step = (total - dict(before).get(path, 0)).float() * is_taken
            assert torch.allclose(model.get_submodule(path).selection_bias, old + 0.01 * (step.mean() - step).sign())
            all_tokens = total.float()
            moved_otherwise |= bool(
                is_taken and ((all_tokens.mean() - all_tokens).sign() != (step.mean() - step).sign()).any()
            )
    assert moved_otherwise  # with all tokens, some bias would have gone the other way


def test_balancing_refuses_models_that_it_cannot_balance():
    with pytest.raises(ConversionError, match=r"'layers.0.mlp.router' has no selection_bias"):
        make(LossFreeBalancing())
    with pytest.raises(ConversionError, match="the model has no experts"):
        make(BalancingLoss(), num_experts=0, experts_per_token=0, expert_dim=0)
    with pytest.raises(ConversionError, match="config has no coefficient"):
        make(BalancingLoss(), router_balance=0.0)
    with pytest.raises(ConversionError, match="must not be negative"):
        BalancingLoss(-1.0)
    model = make(BalancingLoss())
    with pytest.raises(ConversionError, match="does not add the balancing loss"):
        model(TOKENS).sum().backward()
    assert ExpertLoad(make(num_experts=0, experts_per_token=0, expert_dim=0)).metrics() == {}
