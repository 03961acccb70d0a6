"""What copied recipes call, and what older releases wrote."""

import inspect
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.torchtune.checkpoints.small import (
    build,
    close,
    in_peft,
    in_transformers,
    load,
    logits,
    randomize_adapter,
    read,
    same_bits,
    stored,
    write_folder,
)
from torchtune import checkpoints, training
from torchtune.checkpoints import (
    CheckpointError,
    FullModelHFCheckpointer,
    FullModelMetaCheckpointer,
    FullModelTorchTuneCheckpointer,
    get_largest_iter_folder,
    safe_torch_load,
    update_state_dict_for_classifier,
)
from torchtune.modules.peft import LoRA, get_adapter_state_dict, get_merged_lora_ckpt

STATE = {
    "optimizer": {"state": {"norm.scale": {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]},
    "seed": 7,
    "epochs_run": 1,
    "total_epochs": 2,
    "max_steps_per_epoch": None,
    "steps_run": 5,
    "dataloader": {},
}


def checkpointer(source: Path, output: Path, **options: Any) -> FullModelHFCheckpointer:
    """As official YAML of older releases builds it."""
    return FullModelHFCheckpointer(
        checkpoint_dir=source,
        checkpoint_files=["model.safetensors"],
        model_type="LLAMA3",
        output_dir=output,
        **options,
    )


@pytest.mark.parametrize(
    ("shape", "model_type"), [("qwen3_tied", None), ("llama_tied", None), ("phi3", "PHI3_MINI"), ("llama", "REWARD")]
)
def test_former_model_types_are_accepted(shape, model_type, tmp_path):
    """A ``model_type`` of older configs need not be the name of a family."""
    folder = write_folder(tmp_path / "source", shape)
    loaded = FullModelHFCheckpointer(folder, model_type=model_type).load_checkpoint()["model"]
    assert same_bits(loaded, load(folder).state_dict())


@pytest.fixture
def store(source: Path, tmp_path: Path) -> FullModelHFCheckpointer:
    return checkpointer(source, tmp_path)


def test_state_dict_round_trip_is_exact(store, source, tmp_path):
    loaded = store.load_checkpoint()
    assert loaded.keys() == {"model"}
    store.save_checkpoint(loaded, epoch=0)
    assert same_bits(stored(tmp_path / "epoch_0"), stored(source))
    store.save_checkpoint(loaded, epoch=0, step=12, dir_prefix="step", max_shard_size="0.05MB")
    assert len(list((tmp_path / "step_12").glob("model-*.safetensors"))) > 1
    assert same_bits(in_transformers(tmp_path / "step_12").state_dict(), in_transformers(source).state_dict())


@pytest.mark.parametrize("size", ["5", "GB", "five GB", "-1GB"])
def test_malformed_shard_size_is_refused(source, tmp_path, size):
    with pytest.raises(CheckpointError, match=f"max_shard_size: '{size}' is not a size: write it like 5GB"):
        checkpointer(source, tmp_path).save_checkpoint({"model": {}}, epoch=0, max_shard_size=size)


def test_full_training_resumes_from_the_last_checkpoint(source, tmp_path):
    store = checkpointer(source, tmp_path, keep_last_n_checkpoints=1)
    model = store.load_checkpoint()["model"]
    for epoch in (9, 10):
        changed = {name: tensor + epoch for name, tensor in model.items()}
        store.save_checkpoint({"model": changed, **STATE}, epoch=epoch, intermediate_checkpoint=True)
    assert [path.name for path in tmp_path.iterdir()] == ["epoch_10"]
    loaded = checkpointer(source, tmp_path, should_load_recipe_state=True).load_checkpoint()
    assert same_bits(loaded.pop("model"), changed)
    assert loaded == STATE


def lora_state(source: Path) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    """An adapted model, its merged weights and its adapter with settings, as recipes of older releases made them."""
    model = load(source, LoRA(rank=4, alpha=8, attn_modules=["q_proj", "v_proj"], apply_to_mlp=True))
    randomize_adapter(model)
    adapter = get_adapter_state_dict(model.state_dict())
    merged = get_merged_lora_ckpt({k: v.clone() for k, v in model.state_dict().items()}, rank=4, alpha=8)
    config = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj", "w1", "w2", "w3"],
        "peft_type": "LORA",
    }
    return model, merged, {"adapter": adapter, "adapter_config": config}


