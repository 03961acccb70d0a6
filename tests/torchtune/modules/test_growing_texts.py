"""Positions that depend on how long a text is, with a cache that is longer than any: as transformers has them.

LongRoPE reads a text again that outgrows the original context: the reference is transformers without a cache. Its
dynamic scaling keeps keys as they were turned when the text was shorter, so that its cache is the reference.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.devices import DEVICE
from tests.torchtune.models.conftest import load_model, make_hf_model
from torchtune.generation import generate, generate_tokens, stream
from torchtune.modules import TransformerDecoder, delete_kv_caches

_ORIGINAL, _NEW = 12, 9
# Prompts that stay short, become longer than the original context, and are longer from the beginning.
_PROMPTS = {"short": 2, "grows": 8, "long": 20}


_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": _ORIGINAL,
    "short_factor": [1.0, 1.05, 1.1, 1.2],
    "long_factor": [1.0, 2.5, 5.0, 9.0],
}
_KINDS = ["full_attention", "sliding_attention", "full_attention"]
# Family -> fields. In EXAONE 4, only layers with a window have RoPE.
_FIELDS = {
    "phi4_mini": {"original_max_position_embeddings": _ORIGINAL},
    "exaone4": {"layer_types": _KINDS, "max_position_embeddings": 48, "rope_parameters": _LONGROPE},
    "llama3_dynamic": {"max_position_embeddings": _ORIGINAL},
}


@pytest.fixture(scope="module", params=_FIELDS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, TransformerDecoder]:
    hf = make_hf_model(request.param, **_FIELDS[request.param])
    folder: Path = tmp_path_factory.mktemp(request.param)
    hf.save_pretrained(folder)
    hf.to(DEVICE)
    model = load_model(folder)
    model.max_seq_len = 64  # dynamic scaling is for texts beyond it
    return hf, model


def _steps(hf: Any, prompt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and logits of a greedy continuation."""
    generated = hf.generate(
        prompt,
        max_new_tokens=_NEW,
        do_sample=False,
        use_cache=hf.config.rope_parameters["rope_type"] == "dynamic",
        output_logits=True,
        return_dict_in_generate=True,
    )
    return generated.sequences, torch.stack(generated.logits, dim=1)


@pytest.mark.parametrize("length", _PROMPTS.values(), ids=_PROMPTS)
def test_decoding_with_a_large_cache_goes_by_the_length_of_the_text(models, length):
    hf, model = models
    prompt = torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(length))
    tokens, logits = _steps(hf, prompt)
    assert list(stream(model, prompt[0], max_generated_tokens=_NEW, temperature=0.0)) == tokens[0, length:].tolist()
    model.setup_caches(1, torch.float32, decoder_max_seq_len=60)
    try:
        for _ in range(2):  # an emptied cache is as a new one
            continued, found_logits = generate(
                model, prompt, max_generated_tokens=_NEW, temperature=0.0, prompt_lengths=[length]
            )
            model.reset_caches()
            assert torch.equal(continued, tokens)
            torch.testing.assert_close(found_logits, logits, rtol=1e-4, atol=1e-4 * float(logits.abs().max()))
    finally:
        delete_kv_caches(model)


def test_rows_of_a_padded_batch_go_each_by_its_own_length(models):
    hf, model = models
    draw = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 97, (1, length), generator=draw) for length in _PROMPTS.values()]
    longest = max(_PROMPTS.values())
    batch = torch.cat([torch.nn.functional.pad(prompt, (longest - prompt.shape[1], 0)) for prompt in prompts])
    model.setup_caches(3, torch.float32, decoder_max_seq_len=50)
    try:
        lengths = list(_PROMPTS.values())
        continued, _ = generate(model, batch, max_generated_tokens=_NEW, temperature=0.0, prompt_lengths=lengths)
    finally:
        delete_kv_caches(model)
    rows = [prompt[0] for prompt in prompts]
    few = generate_tokens(model, rows, max_new_tokens=_NEW, temperature=0.0, max_sequences=2)
    for row, tokens, prompt in zip(continued, few.tokens, prompts, strict=True):
        wanted = _steps(hf, prompt)[0][0, prompt.shape[1] :]
        assert torch.equal(row[longest:], wanted)
        assert torch.equal(tokens, wanted)


def test_a_text_that_outgrows_its_cache_is_not_read_on(models):
    hf, model = models
    tokens = torch.randint(3, 97, (1, 16), generator=torch.Generator().manual_seed(9))
    mask = torch.ones(16, 16, dtype=torch.bool).tril()[None]
    positions = torch.arange(16)[None]
    model.setup_caches(1, torch.float32, decoder_max_seq_len=16)
    try:
        model(tokens[:, :10], input_pos=positions[:, :10], mask=mask[:, :10])
        assert model.invalidates_caches(positions[:, 10:]) == (hf.config.rope_parameters["rope_type"] == "longrope")
        if hf.config.rope_parameters["rope_type"] == "dynamic":
            model(tokens[:, 10:], input_pos=positions[:, 10:], mask=mask[:, 10:])
            return
        with pytest.raises(ValueError, match=r"call reset_caches\(\)"):
            model(tokens[:, 10:], input_pos=positions[:, 10:], mask=mask[:, 10:])
    finally:
        delete_kv_caches(model)
