"""Attention, grouped products, quantized layers and optimizers on a CUDA GPU, against float64 on the CPU.

Errors are norms of differences relative to the norm of the reference: 1e-2 for outputs in bfloat16 (which keeps 8
bits), 3e-2 for its gradients, 2e-3 in float32, which may be TF32.
"""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from torchtune import training
from torchtune.data import Documents
from torchtune.modules import attention, rms_norm
from torchtune.modules.kernels.grouped import RowGroups, grouped_mm
from torchtune.modules.low_precision import FrozenFloat8Linear, FrozenInt8Linear, FrozenNF4Linear

DEVICE = "cuda"
ON_HOST = True  # tensors start there
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
PREFIXES = (-1, 0, 0, -1)
CASES = [  # compiled for each case: few of them
    (torch.bfloat16, 64, ()),
    (torch.bfloat16, 64, PREFIXES),
    (torch.bfloat16, 256, ()),
    (torch.bfloat16, 256, PREFIXES),
    (torch.float32, 64, ()),
]


def distance(actual: Tensor, expected: Tensor) -> float:
    """Relative error, in the norm."""
    return ((actual.detach().double().cpu() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(("dtype", "head_dim", "prefixes"), CASES)
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 70}, {"softcap": 5.0}, {"sinks": True}, {"sinks": True, "window": 70}],
    ids=str,
)
def test_attention_within_documents_is_that_of_float64(options, dtype, head_dim, prefixes):
    torch.manual_seed(0)
    lengths = [200, 1, 150, 33]
    inputs = [torch.randn(1, sum(lengths), heads, head_dim).to(dtype) for heads in (4, 2, 2)]
    grad = torch.randn(1, sum(lengths), 4, head_dim).to(dtype)
    sinks = torch.linspace(-1.0, 2.0, 4)
    results = []
    for device, wide in (("cpu", torch.float64), (DEVICE, dtype)):
        leaves = [t.to(device, wide).requires_grad_() for t in inputs]
        scores = sinks.to(device, torch.float64 if device == "cpu" else dtype).requires_grad_()
        used_options = {**options, "sinks": scores} if "sinks" in options else options
        documents = Documents.from_lengths(lengths, device, prefixes)
        out = attention(*leaves, documents=documents, **used_options)
        out.backward(grad.to(device, wide))
        results.append([out, *(leaf.grad for leaf in leaves), *([scores.grad] if "sinks" in options else [])])
    errors = [distance(actual, expected.detach()) for expected, actual in zip(*results, strict=True)]
    most = (1e-2, 3e-2) if dtype == torch.bfloat16 else (2e-3, 2e-3)
    assert errors[0] < most[0]
    assert max(errors[1:]) < most[1]


