"""The chunked cross entropy equals its formula, and never holds what it need not."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.work import outermost
from torchtune.data import label_index
from torchtune.modules import TiedLinear
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.loss import CEWithChunkedOutputLoss, LinearCrossEntropyLoss, SFTLoss
from torchtune.modules.loss import cross_entropy as implementation
from torchtune.modules.output_projection import CappedLinear
from torchtune.modules.peft import LoRA

DIM, VOCAB, BATCH, SEQ = 16, 97, 3, 30


class Head(nn.Module):
    """What the loss needs of a model."""

    def __init__(self, output: nn.Module | TiedLinear) -> None:
        super().__init__()
        self.output = output


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks as asked for, however small."""
    monkeypatch.setattr(implementation, "_MIN_CHUNK_ROWS", 1)
    monkeypatch.setattr(implementation, "_MIN_CHUNK_ROWS_TRAINED", 1)


def inputs(dtype: torch.dtype = torch.float64, labelled: float = 0.6) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [b, s, d], weight [v, d], labels [b, s]."""
    torch.manual_seed(0)
    hidden = torch.randn(BATCH, SEQ, DIM, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, DIM, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, VOCAB, (BATCH, SEQ))
    labels[torch.rand(BATCH, SEQ) >= labelled] = -100
    return hidden, weight, labels


def make_head(weight: Tensor) -> Head:
    output = nn.Linear(DIM, VOCAB, bias=False, dtype=weight.dtype)
    output.weight = nn.Parameter(weight.clone())
    return Head(output)


def formula(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Mean of log Σ exp(logits) − logit of the label, written out."""
    rows = labels != -100
    logits = hidden[rows] @ weight.t()
    chosen = logits.gather(1, labels[rows, None])[:, 0]
    return ((logits - chosen[:, None]).exp().sum(1).log()).mean()


def run(loss: nn.Module, head: nn.Module, hidden: Tensor, labels: Tensor, factor: float = 1.7) -> list[Tensor]:
    """Loss, and gradients of ``factor`` times it."""
    loss.set_model_output(head)
    value = loss(hidden, labels)
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    return [value, *torch.autograd.grad(value * factor, [hidden, *trained])]


@pytest.mark.parametrize("chunks", [1, 4, 1000])
@pytest.mark.parametrize("masked", [True, False])
def test_equals_the_formula_in_float64(chunks, masked):
    hidden, weight, labels = inputs()
    exact_weight = weight.clone().requires_grad_()
    exact = formula(hidden, exact_weight, labels)
    expected = [exact, *torch.autograd.grad(exact * 1.7, [hidden, exact_weight])]
    loss = LinearCrossEntropyLoss(num_output_chunks=chunks, mask_ignored_tokens=masked)
    for actual, reference in zip(run(loss, make_head(weight), hidden, labels), expected, strict=True):
        assert actual.dtype == torch.float64
        assert (actual - reference).abs().max() <= 1e-10


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("chunks", [1, 4])
def test_low_precision_stays_near_float64(dtype, tolerance, chunks):
    hidden, weight, labels = inputs(dtype)
    exact_hidden = hidden.detach().double().requires_grad_()
    exact_weight = weight.double().requires_grad_()
    exact = formula(exact_hidden, exact_weight, labels)
    expected = [exact, *torch.autograd.grad(exact * 1.7, [exact_hidden, exact_weight])]
    result = run(LinearCrossEntropyLoss(chunks), make_head(weight), hidden, labels)
    assert [tensor.dtype for tensor in result] == [torch.float32, dtype, dtype]
    for actual, reference in zip(result, expected, strict=True):
        assert (actual.double() - reference).norm() <= tolerance * reference.norm()


def test_tied_projection_adds_to_the_embeddings_gradient():
    _, weight, labels = inputs()
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ))
    embedding = nn.Embedding(VOCAB, DIM, dtype=torch.float64)
    embedding.weight = nn.Parameter(weight.clone())
    head = Head(TiedLinear(embedding))
    loss = LinearCrossEntropyLoss(num_output_chunks=3)
    loss.set_model_output(head)
    loss(embedding(tokens).tanh(), labels).backward()
    exact = weight.clone().requires_grad_()
    formula(F.embedding(tokens, exact).tanh(), exact, labels).backward()
    torch.testing.assert_close(embedding.weight.grad, exact.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["adapter", "bias", "capped"])
