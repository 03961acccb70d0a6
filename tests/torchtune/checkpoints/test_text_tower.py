"""The text decoder of a model with several parts: the others are kept, or left out if asked."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.tiny_images import (
    gemma4_small_config,
    image_text_model,
    mistral3_config,
    qwen3_5_config,
    qwen3_5_moe_config,
)
from tests.torchtune.checkpoints.small import (
    SIZES,
    in_peft,
    in_transformers,
    load,
    logits,
    randomize_adapter,
    read,
    resume,
    same_bits,
    started,
    stored,
    write_folder,
    write_weights,
)
from torchtune.checkpoints import CheckpointError
from torchtune.modules.peft import LoRA

_IMAGE = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def gemma3_config() -> Any:
    text = {**SIZES, "head_dim": 16, "sliding_window": 9}
    return transformers.Gemma3Config(text_config=text, vision_config=_IMAGE, mm_tokens_per_image=1)


CONFIGS = {
    "Gemma3": gemma3_config,
    "Gemma4": gemma4_small_config,
    "Mistral3": mistral3_config,
    "Qwen3_5": qwen3_5_config,
    "Qwen3_5Moe": qwen3_5_moe_config,
}


def lora() -> LoRA:
    return LoRA(rank=2, attn_modules=["q_proj", "v_proj"])


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("name", ["Gemma3", "Mistral3"])
def test_text_decoder_of_a_composite_model_is_exported_as_a_model(name, prefix, tmp_path):
    hf = image_text_model(CONFIGS[name]())
    folder = tmp_path / "whole"
    hf.save_pretrained(folder)
    if prefix == "model.language_model.":  # how newer files spell it
        weights = {
            key.replace("language_model.model.", prefix).replace("language_model.lm_head", "lm_head"): value
            for key, value in stored(folder).items()
        }
        write_weights(folder, weights)
    checkpointer, model = started(folder, text_only=True)
    assert (logits(model) - logits(hf)).abs().max() <= 1e-4

    saved = checkpointer.save("epoch_0", model)
    text = name.removesuffix("3") if name == "Mistral3" else name
    assert read(saved / "config.json")["architectures"] == [f"{text}ForCausalLM"]
    again, loading = transformers.AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert type(again).__name__ == f"{text}ForCausalLM"
    assert not any(loading.values()), loading
    assert torch.equal(logits(again.eval()), logits(hf))


def _folder_of(name: str, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of several parts, with the vision part in bfloat16, and its tensors."""
    folder = tmp_path / "whole"
    image_text_model(CONFIGS[name]()).save_pretrained(folder)
    weights = stored(folder)
    for key in weights:
        if "vision" in key:
            weights[key] = weights[key].bfloat16()
    if name == "Qwen3_5":  # which predicts further tokens by weights that transformers does not load
        weights["mtp.layers.0.self_attn.q_proj.weight"] = torch.randn(3, 5, dtype=torch.bfloat16)
    if name == "Gemma4":  # which has keys and values of layers that use those of others
        weights["model.language_model.layers.3.self_attn.k_proj.weight"] = torch.randn(3, 5, dtype=torch.bfloat16)
    write_weights(folder, weights)
    return folder, weights


