"""Norm in low precision, rotary positions, tied output, vocabulary."""

import copy

import pytest
import torch
from torch import nn

from torchtune.models import Description, build
from torchtune.models.llama3_1 import Llama3ScaledRoPE
from torchtune.models.qwen2 import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import (
    RMSNorm,
    RotaryPositionalEmbeddings,
    TiedLinear,
    apply_rope,
    resize_token_embeddings,
)
from torchtune.utils import simulated


def _norm_formula(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale


def test_rms_norm_computes_in_float32():
    x = (torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * 300).bfloat16()
    norm = RMSNorm(64, eps=1e-5).bfloat16()
    expected = _norm_formula(x.double(), torch.ones(64))
    out = norm(x)
    assert out.dtype == torch.bfloat16
    assert (out - expected).abs().max() <= expected.abs().max() * 2**-8


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
        {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 8192},
    ],
    ids=lambda options: "-".join(f"{key}={value}" for key, value in options.items()),
)
@pytest.mark.parametrize("length", [40, 8192, 8300])
def test_stretched_positions_equal_those_of_transformers(options, length):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from torchtune.models import build
    from torchtune.models.llama3 import SPEC

    if options["rope_type"] == "longrope":
        factors = {"short_factor": [1.0 + i / 32 for i in range(32)], "long_factor": [1.0 + i for i in range(32)]}
        options = {**options, **factors}
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        num_hidden_layers=1,
        vocab_size=8,
        rope_parameters={"rope_theta": 150_000.0, **options},
        max_position_embeddings=8192,
    )
    positions = torch.cat([torch.arange(30), torch.arange(length - 9, length)])[None]
    hf_tables = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    model = build(SPEC.from_hf_config(config.to_dict()))
    tables = model.layers[0].attn.pos_embeddings.cos_sin(positions)
    for table, hf_table in zip(tables, hf_tables, strict=True):
        assert (table[:, :, 0] - hf_table[..., :32]).abs().max() <= 2e-3  # of angles up to 8,300 in float32
        assert (table[:, :30, 0] - hf_table[:, :30, :32]).abs().max() <= 1e-5


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


@pytest.mark.parametrize("layout", ["interleaved", "half", "halves"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rotation_on_accelerators_is_that_on_a_cpu(layout, dtype):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 5, 3, 20, generator=generator).to(dtype)  # 4 channels are not rotated
    grad = torch.randn(2, 5, 3, 20, generator=generator).to(dtype)
    angles = torch.randn(1, 5, 1, 8, generator=generator) * 9
    on_cpu, on_accelerator = (values.clone().requires_grad_() for _ in range(2))
    expected = apply_rope(on_cpu, angles.cos(), angles.sin(), layout)
    expected.backward(grad)
    with simulated():
        rotated = apply_rope(on_accelerator, angles.cos(), angles.sin(), layout)
        rotated.backward(grad)
    tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(rotated, expected, rtol=tolerance, atol=1e-6)
    torch.testing.assert_close(on_accelerator.grad, on_cpu.grad, rtol=tolerance, atol=1e-6)


def test_tied_linear_follows_its_module():
    embedding = nn.Embedding(5, 3)
    tied = TiedLinear(embedding)
    x = torch.randn(2, 3)
    torch.testing.assert_close(tied(x), x @ embedding.weight.T)
    embedding.weight = nn.Parameter(torch.ones(5, 3))
    torch.testing.assert_close(tied(x), x @ torch.ones(3, 5))
    assert not isinstance(tied, nn.Module)
    holder = nn.Module()
    holder.embedding = embedding
    holder.output = tied
    assert set(holder.state_dict()) == {"embedding.weight"}
    twin = copy.deepcopy(holder)
    assert twin.output.tied_module is twin.embedding
    with pytest.raises(AttributeError, match="no attribute 'weight'"):
        TiedLinear(nn.ReLU())


@pytest.mark.parametrize(("tied", "size"), [(False, 5), (True, 13)])
def test_resized_vocabulary_keeps_its_rows_and_begins_new_ones_with_their_mean(tied, size):
    sizes = {"num_layers": 1, "embed_dim": 8, "intermediate_dim": 8, "max_seq_len": 8, "num_heads": 2}
    of_layers = {"layer_embed_dim": 4, "layer_embed_vocab": 10} if tied else {}
    model = build(Description(vocab_size=10, num_kv_heads=2, tie_word_embeddings=tied, **of_layers, **sizes))
    old = model.tok_embeddings.weight.detach().clone()
    resize_token_embeddings(model, size)
    num_cached = min(size, 10)
    assert torch.equal(model.tok_embeddings.weight[:num_cached], old[:num_cached])
    if size > 10:
        assert torch.allclose(model.tok_embeddings.weight[10:], old.mean(0).expand(3, -1), atol=1e-6)
    assert model.description.vocab_size == model.tok_embeddings.num_embeddings == size
    assert model(torch.tensor([[1, size - 1]])).shape == (1, 2, size)
    with pytest.raises(ValueError, match="at least one token"):
        resize_token_embeddings(model, 0)