def test_projections_with_adapter_cap_or_bias_are_recomputed_with_the_same_result(kind):
    hidden, weight, labels = inputs()
    head = make_head(weight)
    if kind == "adapter":
        apply_conversions(head, [LoRA(3, 6, target_modules=["output"])])
        nn.init.normal_(head.output.lora_b.weight)
    elif kind == "capped":
        head.output = CappedLinear(DIM, VOCAB, softcap=3.0).double()
    else:
        head.output.bias = nn.Parameter(torch.randn(VOCAB, dtype=torch.float64))
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    exact = F.cross_entropy(head.output(hidden).flatten(0, 1), labels.flatten())
    expected = [exact, *torch.autograd.grad(exact * 1.7, [hidden, *trained])]
    for actual, reference in zip(run(LinearCrossEntropyLoss(4), head, hidden, labels), expected, strict=True):
        torch.testing.assert_close(actual, reference, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["plain", "bf16", "frozen", "tied", "adapter"])
@pytest.mark.parametrize("masked", [True, False])
def test_a_batch_without_labels_has_loss_and_gradients_zero(kind, masked):
    hidden, weight, labels = inputs(torch.bfloat16 if kind == "bf16" else torch.float32)
    head = make_head(weight)
    embedding = nn.Embedding(VOCAB, DIM)
    if kind == "tied":
        head = Head(TiedLinear(embedding))
        head.embedding = embedding
    elif kind == "frozen":
        head.requires_grad_(False)
    elif kind == "adapter":
        apply_conversions(head, [LoRA(3, 6, target_modules=["output"])])
    loss = LinearCrossEntropyLoss(mask_ignored_tokens=masked)
    loss.set_model_output(head)
    value = loss(hidden, torch.full_like(labels, -100))
    assert value == 0
    assert value.dtype == torch.float32
    value.backward()
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    for tensor in (hidden, *trained):
        assert tensor.grad is not None
        assert not tensor.grad.any()


@pytest.mark.parametrize("masked", [True, False])
def test_a_label_that_is_no_token_is_not_another_one(masked):
    hidden, weight, labels = inputs(torch.float32)
    loss = LinearCrossEntropyLoss(ignore_index=-1, mask_ignored_tokens=masked)
    with pytest.raises(RuntimeError, match="out of bounds"):
        loss.sum_and_count(hidden, torch.full_like(labels, -100), make_head(weight).output)


