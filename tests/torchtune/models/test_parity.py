"""Every family computes what transformers computes, and comes back from our files bit for bit."""

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

from tests.devices import DEVICE
from tests.torchtune.models.conftest import load_model, make_hf_model, on_disk
from tests.torchtune.models.families import CLASSIFIERS
from torchtune.data import Documents
from torchtune.generation import generate
from torchtune.models import ModelError
from torchtune.modules import BidirectionalAttention, local_kv_cache
from torchtune.modules.loss import LinearCrossEntropyLoss, setup_loss

TOKENS = torch.randint(1, 97, (2, 50), generator=torch.Generator().manual_seed(1))


def test_logits_and_loss_equal_in_float32(pair):
    with torch.no_grad():
        logits = pair.model(TOKENS)
        reference_logits = pair.hf(TOKENS).logits
        hidden = pair.model(TOKENS, output="hidden")
        loss, _ = setup_loss(LinearCrossEntropyLoss(), pair.model).sum_and_count(hidden, TOKENS, pair.model.output)
    assert logits.dtype == torch.float32
    assert (logits - reference_logits).abs().max() <= 1e-4
    wanted = torch.nn.functional.cross_entropy(reference_logits.flatten(0, 1), TOKENS.flatten(), reduction="sum")
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=0)


def test_logits_equal_in_bfloat16_within_rounding(pair):
    """Both round; ours is no further from the float32 result than theirs, give or take."""
    # A router that rounds two nearly equal scores chooses another expert, in ours or in theirs, depending on the
    # processor, and one such token outweighs the rounding of all others: both take the experts of float32.
    narrow, theirs_narrow = (copy.deepcopy(model).bfloat16() for model in (pair.model, pair.hf))
    with torch.no_grad():
        with _Choices() as of_theirs:
            exact = pair.hf(TOKENS).logits
        with _Choices() as of_ours:
            pair.model(TOKENS)
        with _Choices(of_theirs.chosen):
            reference_rounded = theirs_narrow(TOKENS).logits.float()
        with _Choices(of_ours.chosen):
            rounded = narrow(TOKENS)
        free = theirs_narrow(TOKENS).logits.float()
    assert (rounded - exact).abs().mean() <= 1.2 * (reference_rounded - exact).abs().mean()
    assert (rounded - exact).abs().max() <= 1.5 * (free - exact).abs().max()


class _Choices(TorchFunctionMode):
    """Records the indices of every ``topk``, or gives it the recorded ones."""

    def __init__(self, recorded: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.chosen: list[torch.Tensor] = []
        self.recorded = None if recorded is None else iter(recorded)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function not in (torch.topk, torch.Tensor.topk):
            return result
        if self.recorded is None:
            self.chosen.append(result.indices)
            return result
        indices = next(self.recorded)
        assert indices.shape == result.indices.shape
        return torch.return_types.topk((args[0].gather(-1, indices), indices))


def test_gradients_of_every_parameter_equal(pair):
    weights = torch.randn(2, 50, 97, generator=torch.Generator().manual_seed(2))
    pair.model.zero_grad()
    pair.hf.zero_grad()
    (pair.model(TOKENS) * weights).sum().backward()
    (pair.hf(TOKENS).logits * weights).sum().backward()
    grads = ((name, parameter.grad) for name, parameter in pair.hf.named_parameters())
    reference_gradients = on_disk(grads, pair.name)
    grads = [(name, parameter.grad) for name, parameter in pair.model.named_parameters() if parameter.requires_grad]
    gradients = dict(pair.model.spec.weight_map("hf").to_external(grads, pair.model.description, partial=True))
    assert gradients.keys() == reference_gradients.keys()
    for name, grad in reference_gradients.items():
        size = grad.norm()
        if name.endswith("k_proj.bias"):  # exactly zero up to rounding: softmax does not see a shift of the keys
            size = reference_gradients[name.replace("k_proj", "q_proj")].norm()
        assert (gradients[name] - grad).norm() <= 1e-4 * size, name


def test_packed_documents_equal_themselves_alone(pair):
    documents = Documents.from_lengths((20, 15, 15, 13, 1, 36), DEVICE)
    row = TOKENS.view(1, -1)
    packed = pair.model(row, documents=documents)
    alone = torch.cat([pair.model(part) for part in row.split(documents.lengths, dim=1)], dim=1)
    # Sums in another order round differently (in float64 they agree), in proportion to the logits.
    assert (packed - alone).abs().max() <= 16 * torch.finfo(torch.float32).eps * alone.abs().max()
    weights = torch.randn(packed.shape, generator=torch.Generator().manual_seed(2))
    trained = [parameter for parameter in pair.model.parameters() if parameter.requires_grad]
    packed_gradients, wanted = (torch.autograd.grad((logits * weights).sum(), trained) for logits in (packed, alone))
    least = 1e-3 * max(grad.norm() for grad in wanted)  # biases of keys have no gradient but rounding
    for gradient, expected_gradient in zip(packed_gradients, wanted, strict=True):
        assert (gradient - expected_gradient).norm() <= 1e-4 * max(expected_gradient.norm(), least)
    with torch.no_grad():  # and positions given by hand change nothing
        again = pair.model(row, documents=documents, input_pos=documents.positions().view(1, -1))
    assert torch.equal(packed, again)


def test_saved_again_bit_equal_and_loadable_by_transformers(pair, tmp_path, save_model):
    from transformers import AutoModelForCausalLM

    written = save_model(pair.model, tmp_path)
    original = load_file(pair.folder / "model.safetensors")
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name].cpu(), tensor) for name, tensor in original.items())
    kind = AutoModelForCausalLM if type(pair.hf.config) in AutoModelForCausalLM._model_mapping else type(pair.hf)
    again, loading = kind.from_pretrained(
        tmp_path,
        output_loading_info=True,
        dtype=torch.float32,
        attn_implementation=pair.hf.config._attn_implementation,
    )
    assert not any(loading.values()), loading
    with torch.no_grad():
        assert torch.equal(again.eval().to(DEVICE)(TOKENS).logits, pair.hf(TOKENS).logits)