def test_adapter_is_saved_beside_merged_weights_and_resumed(store, source, tmp_path):
    model, merged, adapter = lora_state(source)
    store.save_checkpoint({"model": merged, **adapter, **STATE}, epoch=0, intermediate_checkpoint=True)
    folder = tmp_path / "epoch_0" / "adapter"
    assert read(folder / "adapter_config.json")["base_model_name_or_path"] == str(source.resolve())
    close(logits(in_peft(in_transformers(source), folder)), logits(model))
    # transformers adds an adapter that lies beside the weights: the merged ones would get it twice
    close(logits(in_transformers(tmp_path / "epoch_0")), logits(model))

    loaded = checkpointer(source, tmp_path, should_load_recipe_state=True).load_checkpoint()
    assert same_bits(loaded["adapter"], adapter["adapter"])
    assert same_bits(loaded["model"], load(source).state_dict()), "the base, not the merged weights"
    assert loaded["epochs_run"] == 1


def test_adapter_only_save_has_no_model_files(store, source, tmp_path):
    _, _, adapter = lora_state(source)
    store.save_checkpoint({**adapter}, epoch=0, adapter_only=True)
    assert not list((tmp_path / "epoch_0").glob("model*"))
    with pytest.raises(CheckpointError, match="needs an adapter"):
        store.save_checkpoint({"model": {}}, epoch=1, adapter_only=True)


def test_an_older_run_goes_on_in_an_older_recipe_alone(store, source, tmp_path):
    """What an older release left: merged weights, adapter and state, without a marker."""
    model, merged, adapter = lora_state(source)
    for epoch in (0, 1):
        state = {**STATE, "epochs_run": epoch + 1}
        store.save_checkpoint({"model": merged, **adapter, **state}, epoch=epoch, intermediate_checkpoint=True)
        (tmp_path / f"epoch_{epoch}" / ".complete").unlink()
    assert checkpointer(source, tmp_path, should_load_recipe_state=True).load_checkpoint()["epochs_run"] == 2
    conversion = LoRA(rank=4, alpha=8, attn_modules=["q_proj", "v_proj"], apply_to_mlp=True)
    again = load(source, conversion, adapter_checkpoint=tmp_path / "epoch_1")
    assert torch.equal(logits(again), logits(model))
    with pytest.raises(CheckpointError, match="already holds a run"):
        store.check_output_dir(resume=False)
    with pytest.raises(CheckpointError, match="nothing to resume"):
        store.find_resume_point()


def test_folder_without_a_recipe_state_is_refused(source, tmp_path):
    with pytest.raises(CheckpointError, match=r"no checkpoint with a recipe_state\.pt"):
        checkpointer(source, tmp_path, should_load_recipe_state=True).load_checkpoint()


@pytest.mark.parametrize("tied", [False, True])
def test_meta_checkpoints_are_read_and_written(tied, tmp_path):
    expected = load(write_folder(tmp_path / "hf", "llama_tied" if tied else "llama")).state_dict()
    meta_tensors = {
        name.replace(".attn.q_proj", ".attention.wq")
        .replace(".attn.k_proj", ".attention.wk")
        .replace(".attn.v_proj", ".attention.wv")
        .replace(".attn.output_proj", ".attention.wo")
        .replace(".mlp.", ".feed_forward.")
        .replace("sa_norm.scale", "attention_norm.weight")
        .replace("mlp_norm.scale", "ffn_norm.weight")
        .replace("norm.scale", "norm.weight"): tensor
        for name, tensor in expected.items()
    }
    meta_tensors["output.weight"] = meta_tensors.get("output.weight", meta_tensors["tok_embeddings.weight"])
    (tmp_path / "meta").mkdir()
    torch.save({**meta_tensors, "rope.freqs": torch.ones(4)}, tmp_path / "meta" / "consolidated.00.pth")
    for checkpointer_class in (FullModelMetaCheckpointer, FullModelHFCheckpointer):
        again = build(tmp_path / "hf")
        checkpointer_class(tmp_path / "meta", ["consolidated.00.pth"]).load_model(again)
        assert same_bits(again.state_dict(), expected)
    store = FullModelMetaCheckpointer(
        tmp_path / "meta", ["consolidated.00.pth"], "LLAMA3_2" if tied else "LLAMA3", tmp_path / "output"
    )
    assert same_bits(store.load_checkpoint()["model"], expected)
    store.save_checkpoint({"model": expected, **STATE}, epoch=0, intermediate_checkpoint=True)
    assert same_bits(safe_torch_load(tmp_path / "output" / "epoch_0" / "model-00001-of-00001.bin"), meta_tensors)
    store.should_load_recipe_state = True
    loaded = store.load_checkpoint()
    assert same_bits(loaded["model"], expected)
    assert loaded["seed"] == 7
    # where an older release kept its state
    shutil.move(tmp_path / "output" / "epoch_0" / "recipe_state.pt", tmp_path / "output" / "recipe_state.pt")
    (tmp_path / "output" / "recipe_state").mkdir()
    shutil.move(tmp_path / "output" / "recipe_state.pt", tmp_path / "output" / "recipe_state" / "recipe_state.pt")
    assert store.load_checkpoint()["seed"] == 7


