"""Norm, feed-forward, rotary positions, tied output, vocabulary: against their formulas."""

import copy

import pytest
import torch
from torch import nn

from torchtune.models import Description, build
from torchtune.models.llama3_1 import Llama3ScaledRoPE
from torchtune.models.qwen2 import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import (
    FeedForward,
    RMSNorm,
    RotaryPositionalEmbeddings,
    TiedLinear,
    resize_token_embeddings,
    rms_norm,
    swiglu,
)
from torchtune.modules.position_embeddings import apply_rope


def _norm_formula(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale


def test_rms_norm_equals_its_formula_with_gradients():
    torch.manual_seed(0)
    x, scale = torch.randn(3, 5, 16).requires_grad_(), torch.randn(16).requires_grad_()
    wide_x, wide_scale = (t.detach().double().requires_grad_() for t in (x, scale))
    out, expected = rms_norm(x, 1e-5, scale), _norm_formula(wide_x, wide_scale)
    assert (out - expected).abs().max() < 1e-6
    weights = torch.randn(3, 5, 16)
    ours = torch.autograd.grad((out * weights).sum(), (x, scale))
    theirs = torch.autograd.grad((expected * weights).sum(), (wide_x, wide_scale))
    assert all((a - b).abs().max() < 1e-5 for a, b in zip(ours, theirs, strict=True))
    assert (rms_norm(x, 1e-5) - _norm_formula(wide_x, torch.ones(16))).abs().max() < 1e-6


def test_rms_norm_computes_in_float32():
    x = (torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * 300).bfloat16()
    norm = RMSNorm(64, eps=1e-5).bfloat16()
    expected = _norm_formula(x.double(), torch.ones(64))
    out = norm(x)
    assert out.dtype == torch.bfloat16
    assert (out - expected).abs().max() <= expected.abs().max() * 2**-8


def test_compiled_functions_equal_eager_ones():
    torch.manual_seed(0)
    x, up = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 8)
    rope = RotaryPositionalEmbeddings(8)
    cos, sin = rope.cos_sin(torch.arange(3))

    def everything(x: torch.Tensor) -> list[torch.Tensor]:
        rotated = [apply_rope(x, cos, sin, layout) for layout in ("interleaved", "half")]
        return [swiglu(x, up), *rotated]

    compiled = torch.compile(everything, backend="eager", fullgraph=True)
    for eager, other in zip(everything(x), compiled(x), strict=True):
        assert (eager - other).abs().max() < 1e-6
    torch.compiler.reset()


def test_swiglu_equals_its_formula_with_gradients():
    torch.manual_seed(0)
    gate, up = torch.randn(4, 6).double().requires_grad_(), torch.randn(4, 6).double().requires_grad_()
    assert torch.autograd.gradcheck(swiglu, (gate, up))
    assert torch.allclose(swiglu(gate, up), gate * gate.sigmoid() * up)
    assert torch.autograd.grad(swiglu(gate, up.detach()).sum(), gate)[0].shape == gate.shape


def test_feed_forward():
    torch.manual_seed(0)
    w1, w2, w3 = nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 6)
    x = torch.randn(2, 3, 4)
    gated = FeedForward(gate_proj=w1, down_proj=w2, up_proj=w3)
    assert torch.allclose(gated(x), w2(nn.functional.silu(w1(x)) * w3(x)), atol=1e-6)
    assert torch.equal(FeedForward(gate_proj=w1, down_proj=w2)(x), w2(nn.functional.silu(w1(x))))
    gelu = FeedForward(gate_proj=w1, down_proj=w2, up_proj=w3, activation=nn.GELU())
    assert torch.equal(gelu(x), w2(nn.functional.gelu(w1(x)) * w3(x)))


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_rotation_equals_its_formula_with_gradients(layout):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 3, 8).requires_grad_()
    rope = RotaryPositionalEmbeddings(8, base=100.0, layout=layout)
    positions = torch.tensor([[0, 1, 2, 0, 1], [7, 8, 9, 10, 11]])
    angles = positions.double()[:, :, None, None] * 100.0 ** (-torch.arange(0, 8, 2).double() / 8)
    pairs = x.double().unflatten(-1, (4, 2)) if layout == "interleaved" else x.double().unflatten(-1, (2, 4)).mT
    turned = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
    )
    expected = (turned if layout == "interleaved" else turned.mT).flatten(-2)
    out = rope(x, input_pos=positions)
    assert (out - expected).abs().max() < 1e-5
    weights = torch.randn(2, 5, 3, 8)
    ours = torch.autograd.grad((out * weights).sum(), x)[0]
    theirs = torch.autograd.grad((expected * weights).sum(), x)[0]
    assert (ours - theirs).abs().max() < 1e-5
    assert torch.equal(rope(x[:1]), rope(x[:1], input_pos=torch.arange(5)))


