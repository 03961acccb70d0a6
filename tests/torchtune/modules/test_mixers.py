"""Mixers against the recurrences that they are, position by position in float64."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.devices import DEVICE
from torchtune.data import Documents
from torchtune.models import Description, build
from torchtune.models._mixers import DeltaNetMixer
from torchtune.modules.kernels.documents import Boundaries
from torchtune.modules.mixers import GatedDeltaNet, Mamba2, RecurrentMixer, ShortConv, _chunks
from torchtune.modules.mixers._gated_delta_net import _DeltaChunks, gated_delta_rule
from torchtune.modules.mixers._mamba2 import _StateSpaceChunks, state_space
from torchtune.modules.mixers._short_conv import DepthwiseWeight, causal_conv
from torchtune.modules.peft import LoRA
from torchtune.training.parallel._parallel_dims import ParallelDims, ParallelDimsError
from torchtune.training.parallel._parallelize import check_parallelizable
from torchtune.utils import simulated


def _inputs(rows: int, positions: int) -> list[Tensor]:
    """Queries and keys [b, s, 2, 6], values [b, s, 4, 5], logarithms of decays and write strengths [b, s, 4]."""
    torch.manual_seed(0)
    q = torch.randn(rows, positions, 2, 6)
    k = torch.randn(rows, positions, 2, 6)
    v = torch.randn(rows, positions, 4, 5)
    beta = torch.rand(rows, positions, 4)
    g = -torch.rand(rows, positions, 4)
    return [q, k, v, g, beta]


def _position_by_position(
    rule: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, resets: Tensor
) -> Tensor:
    """The definition: at each position the state decays, is written and is read.

    The delta rule writes the difference between the value and what the state has for the key; a state-space model
    writes the value.
    """
    is_delta_rule = rule is gated_delta_rule
    if is_delta_rule:
        q = F.normalize(q, dim=-1) * 6**-0.5
        k = F.normalize(k, dim=-1)
    q = q.repeat_interleave(2, dim=2)  # two value heads share a key head
    k = k.repeat_interleave(2, dim=2)
    state = torch.zeros(q.shape[0], 4, 6, 5, dtype=q.dtype)  # [b, n, k, v]
    out = []
    for t in range(q.shape[1]):
        decay = g[:, t].exp() * ~resets[:, t, None]  # a document begins with an empty state
        state = state * decay[..., None, None]
        written = v[:, t]
        if is_delta_rule:
            written = written - torch.einsum("nhkv,nhk->nhv", state, k[:, t])
        state = state + torch.einsum("nhk,nhv->nhkv", k[:, t], written * beta[:, t, :, None])
        out.append(torch.einsum("nhkv,nhk->nhv", state, q[:, t]))
    return torch.stack(out, dim=1)


def _assert_within_rounding(out: Tensor, expected: Tensor) -> None:
    """Of float32, relative to the largest number."""
    assert (out - expected).abs().max() < 2e-6 * max(1, expected.abs().max())


def _resets(positions: int) -> Tensor:
    """Documents that begin within chunks of 64, at their first and at their last position, and one after another."""
    resets = torch.zeros(2, positions, dtype=torch.bool)
    resets[:, 0] = True
    resets[0, [20, 21, 63, 100]] = True
    resets[1, [64, 127, 128]] = True
    return resets


RULES = pytest.mark.parametrize("rule", [gated_delta_rule, state_space])


@pytest.fixture(params=["cpu", "as on a GPU"])
def decays(request) -> Iterator[None]:
    """Compute decays by cumulative sums, as on a CPU, or by a product, which is fewer launches."""
    with nullcontext() if request.param == "cpu" else simulated():
        yield


@RULES
@pytest.mark.parametrize("chunks_per_group", [1, 2, 3])  # the last chunk alone, alone, and filled up
@pytest.mark.usefixtures("decays")
def test_a_rule_and_its_gradients_equal_the_recurrence(rule, chunks_per_group, monkeypatch):
    monkeypatch.setattr(_chunks, "_chunks_per_group", lambda *_: chunks_per_group)
    inputs = _inputs(2, 150)
    resets = _resets(150)
    weight = torch.randn(2, 150, 4, 5)
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out, _ = rule(*leaves, resets)
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    expected = _position_by_position(rule, *exact, resets)
    _assert_within_rounding(out, expected)
    gradients = torch.autograd.grad((out * weight).sum(), leaves)
    expected_gradients = torch.autograd.grad((expected * weight).sum(), exact)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert (gradient - expected_gradient).abs().max() < 1e-5 * expected_gradient.abs().max()


@RULES
@pytest.mark.parametrize("positions", [384, 340])
def test_chunks_computed_at_once_equal_chunk_after_chunk(rule, positions, monkeypatch):
    inputs = [tensor.requires_grad_() for tensor in _inputs(2, positions)]
    resets = _resets(positions)
    weight = torch.randn(2, positions, 4, 5)
    results = []
    for chunks_per_group in (1, 100):
        monkeypatch.setattr(_chunks, "_chunks_per_group", lambda *_, count=chunks_per_group: count)
        out, state = rule(*inputs, resets)
        results.append([out, state, *torch.autograd.grad((out * weight).sum(), inputs)])
    torch.testing.assert_close(results[1], results[0], atol=2e-5, rtol=1e-5)


def test_a_group_of_chunks_keeps_within_its_memory():
    """Sequences of any length and number are computed in groups of at most so many elements."""

    def keys_and_values(rows, positions, dim, device):
        k = torch.empty(rows, positions, 2, dim, device=device)
        v = torch.empty(rows, positions, 4, dim, device=device)
        return k, v

    # On "meta", which takes as much as a GPU, 2^24 elements of states; a chunk is in a group whatever it takes.
    k, v = keys_and_values(4, 10**6, 128, "meta")
    assert _chunks._chunks_per_group(_DeltaChunks, k, v) * 4 * 4 * 128 * 128 == 2**24
    k, v = keys_and_values(4, 128, 16, "cpu")
    assert _chunks._chunks_per_group(_DeltaChunks, k, v) == 2
    k, v = keys_and_values(4, 128, 128, "cpu")
    assert _chunks._chunks_per_group(_DeltaChunks, k, v) == 1
    # Value heads of Mamba 2 share keys, however large these are.
    k = torch.empty(1, 128, 1, 256, device="cpu")
    v = torch.empty(1, 128, 8, 8, device="cpu")
    assert _chunks._chunks_per_group(_StateSpaceChunks, k, v) * 8 * 64 * 64 == 2**17
    assert _chunks._chunks_per_group(_DeltaChunks, k, v) * 8 * 64 * 256 == 2**17


@RULES
def test_decoding_goes_on_from_a_state(rule):
    inputs = _inputs(2, 90)
    resets = _resets(150)[:, :90]
    full, last_state = rule(*inputs, resets)
    with torch.no_grad():
        prompt = [tensor[:, :70] for tensor in inputs]
        out, state = rule(*prompt, resets[:, :70])
        outputs = [out]
        for t in range(70, 90):
            position = [tensor[:, t : t + 1] for tensor in inputs]
            out, state = rule(*position, resets[:, t : t + 1], state)
            outputs.append(out)
    _assert_within_rounding(torch.cat(outputs, dim=1), full)
    _assert_within_rounding(state, last_state)


@RULES
@pytest.mark.usefixtures("decays")
def test_strong_decay_loses_no_digits(rule):
    """The difference of two cumulative sums of decays: the sums are large, and it may be small."""
    q, k, v, g, beta = _inputs(1, 64)
    g = g * torch.where(torch.arange(64) % 3 == 0, 300.0, 0.1)[None, :, None]
    resets = torch.zeros(1, 64, dtype=torch.bool)
    out, _ = rule(q, k, v, g, beta, resets)
    exact = [tensor.double() for tensor in (q, k, v, g, beta)]
    _assert_within_rounding(out, _position_by_position(rule, *exact, resets))


@RULES
def test_little_is_kept_for_the_backward_pass(rule):
    """The inputs and one state for each chunk; not the matrices between positions of a chunk."""
    num_saved = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal num_saved
        num_saved += tensor.numel()
        return tensor

    inputs = [tensor.requires_grad_() for tensor in _inputs(1, 256)]
    resets = torch.zeros(1, 256, dtype=torch.bool)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        rule(*inputs, resets)
    num_inputs = sum(tensor.numel() for tensor in inputs) + resets.numel()
    num_states = (256 // 64 + 1) * 4 * 6 * 5
    assert num_saved <= num_inputs + num_states


def _mixer(kind: str) -> nn.Module:
    """A mixer of width 8: "conv", "mamba", "mamba scaled", "delta" or "fused"."""
    common = {"embed_dim": 8, "conv_taps": 4, "norm_eps": 1e-6}
    if kind == "conv":
        return ShortConv(embed_dim=8, conv_taps=3)
    if kind.startswith("mamba"):
        options = {}
        if kind == "mamba scaled":
            options = {"has_norm": False, "scales": (0.5, 0.8, 1.5, 1.2, 0.7), "dt_min": 0.02}
        return Mamba2(num_heads=4, head_dim=5, num_groups=2, state_dim=6, **common, **options)
    sizes = {"num_key_heads": 2, "num_value_heads": 4, "key_dim": 6, "value_dim": 5}
    return GatedDeltaNet(fused=kind == "fused", **sizes, **common)


def _mamba_formula(mixer: Mamba2, parameters: dict[str, Tensor], x: Tensor, lengths: list[int]) -> Tensor:
    """Mamba 2 in operators of torch, document by document and position by position, with its parameters by name."""
    widths = torch.tensor([20, 20, 12, 12, 4])  # of z, x, b, c and dt
    scales = torch.repeat_interleave(torch.tensor(mixer.scales, dtype=x.dtype), widths)
    outputs = []
    for document in x.split(lengths, dim=1):
        projected = document @ parameters["in_proj.weight"].T * scales
        z, mixed, dt = projected.split([20, 44, 4], dim=-1)  # mixed: x, b and c
        padded = F.pad(mixed.transpose(1, 2), (3, 0))
        convolved = F.conv1d(padded, parameters["conv.weight"], parameters["conv.bias"], groups=44).transpose(1, 2)
        values, b, c = F.silu(convolved).split([20, 12, 12], dim=-1)
        values = values.unflatten(-1, (4, -1))  # [b, s, n, v]
        b = b.unflatten(-1, (2, -1))  # [b, s, groups, k]
        c = c.unflatten(-1, (2, -1))
        dt = F.softplus(dt + parameters["dt_bias"]).clamp(*mixer.dt_limits)
        resets = torch.zeros(document.shape[:2], dtype=torch.bool)
        out = _position_by_position(state_space, c, b, values, -parameters["a_log"].exp() * dt, dt, resets)
        out = (out + values * parameters["skip"][:, None]).flatten(-2) * F.silu(z)
        if mixer.norm is not None:  # a norm of each group
            groups = out.unflatten(-1, (2, -1))
            groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + 1e-6)
            out = groups.flatten(-2) * parameters["norm.scale"]
        outputs.append(out @ parameters["output_proj.weight"].T)
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("kind", ["mamba", "mamba scaled"])
def test_mamba_2_and_its_gradients_equal_the_formula(kind):
    torch.manual_seed(0)
    mixer = _mixer(kind)
    lengths = [2, 70, 1, 67]
    x = torch.randn(1, 140, 8, requires_grad=True)
    out = mixer(x, input_pos=torch.cat([torch.arange(length) for length in lengths]))
    exact = {}
    for name, parameter in mixer.named_parameters():
        exact[name] = parameter.detach().double().requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    expected = _mamba_formula(mixer, exact, exact_x, lengths)
    assert (out - expected).abs().max() < 1e-6
    weight = torch.randn_like(out)
    gradients = torch.autograd.grad((out * weight).sum(), [x, *mixer.parameters()])
    expected_gradients = torch.autograd.grad((expected * weight).sum(), [exact_x, *exact.values()])
    for name, gradient, expected_gradient in zip(["x", *exact], gradients, expected_gradients, strict=True):
        assert (gradient - expected_gradient).abs().max() < 2e-5 * expected_gradient.abs().max(), name


@pytest.mark.parametrize("kind", ["delta", "mamba", "mamba scaled"])
def test_a_layer_compiles_without_graph_breaks(kind):
    """Operators say what they return."""
    torch.manual_seed(0)
    mixer = _mixer(kind)
    x = torch.randn(2, 70, 8, requires_grad=True)
    positions = torch.cat([torch.arange(40), torch.arange(30)])[None]
    compiled = torch.compile(mixer, backend="aot_eager", fullgraph=True)
    out = compiled(x, input_pos=positions)
    expected = mixer(x, input_pos=positions)
    assert (out - expected).abs().max() < 1e-6
    inputs = (x, *mixer.parameters())
    gradients = torch.autograd.grad(out.sum(), inputs)
    expected_gradients = torch.autograd.grad(expected.sum(), inputs)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert (gradient - expected_gradient).abs().max() < 1e-5 * max(expected_gradient.abs().max(), 1)


@pytest.fixture
def decoder() -> nn.Module:
    """A decoder whose first layer has a state."""
    mixer = DeltaNetMixer(num_key_heads=1, num_value_heads=2, key_dim=4, value_dim=4)
    sizes = {"vocab_size": 11, "num_layers": 2, "embed_dim": 8, "intermediate_dim": 8, "max_seq_len": 8}
    return build(Description(**sizes, num_heads=2, num_kv_heads=2, mixer=mixer, mixer_layers=(0,)))


def test_a_mask_without_positions_is_refused_by_layers_with_a_state(decoder):
    tokens = torch.zeros(1, 4, dtype=torch.long)
    mask = torch.ones(1, 4, 4, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="A mask does not say where the state of linear attention"):
        decoder(tokens, mask=mask)
    decoder(tokens, mask=mask, input_pos=torch.arange(4))


def test_heads_that_context_parallel_ranks_cannot_share_are_refused(decoder):
    check_parallelizable(decoder, ParallelDims(cp=2, world_size=2))
    decoder.layers[1].attn = _mixer("mamba")  # without attention: its heads would be refused first
    message = "context_parallel_dim is 3: it must divide the 2 heads of GatedDeltaNet layers, and divide their 1 key"
    with pytest.raises(ParallelDimsError, match=message):
        check_parallelizable(decoder, ParallelDims(cp=3, world_size=3))
    decoder.layers[0].attn = _mixer("conv")
    with pytest.raises(ParallelDimsError, match="the 4 heads of Mamba2 layers, and divide their 2 groups or be"):
        check_parallelizable(decoder, ParallelDims(cp=8, world_size=8))
    decoder.layers[1].attn = _mixer("conv")
    check_parallelizable(decoder, ParallelDims(cp=8, world_size=8))


def test_a_mixer_that_says_nothing_of_context_parallelism_is_refused(decoder):
    class LocalMixer(ShortConv):
        sharing_obstacle = RecurrentMixer.sharing_obstacle

    decoder.layers[0].attn = LocalMixer(embed_dim=8, conv_taps=3)
    with pytest.raises(
        ParallelDimsError, match="context_parallel_dim is 2: the state of LocalMixer layers is not passed"
    ):
        check_parallelizable(decoder, ParallelDims(cp=2, world_size=2))


def test_lora_of_attention_adapts_the_input_projection(decoder):
    report = LoRA(2, 4, attn_modules=["q_proj"]).convert(decoder)
    assert report.replaced == ["layers.0.attn.qkv_proj", "layers.1.attn.q_proj"]


@pytest.mark.parametrize("kind", ["delta", "fused", "conv", "mamba", "mamba scaled"])
def test_a_cache_continues_padded_prompts(kind):
    torch.manual_seed(0)
    mixer = _mixer(kind)
    x = torch.randn(2, 12, 8)
    positions = torch.stack([torch.arange(12), (torch.arange(12) - 3).clamp(min=0)])  # the second row has 3 of padding
    with torch.no_grad():
        full = mixer(x, input_pos=positions)
        without_padding = mixer(x[1:, 3:])
        assert (full[1, 3:] - without_padding[0]).abs().max() < 1e-6
        mixer.setup_cache(2, torch.float32, max_seq_len=12)
        outputs = [mixer(x[:, :7], input_pos=positions[:, :7])]
        for t in range(7, 12):
            outputs.append(mixer(x[:, t : t + 1], input_pos=positions[:, t : t + 1]))
    assert (torch.cat(outputs, dim=1) - full).abs().max() < 1e-6


@pytest.mark.parametrize("taps", [1, 3, 4])
@pytest.mark.parametrize("lengths", [(5, 1, 2, 3), (1,), (2,)])
def test_convolution_and_its_gradients_stay_within_documents(taps, lengths):
    torch.manual_seed(0)
    x = torch.randn(1, sum(lengths), 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, taps, dtype=torch.float64, requires_grad=True)
    reach = torch.cat([torch.arange(length) for length in lengths])[None]
    documents = []
    for document in x.split(lengths, dim=1):
        padded = F.pad(document.transpose(1, 2), (taps - 1, 0))
        documents.append(F.conv1d(padded, weight[:, None], groups=3).transpose(1, 2))
    expected = torch.cat(documents, dim=1)
    out = causal_conv(x, weight, reach)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    expected_gradients = torch.autograd.grad(expected, [x, weight], grad)
    gradients = torch.autograd.grad(out, [x, weight], grad)  # of the weight, sums in float32
    torch.testing.assert_close(gradients, expected_gradients, atol=1e-5, rtol=1e-5)
    with_frozen_weight = causal_conv(x, weight.detach(), reach)
    (gradient,) = torch.autograd.grad(with_frozen_weight, x, grad)
    torch.testing.assert_close(gradient, expected_gradients[0])


@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("lengths", [(5, 1, 2, 4), (1, 1, 1, 3, 2, 4), (6, 6)])
def test_one_row_with_gaps_equals_taps_within_documents(taps, lengths):
    torch.manual_seed(0)
    documents = Documents.from_lengths(lengths, DEVICE)
    reach = documents.positions().view(2, 6)
    x = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True)
    conv = DepthwiseWeight(3, taps, bias=True).double()
    parameters = [x, conv.weight, conv.bias]
    grad = torch.randn_like(x)

    boundaries = Boundaries.of(documents, gap=3)
    out = conv(x, reach, None, silu=True, documents=boundaries)
    expected = conv(x, reach, None, silu=True)
    torch.testing.assert_close(out, expected)
    gradients = torch.autograd.grad(out, parameters, grad)
    expected_gradients = torch.autograd.grad(expected, parameters, grad)  # of the weight, sums in float32
    torch.testing.assert_close(gradients, expected_gradients, atol=1e-5, rtol=1e-5)

    conv.requires_grad_(False)
    with_frozen_weight = conv(x, reach, None, silu=True, documents=boundaries)
    (gradient,) = torch.autograd.grad(with_frozen_weight, x, grad)
    torch.testing.assert_close(gradient, gradients[0])
