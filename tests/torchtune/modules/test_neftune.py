"""NEFTune: noise of the paper's scale for each document, in training only."""

import pytest
import torch

from torchtune.data import Documents
from torchtune.models import Description, build
from torchtune.modules import NEFTune
from torchtune.modules.conversion import ConversionError, apply_conversions
from torchtune.modules.peft import LoRA

SIZES = Description(
    vocab_size=19, num_layers=2, embed_dim=16, intermediate_dim=24, max_seq_len=512, num_heads=4, num_kv_heads=2
)
TOKENS = torch.randint(0, 19, (1, 12), generator=torch.Generator().manual_seed(1))


def test_noise_of_a_document_has_the_scale_of_its_length():
    """Uniform in ±alpha / sqrt(L d): its standard deviation is that bound over sqrt(3)."""
    torch.manual_seed(0)
    lengths = [400, 25, 100]
    noise = NEFTune(alpha=5).add_noise(torch.zeros(1, 525, 64), Documents.from_lengths(lengths))
    for length, part in zip(lengths, noise[0].split(lengths), strict=True):
        bound = 5 / (length * 64) ** 0.5
        assert 0.98 * bound < part.abs().max() <= bound * 1.0001
        assert part.std().item() == pytest.approx(bound / 3**0.5, rel=0.03)
        assert part.mean().abs() < 0.05 * bound
    noisy = NEFTune(alpha=10).add_noise(torch.zeros(2, 100, 64), None)
    assert noisy.abs().max().item() == pytest.approx(10 / 80, rel=0.01)


def test_noise_is_added_in_training_only():
    torch.manual_seed(0)
    plain = build(SIZES)
    noisy = build(SIZES)
    noisy.load_state_dict(plain.state_dict())
    apply_conversions(noisy, [NEFTune(5), LoRA(rank=2)])
    documents = Documents.from_lengths([5, 7])
    assert torch.equal(noisy.eval()(TOKENS, documents=documents), plain.eval()(TOKENS, documents=documents))
    noisy.train()
    torch.manual_seed(3)
    first = noisy(TOKENS, documents=documents)
    torch.manual_seed(3)
    assert torch.equal(noisy(TOKENS, documents=documents), first)
    torch.manual_seed(3)
    embedded = NEFTune(5).add_noise(plain.embed(TOKENS), documents)
    torch.testing.assert_close(first, plain(None, input_embeds=embedded, documents=documents))
    assert not torch.allclose(first, plain(TOKENS, documents=documents), atol=1e-3)


def test_noise_is_without_effect_on_the_names_of_weights():
    model = build(SIZES)
    names = list(model.state_dict())
    apply_conversions(model, [NEFTune()])
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("alpha", [0, -1, float("nan"), float("inf"), "5"])
def test_scale_that_is_no_positive_number_is_refused(alpha):
    with pytest.raises(ConversionError, match=r"alpha is .*: give a number above 0"):
        NEFTune(alpha)


def test_models_that_cannot_have_noise_are_refused():
    with pytest.raises(ConversionError, match="a Linear is no text decoder"):
        apply_conversions(torch.nn.Linear(2, 2), [NEFTune()])
    with pytest.raises(ConversionError, match="set tensor_parallel_dim to 1"):
        NEFTune().parallel_style(torch.nn.Embedding(3, 2), None)
    with pytest.raises(ConversionError, match="set context_parallel_dim to 1"):
        NEFTune().add_noise(torch.zeros(1, 6, 2), Documents.from_lengths([12]))
