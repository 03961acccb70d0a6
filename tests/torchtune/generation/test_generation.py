"""Sampling and generation."""

from contextlib import nullcontext

import pytest
import torch

from torchtune.generation import (
    generate,
    generate_next_token,
    get_causal_mask_from_padding_mask,
    get_position_ids_from_padding_mask,
    sample,
    stream,
)
from torchtune.models import Description, build
from torchtune.modules import local_kv_cache
from torchtune.modules.loss import LinearCrossEntropyLoss

_TINY = Description(
    vocab_size=29, num_layers=2, embed_dim=16, intermediate_dim=24, max_seq_len=64, num_heads=4, num_kv_heads=2
)


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = build(_TINY).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


def _prompt(*shape):
    return torch.randint(1, 29, shape, generator=torch.Generator().manual_seed(1))


def test_sample_follows_the_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).expand(20_000, 4)
    torch.manual_seed(0)
    for temperature in (1.0, 0.5):
        drawn = sample(logits, temperature=temperature)
        assert drawn.shape == (20_000, 1)
        frequencies = drawn.flatten().bincount(minlength=4) / 20_000
        assert (frequencies - (logits[0] / temperature).softmax(-1)).abs().max() < 0.015
    assert set(sample(logits, top_k=2).unique().tolist()) == {1, 2}
    for everything in (99, 0, None):
        assert sample(logits, top_k=everything).unique().numel() == 4
    with pytest.raises(ValueError, match="both must be at least 0"):
        sample(logits, top_k=-1)
    assert (sample(logits, temperature=0.0) == 2).all()
    noise = torch.ones(20_000, 4)
    assert (sample(logits, q=noise) == 2).all()  # equal noise leaves the most likely


@pytest.mark.parametrize("cached", [False, True])
def test_padded_rows_generate_the_same_as_alone(model, cached):
    long = _prompt(7)
    short = _prompt(9)[5:]
    batch = torch.stack([long, torch.cat([torch.zeros(3, dtype=torch.int64), short])])
    alone = []
    for prompt in (long, short):
        tokens, _ = generate(model, prompt, max_generated_tokens=8, temperature=0.0)
        alone.append(tokens[0, len(prompt) :])
    if cached:
        with local_kv_cache(model, batch_size=2, device="cpu", dtype=torch.float32, decoder_max_seq_len=15):
            out, _ = generate(model, batch, max_generated_tokens=8, pad_id=0, temperature=0.0)
    else:
        out, _ = generate(model, batch, max_generated_tokens=8, pad_id=0, temperature=0.0)
    assert torch.equal(out[:, 7:], torch.stack(alone))


def test_lengths_distinguish_padding_from_a_token_with_the_pad_id(model):
    prompt = torch.tensor([3, 0, 5, 0])
    real, _ = generate(model, prompt, max_generated_tokens=5, temperature=0.0, prompt_lengths=[4])
    with torch.no_grad():
        assert real[0, 4] == model(prompt[None])[0, -1].argmax()
    padded = torch.cat([torch.zeros(2, dtype=torch.int64), prompt])
    again, _ = generate(model, padded, max_generated_tokens=5, temperature=0.0, prompt_lengths=torch.tensor([4]))
    assert torch.equal(again[:, 2:], real)


def test_without_a_pad_id_no_token_is_padding(model):
    for prompt in (torch.tensor([0, 3, 0, 5]), torch.tensor([[0, 3, 0, 5], [0, 0, 4, 2]])):
        out, _ = generate(model, prompt, max_generated_tokens=1, temperature=0.0)
        with torch.no_grad():
            assert torch.equal(out[:, -1], model(prompt.view(-1, 4))[:, -1].argmax(-1))
    inside = torch.tensor([0, 3, 0, 5])  # padding stands before a prompt, not in it
    padded, _ = generate(model, inside, max_generated_tokens=5, pad_id=0, temperature=0.0)
    alone, _ = generate(model, inside[1:], max_generated_tokens=5, temperature=0.0)
    assert torch.equal(padded[:, 1:], alone)
    with pytest.raises(ValueError, match="give pad_id=0 if it is padding, or prompt_lengths"):
        generate(model, torch.tensor([[0, 3], [4, 5]]), max_generated_tokens=1)


def test_without_a_pad_id_a_stop_token_is_followed_by_itself(model):
    prompts = _prompt(3, 5)
    free, _ = generate(model, prompts, max_generated_tokens=12, temperature=0.0)
    stop = free[0, 6].item()
    out, _ = generate(model, prompts, max_generated_tokens=12, temperature=0.0, stop_tokens=[stop])
    assert (out[0, 6:] == stop).all()


