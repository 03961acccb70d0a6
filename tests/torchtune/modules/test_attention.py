"""Attention against the formula in float64, and documents that do not see each other."""

import math

import pytest
import torch
from torch import Tensor, nn

from tests.devices import DEVICE
from torchtune.data import Documents
from torchtune.modules import (
    FlashAttentionKernel,
    MultiHeadAttention,
    RMSNorm,
    attention,
    create_block_causal_mask,
)
from torchtune.modules.conversion import ConversionError
from torchtune.modules.kernels import Card, optional
from torchtune.modules.kernels import documents as document_kernels
from torchtune.modules.kernels.documents import Boundaries
from torchtune.supervision._flops import FlopCount
from torchtune.utils import simulated

# Lengths of the documents of a batch; the last batch has neighbors of equal length.
_LENGTHS = [(7,), (3, 4), (2, 2, 2, 1, 5, 5), (1, 1, 9, 1), (130, 70, 200, 200)]


def _qkv(length: int, n: int = 6, n_kv: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries ``[1, s, n, 8]``, keys and values ``[1, s, n_kv, 8]``."""
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for heads in (n, n_kv, n_kv):
        tensor = torch.randn((1, length, heads, 8), generator=generator)
        tensors.append(tensor.to(dtype).requires_grad_())
    return tuple(tensors)


def _scores_and_values(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Masked scores ``[b, n, s, s]`` and values ``[b, n, s, d]`` in float64; keys are repeated for their queries."""
    q, k, v = (tensor.double().transpose(1, 2) for tensor in (q, k, v))  # [b, n, s, d]
    queries_per_key = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(queries_per_key, dim=1)
    v = v.repeat_interleave(queries_per_key, dim=1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~mask, -math.inf), v


def _formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention in float64, with the mask ``[s, s]`` written out."""
    scores, v = _scores_and_values(q, k, v, mask)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def _formula_with_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
    """A sink is a key that every query of its head sees, with a score of its own and a value of zero."""
    scores, v = _scores_and_values(q, k, v, mask)
    weights = scores.exp()
    total = weights.sum(-1, keepdim=True) + sinks.double().exp()[:, None, None]
    return (weights / total @ v).transpose(1, 2)


def _assert_gradients_close(
    gradients: tuple[Tensor, ...], expected: tuple[Tensor, ...], relative: float, absolute: float = 0.0
) -> None:
    """Compare norms: single elements of a gradient may be close to zero."""
    for gradient, expected_gradient in zip(gradients, expected, strict=True):
        assert (gradient - expected_gradient).norm() <= relative * expected_gradient.norm() + absolute


@pytest.mark.parametrize("n_kv", [2, 6])
@pytest.mark.parametrize("lengths", _LENGTHS)
def test_documents_equal_the_masked_formula(lengths, n_kv):
    q, k, v = _qkv(sum(lengths), n_kv=n_kv)
    mask = create_block_causal_mask([torch.tensor(lengths)])[0]
    expected = _formula(q, k, v, mask)
    out = attention(q, k, v, documents=Documents.from_lengths(lengths, DEVICE))
    assert (out - expected).abs().max() < 1e-5

    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((out * weights).sum(), (q, k, v))
    expected_gradients = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    _assert_gradients_close(gradients, expected_gradients, relative=1e-5, absolute=1e-6)

    masked = attention(q, k, v, mask=mask[None])
    assert (masked - expected).abs().max() < 1e-5


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("lengths", [(8, 12), (90, 150), (1100, 5)])
def test_documents_in_bfloat16_within_rounding(lengths, in_blocks, monkeypatch):
    """The backward pass of short documents runs in blocks on some CPUs; otherwise, torch's kernel computes it."""
    monkeypatch.setattr(document_kernels, "has_bfloat16_vectors_only", lambda: in_blocks)
    q, k, v = _qkv(sum(lengths), dtype=torch.bfloat16)
    out = attention(q, k, v, documents=Documents.from_lengths(lengths, DEVICE))
    expected = _formula(q, k, v, create_block_causal_mask([torch.tensor(lengths)])[0])
    assert out.dtype == torch.bfloat16
    assert (out - expected).abs().max() < 0.03
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    expected_gradients = torch.autograd.grad(expected.sum(), (q, k, v))
    _assert_gradients_close(gradients, expected_gradients, relative=0.01)


def _seen_with_prefixes(documents: Documents, window: int | None) -> Tensor:
    """Which keys a query sees, bool ``[t, t]``, by the definition, document by document."""
    starts = documents.cu_seqlens.tolist()
    positions = documents.positions()
    seen = torch.zeros(starts[-1], starts[-1], dtype=torch.bool)
    for index, prefix in enumerate(documents.prefixes):
        document = slice(starts[index], starts[index + 1])
        seen[document, document] = True
        if prefix >= 0:
            seen[document, starts[prefix] : starts[prefix + 1]] = True
    distance = positions[:, None] - positions  # a document goes on where its prefix ends
    seen &= distance >= 0
    if window is not None:
        seen &= distance < window
    return seen


@pytest.mark.parametrize("window", [None, 4, 100])
@pytest.mark.parametrize(
    ("lengths", "prefixes"),
    [((5, 2, 3, 4), (-1, 0, 0, -1)), ((2, 6, 3, 1, 1), (1, -1, -1, 2, 2)), ((170, 140, 5, 5, 9), (-1, 0, 0, 0, -1))],
)
def test_documents_that_share_a_prefix_equal_the_formula(lengths, prefixes, window):
    documents = Documents.from_lengths(lengths, DEVICE, prefixes=prefixes)
    q, k, v = _qkv(sum(lengths))
    sinks = torch.linspace(-1.0, 2.0, 6).requires_grad_()  # a head each
    seen = _seen_with_prefixes(documents, window)
    weights = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))

    def compare(out, expected, inputs):
        assert (out - expected).abs().max() < 1e-5
        gradients = torch.autograd.grad((out * weights).sum(), inputs)
        expected_gradients = torch.autograd.grad((expected * weights).sum(), inputs)
        _assert_gradients_close(gradients, expected_gradients, relative=1e-5, absolute=1e-6)

    out = attention(q, k, v, documents=documents, window=window)
    compare(out, _formula(q, k, v, seen), (q, k, v))
    out = attention(q, k, v, documents=documents, window=window, sinks=sinks)
    compare(out, _formula_with_sinks(q, k, v, seen, sinks), (q, k, v, sinks))