def test_cached_greedy_generation_gives_the_same_32_tokens(pair):
    prompt = TOKENS[:, :9].clone()
    prompt[1, :4] = 0  # padding on the left
    mask = (prompt != 0).long()
    reference = pair.hf.generate(prompt, attention_mask=mask, max_new_tokens=32, do_sample=False)
    with local_kv_cache(pair.model, batch_size=2, device=DEVICE, dtype=torch.float32, decoder_max_seq_len=41):
        generated, logits = generate(pair.model, prompt, max_generated_tokens=32, temperature=0.0, pad_id=0)
    assert torch.equal(generated, reference)
    assert logits.shape == (2, 32, 97)
    uncached, _ = generate(pair.model, prompt, max_generated_tokens=8, temperature=0.0, pad_id=0)
    assert torch.equal(uncached, reference[:, :17])


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifier_equals_that_of_transformers(name, tmp_path, save_model):
    import transformers

    hf = make_hf_model(name, "ForSequenceClassification", num_labels=3)
    hf.save_pretrained(tmp_path)
    hf.to(DEVICE)
    model = load_model(tmp_path)
    assert model.description.num_classes == 3
    tokens = TOKENS[:, :20].clamp(min=1)
    with torch.no_grad():
        expected = hf(tokens).logits
        assert (model(tokens)[:, -1] - expected).abs().max() <= 1e-4
    again = tmp_path / "again"
    again.mkdir()
    save_model(model, again)
    with torch.no_grad():
        reloaded = (
            transformers.AutoModelForSequenceClassification.from_pretrained(again, dtype=torch.float32)
            .eval()
            .to(DEVICE)
        )
        reloaded.config._attn_implementation = hf.config._attn_implementation
        assert torch.equal(reloaded(tokens).logits, expected)


def test_attention_in_both_directions_is_that_of_transformers(pair):
    """As ``is_causal: false`` of config.json says; a model with windows or mixers refuses it."""
    description = pair.model.description
    if description.causal_part() is not None:
        with pytest.raises(ModelError, match="is_causal"):
            replace(description, is_causal=False)
        return
    config = json.loads((pair.folder / "config.json").read_text())
    both_ways = pair.model.spec.from_hf_config({**config, "is_causal": False})
    assert both_ways == replace(description, is_causal=False)
    assert pair.model.spec.to_hf_config(both_ways)["is_causal"] is False
    tokens = torch.tensor([[1, 20, 33, 7, 50]], device=DEVICE)
    conversion = BidirectionalAttention()
    conversion.convert(pair.model)
    pair.hf.config.is_causal = False
    try:
        with torch.no_grad():
            hidden = pair.model(tokens, output="hidden") / description.hidden_scale
            expected = pair.hf.base_model(tokens).last_hidden_state
    finally:
        del pair.hf.config.is_causal
        conversion.revert(pair.model)
    torch.testing.assert_close(hidden, expected, atol=2e-4, rtol=1e-3)