def _same_other_towers(saved_tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> set[str]:
    """The names of the others, with tensors [3, 5] that no model of transformers has."""
    text_parts = ("language_model", "text_model", "lm_head")
    other_names = set()
    for name, tensor in expected.items():
        if tensor.shape == (3, 5) or not any(part in name for part in text_parts):
            other_names.add(name)
    assert saved_tensors.keys() == expected.keys()
    assert len(other_names) > 5
    assert same_bits({key: saved_tensors[key] for key in other_names}, {key: expected[key] for key in other_names})
    return other_names


@pytest.mark.parametrize(
    ("name", "max_shard_bytes"),
    [
        ("Gemma3", 5 * 10**9),
        ("Gemma3", 50_000),
        ("Mistral3", 5 * 10**9),
        ("Mistral3", 50_000),
        ("Gemma4", 50_000),
        ("Qwen3_5", 50_000),
        ("Qwen3_5Moe", 50_000),
    ],
)
def test_towers_that_are_not_trained_are_written_back_bit_by_bit(name, max_shard_bytes, tmp_path):
    folder, source = _folder_of(name, tmp_path)
    checkpointer, model = started(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)  # exact in float32
    saved = checkpointer.save("epoch_0", model, max_shard_bytes=max_shard_bytes)
    saved_tensors = stored(saved)
    for key in source.keys() - _same_other_towers(saved_tensors, source):
        assert torch.equal(saved_tensors[key], source[key] * 1.25), key
    config = read(saved / "config.json")
    assert config == read(folder / "config.json") | {"text_config": config["text_config"]}

    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    again, loading = kind.from_pretrained(saved, output_loading_info=True, dtype=torch.float32)
    assert not any(loading.values()), loading
    assert (logits(again.eval()) - logits(model)).abs().max() <= 1e-3  # scaled up by five quarters a matrix


def test_a_merged_adapter_and_a_resume_keep_other_towers(tmp_path):
    folder, source = _folder_of("Gemma3", tmp_path)
    checkpointer, model = started(folder, lora(), output=tmp_path / "lora")
    randomize_adapter(model)
    merged = checkpointer.save("epoch_0", model, contents=("adapter", "merged"))
    merged_tensors = stored(merged)
    _same_other_towers(merged_tensors, source)
    changed = {key for key in source if not torch.equal(merged_tensors[key], source[key])}
    assert {key.rpartition("self_attn.")[2] for key in changed} == {"q_proj.weight", "v_proj.weight"}

    # The output is itself a checkpoint of all parts: train on from it, resume, and save once more.
    checkpointer, model = started(merged, output=tmp_path / "full")
    checkpointer.save("step_1", model, state={"progress": {"step": 1}})
    again = load(merged)
    with torch.no_grad():
        again.norm.scale.zero_()
    assert resume(checkpointer, again) == {"progress": {"step": 1}}
    assert same_bits(again.state_dict(), model.state_dict())
    assert same_bits(stored(checkpointer.save("step_2", again)), merged_tensors)


def test_text_decoder_with_the_prefix_text_model_is_read(tmp_path):
    folder, source = _folder_of("Gemma3", tmp_path)
    source = {key.replace("language_model.model.", "model.text_model."): value for key, value in source.items()}
    write_weights(folder, source)
    checkpointer, model = started(folder)
    saved_tensors = stored(checkpointer.save("epoch_0", model))
    _same_other_towers(saved_tensors, source)
    assert all(torch.equal(saved_tensors[key], source[key]) for key in source)


def _folder_of_text(architecture: str, folder: Path, extra: tuple[str, ...], **options: Any) -> dict[str, torch.Tensor]:
    """A text-only checkpoint with tensors that transformers does not load, and all of its tensors."""
    write_folder(folder, (architecture, options), num_hidden_layers=2)
    weights = stored(folder)
    weights |= {name: torch.randn(3, 5).to(torch.bfloat16) for name in extra}
    write_weights(folder, weights)
    return weights


_GLM = {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "num_mtp_layers": 1}
_UNTRAINED = {
    "Glm4Moe": ("model.layers.2.eh_proj.weight", "model.layers.2.mlp.experts.0.up_proj.weight"),
    "Qwen3_5": ("mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"),
}


@pytest.mark.parametrize("architecture", _UNTRAINED)
def test_weights_of_multi_token_prediction_are_carried(architecture, tmp_path):
    options = _GLM if architecture == "Glm4Moe" else {"layer_types": ["full_attention"] * 2, "head_dim": 16}
    source = _folder_of_text(architecture, tmp_path / "in", _UNTRAINED[architecture], **options)
    checkpointer, model = started(tmp_path / "in")
    with torch.no_grad():
        model.norm.scale.mul_(1.25)
    saved = checkpointer.save("epoch_0", model)
    saved_tensors = stored(saved)
    assert saved_tensors.keys() == source.keys()
    assert {key for key in source if not torch.equal(saved_tensors[key], source[key])} == {"model.norm.weight"}
    assert all(saved_tensors[key].dtype is torch.bfloat16 for key in _UNTRAINED[architecture])
    assert read(saved / "config.json") == read(tmp_path / "in" / "config.json")
    assert torch.equal(load(saved).norm.scale, model.norm.scale)
    alone, model = started(tmp_path / "in", output=tmp_path / "alone", text_only=True)
    assert stored(alone.save("epoch_0", model)).keys() == source.keys() - set(_UNTRAINED[architecture])


def test_additional_layer_without_multi_token_prediction_is_refused(tmp_path):
    _folder_of_text("Glm4Moe", tmp_path / "in", _UNTRAINED["Glm4Moe"][1:], **_GLM)
    with pytest.raises(CheckpointError, match=r"'model\.layers\.2\.mlp.* has no place .* .the model has 2 layers"):
        load(tmp_path / "in")


def test_experts_in_one_tensor_are_read(tmp_path):
    options = {"layer_types": ["full_attention"], "num_experts": 3, "num_experts_per_tok": 2, "head_dim": 16}
    options |= {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    write_folder(tmp_path, ("Qwen3_5Moe", options), num_hidden_layers=1)
    one_by_one = load(tmp_path)
    weights = {name: tensor.clone() for name, tensor in in_transformers(tmp_path).state_dict().items()}
    assert weights["model.layers.0.mlp.experts.gate_up_proj"].shape == (3, 16, SIZES["hidden_size"])
    write_weights(tmp_path, weights)
    assert same_bits(load(tmp_path).state_dict(), one_by_one.state_dict())


@pytest.mark.parametrize("name", ["Gemma3", "Mistral3"])
def test_adapter_of_the_text_decoder_is_exchanged_with_peft(name, tmp_path):
    folder = tmp_path / "whole"
    hf = image_text_model(CONFIGS[name]())
    hf.save_pretrained(folder)
    checkpointer, model = started(folder, lora())
    before = logits(model)
    randomize_adapter(model)
    expected = logits(model)
    assert (expected - before).abs().max() > 0.1
    peft_model = in_peft(hf, checkpointer.save("epoch_0", model, contents="adapter"))
    assert (logits(peft_model) - expected).abs().max() <= 1e-4

    # Read back: peft's file of the composite model, and one with the names of the text model.
    peft_folder = tmp_path / "theirs"
    text = tmp_path / "text"
    peft_model.save_pretrained(peft_folder)
    shutil.copytree(peft_folder, text)
    tensors = load_file(peft_folder / "adapter_model.safetensors")
    assert all(key.startswith("base_model.model.model.language_model.layers.") for key in tensors)
    alone = {key.replace("model.language_model.", "model."): value for key, value in tensors.items()}
    save_file(alone, text / "adapter_model.safetensors")
    for path in (peft_folder, text):
        assert torch.equal(logits(load(folder, lora(), adapter_checkpoint=path)), expected)

    # As a model of its own, it has the names of the text model.
    checkpointer, model = started(folder, lora(), text_only=True)
    adapter_tensors = load_file(checkpointer.save("epoch_1", model, contents="adapter") / "adapter_model.safetensors")
    assert adapter_tensors.keys() == alone.keys()


def test_adapter_of_a_text_decoder_has_the_names_of_its_modules_in_the_composite_model(tmp_path):
    """A family may have other names in files than in transformers, as NemotronH has."""
    image_text_model(mistral3_config()).save_pretrained(tmp_path / "whole")
    checkpointer, model = started(tmp_path / "whole", lora())
    weight_map = replace(model.spec.weight_map("hf"), modules=(("model.", "backbone."),))
    model.spec = replace(
        model.spec, weight_maps={"hf": weight_map}, module_prefixes={"backbone.": "model.language_model."}
    )
    adapter = load_file(checkpointer.save("epoch_0", model, contents="adapter") / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in adapter)