def test_gradients_of_a_shared_prefix_do_not_round_at_every_document():
    """300 documents go on from one token, and each attends to it by half; in bfloat16 a sum of halves stops at 128."""
    documents = Documents.from_lengths([1] * 301, DEVICE, prefixes=[-1] + [0] * 300)
    q = torch.zeros(1, 301, 1, 8, dtype=torch.bfloat16)
    k = torch.zeros_like(q)
    v = torch.zeros_like(q, requires_grad=True)
    attention(q, k, v, documents=documents).sum().backward()
    assert v.grad[0, 0, 0, 0].item() == pytest.approx(1 + 300 / 2, rel=2**-8)
    with pytest.raises(ValueError, match="share a prefix has no dropout"):
        attention(q, k, v, documents=documents, dropout_p=0.1)


def test_invalid_prefixes_of_documents_are_refused():
    with pytest.raises(ValueError, match="itself goes on from another"):
        Documents.from_lengths([1, 2, 3], DEVICE, prefixes=[-1, 0, 1])
    with pytest.raises(ValueError, match="do not name documents of 2"):
        Documents.from_lengths([1, 2], DEVICE, prefixes=[-1, 2])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")  # it is, on CUDA
def test_sinks_with_a_block_mask_equal_the_formula():
    from torch.nn.attention.flex_attention import create_block_mask

    from torchtune.compat import causal_mask_flex

    q, k, v = (t.detach() for t in _qkv(20))
    sinks = torch.linspace(-1.0, 2.0, 6)
    mask = create_block_mask(causal_mask_flex, 1, None, 20, 20, device=DEVICE)
    expected = _formula_with_sinks(q, k, v, torch.ones(20, 20, dtype=torch.bool).tril(), sinks)
    assert (attention(q, k, v, mask=mask, sinks=sinks) - expected).abs().max() < 1e-5
    assert (attention(q, k, v, sinks=sinks) - expected).abs().max() < 1e-5
    with pytest.raises(ValueError, match="or sinks has no dropout"):
        attention(q, k, v, sinks=sinks, dropout_p=0.1)


