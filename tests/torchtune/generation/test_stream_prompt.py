"""Streaming gives the tokens that generate() gives, one at a time."""

import pytest
import torch

from torchtune.generation import generate, stream
from torchtune.models.llama3 import llama3


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    model = llama3(
        vocab_size=50, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=32, max_seq_len=64, intermediate_dim=64
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.mark.parametrize("use_cache", [True, False])
def test_equals_generate(model: torch.nn.Module, use_cache: bool) -> None:
    prompt = torch.tensor([3, 1, 4, 1, 5])
    expected, _ = generate(model, prompt, max_generated_tokens=20, pad_id=-1, temperature=0.0)
    tokens = list(stream(model, prompt, max_generated_tokens=20, temperature=0.0, use_cache=use_cache))
    assert tokens == expected[0, 5:].tolist()
    assert not model.caches_are_setup()


def test_ends_before_a_stop_token(model: torch.nn.Module) -> None:
    prompt = torch.tensor([3, 1, 4, 1, 5])
    tokens = list(stream(model, prompt, max_generated_tokens=20, temperature=0.0))
    stop = next(token for index, token in enumerate(tokens) if index > 3 and token not in tokens[:index])
    stopped = list(stream(model, prompt, max_generated_tokens=20, temperature=0.0, stop_tokens=[stop]))
    assert stopped == tokens[: tokens.index(stop)]


def test_leaving_early_takes_the_caches_away(model: torch.nn.Module) -> None:
    running = stream(model, torch.tensor([1, 2]), max_generated_tokens=10)
    next(running)
    assert model.caches_are_setup()
    running.close()
    assert not model.caches_are_setup()
