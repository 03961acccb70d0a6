"""The text decoder of a model with several parts: the others are kept, or left out if asked."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.torchtune.checkpoints.small import build, randomize_adapter, stored, write_folder, write_weights
from torchtune.checkpoints import CheckpointError
from torchtune.models import from_hf_config
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.peft import LoRA
from torchtune.training import FullModelHFCheckpointer

_TEXT = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
_IMAGE = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_UNUSED = "model.language_model.layers.3.self_attn.k_proj."
TOKENS = torch.randint(1, 97, (2, 40), generator=torch.Generator().manual_seed(1))


def _whole(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if name == "Gemma3":
        config: Any = transformers.Gemma3Config(
            text_config={**_TEXT, "sliding_window": 9}, vision_config=_IMAGE, mm_tokens_per_image=1
        )
    elif name == "Gemma4":
        kinds = ["sliding_attention", "full_attention"] * 2
        small = {"num_hidden_layers": 4, "layer_types": kinds, "sliding_window": 9, "global_head_dim": 24}
        small |= {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97}
        sizes = {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16, "patch_size": 4}
        config = transformers.Gemma4Config(
            text_config={**_TEXT, **small}, vision_config={**_IMAGE, **sizes}, audio_config=None
        )
    elif name == "Qwen3_5":
        small = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2}
        small |= {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
        sizes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}
        config = transformers.Qwen3_5Config(
            text_config={**_TEXT, **small, "initializer_range": 0.05, "tie_word_embeddings": True},
            vision_config=sizes | {"patch_size": 4, "num_position_embeddings": 16},
            tie_word_embeddings=True,
        )
    else:
        config = transformers.Mistral3Config(
            text_config={**_TEXT, "model_type": "mistral"},
            vision_config={**_IMAGE, "model_type": "pixtral"},
            tie_word_embeddings=False,
        )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("name", ["Gemma3", "Mistral3"])
def test_text_tower_comes_out_as_a_model_of_its_own(name: str, prefix: str, tmp_path: Path) -> None:
    hf, folder = _whole(name), tmp_path / "whole"
    hf.save_pretrained(folder)
    if prefix == "model.language_model.":  # how newer files spell it
        weights = {
            key.replace("language_model.model.", prefix).replace("language_model.lm_head", "lm_head"): value
            for key, value in stored(folder).items()
        }
        write_weights(folder, weights)
    with torch.device("meta"):
        model = from_hf_config(folder)
    checkpointer = FullModelHFCheckpointer(folder, output_dir=tmp_path / "out", text_only=True)
    checkpointer.load_model(model, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        expected = hf(TOKENS).logits
        assert (model.eval()(TOKENS) - expected).abs().max() <= 1e-4

    checkpointer.save("epoch_0", model)
    saved = tmp_path / "out" / "epoch_0"
    text = name.removesuffix("3") if name == "Mistral3" else name
    assert json.loads((saved / "config.json").read_text())["architectures"] == [f"{text}ForCausalLM"]
    again, loading = transformers.AutoModelForCausalLM.from_pretrained(
        saved, output_loading_info=True, dtype=torch.float32
    )
    assert type(again).__name__ == f"{text}ForCausalLM"
    assert not any(loading.values()), loading
    with torch.no_grad():
        assert torch.equal(again.eval()(TOKENS).logits, expected)


def _folder_of(name: str, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of several parts, with the vision part in bfloat16, and its tensors."""
    folder = tmp_path / "whole"
    _whole(name).save_pretrained(folder)
    weights = stored(folder)
    weights = {key: value.bfloat16() if "vision" in key else value for key, value in weights.items()}
    if name == "Qwen3_5":  # which predicts further tokens by weights that transformers does not load
        weights["mtp.layers.0.self_attn.q_proj.weight"] = torch.randn(3, 5, dtype=torch.bfloat16)
    if name == "Gemma4":  # which has keys and values of layers that use those of others
        weights[f"{_UNUSED}weight"] = torch.randn(3, 5, dtype=torch.bfloat16)
    write_weights(folder, weights)
    return folder, weights


def _loaded(folder: Path, output: Path, **options: Any) -> tuple[FullModelHFCheckpointer, torch.nn.Module]:
    with torch.device("meta"):
        model = from_hf_config(folder)
    if options.pop("lora", False):
        apply_conversions(model, [LoRA(rank=2, attn_modules=["q_proj", "v_proj"])])
    checkpointer = FullModelHFCheckpointer(folder, output_dir=output, **options)
    checkpointer.load_model(model, device="cpu", dtype=torch.float32)
    return checkpointer, model