def operators_of(function) -> set[str]:
    """Names of the operators that a function runs, those inside of other operators included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return {event.name for event in profile.events()}


@pytest.mark.parametrize("kind", ["rows", "a mask", "documents", "documents with later keys"])
def test_attention_is_not_that_of_cudnn(kind):
    # Half precision, long enough and as many heads of keys as of queries: what torch may give to cuDNN.
    q = torch.randn(1, 400, 4, 64, device=DEVICE, dtype=torch.float16, requires_grad=True)
    options = {}
    if kind == "a mask":
        options["mask"] = torch.ones(1, 400, 400, dtype=torch.bool, device=DEVICE).tril()
    elif kind != "rows":
        options["documents"] = Documents.from_lengths([250, 150], DEVICE)
        options["is_causal"] = kind == "documents"
    operators = operators_of(lambda: attention(q, q, q, **options).sum().backward())
    assert operators
    assert not any("cudnn" in name for name in operators)


def test_attention_to_later_keys_sees_whole_documents():
    torch.manual_seed(0)
    lengths = [250, 1, 149]
    q, k, v = (torch.randn(1, sum(lengths), 4, 64).half() for _ in range(3))
    documents = Documents.from_lengths(lengths, DEVICE)
    out = attention(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), documents=documents, is_causal=False)
    expected = []
    for queries, keys, values in zip(*(tensor[0].double().split(lengths) for tensor in (q, k, v)), strict=True):
        weights = (torch.einsum("snh,tnh->nst", queries, keys) * 64**-0.5).softmax(-1)
        expected.append(torch.einsum("nst,tnh->snh", weights, values))
    assert distance(out[0], torch.cat(expected)) < 1e-2


@pytest.mark.parametrize("counts", [(64, 0, 130, 6), (0, 0, 0, 200), (50, 50, 50, 50)])
def test_products_of_groups_are_those_of_float64(counts):
    torch.manual_seed(0)
    x = torch.randn(sum(counts), 64).bfloat16()
    weight = torch.randn(len(counts), 64, 96).bfloat16()
    grad = torch.randn(sum(counts), 96).bfloat16()
    results = []
    for device, dtype in (("cpu", torch.float64), (DEVICE, torch.bfloat16)):
        leaves = [t.to(device, dtype).requires_grad_() for t in (x, weight)]
        out = grouped_mm(*leaves, RowGroups.of(torch.tensor(counts, device=device)))
        out.backward(grad.to(device, dtype))
        results.append([out, *(leaf.grad for leaf in leaves)])
    assert max(distance(actual, expected.detach()) for expected, actual in zip(*results, strict=True)) < 1e-2


@pytest.mark.parametrize("is_frozen", [False, True])
def test_norm_and_its_gradients_are_those_of_float64(is_frozen):
    torch.manual_seed(0)
    x = torch.randn(2, 9, 64).bfloat16()
    scale = torch.rand(64).bfloat16()
    grad = torch.randn(2, 9, 64).bfloat16()
    results = []
    for device, dtype in (("cpu", torch.float64), (DEVICE, torch.bfloat16)):
        inputs = [x.to(device, dtype).requires_grad_(), scale.to(device, dtype).requires_grad_(not is_frozen)]
        out = rms_norm(inputs[0], 1e-5, inputs[1])
        out.backward(grad.to(device, dtype))
        results.append([out, *(tensor.grad for tensor in inputs if tensor.requires_grad)])
    errors = [distance(actual, expected.detach()) for expected, actual in zip(*results, strict=True)]
    assert max(errors) < 1e-2


@pytest.mark.parametrize("kind", [FrozenNF4Linear, FrozenInt8Linear, FrozenFloat8Linear])
def test_quantized_layers_compute_with_the_weight_of_the_host(kind):
    torch.manual_seed(0)
    linear = nn.Linear(256, 128, bias=False, dtype=torch.bfloat16)
    x = torch.randn(40, 256).bfloat16()
    layer = kind.from_linear(linear)
    weight = layer.full_weight()
    layer = layer.to(DEVICE)
    x = x.to(DEVICE).requires_grad_()
    assert torch.equal(layer.full_weight().cpu(), weight)
    out = layer(x)
    out.sum().backward()
    assert distance(out, x.detach().cpu().double() @ weight.double().T) < 1e-2
    assert distance(x.grad, weight.double().sum(0).expand(40, -1)) < 1e-2


@pytest.mark.parametrize("precision", ["stochastic_rounding", "fp32_master"])
def test_small_steps_of_bfloat16_weights_arrive(precision):
    model = nn.Linear(256, 256, bias=False, device=DEVICE, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    torch.manual_seed(0)
    optimizer = training.setup_optimizer(partial(torch.optim.SGD, lr=1e-4), model, precision=precision)
    for _ in range(50):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    # 50 steps of 1e-4, of which bfloat16 alone would round each away; 65,536 elements round at random
    assert model.weight.float().mean().item() == pytest.approx(1.0 - 50e-4, abs=4e-3 if precision[0] == "f" else 3e-4)
