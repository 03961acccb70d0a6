"""Every setting of an adapter's file is understood as peft understands it, or refused by name."""

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import torchtune
from tests.torchtune.checkpoints import ranks
from tests.torchtune.checkpoints.small import (
    build,
    close,
    hf_model,
    in_peft,
    in_transformers,
    load,
    logits,
    randomize_adapter,
    read,
    resume,
    same_bits,
    started,
    write_folder,
)
from torchtune.checkpoints import CheckpointError, FullModelHFCheckpointer, adapter_conversion
from torchtune.modules.conversion import ConversionError
from torchtune.modules.peft import LoRA

PEFT = ["q_proj", "o_proj", "down_proj"]
OURS = ["q_proj", "output_proj", "w2"]


def trained_by_peft(folder: Path, shape: str = "llama", **settings: Any) -> nn.Module:
    """An adapter that has moved away from its start, saved by peft; the model that it makes of it when it loads it."""
    torch.manual_seed(5)
    wanted = LoraConfig(r=4, lora_alpha=6, **({"target_modules": PEFT} | settings))
    model = get_peft_model(hf_model(shape), wanted)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(1 + 0.5 * torch.rand_like(parameter)).add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return in_peft(hf_model(shape), folder)


def change(folder: Path, **settings: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(read(path) | settings))


def lora(dora: bool = False) -> LoRA:
    return LoRA(4, 6, target_modules=OURS, use_dora=dora)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("init", [True, False, "gaussian", "orthogonal", "pissa", "olora", "OLoRA"])
def test_adapters_of_every_initialization_have_the_logits_of_peft(init, dora, tmp_path):
    source = write_folder(tmp_path / "in")
    peft_model = trained_by_peft(source, init_lora_weights=init, use_dora=dora)
    close(logits(load(source, lora(dora))), logits(peft_model))


@pytest.mark.parametrize("init", ["pissa", "olora"])
@pytest.mark.parametrize("shape", ["llama", "qwen2_tied"])
def test_adapters_out_of_the_base_are_saved_and_merged(shape, init, tmp_path):
    source = write_folder(tmp_path / "in", shape)
    trained_by_peft(tmp_path / "peft", shape, init_lora_weights=init)
    checkpointer, model = started(source, lora(), adapter_checkpoint=tmp_path / "peft")
    again = load(source, lora(), adapter_checkpoint=tmp_path / "peft")
    randomize_adapter(model)  # trained on
    expected = logits(model)
    assert (expected - logits(again)).abs().max() > 0.1

    step = checkpointer.save("step_1", model, state={"progress": {}}, contents="adapter")
    close(logits(in_peft(hf_model(shape), step)), expected)
    resume(checkpointer, again)
    assert same_bits(again.state_dict(), model.state_dict())  # the base is changed once

    epoch = checkpointer.save("epoch_0", model, contents=("adapter", "merged"))
    close(logits(in_transformers(epoch)), expected)
    close(logits(in_peft(hf_model(shape), epoch / "adapter")), expected)
    with pytest.raises(CheckpointError, match=f"its base lacks what the adapter started with .*'{init}'"):
        checkpointer.save("epoch_1", model.requires_grad_(False))


def sharded(folder: Path) -> None:
    model = ranks.shard(build(folder / "in", lora()), "fsdp")
    FullModelHFCheckpointer(folder / "in").load_model(model)
    alone = load(folder / "in", lora())
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(ranks.whole(model.get_parameter(name)), parameter.detach(), atol=1e-6, rtol=1e-5)


def test_the_base_of_sharded_models_is_changed_alike(tmp_path):
    trained_by_peft(write_folder(tmp_path / "in"), init_lora_weights="pissa")
    ranks.run(2, [sharded], tmp_path)


def test_resume_of_an_adapter_with_another_initialization_is_refused(tmp_path):
    source = write_folder(tmp_path / "in")
    trained_by_peft(tmp_path / "pissa", init_lora_weights="pissa")
    trained_by_peft(tmp_path / "plain")
    store, model = started(source, lora(), adapter_checkpoint=tmp_path / "plain")
    store.save("step_1", model, state={"progress": {}}, contents="adapter")
    FullModelHFCheckpointer(source, adapter_checkpoint=tmp_path / "pissa").load_model(model)
    with pytest.raises(CheckpointError, match="adapter of the kind pissa already"):
        resume(store, model)


