"""Adapters in PEFT's files: what we write gives the same logits in peft, what peft writes gives them with us."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

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
    refusal,
    resume,
    same_bits,
    some_tokens,
    started,
    stored,
    write_folder,
)
from torchtune.checkpoints import CheckpointError, FullModelHFCheckpointer, adapter_conversion
from torchtune.modules import TransformerDecoder
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.peft import LoRA, get_adapter_params

# What is adapted: our arguments, and PEFT's target_modules.
TARGETS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "attention": ({"attn_modules": ["q_proj", "v_proj"]}, ["q_proj", "v_proj"]),
    "mlp": ({"attn_modules": ["k_proj"], "apply_to_mlp": True}, ["k_proj", "gate_proj", "down_proj", "up_proj"]),
    "patterns": (
        {"target_modules": ["layers.[12].attn.k_proj", "layers.0.mlp.w2"]},
        ["model.layers.1.self_attn.k_proj", "model.layers.2.self_attn.k_proj", "model.layers.0.mlp.down_proj"],
    ),
    "output": ({"attn_modules": ["q_proj"], "apply_to_output": True}, ["q_proj", "lm_head"]),
}
OPTIONS = ("", "use_dora", "use_rslora")


def adapters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in get_adapter_params(model).items()}


def gradients_under_names_of_peft(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradients of an adapter, ours or peft's."""
    is_torchtune = isinstance(model, TransformerDecoder)
    named = get_adapter_params(model) if is_torchtune else {n: p for n, p in model.named_parameters() if "lora_" in n}
    for parameter in named.values():
        parameter.requires_grad_(True)
    out = model(some_tokens()) if is_torchtune else model(some_tokens()).logits
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    gradients = dict(zip(named, torch.autograd.grad((out * weights).sum(), named.values()), strict=True))
    if is_torchtune:
        return dict(model.spec.weight_map("hf").peft().to_external(gradients.items(), model.description, partial=True))
    return {n.replace(".default", "").replace("vector.weight", "vector"): gradient for n, gradient in gradients.items()}


# Every shape with all targets, and every pair of a shape or of targets and an option.
PAIRS = []
for _row, _shape in enumerate(("llama", "qwen2", "qwen3")):
    for _column, _targets in enumerate(TARGETS):
        PAIRS.append((_shape, _targets, OPTIONS[(_row + _column) % 3]))