def test_documents_cover_the_flattened_rows():
    """Documents cover the positions of all rows, one row after the other, so that one may run over a row's end."""
    q, k, v = _qkv(12)
    mask = create_block_causal_mask([torch.tensor([4, 5, 3])])[0]
    expected = _formula(q, k, v, mask)
    rows = (tensor.view(2, 6, *tensor.shape[2:]) for tensor in (q, k, v))
    out = attention(*rows, documents=Documents.from_lengths((4, 5, 3), DEVICE))
    assert (out.view(1, 12, 6, 8) - expected).abs().max() < 1e-5


def test_without_boundaries_rows_are_causal():
    q, k, v = (tensor.view(2, 6, *tensor.shape[2:]) for tensor in _qkv(12))
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    assert (attention(q, k, v) - _formula(q, k, v, causal)).abs().max() < 1e-5
    everything = torch.ones(6, 6, dtype=torch.bool)
    assert (attention(q, k, v, is_causal=False) - _formula(q, k, v, everything)).abs().max() < 1e-5


def test_dropout_drops_within_documents_only():
    q, k, v = _qkv(400)
    documents = Documents.from_lengths((200, 200), DEVICE)
    torch.manual_seed(0)
    out = attention(q, k, v, documents=documents, dropout_p=0.5)
    exact = attention(q, k, v, documents=documents)
    assert not torch.allclose(out, exact)
    (gradient,) = torch.autograd.grad(out[:, :200].square().sum(), k)  # of the first document alone
    assert gradient[:, :200].any()
    assert not gradient[:, 200:].any()


def test_arguments_of_attention_that_contradict_each_other_are_refused():
    q, k, v = _qkv(6)
    with pytest.raises(ValueError, match="cover 5 positions, the batch has 6"):
        attention(q, k, v, documents=Documents.from_lengths((2, 3), DEVICE))
    with pytest.raises(ValueError, match="either documents or a mask"):
        attention(q, k, v, documents=Documents.from_lengths((6,), DEVICE), mask=torch.ones(1, 6, 6, dtype=torch.bool))