def test_initialization_of_a_fused_projection_is_refused(tmp_path):
    source = write_folder(tmp_path / "in", "phi3")
    trained_by_peft(source, "phi3", target_modules=["qkv_proj"], init_lora_weights="pissa")
    with pytest.raises(CheckpointError, match=r"'pissa' cannot be expressed for 'layers\.0\.attn\.q_proj"):
        load(source, LoRA(4, 6, attn_modules=["q_proj", "k_proj", "v_proj"]))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("init_lora_weights", start) for start in ("pissa_niter_4", "loftq", "corda")),
        ("layer_replication", [[0, 2], [1, 3]]),
        ("peft_type", "IA3"),
        ("a_setting_of_next_year", 0.5),
    ],
)
def test_settings_that_change_the_result_are_refused(key, value, tmp_path):
    """The tensors would fit, and the model would compute something else."""
    source = write_folder(tmp_path / "in")
    trained_by_peft(source)
    change(source, **{key: value})
    with pytest.raises(
        CheckpointError, match=rf"adapter_config\.json: ({key} = .*cannot be expressed|an adapter of type IA3).*\.$"
    ):
        load(source, lora())


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (
            "rank_pattern",
            {"q_proj": 2},
            r"r = 2 for model\.layers\.0\.self_attn\.q_proj, the model in the run's config 4",
        ),
        ("alpha_pattern", {"layers.1.*o_proj": 9}, r"lora_alpha = 9 for model\.layers\.1\.self_attn\.o_proj, .* 6"),
        ("rank_pattern", {"q_proj(": 2}, "numbers by patterns of module names are expected"),
        ("alpha_pattern", {"q_proj": "many"}, "numbers by patterns of module names are expected"),
    ],
)
def test_patterns_of_ranks_and_alphas_that_differ_from_the_model_are_refused(key, value, words, tmp_path):
    source = write_folder(tmp_path / "in")
    trained_by_peft(source)
    change(source, **{key: value})
    with pytest.raises(CheckpointError, match=words):
        load(source, lora())


PATTERNS = {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 8}
ALPHAS = {r"model\.layers\.[01]\.self_attn\.o_proj": 3, "q_proj": 5}


@pytest.mark.parametrize("option", ["", "use_dora", "use_rslora"])
def test_adapters_with_ranks_and_alphas_by_pattern_are_exchanged_with_peft(option, tmp_path):
    """The keys are regular expressions of the ends of paths, ours of our paths."""
    source = write_folder(tmp_path / "in")
    kind = {option: True} if option else {}
    peft_model = trained_by_peft(source, rank_pattern=PATTERNS, alpha_pattern=ALPHAS, **kind)
    conversion = LoRA(
        4,
        6,
        target_modules=OURS,
        rank_pattern={"q_proj": 2, r"layers\.1\.mlp\.w2": 8},
        alpha_pattern={r"layers\.[01]\.attn\.output_proj": 3, "q_proj": 5},
        **kind,
    )
    checkpointer, model = started(source, conversion)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if name.endswith("lora_b.weight")}
    assert shapes["layers.2.attn.q_proj.lora_b.weight"] == (32, 2)
    assert shapes["layers.1.mlp.w2.lora_b.weight"] == (32, 8)
    assert shapes["layers.0.mlp.w2.lora_b.weight"] == (32, 4)
    close(logits(model), logits(peft_model))
    assert torch.equal(logits(load(source, adapter_conversion(build(source), source))), logits(model))

    saved = checkpointer.save("epoch_0", model, contents="adapter")
    assert read(saved / "adapter_config.json")["rank_pattern"]["q_proj"] == 2
    close(logits(in_peft(hf_model("llama"), saved)), logits(model))
    merged = checkpointer.save("epoch_1", model, contents=("adapter", "merged"))
    close(logits(in_transformers(merged)), logits(model))
    folder = tmp_path / "adapter"
    in_peft(hf_model("llama"), saved).save_pretrained(folder)
    assert same_bits(load(source, conversion, adapter_checkpoint=folder).state_dict(), model.state_dict())