@pytest.mark.parametrize(("shape", "targets", "option"), PAIRS)
def test_adapters_are_exchanged_with_peft(shape, targets, option, tmp_path):
    names, peft_model = TARGETS[targets]
    source = write_folder(tmp_path / "in", shape)
    kind = {option: True} if option else {}
    conversion = LoRA(rank=4, alpha=6, **kind, **names)
    checkpointer, model = started(source, conversion)
    base = logits(hf_model(shape))
    close(logits(model), base)  # it changes nothing yet
    randomize_adapter(model)
    expected = logits(model)
    assert (expected - base).abs().max() > 0.1

    saved = checkpointer.save("epoch_0", model, contents="adapter")
    assert not list(saved.glob("model*"))
    settings = read(saved / "adapter_config.json")
    assert sorted(settings["target_modules"]) == sorted(peft_model)
    assert (settings["r"], settings["lora_alpha"]) == (4, 6)
    assert {name for name in ("use_dora", "use_rslora") if settings[name]} == kind.keys()
    assert settings["base_model_name_or_path"] == str(source)
    peft_model = in_peft(hf_model(shape), saved)
    close(logits(peft_model), expected)
    gradients, wanted = gradients_under_names_of_peft(model), gradients_under_names_of_peft(peft_model)
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (gradients[name] - gradient).norm() <= 1e-4 * gradient.norm(), name

    peft_model.save_pretrained(source)
    again = load(source, conversion)
    assert same_bits(adapters(again), adapters(model))
    assert torch.equal(logits(again), expected)
    assert torch.equal(logits(load(source, adapter_conversion(build(source), source))), expected)
    folder = checkpointer.save("epoch_1", model, contents=("adapter", "merged"), max_shard_bytes=40_000)
    # Loaders would take an adapter beside the merged weights for theirs and count it twice.
    assert not list(folder.glob("adapter_*"))
    close(logits(in_transformers(folder)), expected)
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape", ["phi3", "glm4"])
def test_adapters_of_fused_projections_are_exchanged_with_peft(shape, option, tmp_path):
    """One projection there is several here: theirs of rank 4 is each of ours of rank 4; ours are theirs of rank 4 n."""
    source = write_folder(tmp_path / "in", shape)
    kind = {option: True} if option else {}
    fused = ["qkv_proj"] if shape == "phi3" else ["q_proj", "k_proj", "v_proj"]
    torch.manual_seed(5)
    wanted = LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=[*fused, "gate_up_proj", "down_proj"],
        init_lora_weights=False,
        **kind,
    )
    peft_model = get_peft_model(hf_model(shape), wanted).eval()
    peft_model.save_pretrained(source)
    conversion = LoRA(4, 6, attn_modules=["q_proj", "k_proj", "v_proj"], apply_to_mlp=True, **kind)
    close(logits(load(source, conversion)), logits(peft_model))

    checkpointer, model = started(source, conversion)
    randomize_adapter(model)  # the parts differ now
    expected = logits(model)
    peft_model = in_peft(hf_model(shape), checkpointer.save("epoch_0", model, contents="adapter"))
    close(logits(peft_model), expected)
    peft_model.save_pretrained(source)
    assert same_bits(adapters(load(source, conversion)), adapters(model))
    close(logits(in_transformers(checkpointer.save("epoch_1", model, contents=("adapter", "merged")))), expected)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_adapters_of_frozen_parts_of_a_fused_projection_stay_zero(dora, tmp_path):
    """The adapters of the other parts stay zero: here, in peft, and after training."""
    source = write_folder(tmp_path / "in", "phi3")
    conversion = LoRA(4, 6, attn_modules=["q_proj", "v_proj"], use_dora=dora)
    checkpointer, model = started(source, conversion)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name.split(".")[3] for name in trained} == {"q_proj", "v_proj"}
    untrained = {name: value.clone() for name, value in adapters(model).items() if name not in trained}
    assert untrained
    optimizer = torch.optim.SGD(trained.values(), lr=30.0)
    for _ in range(2):  # B first, then A
        model(some_tokens()).square().mean().backward()
        optimizer.step()
    assert same_bits({name: value for name, value in adapters(model).items() if name in untrained}, untrained)
    assert not any(value.any() for name, value in untrained.items() if "lora_b" in name)
    expected = logits(model.eval())
    saved = checkpointer.save("epoch_0", model, contents="adapter")
    assert not torch.allclose(expected, logits(load(source)), atol=1e-3)
    close(logits(in_peft(hf_model("phi3"), saved)), expected)
    shutil.copytree(saved, source, dirs_exist_ok=True)
    again = load(source, conversion)
    assert same_bits(adapters(again), adapters(model))
    assert [name for name, parameter in again.named_parameters() if parameter.requires_grad] == list(trained)


def test_fused_adapter_that_cannot_be_split_is_refused(tmp_path):
    source = write_folder(tmp_path / "in", "phi3")
    wanted = LoraConfig(r=12, lora_alpha=12, target_modules=["qkv_proj"], init_lora_weights=False)
    get_peft_model(hf_model("phi3"), wanted).save_pretrained(source)
    settings = read(source / "adapter_config.json")
    settings |= {"r": 4, "lora_alpha": 4, "rank_pattern": {"qkv_proj": 12}, "alpha_pattern": {"qkv_proj": 12}}
    (source / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="is not made of one for each of its parts"):
        load(source, LoRA(4, 4, attn_modules=["q_proj", "k_proj", "v_proj"]))


@pytest.mark.parametrize("merge", [False, True], ids=["adapter only", "merged"])
@pytest.mark.parametrize("shape", ["llama", "qwen3_tied"])
def test_adapter_of_a_bf16_model_resumes_bit_exact(shape, merge, tmp_path):
    source = write_folder(tmp_path / "in", shape, torch.bfloat16)
    conversion = LoRA(4, 8, use_dora=True)
    checkpointer, model = started(source, conversion, dtype=torch.bfloat16)
    again = load(source, conversion, dtype=torch.bfloat16)
    randomize_adapter(model)
    state = {"progress": {"global_step": 3}}
    folder = checkpointer.save("step_3", model, state=state, contents=("adapter", "merged") if merge else "adapter")
    assert resume(checkpointer, again) == state
    assert same_bits(again.state_dict(), model.state_dict())
    trained = get_adapter_params(again)
    assert {parameter.dtype for parameter in trained.values()} == {torch.float32}
    assert {p.dtype for name, p in again.named_parameters() if name not in trained} == {torch.bfloat16}
    folder = folder / "adapter" if merge else folder
    peft_tensors = get_peft_model_state_dict(in_peft(hf_model(shape, torch.bfloat16), folder))
    assert same_bits(
        peft_tensors, load_file(folder / "adapter_model.safetensors")
    )  # which keeps them in float32 as well


