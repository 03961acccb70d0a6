"""Latent attention against its formula, and its cache of latents against attention over whole sequences."""

import pytest
import torch

from tests.devices import DEVICE
from torchtune.models import Description, ModelError, build, get_spec
from torchtune.modules import LatentAttention, RMSNorm, local_kv_cache
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.low_precision import QuantizeBase
from torchtune.modules.peft import LoRA, get_adapter_params
from torchtune.training import ParallelDims
from torchtune.training.parallel import ParallelDimsError, check_parallelizable

HEADS, KEY, TURNING, VALUE, LATENT = 3, 10, 4, 14, 16
TINY = Description(
    vocab_size=64,
    num_layers=2,
    embed_dim=32,
    intermediate_dim=48,
    max_seq_len=64,
    num_heads=HEADS,
    num_kv_heads=HEADS,
    head_dim=KEY,
    rope_dim=TURNING,
    kv_latent_dim=LATENT,
    q_latent_dim=12,
    value_dim=VALUE,
)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    model = build(TINY, get_spec("deepseek_v3")).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, float("scale" in name), 0.3)
    return model


@pytest.mark.parametrize("kind", ["plain", "lora", "qlora"])
def test_latents_are_cached_and_compared_as_keys_would_be(model, kind):
    torch.manual_seed(1)
    decoder = build(TINY, get_spec("deepseek_v3")).eval()
    decoder.load_state_dict(model.state_dict())
    if kind != "plain":
        lora = LoRA(rank=2, attn_modules=["q_proj", "k_proj"])
        apply_conversions(decoder, [QuantizeBase("int8"), lora] if kind == "qlora" else [lora])
        assert len(lora.adapted_paths(decoder)) == 2 * 4
        for parameter in get_adapter_params(decoder).values():
            torch.nn.init.normal_(parameter, std=0.2)
    tokens = torch.randint(0, 64, (2, 12))
    mask = torch.ones(12, 12, dtype=torch.bool).tril().expand(2, -1, -1)
    with torch.no_grad():
        expected = decoder(tokens)
        with local_kv_cache(decoder, batch_size=2, device=DEVICE, dtype=torch.float32, decoder_max_seq_len=12):
            cache = decoder.layers[0].attn.kv_cache
            assert sum(cached.numel() for cached in (cache.k_cache, cache.v_cache)) == 2 * 12 * (LATENT + TURNING)
            parts = [decoder(tokens[:, :5], mask=mask[:, :5], input_pos=torch.arange(5))]
            for i in range(5, 12):
                parts.append(decoder(tokens[:, i : i + 1], mask=mask[:, i : i + 1], input_pos=torch.tensor([i])))
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=2e-5, rtol=1e-4)


def test_options_that_latent_attention_excludes_are_refused(model):
    with pytest.raises(ParallelDimsError, match="tensor_parallel_dim is 2: it must divide the 3 query heads"):
        check_parallelizable(model, ParallelDims(tp=2, world_size=2))
    numbers = {"vocab_size": 8, "num_layers": 1, "embed_dim": 8, "intermediate_dim": 8, "max_seq_len": 8}
    heads = {"num_heads": 2, "num_kv_heads": 2}
    with pytest.raises(ModelError, match=r"kv_latent_dim \(got 4\) and value_dim go together"):
        Description(**numbers, **heads, kv_latent_dim=4)
    with pytest.raises(ModelError, match="kv_latent_dim and attn_sinks do not go together"):
        Description(**numbers, **heads, kv_latent_dim=4, value_dim=4, attn_sinks=True)
    with pytest.raises(ModelError, match=r"needs num_kv_heads = num_heads \(2\), got 1"):
        Description(**numbers, num_heads=2, num_kv_heads=1, kv_latent_dim=4, value_dim=4)
    sizes = {"embed_dim": 8, "num_heads": 1, "key_dim": 8, "rope_dim": 2}
    projections = dict.fromkeys(
        ("q_proj", "kv_down_proj", "kv_proj", "output_proj", "q_down_proj"), torch.nn.Identity()
    )
    with pytest.raises(ValueError, match="q_down_proj and q_down_norm"):
        LatentAttention(**sizes, **projections, value_dim=8, kv_dim=6, kv_down_norm=RMSNorm(6))
