"""Which tokens are left to sample from: those of ``transformers``; processors see each sequence alone."""

import pytest
import torch

from torchtune.generation import Sampling, generate, generate_tokens, sample, stream
from torchtune.generation._sampling import draw_tokens, keep_likely
from torchtune.models import Description, build

PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 6], [5, 3, 5, 8]]


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = build(
        Description(
            vocab_size=29, num_layers=2, embed_dim=16, intermediate_dim=24, max_seq_len=64, num_heads=4, num_kv_heads=2
        )
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


def transformers_warpers(temperature, top_k, top_p, min_p):
    """The warpers in the order in which ``GenerationMixin`` applies them."""
    from transformers.generation import logits_process

    warpers = [logits_process.TemperatureLogitsWarper(temperature)]
    if top_k:
        warpers.append(logits_process.TopKLogitsWarper(top_k))
    if top_p is not None:
        warpers.append(logits_process.TopPLogitsWarper(top_p))
    if min_p is not None:
        warpers.append(logits_process.MinPLogitsWarper(min_p))
    return logits_process.LogitsProcessorList(warpers)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, None, 0.9, None),
        (0.7, None, 0.5, None),
        (1.3, 7, 0.8, None),
        (1.0, None, None, 0.1),
        (2.0, 20, 0.95, 0.3),
        (1.0, None, 0.0, None),
        (1.0, None, 1.0, 1.0),
    ],
)
def test_truncation_keeps_the_same_tokens_as_transformers(temperature, top_k, top_p, min_p):
    logits = torch.randn(16, 101, generator=torch.Generator().manual_seed(0)) * 3
    expected = transformers_warpers(temperature, top_k, top_p, min_p)(torch.zeros(16, 1, dtype=torch.int64), logits)
    sampling = Sampling(temperature, top_k, top_p, min_p)
    truncated = keep_likely(logits / temperature, sampling)
    torch.testing.assert_close(truncated, expected)

    # Every uniform number gives a token that is left, and its log-probability is that of the whole distribution.
    for uniform in (0.0, 0.4, 1 - 1e-7):
        tokens, probabilities = draw_tokens(logits, sampling, torch.full((16,), uniform))
        assert expected.gather(1, tokens).isfinite().all()
        torch.testing.assert_close(probabilities, (logits / temperature).softmax(-1))
    torch.manual_seed(0)
    drawn = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert expected.gather(1, drawn).isfinite().all()


def test_top_p_reaches_every_way_to_generate(model):
    prompt = torch.tensor(PROMPTS[0])
    greedy = generate_tokens(model, [prompt], max_new_tokens=6, temperature=0.0).tokens[0].tolist()
    for truncation in ({"top_p": 0.0}, {"min_p": 1.0}):  # the most likely token alone
        assert generate_tokens(model, [prompt], max_new_tokens=6, **truncation).tokens[0].tolist() == greedy
        assert list(stream(model, prompt, max_generated_tokens=6, **truncation)) == greedy
        assert generate(model, prompt, max_generated_tokens=6, **truncation)[0][0, 6:].tolist() == greedy


@pytest.mark.parametrize("use_cache", [True, False])
def test_processors_see_each_sequence_without_padding(model, use_cache):
    seen = []

    def count_up(tokens, logits):
        seen.append(tokens[0].tolist())
        return torch.full_like(logits, float("-inf")).scatter(1, (tokens[:, -1:] + 1) % 29, 0.0)

    generated = generate_tokens(
        model, PROMPTS, max_new_tokens=3, num_samples=2, logits_processors=[count_up], use_cache=use_cache
    )
    for index, tokens in enumerate(generated.tokens):
        prompt = PROMPTS[index // 2]
        expected = [prompt[-1] + 1, prompt[-1] + 2, prompt[-1] + 3]
        assert tokens.tolist() == expected
        assert generated.log_probs[index].tolist() == [0.0, 0.0, 0.0]
        for length in range(3):
            assert prompt + expected[:length] in seen
    assert len(seen) == 18


def test_processors_of_transformers_fit_and_run_in_order(model):
    from transformers.generation import logits_process

    greedy = generate_tokens(model, PROMPTS, max_new_tokens=1, temperature=0.0).tokens
    banned = {int(tokens) for tokens in greedy}
    suppress = logits_process.SuppressTokensLogitsProcessor(sorted(banned), device="cpu")
    generated = generate_tokens(model, PROMPTS, max_new_tokens=4, temperature=0.0, logits_processors=[suppress])
    assert not banned & set(torch.cat(generated.tokens).tolist())
    order = []
    generate(
        model,
        torch.tensor(PROMPTS[0]),
        max_generated_tokens=1,
        logits_processors=[lambda t, x: order.append("first") or x, lambda t, x: order.append("second") or x],
    )
    assert order == ["first", "second"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 1.5}, "top_p is 1.5: it must be between 0 and 1"),
        ({"min_p": float("nan")}, "min_p is nan: it must be between 0 and 1"),
        ({"logits_processors": ["ban"]}, "'ban' cannot be called"),
        ({"logits_processors": [lambda tokens, logits: None]}, r"<lambda> returned NoneType.*shape \[1, 29\]"),
        ({"logits_processors": [lambda tokens, logits: logits[:, :3]]}, r"returned \[1, 3\]"),
        ({"logits_processors": [lambda t, logits: torch.full_like(logits, -torch.inf)]}, "left no token to sample"),
    ],
)
def test_invalid_sampling_settings_are_named(model, options, message):
    with pytest.raises(ValueError, match=message):
        generate_tokens(model, PROMPTS, max_new_tokens=2, **options)


def test_a_function_that_samples_alone_takes_no_processors(model):
    with pytest.raises(ValueError, match="do not reach compiled_generate_next_token"):
        generate(
            model,
            torch.tensor(PROMPTS[0]),
            max_generated_tokens=2,
            compiled_generate_next_token=lambda *_: None,
            logits_processors=[lambda t, x: x],
        )