def test_adapter_file_of_an_older_checkpoint_is_read(tmp_path):
    source = write_folder(tmp_path / "in")
    model = load(source, LoRA(4, 8))
    randomize_adapter(model)
    torch.save(adapters(model), source / "adapter_model.pt")
    again = load(source, LoRA(4, 8), adapter_checkpoint="adapter_model.pt")
    assert same_bits(adapters(again), adapters(model))
    # Older releases wrote it beside the weights that they had merged it into: it must not count twice unasked.
    with pytest.raises(CheckpointError, match="adapter_checkpoint"):
        load(source, LoRA(4, 8))
    assert torch.equal(load(source).tok_embeddings.weight, model.tok_embeddings.weight)


def test_dora_magnitudes_are_the_norms_of_the_loaded_weights(tmp_path):
    """Made before there were weights, they must be the lengths of the rows that were loaded."""
    source = write_folder(tmp_path / "in")
    with_meta = load(source, LoRA(4, 8, use_dora=True))
    real = build(source).to_empty(device="cpu")
    for parameter in real.parameters():
        torch.nn.init.normal_(parameter)
    apply_conversions(real, [LoRA(4, 8, use_dora=True)])
    embedding = real.tok_embeddings.weight
    FullModelHFCheckpointer(source).load_model(real)
    assert real.tok_embeddings.weight is embedding, "a real model is loaded in place"
    assert torch.equal(embedding, with_meta.tok_embeddings.weight)
    for model in (with_meta, real):
        layer = model.layers[1].attn.q_proj
        torch.testing.assert_close(layer.magnitude, layer.weight.norm(dim=1))


@pytest.fixture
def adapted(source: Path, tmp_path: Path) -> Path:
    """A folder with an adapter of rank 4 beside the weights."""
    folder = shutil.copytree(source, tmp_path / "in")
    checkpointer, model = started(folder, LoRA(4, 8, attn_modules=["q_proj"]))
    saved = checkpointer.save("epoch_0", model, contents="adapter")
    return shutil.copytree(saved, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("config.json"))


@pytest.mark.parametrize(
    ("conversion", "words"),
    [
        (LoRA(8, 8, attn_modules=["q_proj"]), ["adapter_config.json", "4", "8"]),
        (LoRA(4, 16, attn_modules=["q_proj"]), ["adapter_config.json", "alpha", "8", "16"]),
        (LoRA(4, 8, attn_modules=["q_proj", "v_proj"]), ["adapter_model.safetensors", "v_proj"]),
        (LoRA(4, 8, attn_modules=["v_proj"]), ["adapter_model.safetensors", "q_proj"]),
        (LoRA(4, 8, attn_modules=["q_proj"], use_dora=True), ["adapter_"]),
    ],
    ids=["rank", "alpha", "too few layers", "other layers", "dora"],
)
def test_adapter_that_does_not_fit_is_refused(conversion, words, adapted):
    message = refusal(load, adapted, conversion)
    assert all(word in message for word in words), message


def test_cut_or_foreign_adapter_is_refused(adapted):
    conversion = LoRA(4, 8, attn_modules=["q_proj"])
    path = adapted / "adapter_model.safetensors"
    file_bytes = path.read_bytes()
    tensors = load_file(path)
    path.write_bytes(file_bytes[: len(file_bytes) // 2])
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors .* is not a whole safetensors file"):
        load(adapted, conversion)
    name = next(iter(tensors))
    save_file(tensors | {name.replace("layers.0", "layers.9"): tensors[name].clone()}, path)
    with pytest.raises(CheckpointError, match=r"layers\.9.*: it is an adapter of another model"):
        load(adapted, conversion)
    (adapted / "adapter_config.json").write_text("{")
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        load(adapted, conversion)
    with pytest.raises(CheckpointError, match=r"epoch_0.*base model"):
        FullModelHFCheckpointer(adapted.parent / "out" / "epoch_0").load_model(build(adapted, conversion))


def test_base_of_an_adapter_is_named_and_saved_where_the_adapter_is_frozen(tmp_path):
    """`tune download` notes where the base came from: others find it there, not in a folder of this machine."""
    source = write_folder(tmp_path / "in")
    (source / "original_repo_id.json").write_text('{"repo_id": "org/model"}')
    checkpointer, model = started(source, LoRA(4, 8))
    saved = checkpointer.save("epoch_0", model, contents="adapter")
    assert read(saved / "adapter_config.json")["base_model_name_or_path"] == "org/model"
    randomize_adapter(model)
    assert same_bits(stored(checkpointer.save("epoch_1", model.requires_grad_(False))), stored(source))
