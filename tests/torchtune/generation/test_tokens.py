"""Tokens and log-probabilities: those of ``transformers`` and of a forward pass over what was generated."""

import pytest
import torch

from tests.devices import DEVICE
from tests.tiny import write_checkpoint
from torchtune.checkpoints import FullModelHFCheckpointer
from torchtune.generation import generate_tokens, stream_tokens
from torchtune.models import Description, build, from_hf_config
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.kv_cache import KVCache
from torchtune.modules.peft import LoRA

_TINY = Description(
    vocab_size=29, num_layers=2, embed_dim=16, intermediate_dim=24, max_seq_len=64, num_heads=4, num_kv_heads=2
)
PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 6], [5, 3, 5, 8]]


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = build(_TINY)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


def teacher_forced(model, prompt, tokens, temperature):
    """Log-probabilities of ``tokens`` [n] after ``prompt``, by one forward pass."""
    sequence = torch.cat([torch.tensor(prompt), tokens])
    with torch.no_grad():
        logits = model(sequence[None], output="logits")[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, tokens[:, None])[:, 0]


def test_greedy_equals_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    folder = write_checkpoint(tmp_path / "checkpoint")
    with torch.device("meta"):
        model = from_hf_config(folder)
    FullModelHFCheckpointer(str(folder)).load_model(model, device=torch.device(DEVICE))
    hf_model = AutoModelForCausalLM.from_pretrained(folder).to(DEVICE)
    generated = generate_tokens(model, PROMPTS, max_new_tokens=20, temperature=0.0).tokens
    for prompt, tokens in zip(PROMPTS, generated, strict=True):
        prompt_ids = torch.tensor([prompt])
        expected = hf_model.generate(
            prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
        )
        assert tokens.tolist() == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(("temperature", "top_k"), [(0.7, 5), (1.3, 0), (0.0, None)])
def test_log_probs_are_those_of_a_forward_pass(model, use_cache, temperature, top_k):
    rng = torch.Generator().manual_seed(0)
    generated = generate_tokens(
        model,
        PROMPTS,
        max_new_tokens=15,
        num_samples=4,
        temperature=temperature,
        top_k=top_k,
        stop_tokens=[7, 11],
        rng=rng,
        use_cache=use_cache,
    )
    lengths = [len(tokens) for tokens in generated.tokens]
    assert len(lengths) == 12
    if temperature:
        assert min(lengths) < max(lengths) <= 15
    for index, (tokens, log_probs) in enumerate(zip(generated.tokens, generated.log_probs, strict=True)):
        assert not {7, 11} & set(tokens[:-1].tolist())
        assert len(tokens) == 15 or tokens[-1] in (7, 11)
        expected = teacher_forced(model, PROMPTS[index // 4], tokens, temperature or 1.0)
        torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-5)


def test_samples_of_a_prompt_follow_its_distribution(model):
    generated = generate_tokens(
        model, PROMPTS[:2], max_new_tokens=1, num_samples=8000, rng=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        for index, prompt in enumerate(PROMPTS[:2]):
            drawn = torch.cat(generated.tokens[index * 8000 : (index + 1) * 8000]).bincount(minlength=29) / 8000
            assert (drawn - model(torch.tensor([prompt]))[0, -1].softmax(-1)).abs().max() < 0.02


def test_prompts_go_through_once_and_ended_rows_leave(model):
    shapes = []
    model.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    stop_tokens = [7, 11, 2, 3]
    options = {"num_samples": 4, "stop_tokens": stop_tokens, "tokens_per_check": 1}  # as the default of a CPU
    steps = list(stream_tokens(model, PROMPTS, max_new_tokens=15, **options))
    assert shapes[0] == (1, sum(map(len, PROMPTS)))
    assert shapes[1:] == [(len(step.rows), 1) for step in steps[1:]]
    assert len(steps[-1].rows) < 12
    ended = []
    for step in steps:
        for row, token in zip(step.rows.tolist(), step.tokens.tolist(), strict=True):
            if token in stop_tokens:
                ended.append(row)
    assert len(ended) == len(set(ended))


def test_modes_caches_and_flags_of_the_model_are_restored(model):
    apply_conversions(model, [LoRA(2, 4, dropout=0.5)])
    model.train()
    model.skip_output_layer = True  # by an older recipe
    model.setup_caches(2, torch.float32, decoder_max_seq_len=9)
    cache_ids = [id(module.kv_cache) for module in model.modules() if hasattr(module, "kv_cache")]
    modes = [module.training for module in model.modules()]

    def check_unchanged():
        assert len(cache_ids) == 2
        assert [id(module) for module in model.modules() if isinstance(module, KVCache)] == cache_ids
        assert [module.training for module in model.modules()] == modes
        assert model.decoder_max_cache_seq_len == 9

    greedy = generate_tokens(model, PROMPTS, max_new_tokens=5, temperature=0.0)
    again = generate_tokens(model, PROMPTS, max_new_tokens=5, temperature=0.0)
    for tokens, tokens_again in zip(greedy.tokens, again.tokens, strict=True):  # no dropout
        assert torch.equal(tokens, tokens_again)
    check_unchanged()
    running = stream_tokens(model, PROMPTS, max_new_tokens=5)
    next(running)
    assert not model.training
    running.close()
    check_unchanged()
    with pytest.raises(ZeroDivisionError):
        list(stream_tokens(model, PROMPTS, max_new_tokens=5, is_over=lambda *_: bool(1 // 0)))
    check_unchanged()
    assert model.skip_output_layer is True


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "give at least one"),
        ([[1], []], {}, "at least one token in each"),
        ([[1]], {"num_samples": 0}, "both must be at least 1"),
        ([[1] * 50], {"max_new_tokens": 16}, "exceeds the model's max_seq_len 64"),
        ([1, 2], {}, "at least one token in each"),
        ("ab", {}, "'a' is not a token id: give int64 ids"),
        ([[[1, 2]]], {}, "is not a token id"),
        ([torch.tensor([1.5])], {}, "'1.5' is not a token id"),
        ([[1], [-1]], {}, "the model has no token -1"),
        ([[1, 1000]], {}, "the model has no token 1000"),
        ([[1]], {"temperature": -0.5}, "temperature is -0.5 and top_k None"),
    ],
)
def test_invalid_prompts_and_limits_are_refused(model, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        generate_tokens(model, prompts, **{"max_new_tokens": 3, **options})