@pytest.mark.parametrize("cached", [False, True])
def test_flag_set_by_an_older_recipe_is_ignored(model, cached):
    prompts = _prompt(2, 5)
    arguments = {"max_generated_tokens": 6, "temperature": 0.0}
    expected, expected_logits = generate(model, prompts, **arguments)
    LinearCrossEntropyLoss().set_model_output(model)
    cache = local_kv_cache(model, batch_size=2, device="cpu", dtype=torch.float32, decoder_max_seq_len=11)
    with cache if cached else nullcontext():
        out, logits = generate(model, prompts, **arguments)
    assert torch.equal(out, expected)
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-5)
    assert list(stream(model, prompts[0], **arguments)) == expected[0, 5:].tolist()
    assert model.skip_output_layer is True  # the older recipe goes on training


def test_stream_ends_before_the_stop_token_and_deletes_its_caches(model):
    prompt = _prompt(5)
    tokens = list(stream(model, prompt, max_generated_tokens=20, temperature=0.0, use_cache=False))
    stop = next(token for index, token in enumerate(tokens) if index and token not in tokens[:index])
    stopped = list(stream(model, prompt, max_generated_tokens=20, temperature=0.0, stop_tokens=[stop]))
    assert stopped == tokens[: tokens.index(stop)]
    running = stream(model, prompt, max_generated_tokens=10)
    next(running)
    assert model.caches_are_setup()
    running.close()
    assert not model.caches_are_setup()


def test_training_modes_are_restored(model):
    model.train()
    model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    generate(model, _prompt(4), max_generated_tokens=2)
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(IndexError):
        generate(model, torch.tensor([1000]), max_generated_tokens=2)
    assert [module.training for module in model.modules()] == modes


def test_stop_tokens_end_rows_and_then_generation(model):
    prompts = _prompt(2, 5)
    free, free_logits = generate(model, prompts, max_generated_tokens=12, temperature=0.0, pad_id=28)
    stop = free[0, 7].item()
    out, logits = generate(model, prompts, max_generated_tokens=12, temperature=0.0, pad_id=28, stop_tokens=[stop])
    ends = []
    for row in range(2):
        positions = (free[row, 5:] == stop).nonzero().flatten()
        end = int(positions[0]) + 1 if len(positions) else 12
        ends.append(end)
        assert torch.equal(out[row, 5 : 5 + end], free[row, 5 : 5 + end])
        assert (out[row, 5 + end :] == 28).all()
        assert torch.equal(logits[row, :end], free_logits[row, :end])
        assert not logits[row, end:].any()
    assert out.shape[1] == 5 + max(ends)


def test_same_generator_seed_gives_the_same_tokens(model):
    def run(seed):
        rng = torch.Generator().manual_seed(seed)
        return generate(model, _prompt(3, 4), max_generated_tokens=10, temperature=1.5, top_k=20, rng=rng)[0]

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))


def test_another_step_function_takes_over_after_the_first_token(model):
    calls = []

    def step(*args, **kwargs):
        calls.append(args[2].shape)
        return generate_next_token(*args, **kwargs)

    with local_kv_cache(model, batch_size=1, device="cpu", dtype=torch.float32, decoder_max_seq_len=10):
        out, _ = generate(model, _prompt(4), max_generated_tokens=5, temperature=0.0, compiled_generate_next_token=step)
    assert calls == [(1, 1)] * 4
    assert torch.equal(out, generate(model, _prompt(4), max_generated_tokens=5, temperature=0.0)[0])


def test_invalid_limits_and_small_caches_are_refused(model):
    with pytest.raises(ValueError, match="at least 1"):
        generate(model, _prompt(4), max_generated_tokens=0)
    with (
        local_kv_cache(model, batch_size=1, device="cpu", dtype=torch.float32, decoder_max_seq_len=8),
        pytest.raises(ValueError, match=r"hold 8 positions, too few for a prompt of 4 and 6 new tokens"),
    ):
        generate(model, _prompt(4), max_generated_tokens=6)


def test_masks_and_positions_ignore_padding():
    real = torch.tensor([[False, True, True], [True, True, True]])
    mask = get_causal_mask_from_padding_mask(real, target_seq_len=4)
    assert mask.int().tolist() == [
        [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0]],
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]],
    ]
    assert get_causal_mask_from_padding_mask(real).shape == (2, 3, 3)
    assert get_position_ids_from_padding_mask(real).tolist() == [[0, 0, 1], [0, 1, 2]]
    with pytest.raises(AssertionError, match="shorter"):
        get_causal_mask_from_padding_mask(real, target_seq_len=2)