def test_fused_projections_with_ranks_by_pattern_are_exchanged_with_peft(tmp_path):
    source = write_folder(tmp_path / "in", "phi3")
    trained_by_peft(source, "phi3", target_modules=["qkv_proj", "o_proj"], rank_pattern={"o_proj": 2})
    conversion = LoRA(
        4,
        6,
        rank_pattern={"output_proj": 2, r"layers\.0\.attn\.[qkv]_proj": 3},
        alpha_pattern={"k_proj|q_proj|v_proj": 5},
    )
    checkpointer, model = started(write_folder(tmp_path / "base", "phi3"), conversion)
    randomize_adapter(model)
    saved = checkpointer.save("epoch_0", model, contents="adapter")
    assert read(saved / "adapter_config.json")["rank_pattern"] == {
        "model.layers.0.self_attn.qkv_proj": 9,
        "model.layers.1.self_attn.qkv_proj": 12,
        "model.layers.2.self_attn.qkv_proj": 12,
        "o_proj": 2,
    }
    close(logits(in_peft(hf_model("phi3"), saved)), logits(model))
    loaded = load(tmp_path / "base", adapter_conversion(build(source), saved), adapter_checkpoint=saved)
    assert torch.equal(logits(loaded), logits(model))
    with pytest.raises(ConversionError, match="are one projection in files"):
        build(source, LoRA(4, 6, rank_pattern={"q_proj": 2}))


def test_settings_without_effect_are_accepted(tmp_path):
    """Tensors say which layers there are; EVA looks at data before training; what a newer release has off is off."""
    source = write_folder(tmp_path / "in")
    peft_model = trained_by_peft(
        source, target_modules=["q_proj"], layers_to_transform=[1, 2], exclude_modules=["k_proj"]
    )
    change(source, a_setting_of_next_year=None, another=False, lora_dropout=0.3, peft_version="9.0", loftq_config={})
    change(source, init_lora_weights="eva", eva_config={"rho": 2.0})
    model = load(source, LoRA(4, 6, target_modules=["layers.[12].attn.q_proj"]))
    close(logits(model), logits(peft_model))


def test_no_setting_of_peft_is_overlooked(tmp_path):
    """Each one switched on, to something that is not its default, is refused or among those that were looked at."""
    source = write_folder(tmp_path / "in")
    trained_by_peft(source)
    settings = read(source / "adapter_config.json")
    assert settings.keys() >= {field.name for field in dataclasses.fields(LoraConfig)} - {"runtime_config"}
    passed = set()
    for key in settings.keys() - {"r", "lora_alpha", "use_dora", "peft_type"}:
        change(source, **{**settings, key: "something"})
        try:
            load(source, lora())
        except CheckpointError as error:
            assert key in str(error)  # noqa: PT017 - which of both happens is what is looked at
            continue
        passed.add(key)
    assert passed == {
        *("auto_mapping", "base_model_name_or_path", "revision", "peft_version", "task_type", "inference_mode"),
        *("lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "megatron_core"),
        *("qalora_group_size", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("ensure_weight_tying", "target_parameters"),
    }


def test_settings_of_the_wrong_type_are_refused(tmp_path):
    source = write_folder(tmp_path / "base")
    trained_by_peft(saved := tmp_path / "adapter")
    settings = read(saved / "adapter_config.json") | {"base_model_name_or_path": str(source)}
    for key, value in itertools.product(("r", "lora_alpha", "use_dora", "use_rslora"), ("4", None, 10**400, math.nan)):
        change(saved, **settings | {key: value})
        message = rf"adapter_config.json: {key} is .*, where .* is expected: correct it"
        with pytest.raises(CheckpointError, match=message):
            torchtune.load(saved, device="cpu")
        with pytest.raises(CheckpointError, match=message):
            load(source, lora(), adapter_checkpoint=saved)