def _layer(**options: object) -> MultiHeadAttention:
    """A small layer; ``options`` replace its arguments."""
    torch.manual_seed(0)
    linear = torch.nn.Linear
    sizes = {"embed_dim": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
    projections = {
        "q_proj": linear(16, 16),
        "k_proj": linear(16, 8),
        "v_proj": linear(16, 8),
        "output_proj": linear(16, 16),
    }
    return MultiHeadAttention(**{**sizes, **projections, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_heads": 3}, "multiple of num_kv_heads"),
        ({"attn_dropout": 1.5}, "attn_dropout"),
        ({"q_norm": RMSNorm(4)}, "q_norm and k_norm"),
    ],
)
def test_layer_refuses_numbers_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        _layer(**options)


def test_newer_flash_attention_is_refused_where_it_would_do_nothing(monkeypatch):
    monkeypatch.setitem(optional._CARDS, torch.device("cuda"), Card((9, 0), 227 * 2**10))

    def model(dtype: torch.dtype = torch.bfloat16, **options: object) -> nn.Module:
        return nn.ModuleDict({"attn": _layer(**options)}).to(dtype)

    with pytest.raises(ConversionError, match="kernel is 'FA2', it must be FA3 or FA4"):
        FlashAttentionKernel("FA2")
    for unsupported in (model(sinks=True), model(softcap=30.0), model(torch.float32)):
        with pytest.raises(ConversionError, match="runs no layer"):
            FlashAttentionKernel("FA3").convert(unsupported)
    with simulated():
        assert FlashAttentionKernel("FA4").convert(model()).replaced == ["attn"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_newer_flash_attention_needs_cuda():
    with pytest.raises(ConversionError, match="FA3 runs on CUDA, and there is none"):
        FlashAttentionKernel("FA3").convert(nn.ModuleDict({"attn": _layer()}).bfloat16())


@pytest.mark.parametrize("size", [4, 5, 6])
def test_chunks_of_documents_that_share_their_beginning_equal_those_of_whole_texts(size):
    lengths = (6, 3, 9)  # a prefix and two answers
    tensors = []
    for heads in (4, 2, 1):
        tensors.append(torch.randn(1, 18, heads, 8, generator=torch.Generator().manual_seed(heads)))
    q, k, v = tensors
    v = v.expand(-1, -1, 2, -1)  # one head for both, without a copy
    documents = Documents.from_lengths(lengths, DEVICE, prefixes=(-1, 0, 0))
    chunked = attention(q, k, v, documents=documents, chunk=size)

    splits = (q.split(lengths, 1), k.split(lengths, 1), v.split(lengths, 1))
    prefix, *answers = zip(*splits, strict=True)  # (q, k, v) of each document
    expected = [attention(*prefix, chunk=size)]
    for answer in answers:
        text = [torch.cat(pair, 1) for pair in zip(prefix, answer, strict=True)]
        out = attention(*text, chunk=size)
        expected.append(out[:, 6:])  # without the prefix
    torch.testing.assert_close(chunked, torch.cat(expected, 1), atol=1e-5, rtol=1e-5)

    last = attention(q[:, -1:], k, v, chunk=size)
    torch.testing.assert_close(last, attention(q, k, v, chunk=size)[:, -1:], atol=1e-5, rtol=1e-5)

    # A position attends to those of its chunk that are not after it.
    pairs = 0
    for length in lengths:
        pairs += sum(position % size + 1 for position in range(length))
    assert FlopCount(0.0, 0.0, {}, {size: 1.0}).attention(lengths) == pairs


def test_boundaries_without_chunks_are_refused_by_layers_with_chunks():
    q = torch.randn(1, 8, 2, 8)
    with pytest.raises(ValueError, match="where chunks of 4 begin: give the documents"):
        attention(q, q, q, documents=Boundaries.of(Documents.from_lengths((8,), DEVICE)), chunk=4)
    with pytest.raises(ValueError, match="chunks, a soft cap or sinks has no dropout"):
        attention(q, q, q, dropout_p=0.1, chunk=4)


@pytest.mark.parametrize("is_training", [True, False])
def test_blocks_of_image_tokens_have_the_dropout_of_attention_weights(is_training):
    layer = _layer(attn_dropout=0.5).train(is_training)
    x = torch.randn(1, 6, 16)
    outputs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        outputs.append(layer(x, blocks=[(0, 2, 5)])[0, 2:5])
    assert torch.equal(*outputs) != is_training


def test_blocks_of_image_tokens_in_every_row_see_the_keys_of_a_cache():
    """A cache has keys for more positions than the input has."""
    layer = _layer()
    x = torch.randn(2, 6, 16)
    blocks = [(0, 2, 5), (6, 7, 10)]  # in positions of the flattened batch
    expected = layer(x, blocks=blocks)
    layer.setup_cache(2, torch.float32, 9)
    mask = torch.ones(6, 9, dtype=torch.bool).tril().expand(2, -1, -1)
    torch.testing.assert_close(layer(x, mask=mask, blocks=blocks), expected)


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"sinks": torch.zeros(6)}])
def test_several_causal_queries_and_more_keys_need_a_mask(options):
    q, k, v = _qkv(5)
    with pytest.raises(ValueError, match="of 3 queries to 5 keys with a soft cap or sinks needs a mask"):
        attention(q[:, -3:], k, v, **options)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()[None, -3:]
    expected = attention(q, k, v, **options)[:, -3:]
    torch.testing.assert_close(attention(q[:, -3:], k, v, mask=mask, **options), expected, atol=1e-5, rtol=1e-5)