@pytest.mark.parametrize(
    "options",
    [
        {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
        {"rope_type": "yarn", "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 0.8, "beta_fast": 16.0},
        {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.25, "beta_slow": 2.0},
        {"rope_type": "yarn", "factor": 0.5},
        {"rope_type": "longrope", "original_max_position_embeddings": 4096},
        {"rope_type": "longrope", "original_max_position_embeddings": 50, "attention_factor": 1.25},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "linear", "factor": 4.0},
    ],
    ids=lambda options: "-".join(f"{key}={value}" for key, value in options.items()),
)
@pytest.mark.parametrize("length", [40, 8192, 8300])
def test_stretched_positions_equal_those_of_transformers(options, length):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from torchtune.models._build import _rope
    from torchtune.models.llama3 import SPEC

    if options["rope_type"] == "longrope":
        factors = {"short_factor": [1.0 + i / 32 for i in range(32)], "long_factor": [1.0 + i for i in range(32)]}
        options = {**options, **factors}
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        rope_parameters={"rope_theta": 150_000.0, **options},
        max_position_embeddings=8192,
    )
    positions = torch.cat([torch.arange(30), torch.arange(length - 9, length)])[None]
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    ours = _rope(SPEC.from_hf_config(config.to_dict())).cos_sin(positions)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine[:, :, 0] - other[..., :32]).abs().max() <= 2e-3  # of angles up to 8,300 in float32
        assert (mine[:, :30, 0] - other[:, :30, :32]).abs().max() <= 1e-5


def test_scaled_frequencies_equal_those_of_transformers():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, rope_parameters=scaling, max_position_embeddings=131_072
    )
    theirs = LlamaRotaryEmbedding(config)
    ours = Llama3ScaledRoPE(64, 131_072, 500_000, scale_factor=32)
    positions = torch.tensor([[0, 1, 17, 8191, 100_000]])
    cos, sin = ours.cos_sin(positions)
    their_cos, their_sin = theirs(torch.zeros(1, 5, 128), positions)
    assert torch.equal(cos[:, :, 0], their_cos[..., :32])
    assert torch.equal(sin[:, :, 0], their_sin[..., :32])
    plain = RotaryPositionalEmbeddings(64, base=500_000)
    assert not torch.equal(plain.cos_sin(positions)[0], cos)


def test_rotary_modules_hold_no_tensors_and_survive_meta():
    for kind in (RotaryPositionalEmbeddings, Llama3ScaledRoPE, Qwen2RotaryPositionalEmbeddings):
        with torch.device("meta"):
            late = kind(8)
        assert not late.state_dict()
        assert not list(late.buffers())
        late.rope_init()
        x = torch.randn(1, 4, 2, 8)
        assert torch.equal(late.to(torch.bfloat16)(x), kind(8)(x))
    with pytest.raises(ValueError, match="even"):
        RotaryPositionalEmbeddings(7)


def test_tied_linear_follows_its_module():
    embedding = nn.Embedding(5, 3)
    tied = TiedLinear(embedding)
    x = torch.randn(2, 3)
    torch.testing.assert_close(tied(x), x @ embedding.weight.T)
    embedding.weight = nn.Parameter(torch.ones(5, 3))
    torch.testing.assert_close(tied(x), x @ torch.ones(3, 5))
    assert not isinstance(tied, nn.Module)
    holder = nn.Module()
    holder.embedding, holder.output = embedding, tied
    assert set(holder.state_dict()) == {"embedding.weight"}
    twin = copy.deepcopy(holder)
    assert twin.output.tied_module is twin.embedding
    with pytest.raises(AttributeError, match="no attribute 'weight'"):
        TiedLinear(nn.ReLU())


@pytest.mark.parametrize(("tied", "size"), [(False, 5), (True, 13)])
def test_resized_vocabulary(tied, size):
    sizes = {"num_layers": 1, "embed_dim": 8, "intermediate_dim": 8, "max_seq_len": 8, "num_heads": 2}
    of_layers = {"layer_embed_dim": 4, "layer_embed_vocab": 10} if tied else {}
    model = build(Description(vocab_size=10, num_kv_heads=2, tie_word_embeddings=tied, **of_layers, **sizes))
    old = model.tok_embeddings.weight.detach().clone()
    resize_token_embeddings(model, size)
    kept = min(size, 10)
    assert torch.equal(model.tok_embeddings.weight[:kept], old[:kept])
    if size > 10:
        assert torch.allclose(model.tok_embeddings.weight[10:], old.mean(0).expand(3, -1), atol=1e-6)
    assert model.description.vocab_size == model.tok_embeddings.num_embeddings == size
    assert model(torch.tensor([[1, size - 1]])).shape == (1, 2, size)
    with pytest.raises(ValueError, match="at least one token"):
        resize_token_embeddings(model, 0)
