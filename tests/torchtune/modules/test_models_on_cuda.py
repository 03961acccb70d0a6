"""Tiny models of every kind of layer on a CUDA GPU, against float64 on the CPU: losses, gradients, answers.

Errors of gradients are norms of differences relative to the norm of the reference: 5e-3 in float32, where products of
convolutions may be in TF32, and 8e-2 in bfloat16, whose rounding adds up over layers.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.torchtune.modules.test_on_cuda import distance
from torchtune import training
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, Batch, collate_documents
from torchtune.generation import generate_tokens
from torchtune.models import Description, build
from torchtune.models._mixers import DeltaNetMixer, Mamba2Mixer
from torchtune.models.llama3_2 import SPEC
from torchtune.modules.loss import LinearCrossEntropyLoss

DEVICE = "cuda"
ON_HOST = True  # tensors start there
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

PLAIN = Description(
    vocab_size=128,
    num_layers=2,
    embed_dim=64,
    intermediate_dim=96,
    max_seq_len=2048,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope_layout="half",
)
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_dim": 32}
LATENT = {"num_kv_heads": 4, "head_dim": 24, "rope_dim": 8, "kv_latent_dim": 16, "q_latent_dim": 16, "value_dim": 16}
DELTA = DeltaNetMixer(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=16)
MAMBA = Mamba2Mixer(num_heads=4, head_dim=16, num_groups=2, state_dim=16)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm of heads and gate": {"qk_norm": "before_rope", "attn_gate": True},
    "window": {"window": 64, "window_layers": (0,)},
    "soft cap": {"attn_softcap": 30.0},
    "embeddings scaled": {"embed_scale": 8.0},
    "sinks": {"attn_sinks": True, "window": 64, "window_layers": (0,)},
    "latent attention": LATENT,
    "gated delta rule": {"mixer": DELTA, "mixer_layers": (0,)},
    "state space": {"mixer": MAMBA, "mixer_layers": (0,)},
    "experts": EXPERTS,
    "shared expert": {**EXPERTS, "shared_expert_dim": 32},
    "clamped experts": {**EXPERTS, "expert_limit": 7.0, "router_bias": True},
}


def make_model(**changes: Any) -> nn.Module:
    """A tiny model with random float64 weights, on the CPU."""
    torch.manual_seed(0)
    with training.set_default_dtype(torch.float64):
        model = build(Description(**{**vars(PLAIN), **changes}), SPEC)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.1)
            else:
                parameter.uniform_(0.5, 1.0)
    return model.train()


def make_batch(lengths: tuple[int, ...] = (200, 1, 130, 53)) -> Batch:
    """Documents of random tokens, labeled but for every fifth position."""
    generator = torch.Generator().manual_seed(1)
    documents = []
    for length in lengths:
        tokens = torch.randint(PLAIN.vocab_size, (length,), generator=generator)
        labels = tokens.roll(-1)
        labels[::5] = CROSS_ENTROPY_IGNORE_IDX
        documents.append({"tokens": tokens, "labels": labels})
    return collate_documents(documents)


def loss_of(model: nn.Module, batch: Batch, loss_fn: nn.Module | None = None) -> Tensor:
    """Mean loss, as recipes compute it."""
    hidden = model(**batch.model_inputs(), output="hidden")
    total, count = (loss_fn or LinearCrossEntropyLoss()).sum_and_count(hidden, batch.labels, model.output)
    return total / count


def compare_gradients(actual: nn.Module, expected: nn.Module, tolerance: float) -> None:
    """Compare all gradients at once, and see that each is there."""
    on_device = [parameter.grad for parameter in actual.parameters() if parameter.grad is not None]
    on_host = [parameter.grad for parameter in expected.parameters() if parameter.grad is not None]
    assert [grad.shape for grad in on_device] == [grad.shape for grad in on_host]
    flat_on_device = torch.cat([grad.double().cpu().flatten() for grad in on_device])
    flat_on_host = torch.cat([grad.double().cpu().flatten() for grad in on_host])
    assert distance(flat_on_device, flat_on_host) < tolerance


KINDS_AND_TOLERANCES = [(kind, torch.float32, 1e-3, 5e-3) for kind in KINDS]
for _kind in KINDS:
    if "expert" not in _kind:  # rounding may change which experts are chosen
        KINDS_AND_TOLERANCES.append((_kind, torch.bfloat16, 2e-2, 8e-2))


@pytest.mark.parametrize(("kind", "dtype", "of_loss", "of_gradients"), KINDS_AND_TOLERANCES)
def test_models_have_the_loss_and_gradients_of_the_host(kind, dtype, of_loss, of_gradients):
    expected = make_model(**KINDS[kind])
    batch = make_batch()
    on_device = copy.deepcopy(expected).to(DEVICE, dtype)
    losses = loss_of(on_device, batch.to(DEVICE)), loss_of(expected, batch)
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=of_loss)
    compare_gradients(on_device, expected, of_gradients)


@pytest.mark.parametrize("kind", ["plain", "window", "experts", "gated delta rule"])
def test_compiled_layers_are_the_layers(kind):
    eager = make_model(**KINDS[kind]).to(DEVICE, torch.float32)
    compiled = copy.deepcopy(eager)
    loss_fn = LinearCrossEntropyLoss()
    training.compile_model(compiled, verbose=False)
    training.compile_loss(loss_fn, verbose=False)
    for lengths in ((200, 1, 130, 53), (90, 90, 17), (300,)):  # the second length makes the code for all
        batch = make_batch(lengths).to(DEVICE)
        losses = loss_of(compiled, batch, loss_fn), loss_of(eager, batch)
        for loss in losses:
            loss.backward()
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-3)
    compare_gradients(compiled, eager, 5e-3)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("kind", ["plain", "window", "soft cap", "sinks", "latent attention", "embeddings scaled"])
def test_the_host_does_not_wait_in_a_micro_batch(kind):
    """From the batch on the host to the gradients: nothing is copied back, and nothing copied from pageable memory."""
    model = make_model(**KINDS[kind]).to(DEVICE, torch.bfloat16)
    loss_fn = LinearCrossEntropyLoss()
    for debug_mode in ("default", "error"):  # the first step may look things up
        torch.cuda.set_sync_debug_mode(debug_mode)
        try:
            batch = make_batch().to(DEVICE, non_blocking=True)
            hidden = model(**batch.model_inputs(), output="hidden")
            total, count = loss_fn.sum_and_count(hidden, batch.labels, model.output, index=batch.label_index)
            (total / count).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", ["plain", "window", "soft cap", "gated delta rule", "experts"])
def test_the_likeliest_answers_are_those_of_the_host(kind):
    expected = make_model(**KINDS[kind]).eval()
    on_device = copy.deepcopy(expected).to(DEVICE, torch.float32)
    prompts = [list(range(3, 40)), [5, 6], list(range(60, 100))]
    options = {"max_new_tokens": 24, "temperature": 0.0, "num_samples": 1}
    answers = generate_tokens(on_device, prompts, **options)
    expected_answers = generate_tokens(expected, prompts, **options)
    for tokens, expected_tokens in zip(answers.tokens, expected_answers.tokens, strict=True):
        assert tokens.tolist() == expected_tokens.tolist()
    for log_probs, expected_log_probs in zip(answers.log_probs, expected_answers.log_probs, strict=True):
        torch.testing.assert_close(log_probs.cpu().double(), expected_log_probs.double(), atol=2e-3, rtol=0)