def _same_other_parts(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    ours = ("language_model", "text_model")
    others = [key for key in expected if key.startswith(_UNUSED) or not any(part in key for part in ours)]
    assert len(others) > 5
    for key in others:
        assert found[key].dtype == expected[key].dtype
        assert torch.equal(found[key], expected[key]), key


@pytest.mark.parametrize(
    ("name", "max_shard_bytes"),
    [(name, size) for name in ("Gemma3", "Mistral3") for size in (5 * 10**9, 50_000)]
    + [(name, 50_000) for name in ("Gemma4", "Qwen3_5")],
)
def test_other_parts_are_written_back_bit_by_bit(name: str, max_shard_bytes: int, tmp_path: Path) -> None:
    folder, source = _folder_of(name, tmp_path)
    checkpointer, model = _loaded(folder, tmp_path / "out")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)  # exact in float32
    saved = checkpointer.save("epoch_0", model, max_shard_bytes=max_shard_bytes)
    found = stored(saved)
    _same_other_parts(found, source)
    for key in source.keys() - {key for key in source if "language_model" not in key or key.startswith(_UNUSED)}:
        assert torch.equal(found[key], source[key] * 1.25), key
    config = json.loads((saved / "config.json").read_text())
    assert config == json.loads((folder / "config.json").read_text()) | {"text_config": config["text_config"]}

    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    again, loading = kind.from_pretrained(saved, output_loading_info=True, dtype=torch.float32)
    assert not any(loading.values()), loading
    with torch.no_grad():
        difference = (again.eval()(TOKENS).logits - model.eval()(TOKENS)).abs().max()
    assert difference <= 1e-3  # of logits scaled up by five quarters a matrix


def test_a_merged_adapter_and_a_resume_keep_other_parts(tmp_path: Path) -> None:
    folder, source = _folder_of("Gemma3", tmp_path)
    checkpointer, model = _loaded(folder, tmp_path / "lora", lora=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b.weight"):
                parameter.normal_(generator=torch.Generator().manual_seed(3))
    merged = checkpointer.save("epoch_0", model, contents=("adapter", "merged"))
    found = stored(merged)
    _same_other_parts(found, source)
    changed = {key for key in source if not torch.equal(found[key], source[key])}
    assert {key.rpartition("self_attn.")[2] for key in changed} == {"q_proj.weight", "v_proj.weight"}

    # The output is itself a checkpoint of all parts: train on from it, resume, and save once more.
    checkpointer, model = _loaded(merged, tmp_path / "full")
    checkpointer.save("step_1", model, state={"progress": {"step": 1}})
    checkpointer, again = _loaded(merged, tmp_path / "full")
    with torch.no_grad():
        again.norm.scale.zero_()
    point = checkpointer.find_resume_point()
    assert point is not None
    progress: dict[str, Any] = {"step": 0}
    checkpointer.resume(point, again, {"progress": progress})
    assert progress == {"step": 1}
    for (key, first), second in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(first, second), key
    last = stored(checkpointer.save("step_2", again))
    assert all(torch.equal(last[key], found[key]) for key in found)


def test_a_checkpoint_with_the_text_part_called_text_model(tmp_path: Path) -> None:
    folder, source = _folder_of("Gemma3", tmp_path)
    source = {key.replace("language_model.model.", "model.text_model."): value for key, value in source.items()}
    write_weights(folder, source)
    checkpointer, model = _loaded(folder, tmp_path / "out")
    found = stored(checkpointer.save("epoch_0", model))
    _same_other_parts(found, source)
    assert all(torch.equal(found[key], source[key]) for key in source)


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
def test_weights_of_multi_token_prediction_are_carried(architecture: str, tmp_path: Path) -> None:
    options = _GLM if architecture == "Glm4Moe" else {"layer_types": ["full_attention"] * 2, "head_dim": 16}
    source = _folder_of_text(architecture, tmp_path / "in", _UNTRAINED[architecture], **options)
    checkpointer, model = _loaded(tmp_path / "in", tmp_path / "out")
    with torch.no_grad():
        model.norm.scale.mul_(1.25)
    saved = checkpointer.save("epoch_0", model)
    found = stored(saved)
    assert found.keys() == source.keys()
    assert {key for key in source if not torch.equal(found[key], source[key])} == {"model.norm.weight"}
    assert all(found[key].dtype is torch.bfloat16 for key in _UNTRAINED[architecture])
    before, after = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "in", saved))
    assert before == after
    again = _loaded(saved, tmp_path / "more")[1]
    assert torch.equal(again.norm.scale, model.norm.scale)
    alone, model = _loaded(tmp_path / "in", tmp_path / "alone", text_only=True)
    assert stored(alone.save("epoch_0", model)).keys() == source.keys() - set(_UNTRAINED[architecture])


def test_a_layer_too_many_is_no_multi_token_prediction(tmp_path: Path) -> None:
    _folder_of_text("Glm4Moe", tmp_path / "in", _UNTRAINED["Glm4Moe"][1:], **_GLM)
    with pytest.raises(CheckpointError, match=r"'model\.layers\.2\.mlp.* has no place .* .the model has 2 layers"):
        _loaded(tmp_path / "in", tmp_path / "out")


