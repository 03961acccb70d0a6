"""What attention runs on CUDA, as far as a machine without a GPU can tell: masks, and which kernel is chosen."""

import itertools
import random

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tests.devices import DEVICE
from tools.check_cuda import Counting
from torchtune.data import Documents
from torchtune.modules.kernels import Card, optional
from torchtune.modules.kernels import attention as attention_kernels
from torchtune.modules.kernels.attention import (
    Kernel,
    Visibility,
    attention,
    attention_backend,
    attention_limits,
    choose_kernel,
    describe_attention,
    flex_blocks,
)
from torchtune.modules.kernels.documents import Boundaries, document_attention
from torchtune.modules.kernels.flex import BLOCK, document_block_mask

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
T4, A100, RTX_4090, H100 = (
    Card(capability, kib * 2**10) for capability, kib in (((7, 5), 64), ((8, 0), 163), ((8, 9), 99), ((9, 0), 227))
)


@pytest.fixture(autouse=True)
def card(monkeypatch):
    """What is chosen does not depend on the card of this machine."""
    monkeypatch.setitem(optional._CARDS, CUDA, H100)


def boundaries(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def seen(lengths: list[int], before: list[int], window: int) -> Tensor:
    """bool ``[t, k]``: what the definition says; ``before`` keys stand before those of a document's own positions."""
    parts = []
    for length, first in zip(lengths, before, strict=True):
        distance = torch.arange(first, first + length)[:, None] - torch.arange(first + length)
        parts.append((distance >= 0) & (distance < (window or first + length)))
    return torch.block_diag(*parts)


def blocks(counts: Tensor, indices: Tensor) -> Tensor:
    """bool ``[blocks, blocks]`` of a block mask's lists, each of which names a block once."""
    block_counts = torch.zeros(indices.shape[-2:], dtype=torch.int64)
    for row, (count, places) in enumerate(zip(counts[0, 0].tolist(), indices[0, 0].tolist(), strict=True)):
        for block in places[:count]:
            block_counts[row, block] += 1
    assert block_counts.max() <= 1
    return block_counts.bool()


def test_block_masks_of_documents():
    """No block is missed, none is called whole that is not, and none is visited in vain."""
    rng = random.Random(0)
    windowed = 0
    for run in range(150):
        lengths = [rng.choice([1, 5, 100, 127, 128, 129, 256, 300, 700]) for _ in range(rng.randint(1, 7))]
        before = [rng.choice([0, 0, 7, 128, 200]) * (run % 2) for _ in lengths]
        window = rng.choice([0, 0, 1, 64, 128, 129, 200, 1000])
        sizes = total, total_keys = sum(lengths), sum(lengths) + sum(before)
        keys = boundaries([x + y for x, y in zip(lengths, before, strict=True)])
        further_args = (keys, total_keys) if run % 2 else ()
        mask = document_block_mask(boundaries(lengths), total, window, *further_args)
        expected = seen(lengths, before, window)
        assert torch.equal(mask.mask_mod(None, None, torch.arange(total)[:, None], torch.arange(total_keys)), expected)
        count, count_keys = (-(-size // BLOCK) for size in sizes)
        padded = torch.zeros(count * BLOCK, count_keys * BLOCK)
        padded[:total, :total_keys] = expected
        pairs = padded.view(count, BLOCK, count_keys, BLOCK).sum((1, 3))
        real = (total - torch.arange(count) * BLOCK).clamp(max=BLOCK)
        partial = blocks(mask.kv_num_blocks, mask.kv_indices)
        full_blocks = blocks(mask.full_kv_num_blocks, mask.full_kv_indices)
        assert not (partial & full_blocks).any()
        visited = partial | full_blocks
        assert visited[pairs > 0].all()
        if not (window and any(before)):  # keys before the window of a later document of the block are visited in vain
            assert not visited[pairs == 0].any()
        real_keys = (total_keys - torch.arange(count_keys) * BLOCK).clamp(max=BLOCK)
        assert (pairs[full_blocks] == (real[:, None] * real_keys)[full_blocks]).all()
        windowed += bool(window) and bool(full_blocks.any())
    assert windowed > 10


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_flex_attention_over_documents(window, softcap, sinks, monkeypatch):
    """The path of CUDA, forward (flex attention has no backward pass on the CPU), against that of the CPU."""
    torch.manual_seed(0)
    lengths = [100, 1, 150, 49]
    q, k, v = (torch.randn(2, 150, heads, 16) for heads in (4, 2, 2))
    scores = torch.randn(4) if sinks else None
    expected = document_attention(
        *(t.flatten(0, 1) for t in (q, k, v)), boundaries(lengths), window, softcap, scores
    ).view(q.shape)
    documents = Boundaries(boundaries(lengths), 512)
    shared = Documents.from_lengths(lengths, DEVICE, prefixes=[-1, 0, 0, -1])
    options = {"window": window or None, "softcap": softcap or None, "sinks": scores}
    goes_on = attention(q, k, v, documents=shared, **options)
    monkeypatch.setattr(attention_kernels, "choose_kernel", lambda *_, **__: Kernel.FLEX)
    with torch.no_grad():
        torch.testing.assert_close(attention(q, k, v, documents=shared, **options), goes_on, atol=2e-6, rtol=0)
        of_documents = Boundaries.of(shared, block_masks=[window])
        torch.testing.assert_close(attention(q, k, v, documents=of_documents, **options), goes_on, atol=2e-6, rtol=0)
        alone = attention(q, k, v, documents=documents, **options)
        documents.block_masks[window] = document_block_mask(documents.cu_seqlens, 300, window)
        result = attention(q, k, v, documents=documents, **options)
    torch.testing.assert_close(alone, expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(result, alone, atol=0, rtol=0)


@pytest.mark.parametrize("kernel", [Kernel.VARLEN, Kernel.FLEX, Kernel.PER_DOCUMENT])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("lengths", [(4, 7), (5, 8)])
def test_documents_that_do_not_cover_the_batch_are_refused_before_any_kernel(lengths, is_causal, kernel, monkeypatch):
    monkeypatch.setattr(attention_kernels, "choose_kernel", lambda *_, **__: kernel)
    q = torch.randn(2, 6, 4, 16)
    k = torch.randn(2, 6, 2, 16)
    short_or_long = Documents.from_lengths(lengths, DEVICE)
    for documents in (short_or_long, Boundaries.of(short_or_long)):
        with pytest.raises(ValueError, match=f"cover {sum(lengths)} positions, the batch has 12: their lengths must"):
            attention(q, k, k, documents=documents, is_causal=is_causal)


@pytest.mark.parametrize(
    ("dtype", "kind", "kernel"),
    [
        (torch.bfloat16, {}, Kernel.VARLEN),
        (torch.bfloat16, {"window": 4096}, Kernel.VARLEN),
        (torch.bfloat16, {"window": 128, "sinks": True}, Kernel.FLEX),
        (torch.bfloat16, {"softcap": 50.0, "window": 4096}, Kernel.FLEX),
        (torch.bfloat16, {"head_dim": 512}, Kernel.FLEX),
        (torch.float32, {}, Kernel.FLEX),
        (torch.float32, {"head_dim": 16}, Kernel.FLEX),
    ],
)
def test_no_kind_of_layer_falls_back_to_loops_on_cuda(dtype, kind, kernel):
    assert choose_kernel(CUDA, dtype, **kind) is kernel
    assert attention_backend(CUDA, dtype, documents=True, **kind) == kernel.value
    assert choose_kernel(CPU, dtype, **kind) is Kernel.PER_DOCUMENT


def test_heads_that_flex_attention_cannot_take_go_document_by_document():
    assert choose_kernel(CUDA, torch.float32, head_dim=8) is Kernel.PER_DOCUMENT


@pytest.mark.parametrize(
    ("card", "dtype", "kind", "kernel", "blocks"),
    [
        (RTX_4090, torch.bfloat16, {}, Kernel.VARLEN, None),
        (RTX_4090, torch.bfloat16, {"softcap": 50.0}, Kernel.FLEX, None),
        (RTX_4090, torch.bfloat16, {"softcap": 50.0, "head_dim": 256}, Kernel.FLEX, 32),
        (RTX_4090, torch.bfloat16, {"head_dim": 512}, Kernel.FLEX, 16),
        (RTX_4090, torch.float32, {"head_dim": 256}, Kernel.FLEX, 16),
        (RTX_4090, torch.float32, {"head_dim": 512}, Kernel.PER_DOCUMENT, 0),
        (A100, torch.bfloat16, {"softcap": 50.0, "head_dim": 256}, Kernel.FLEX, None),
        (A100, torch.float32, {"head_dim": 512}, Kernel.FLEX, None),
        (T4, torch.float16, {"head_dim": 64}, Kernel.FLEX, None),
        (T4, torch.float16, {}, Kernel.FLEX, 32),
        (T4, torch.float16, {"head_dim": 512}, Kernel.PER_DOCUMENT, 0),
    ],
)
def test_a_card_runs_what_its_shared_memory_holds(card, dtype, kind, kernel, blocks, monkeypatch):
    monkeypatch.setitem(optional._CARDS, CUDA, card)
    assert choose_kernel(CUDA, dtype, **kind) is kernel
    assert flex_blocks(card, kind.get("head_dim", 128), dtype.itemsize) == blocks
    backend = attention_backend(CUDA, dtype, documents=True, **kind)
    assert backend.startswith(kernel.value)
    assert (f"in blocks of {blocks}" in backend) == (kernel is Kernel.FLEX and blocks is not None)


@pytest.mark.parametrize(
    ("options", "kernel"),
    [
        ({"dropout": True}, Kernel.PER_DOCUMENT),
        ({"is_causal": False}, Kernel.VARLEN),
        ({"sees": Visibility.ROWS}, Kernel.SDPA),
        ({"sees": Visibility.ROWS, "softcap": 30.0}, Kernel.SCORES),
        ({"sees": Visibility.MASK, "dropout": True}, Kernel.SDPA),
        ({"sees": Visibility.MASK, "sinks": True}, Kernel.SCORES),
        ({"sees": Visibility.BLOCK_MASK, "softcap": 30.0, "window": 8}, Kernel.BLOCK_MASK),
        ({"sees": Visibility.TILES, "dropout": True}, Kernel.TILES),
    ],
)
def test_the_first_row_that_computes_all_features_runs_them(options, kernel):
    assert choose_kernel(CUDA, torch.bfloat16, **options) is kernel


@pytest.mark.parametrize("options", [{"window": 8, "sees": Visibility.ROWS}, {"sinks": True, "sees": Visibility.TILES}])
def test_features_that_no_kernel_computes_together_are_refused(options):
    with pytest.raises(ValueError, match=r"No kernel computes attention over .*: give documents or a bool mask"):
        choose_kernel(CUDA, torch.bfloat16, **options)


def test_the_table_of_attention_names_what_every_kernel_computes():
    lines = describe_attention(CUDA)
    assert lines[1] == (
        "documents: flex attention with a block mask of the documents; computes windows, soft caps, sinks"
    )
    assert lines[-2] == "causal rows with a window, a soft cap, sinks or chunks run as documents"
    assert lines[-1].startswith("cuDNN's kernels are not used")
    assert not any("varlen" in line for line in describe_attention(CPU))


def test_the_doctor_says_what_a_card_cannot_run(monkeypatch):
    monkeypatch.setitem(optional._CARDS, CUDA, T4)
    assert attention_limits(CUDA) == (
        "64 KiB of shared memory; no flash attention, flex attention instead, "
        "flex attention in blocks of 32 for heads of 128, flex attention in blocks of 16 for heads of 256, "
        "documents one by one for heads of 512 that flash attention does not take"
    )


def test_the_host_waits_for_nothing():
    with Counting() as counting:
        mask = document_block_mask(boundaries([100, 300]), 400, 128)
    assert isinstance(mask, BlockMask)
    assert counting.counts
    assert counting.syncs() == {}
    with Counting() as counting:
        torch.ones(1).item()
    assert counting.syncs(), "the counter must see a host sync"
