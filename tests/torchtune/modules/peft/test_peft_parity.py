"""The same adapter in peft and here: same logits, same gradients."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.tiny import write_checkpoint
from torchtune.models import from_hf_config
from torchtune.modules import TransformerDecoder
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.peft import LoRA, get_adapter_params

TOKENS = torch.randint(0, 300, (2, 30), generator=torch.Generator().manual_seed(0))


def make_ours(folder: Path, lora: LoRA) -> TransformerDecoder:
    """The checkpoint with a random adapter."""
    from safetensors.torch import load_file

    with torch.device("meta"):
        model = from_hf_config(folder)
        apply_conversions(model, [lora])
    model.to_empty(device="cpu")
    weights = load_file(folder / "model.safetensors").items()
    state = dict(model.spec.weight_map("hf").to_tune(weights, model.description))
    assert set(model.load_state_dict(state, strict=False).missing_keys) == get_adapter_params(model).keys()
    torch.manual_seed(1)
    for module in model.modules():
        if hasattr(module, "adapter_params"):
            module.initialize_parameters()
            nn.init.normal_(module.lora_b.weight, std=0.1)
    for name, parameter in get_adapter_params(model).items():
        if name.endswith("magnitude"):
            with torch.no_grad():
                parameter.mul_(torch.rand_like(parameter) + 0.5)
    return model


def to_peft(model: TransformerDecoder, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Adapter tensors under peft's names."""
    weight_map = model.spec.weight_map("hf").peft()
    return dict(weight_map.to_external(tensors.items(), model.description, partial=True))


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("everything", [False, True])
def test_same_logits_and_gradients(tmp_path, use_dora, everything):
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    folder = write_checkpoint(tmp_path / "base", tied=not everything)
    modules = None if everything else ["q_proj", "v_proj"]
    lora = LoRA(5, 7, attn_modules=modules, apply_to_mlp=everything, apply_to_output=everything, use_dora=use_dora)
    ours = make_ours(folder, lora)
    settings = lora.peft_config(ours)
    names = {path.rpartition(".")[2]: path for path in lora.adapted_paths(ours)}
    weight_map = ours.spec.weight_map("hf")
    settings["target_modules"] = [
        weight_map.external_module(names[name], ours.description).rpartition(".")[2]
        for name in settings["target_modules"]
    ]
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = get_peft_model(hf, LoraConfig(**{key: settings[key] for key in settings if key != "peft_type"}))
    adapter = {name: parameter.detach() for name, parameter in get_adapter_params(ours).items()}
    result = set_peft_model_state_dict(theirs, to_peft(ours, adapter))
    assert not result.unexpected_keys

    weights = torch.randn(2, 30, hf.config.vocab_size, generator=torch.Generator().manual_seed(2))
    tokens = TOKENS % hf.config.vocab_size
    logits, exact = ours(tokens), theirs(tokens).logits
    assert (logits - exact).abs().max() <= 1e-4
    (logits * weights).sum().backward()
    (exact * weights).sum().backward()
    grads = to_peft(ours, {name: parameter.grad for name, parameter in get_adapter_params(ours).items()})
    expected = {
        name.replace(".default", ""): parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    expected = {
        name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector"): g for name, g in expected.items()
    }
    assert grads.keys() == expected.keys()
    for name, grad in expected.items():
        assert (grads[name] - grad).norm() <= 1e-4 * grad.norm(), name
    merged = {name: lora.merged(name, w, ours) for name, w in ours.state_dict().items() if name not in adapter}
    ours_merged = dict(weight_map.to_external(merged.items(), ours.description))
    theirs_merged = theirs.merge_and_unload().state_dict()
    for name, tensor in ours_merged.items():
        torch.testing.assert_close(tensor, theirs_merged[name], rtol=1e-5, atol=1e-5)