def test_only_labelled_rows_are_projected_in_chunks():
    """Products of the projection have the labeled rows, at most a chunk of them at a time."""
    hidden, weight, labels = inputs(torch.float32)
    count = int((labels != -100).sum())
    loss = LinearCrossEntropyLoss(num_output_chunks=4)
    loss.set_model_output(make_head(weight))
    with torch.profiler.profile(record_shapes=True) as profile:
        loss(hidden, labels).backward()
    rows = [
        event.input_shapes[0][0]
        for event in outermost(profile.events(), "aten::mm")
        if event.input_shapes[:2] == [[event.input_shapes[0][0], DIM], [DIM, VOCAB]]
    ]
    assert sum(rows) == count
    assert max(rows) == -(-count // 4)


def test_a_second_backward_pass_is_refused():
    hidden, weight, labels = inputs()
    loss = LinearCrossEntropyLoss()
    loss.set_model_output(make_head(weight))
    value = loss(hidden, labels)
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call the loss again"):
        value.backward()


def test_the_projection_is_no_part_of_the_loss():
    loss = LinearCrossEntropyLoss()
    assert isinstance(loss, SFTLoss)
    with pytest.raises(AttributeError, match=r"call set_model_output\(model\)"):
        loss(torch.zeros(1, 2, DIM), torch.zeros(1, 2, dtype=torch.long))
    head = make_head(inputs()[1])
    loss.set_model_output(head)
    assert head.skip_output_layer is True
    assert loss.linear_projection is head.output
    assert not list(loss.parameters())
    assert not loss.state_dict()
    assert loss.patch_tp_plan({"output": 1, "norm": 2}) == {"output": 1, "norm": 2}
    assert loss.tp_requires_loss_parallel_ctx_manager is False
    with pytest.raises(ValueError, match="num_output_chunks is 0"):
        LinearCrossEntropyLoss(num_output_chunks=0)


def test_compiled_passes_give_the_same():
    hidden, weight, labels = inputs(torch.float32)
    plain = run(LinearCrossEntropyLoss(3), make_head(weight), hidden, labels)
    loss = LinearCrossEntropyLoss(3)
    assert loss.apply_compile_strategy(backend="aot_eager") is loss
    for actual, reference in zip(run(loss, make_head(weight), hidden, labels), plain, strict=True):
        torch.testing.assert_close(actual, reference, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(loss(hidden, labels), plain[0].detach(), rtol=1e-6, atol=1e-6)
    loss = LinearCrossEntropyLoss(3)
    loss.set_model_output(make_head(weight))
    torch.testing.assert_close(torch.compile(loss, backend="aot_eager")(hidden, labels), plain[0])  # by a user


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_passes_take_the_logits_of_a_chunk_block_by_block(dtype, monkeypatch):
    """On a GPU, a chunk of a large vocabulary has several blocks, which are views of its logits."""
    monkeypatch.setattr(implementation, "_CPU_BLOCK", 7 * VOCAB)
    torch.compiler.reset()  # the second shape has to compile anew
    hidden, weight, labels = inputs(dtype)
    plain = run(LinearCrossEntropyLoss(3), make_head(weight), hidden, labels)
    loss = LinearCrossEntropyLoss(3).apply_compile_strategy(backend="aot_eager")
    for compiled, expected in zip(run(loss, make_head(weight), hidden, labels), plain, strict=True):
        torch.testing.assert_close(compiled, expected)


def test_the_loss_by_its_older_name_is_the_same():
    hidden, weight, labels = inputs()
    with pytest.warns(FutureWarning, match="Use torchtune.modules.loss.LinearCrossEntropyLoss"):
        loss = CEWithChunkedOutputLoss(num_output_chunks=4)
    head = make_head(weight)
    exact = formula(hidden, weight, labels)
    torch.testing.assert_close(run(loss, head, hidden, labels)[0], exact)
    chunks = (hidden @ weight.t()).chunk(4, dim=1)
    torch.testing.assert_close(loss(chunks, labels), exact)
    assert isinstance(loss, LinearCrossEntropyLoss)


def test_gradient_of_bfloat16_logits_is_scaled_in_float32():
    """150 rows of 7,000 logits are two blocks of a CPU's cache; the factors are no numbers of bfloat16."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(150, 7000, generator=generator).bfloat16()
    target = torch.randint(0, 7000, (150,), generator=generator)
    factors = torch.rand(150, generator=generator)
    leaf = logits.clone().requires_grad_()
    loss = LinearCrossEntropyLoss()
    total, _ = loss.sum_and_count(leaf[None], target[None], nn.Identity(), weights=factors[None])
    total.backward()
    softmax = logits.float().softmax(-1)
    gradient = (softmax - F.one_hot(target, 7000)).bfloat16()
    assert torch.equal(leaf.grad, (gradient.float() * factors[:, None]).bfloat16())


@pytest.mark.parametrize("is_masked", [True, False])
@pytest.mark.parametrize("with_index", [True, False])
def test_weighted_losses_and_gradients_are_those_of_the_formula(is_masked, with_index):
    torch.manual_seed(0)
    hidden = torch.randn(2, 700, 8, dtype=torch.float64, requires_grad=True)
    projection = nn.Linear(8, 32, bias=False, dtype=torch.float64)
    labels = torch.randint(0, 32, (2, 700))
    labels[:, ::3] = -100
    weights = torch.rand(2, 700, dtype=torch.float64) * 2
    inputs = (hidden, projection.weight)
    logits = projection(hidden).flatten(0, 1)
    losses = nn.functional.cross_entropy(logits, labels.flatten(), reduction="none")
    expected = (losses * weights.flatten()).sum()
    expected_gradients = torch.autograd.grad(expected, inputs)

    loss = LinearCrossEntropyLoss(num_output_chunks=4, mask_ignored_tokens=is_masked)
    index = label_index(labels) if with_index else None
    total, count = loss.sum_and_count(hidden, labels, projection, index=index, weights=weights)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(count, weights[labels != -100].sum())
    for gradient, expected_gradient in zip(torch.autograd.grad(total, inputs), expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient)


def test_label_weights_of_1_change_nothing():
    torch.manual_seed(0)
    hidden = torch.randn(1, 20, 8)
    projection = nn.Linear(8, 32, bias=False)
    labels = torch.randint(0, 32, (1, 20))
    loss = LinearCrossEntropyLoss()
    total, count = loss.sum_and_count(hidden, labels, projection)
    weighted_total, weighted_count = loss.sum_and_count(hidden, labels, projection, weights=torch.ones(1, 20))
    assert torch.equal(total, weighted_total)
    assert count == weighted_count


def entropy_of_top(logits: Tensor, count: int = 20) -> Tensor:
    """Entropy of the renormalized likeliest tokens, [n]."""
    probabilities = logits.topk(count, -1).values.softmax(-1)
    return -(probabilities * probabilities.log()).sum(-1)


# Arguments -> losses [n] of logits [n, v] and labels [n], as their papers and torch have them.
TERMS = {
    "smoothed": (
        {"label_smoothing": 0.1},
        lambda logits, labels: F.cross_entropy(logits, labels, label_smoothing=0.1, reduction="none"),
    ),
    "z": (
        {"z_loss": 0.03},
        lambda logits, labels: (
            F.cross_entropy(logits, labels, reduction="none") + 0.03 * logits.exp().sum(-1).log() ** 2
        ),
    ),
    "smoothed-z": (
        {"label_smoothing": 0.2, "z_loss": 0.01},
        lambda logits, labels: (
            F.cross_entropy(logits, labels, label_smoothing=0.2, reduction="none")
            + 0.01 * logits.exp().sum(-1).log() ** 2
        ),
    ),
    "dft": (
        {"reweighting": "dft"},
        lambda logits, labels: (
            F.cross_entropy(logits, labels, reduction="none")
            * logits.softmax(-1).gather(1, labels[:, None])[:, 0].detach()
        ),
    ),
    "eaft": (
        {"reweighting": "eaft", "eaft_alpha": 1.5},
        lambda logits, labels: (
            F.cross_entropy(logits, labels, reduction="none") * (entropy_of_top(logits.detach()) / 3.0) ** 1.5
        ),
    ),
    "dft-z": (
        {"reweighting": "dft", "z_loss": 0.03},
        lambda logits, labels: (
            F.cross_entropy(logits, labels, reduction="none")
            * logits.softmax(-1).gather(1, labels[:, None])[:, 0].detach()
            + 0.03 * logits.exp().sum(-1).log() ** 2
        ),
    ),
}


def exact_results(name: str, hidden: Tensor, weight: Tensor, labels: Tensor) -> list[Tensor]:
    """Loss and gradients of the formula in float64."""
    exact_hidden = hidden.detach().double().requires_grad_()
    exact_weight = weight.double().requires_grad_()
    rows = labels != -100
    _, losses = TERMS[name]
    exact = losses(exact_hidden[rows] @ exact_weight.t(), labels[rows]).mean()
    return [exact, *torch.autograd.grad(exact * 1.7, [exact_hidden, exact_weight])]


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("name", TERMS)
def test_terms_of_the_loss_and_their_gradients_equal_the_formulas(name, chunks, masked):
    hidden, weight, labels = inputs()
    loss = LinearCrossEntropyLoss(chunks, mask_ignored_tokens=masked, **TERMS[name][0])
    expected = exact_results(name, hidden, weight, labels)
    for actual, exact in zip(run(loss, make_head(weight), hidden, labels), expected, strict=True):
        assert actual.dtype == torch.float64
        assert (actual - exact).abs().max() <= 1e-10


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("name", TERMS)
def test_terms_of_the_loss_in_low_precision_stay_near_float64(name, dtype, tolerance):
    hidden, weight, labels = inputs(dtype)
    result = run(LinearCrossEntropyLoss(2, **TERMS[name][0]), make_head(weight), hidden, labels)
    for actual, exact in zip(result, exact_results(name, hidden, weight, labels), strict=True):
        assert (actual.double() - exact).norm() <= tolerance * exact.norm()


@pytest.mark.parametrize("name", ["smoothed-z", "dft", "eaft"])
def test_compiled_terms_give_the_same(name):
    hidden, weight, labels = inputs(torch.float32)
    plain = run(LinearCrossEntropyLoss(3, **TERMS[name][0]), make_head(weight), hidden, labels)
    loss = LinearCrossEntropyLoss(3, **TERMS[name][0]).apply_compile_strategy(backend="aot_eager")
    for actual, expected in zip(run(loss, make_head(weight), hidden, labels), plain, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"label_smoothing": 1.0}, r"label_smoothing is 1\.0: .* from 0 to below 1"),
        ({"z_loss": -1.0}, r"z_loss is -1\.0: it must be at least 0"),
        ({"reweighting": "asft"}, "reweighting is 'asft': it must be dft or eaft"),
        ({"reweighting": "dft", "label_smoothing": 0.1}, "set one of the two"),
        ({"reweighting": "eaft", "eaft_alpha": 0.0}, r"eaft_alpha is 0\.0: it must be above 0"),
    ],
)
def test_impossible_terms_of_the_loss_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        LinearCrossEntropyLoss(**settings)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "unmasked", "smoothed", "compiled", "frozen"])
def test_accuracy_and_entropy_of_predictions_are_those_of_all_logits(kind, dtype, monkeypatch):
    monkeypatch.setattr(implementation, "_PRODUCT_BLOCK", 5 * VOCAB)
    monkeypatch.setattr(implementation, "_CPU_PRODUCT_BLOCK", 5 * VOCAB)
    hidden, weight, labels = inputs(dtype)
    rows = labels != -100
    head = make_head(weight)
    logits = head.output(hidden)[rows].detach().double()
    labels[rows.nonzero(as_tuple=True)[0][:9], rows.nonzero(as_tuple=True)[1][:9]] = logits.argmax(-1)[:9]
    loss = LinearCrossEntropyLoss(3, mask_ignored_tokens=kind != "unmasked")
    if kind == "smoothed":
        loss = LinearCrossEntropyLoss(3, label_smoothing=0.1, z_loss=0.1)
    elif kind == "compiled":
        loss.apply_compile_strategy(backend="aot_eager")
    elif kind == "frozen":
        head.requires_grad_(False)
    metrics = {}
    with_metrics, _ = loss.sum_and_count(hidden, labels, head.output, metrics=metrics)
    without_metrics, _ = loss.sum_and_count(hidden, labels, head.output)
    assert torch.equal(with_metrics, without_metrics)
    log_probs = logits.log_softmax(-1)
    expected_entropy = -(log_probs.exp() * log_probs).sum()
    num_correct, num_labels = metrics["token_accuracy"]
    assert num_labels == rows.sum()
    assert num_correct == (logits.gather(1, labels[rows][:, None])[:, 0] == logits.amax(1)).sum()
    assert num_correct >= 9
    entropy, num_labels = metrics["entropy"]
    assert num_labels == rows.sum()
    assert not entropy.requires_grad
    torch.testing.assert_close(
        entropy.double(), expected_entropy, rtol=1e-9 if dtype == torch.float64 else 1e-5, atol=0
    )
    with torch.no_grad():
        again = {}
        loss.sum_and_count(hidden, labels, head.output, metrics=again)
        torch.testing.assert_close(again, metrics, rtol=1e-5, atol=0)


def test_batch_without_labels_has_no_accuracy():
    hidden, weight, labels = inputs(torch.float32)
    metrics = {}
    LinearCrossEntropyLoss().sum_and_count(
        hidden, torch.full_like(labels, -100), make_head(weight).output, metrics=metrics
    )
    assert metrics == {"token_accuracy": (0, 0), "entropy": (0, 0)}


def test_logits_that_hold_their_gradient_are_not_multiplied_by_ones():
    hidden, weight, labels = inputs(torch.float32)
    head = make_head(weight)
    with torch.profiler.profile(record_shapes=True) as profile:
        LinearCrossEntropyLoss(num_output_chunks=1).sum_and_count(hidden, labels, head.output)
    num_labels = int((labels != -100).sum())
    for event in profile.events():
        if event.name == "aten::mul_":
            assert [num_labels, VOCAB] not in event.input_shapes