def test_checkpoints_with_names_of_this_library_are_read_and_written(source, tmp_path):
    expected = load(source).state_dict()
    (tmp_path / "tune").mkdir()
    torch.save(expected, tmp_path / "tune" / "model.pt")
    store = FullModelTorchTuneCheckpointer(
        tmp_path / "tune", checkpoint_files=["model.pt"], model_type="LLAMA3", output_dir=tmp_path / "output"
    )
    assert same_bits(store.load_checkpoint(weights_only=True)["model"], expected)
    again = build(source)
    store.load_model(again)
    assert same_bits(again.state_dict(), expected)
    adapter = {"layers.0.attn.q_proj.lora_a.weight": torch.ones(2, 2)}
    store.save_checkpoint({"model": expected, "adapter": adapter, **STATE}, epoch=3, intermediate_checkpoint=True)
    store.should_load_recipe_state = True
    loaded = store.load_checkpoint()
    assert same_bits(loaded["model"], expected)
    assert same_bits(loaded["adapter"], adapter)


def test_signatures_are_those_of_older_releases():
    """Order and names of what was positional; new arguments come after a star."""
    common = ["checkpoint_dir", "checkpoint_files", "model_type", "output_dir", "adapter_checkpoint"]
    common += ["recipe_checkpoint", "resume_from_checkpoint"]
    expected = {
        FullModelHFCheckpointer: [*common, "safe_serialization", "should_load_recipe_state"],
        FullModelMetaCheckpointer: [*common, "should_load_recipe_state"],
        FullModelTorchTuneCheckpointer: [*common, "should_load_recipe_state"],
    }
    for cls, names in expected.items():
        parameters = inspect.signature(cls).parameters.values()
        assert [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD] == names
    assert inspect.signature(FullModelHFCheckpointer).parameters["enable_dcp"].kind is inspect.Parameter.KEYWORD_ONLY


def test_state_dict_keys_are_those_of_older_releases():
    keys = "MODEL OPT ADAPTER SEED EPOCHS TOTAL_EPOCHS MAX_STEPS STEPS DATALOADER VAL_DATALOADER RNG".split()
    values = "model optimizer adapter seed epochs_run total_epochs max_steps_per_epoch steps_run dataloader"
    assert [getattr(training, f"{key}_KEY") for key in keys] == [*values.split(), "val_dataloader", "rng_state"]
    assert checkpoints.ADAPTER_CONFIG == "adapter_config"
    assert checkpoints.ModelType.LLAMA3_2.value == "llama3_2"


def test_folder_with_the_largest_number_is_found(tmp_path):
    assert get_largest_iter_folder(tmp_path) is None
    assert get_largest_iter_folder(tmp_path / "nowhere") is None
    for name in ("epoch_2", "epoch_10", "step_300", "epoch_x"):
        (tmp_path / name).mkdir()
    assert get_largest_iter_folder(tmp_path) == "epoch_10"
    assert get_largest_iter_folder(tmp_path, r"^step_(\d+)") == "step_300"


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("rows", [2, 7])
def test_classifier_head_is_replaced_unless_it_fits(rows, force):
    new_head = nn.Parameter(torch.ones(2, 3))
    state = {"output.weight": torch.zeros(rows, 3), "output.bias": torch.zeros(rows), "norm.scale": torch.ones(3)}
    update_state_dict_for_classifier(state, [("output.weight", new_head)], force_override=force)
    assert state.keys() == {"output.weight", "norm.scale"}
    assert (state["output.weight"] is new_head) is (force or rows == 7)
    with pytest.raises(CheckpointError, match=r"no output\.weight"):
        update_state_dict_for_classifier({}, [("norm.scale", new_head)])