def test_experts_in_one_tensor_are_read(tmp_path: Path) -> None:
    options = {"layer_types": ["full_attention"], "num_experts": 3, "num_experts_per_tok": 2, "head_dim": 16}
    options |= {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    write_folder(tmp_path, ("Qwen3_5Moe", options), num_hidden_layers=1)
    _, one_by_one = _loaded(tmp_path, tmp_path / "out")
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    weights = {name: tensor.clone() for name, tensor in hf.state_dict().items()}
    assert weights["model.layers.0.mlp.experts.gate_up_proj"].shape == (3, 16, hf.config.hidden_size)
    write_weights(tmp_path, weights)
    _, fused = _loaded(tmp_path, tmp_path / "out")
    for (name, first), second in zip(one_by_one.named_parameters(), fused.parameters(), strict=True):
        assert torch.equal(first, second), name


@pytest.mark.parametrize("name", ["Gemma3", "Mistral3"])
def test_an_adapter_of_the_text_part_is_peft_s_of_the_whole_model(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "whole"
    hf = _whole(name)
    hf.save_pretrained(folder)
    checkpointer, model = _loaded(folder, tmp_path / "out", lora=True)
    with torch.no_grad():
        before = model.eval()(TOKENS)
        for key, parameter in model.named_parameters():
            if key.endswith("lora_b.weight"):
                parameter.normal_(generator=torch.Generator().manual_seed(3))
        expected = model(TOKENS)
    assert (expected - before).abs().max() > 0.1
    saved = checkpointer.save("epoch_0", model, contents="adapter")

    # peft's own layout: the names that it gives the same adapter of the composite model.
    whole = peft.PeftModel.from_pretrained(hf, saved).eval()
    with torch.no_grad():
        assert (whole(TOKENS).logits - expected).abs().max() <= 1e-4
    adapted = [key for key, module in whole.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer)]
    assert len(adapted) == 4
    assert all(".language_model." in key for key in adapted)  # none in the vision tower
    theirs = tmp_path / "theirs"
    whole.save_pretrained(theirs)
    ours, again = (load_file(path / "adapter_model.safetensors") for path in (saved, theirs))
    assert ours.keys() == again.keys()
    assert all(key.startswith("base_model.model.model.language_model.layers.") for key in ours)

    # Read back: peft's file of the composite model, and one with the names of the text model.
    text = tmp_path / "text"
    shutil.copytree(theirs, text)
    alone = {key.replace("model.language_model.", "model."): value for key, value in again.items()}
    save_file(alone, text / "adapter_model.safetensors")
    for path in (theirs, text):
        _, loaded = _loaded(folder, tmp_path / "out", lora=True, adapter_checkpoint=str(path))
        with torch.no_grad():
            assert torch.equal(loaded.eval()(TOKENS), expected)

    # As a model of its own, it has the names of the text model.
    checkpointer, loaded = _loaded(folder, tmp_path / "own", lora=True, text_only=True)
    own = load_file(checkpointer.save("epoch_0", loaded, contents="adapter") / "adapter_model.safetensors")
    assert own.keys() == alone.keys()


@pytest.mark.filterwarnings("ignore:target_modules=.* were set but no module was matched:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")
def test_adapters_of_experts_beside_other_towers(tmp_path: Path) -> None:
    text = {**_TEXT, "layer_types": ["full_attention"] * 2, "num_hidden_layers": 2, "num_experts": 4}
    text |= {"num_experts_per_tok": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20}
    text["initializer_range"] = 0.08
    sizes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}
    vision = sizes | {"patch_size": 4, "num_position_embeddings": 16}
    torch.manual_seed(0)
    hf = transformers.Qwen3_5MoeForConditionalGeneration(
        transformers.Qwen3_5MoeConfig(text_config=text, vision_config=vision)
    ).eval()
    source = tmp_path / "in"
    hf.save_pretrained(source)

    def adapted(target: str) -> torch.nn.Module:
        model = build(source, LoRA(3, 5, target_modules=[target]))
        checkpointer = FullModelHFCheckpointer(source, output_dir=tmp_path / "out")
        checkpointer.load_model(model)
        randomize_adapter(model)
        checkpointer.save("epoch_0", model, contents=("adapter", "merged"))
        checkpointer.close()
        return model.eval()

    with torch.no_grad():
        for target in ("shared_expert.w*", "mlp.experts"):
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
            wanted, saved = adapted(target)(TOKENS), tmp_path / "out" / "epoch_0"
            in_peft = peft.PeftModel.from_pretrained(copy.deepcopy(hf), saved / "adapter").eval()
            tensors = load_file(saved / "adapter" / "adapter_model.safetensors")
            assert not peft.set_peft_model_state_dict(in_peft, tensors).unexpected_keys
            assert (wanted - hf(TOKENS).logits).abs().max() > 0.01
            assert (wanted - in_peft(TOKENS).logits).abs().max() <= 1e-4
            merged = transformers.Qwen3_5MoeForConditionalGeneration.from_pretrained(saved).eval()
            assert (wanted - merged(TOKENS).logits).abs().max() <= 1e-4
            again = build(source, LoRA(3, 5, target_modules=[target]))
            FullModelHFCheckpointer(source, adapter_checkpoint=saved / "adapter").load_model(again)
            assert torch.equal(again.eval()(TOKENS), wanted)
