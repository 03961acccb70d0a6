"""What a step asks of the host and of the memory of a CUDA device: launches, waits, peaks, compilations.

Nothing here compares results: a device whose numbers mean nothing will do.
"""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtune import supervision, training
from torchtune.data import Documents
from torchtune.generation._continuous_batch import StaticStep
from torchtune.models.llama3_2 import llama3_2
from torchtune.modules import TransformerDecoder, attention
from torchtune.modules.kernels.documents import Boundaries
from torchtune.modules.kernels.flex import compile_flex_attention
from torchtune.modules.kv_cache import Place, attention_modules
from torchtune.modules.loss import LinearCrossEntropyLoss
from torchtune.modules.mixers._short_conv import DepthwiseWeight
from torchtune.modules.moe import ClampedExperts, GroupedExperts, MoE, TokenChoiceTopKRouter
from torchtune.training.parallel import LateExchange

pytestmark = [
    pytest.mark.cuda_host,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]
ON_HOST = True  # tensors say where they are
LENGTHS = (200, 1, 130, 53)
# The most operators that compute in a layer, uncompiled.
FORWARD, BACKWARD = 26, 40


class Operators(TorchDispatchMode):
    """Counts the operators that compute on the device: views and empty tensors launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple | list) and result else result
        is_empty = "empty" in function.name() or function.name() in ("aten::detach", "aten::_unsafe_view")
        if isinstance(first, torch.Tensor) and first.is_cuda and not function.is_view and not is_empty:
            self.count += 1
        return result


def make_model(num_layers: int = 2, dtype: torch.dtype | None = None) -> TransformerDecoder:
    torch.manual_seed(0)
    model = llama3_2(
        vocab_size=128,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        embed_dim=64,
        max_seq_len=2048,
        intermediate_dim=96,
    )
    if dtype is None:
        has_bfloat16 = torch.cuda.get_device_capability() >= (8, 0)
        dtype = torch.bfloat16 if has_bfloat16 else torch.float16
    return model.to("cuda", dtype)


def make_batch(lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
    documents = Documents.from_lengths(lengths, "cuda")
    tokens = torch.zeros(1, documents.num_tokens, dtype=torch.int64, device="cuda")
    return {"tokens": tokens, "documents": documents, "input_pos": documents.positions()[None]}


def operators_of(num_layers: int) -> tuple[int, int]:
    """Operators of a forward and of a backward pass."""
    model = make_model(num_layers)
    batch = make_batch()
    with Operators() as forward:
        hidden = model(**batch, output="hidden")
    with Operators() as backward:
        hidden.sum().backward()
    return forward.count, backward.count


def test_layer_stays_within_its_number_of_operators():
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip(
            "without flash attention a compiled kernel attends, which a mode that counts operators leaves eager"
        )
    of_four, of_two = operators_of(4), operators_of(2)
    of_a_layer = [(a - b) / 2 for a, b in zip(of_four, of_two, strict=True)]
    assert 10 < of_a_layer[0] <= FORWARD
    assert 10 < of_a_layer[1] <= BACKWARD


def operators_of_module(module: torch.nn.Module, *inputs: Any) -> tuple[int, int]:
    """Operators of a forward and of a backward pass."""
    with Operators() as forward:
        out = module(*inputs)
    with Operators() as backward:
        out.sum().backward()
    return forward.count, backward.count


@pytest.mark.parametrize(
    ("experts", "most"), [(GroupedExperts, (25, 32)), (ClampedExperts, (32, 44))], ids=["gated", "clamped"]
)
def test_mixture_of_experts_stays_within_its_number_of_operators(experts, most):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("without torch's grouped products a loop over the experts multiplies")
    gate = torch.nn.Linear(64, 8, bias=False)
    router = TokenChoiceTopKRouter(gate=gate, dim=64, num_experts=8, experts_per_token=2, normalize=True)
    mixture = MoE(experts=experts(dim=64, hidden_dim=32, num_experts=8), router=router).to("cuda", torch.bfloat16)
    hidden = torch.zeros(1, 300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    operators_of_module(mixture, hidden)  # accumulates no gradient
    mixture.zero_grad()
    hidden.grad = None
    forward, backward = operators_of_module(mixture, hidden)
    assert 10 < forward <= most[0]
    assert 10 < backward <= most[1]


def test_short_convolution_stays_within_its_number_of_operators():
    convolution = DepthwiseWeight(64, 4).to("cuda", torch.bfloat16)
    convolution.weight.requires_grad_(False)
    hidden = torch.zeros(1, 300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    reach = torch.arange(300, device="cuda")[None]
    forward, backward = operators_of_module(convolution, hidden, reach, None)
    assert forward <= 9
    assert backward <= 9  # with the gradient of the sum, and without that of a frozen weight


def test_block_mask_reaches_the_device_in_a_copy_and_is_that_of_the_device():
    lengths = (200, 1, 130, 530)
    documents = Documents.from_lengths(lengths, "cuda", prefixes=(-1, 0, 0, -1))
    torch.cuda.set_sync_debug_mode("error")
    try:
        with Operators() as operators:
            mask = Boundaries.of(documents, block_masks=[64]).block_masks[64]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert operators.count <= 2  # the copy
    on_host = Boundaries.of(Documents.from_lengths(lengths, "cpu", prefixes=(-1, 0, 0, -1)), block_masks=[64])
    for name in ("kv_num_blocks", "kv_indices", "full_kv_indices", "q_num_blocks", "q_indices", "full_q_indices"):
        sent = getattr(mask, name)
        assert sent.data_ptr() % 16 == 0
        assert torch.equal(sent.cpu(), getattr(on_host.block_masks[64], name)), name


class Shapes(TorchDispatchMode):
    """Lists operators with the shapes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        shapes = [tuple(value.shape) for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        self.operators.append(f"{function.name()} {shapes}")
        return result


@torch.no_grad()
def test_steps_of_decoding_have_the_same_launches_and_shapes_and_the_host_waits_for_none():
    """What a CUDA graph can repeat, whatever the lengths of the rows, their number and the column."""
    model = make_model().eval()
    position = Place()
    with torch.device("cuda"):
        model.setup_caches(4, model.tok_embeddings.weight.dtype, decoder_max_seq_len=96)
    caches = [module.kv_cache for module in attention_modules(model)]
    for cache in caches:
        cache.place = position
    step = StaticStep(model, caches, position, captures=False)
    sequences = []
    for count, column in ((4, 20), (4, 21), (2, 22), (3, 90)):
        tokens = torch.ones(count, 1, dtype=torch.int64, device="cuda")
        starts = torch.arange(count, device="cuda")
        step.set_inputs(tokens, starts, torch.zeros_like(starts), column)
        if not sequences:
            step.compute()  # chooses kernels, and sends the frequencies of positions
        torch.cuda.set_sync_debug_mode("error")
        try:
            with Shapes() as shapes:
                logits = step.compute()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert logits.shape == (4, 128)
        sequences.append(shapes.operators)
    assert all(sequence == sequences[0] for sequence in sequences)
    assert not any("_pin_memory" in operator for operator in sequences[0])  # nothing is sent from the host


def test_an_optimizer_step_makes_the_host_wait_for_nothing():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model(**make_batch(), output="hidden").sum().backward()
    for debug_mode in ("default", "error"):  # the first step makes states
        torch.cuda.set_sync_debug_mode(debug_mode)
        try:
            training.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


class Loader:
    """Knows no rows."""

    rank = 0
    epoch = 0
    step_indices = None

    def rows(self, parts, step_indices):
        return []


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("stochastic_rounding", torch.bfloat16),
        ("fp32_master", torch.bfloat16),
        ("fp32_master", torch.float16),
        ("param_dtype", torch.bfloat16),
    ],
)
def test_host_waits_in_no_step(precision, dtype, tmp_path, monkeypatch):
    """From the first launch to the last, it only asks for the values of the step before."""
    model = make_model(dtype=dtype)
    optimizer = training.setup_optimizer(lambda parameters: torch.optim.AdamW(parameters, fused=True), model, precision)
    metrics = supervision.StepMetrics()
    dims = training.ParallelDims()
    control = supervision.RunControl(dims, tmp_path)
    scaler = training.LossScaler(optimizer, dtype)
    skips = training.DeviceSkips(optimizer, model)
    guard = supervision.StepGuard(metrics, Loader(), dims, tmp_path, 100, None, scaler, skips)
    # A step that is left out reads its losses for the record. Kernels may compute nothing here.
    monkeypatch.setattr(guard, "_rows_to_record", lambda step_data: [])
    received = []
    wait = LateExchange.wait
    monkeypatch.setattr(LateExchange, "wait", lambda self: received.append(self) or wait(self))

    def run_step(step: int, batch: dict[str, Any]) -> Any:
        loss = model(**batch, output="hidden").float().mean() * 0
        metrics.add_loss(loss)
        metrics.log_mean({name: (torch.ones((), device="cuda"), 2) for name in ("accuracy", "margin")})
        scaler.scale(loss).backward()
        grad_norm = training.clip_grad_norm_(model.parameters(), 1.0, scaler.factor)
        values = control.synchronize(step, metrics, grad_norm)
        assert guard.accepts(step, values)
        optimizer.step()
        optimizer.zero_grad()
        values["lr"] = 0.1
        return values

    run_step(1, make_batch())  # in which names are new
    run_step(2, make_batch())
    for step in (3, 4):
        batch = make_batch()
        torch.cuda.set_sync_debug_mode("error")
        try:
            values = run_step(step, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len(received) == step - 1, "the values of the step before"
    assert {type(value) for value in values.values()} == {float}
    assert len(received) == 4


def test_logits_of_all_positions_are_never_in_memory():
    """The peak of forward and backward is far below the float32 logits of a large vocabulary."""
    hidden = torch.zeros(1, 4096, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    output = torch.nn.Linear(64, 32_000, bias=False, device="cuda", dtype=torch.bfloat16)
    labels = torch.zeros(1, 4096, device="cuda", dtype=torch.int64)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    total, _ = LinearCrossEntropyLoss(num_output_chunks=16).sum_and_count(hidden, labels, output)
    total.backward()
    assert torch.cuda.max_memory_allocated() - before < 4096 * 32_000 * 4 / 2


@pytest.fixture
def compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_flex_attention.cache_clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


def test_flex_attention_is_compiled_for_all_lengths(compiler):
    def run(softcap: float, lengths: tuple[int, ...]) -> None:
        q, k = (torch.zeros(1, sum(lengths), heads, 16, device="cuda") for heads in (4, 2))
        attention(q, k, k, documents=Documents.from_lengths(lengths, "cuda"), softcap=softcap)

    for lengths in (LENGTHS, (300, 5), (64,)):  # one length, all lengths, and one block that holds all positions
        run(30.0, lengths)
    compiled = compiler["stats"]["unique_graphs"]
    for softcap in (30.0, 50.0):
        for lengths in ((90, 90, 17), (50,), (700,), LENGTHS):
            run(softcap, lengths)
    assert 0 < compiler["stats"]["unique_graphs"] <= compiled + 1
    assert not compiler["graph_break"]


def test_compiled_layers_have_two_graphs_and_no_break(compiler, monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")
    model = make_model(3)
    training.compile_model(model, verbose=False)
    # The compiler makes a symbol of what the second batch has another number of: positions, and on cards without flash
    # attention also blocks of 128 positions, of which the first batch has three.
    for lengths in (LENGTHS, (500, 5), (90, 90, 17), (700, 3), (1900, 20), (1000, 80, 900)):
        model(**make_batch(lengths), output="hidden").sum().backward()
    assert compiler["stats"]["unique_graphs"] == 2
    assert not compiler["graph_break"]
