"""A store of several models: trained ones in one checkpoint, frozen ones recorded, and what a resume refuses."""

import shutil
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import torchtune
from tests.torchtune.checkpoints.small import SIZES, build, read, resume, same_bits, some_tokens, started, write_folder
from torchtune import config
from torchtune.checkpoints import (
    CheckpointError,
    CheckpointStore,
    FullModelHFCheckpointer,
    ModelSource,
    verify_checkpoint,
)
from torchtune.modules import TransformerDecoder, classifier_model
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.peft import LoRA


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a policy and a reference model (equal sizes, other weights) and of a value model."""
    folder = tmp_path_factory.mktemp("sources")
    folders = {
        "policy": write_folder(folder / "policy", "llama", seed=0),
        "reference": write_folder(folder / "reference", "llama", seed=1),
        "value": folder / "value",
    }
    settings = transformers.Qwen2Config(**SIZES, num_labels=1)
    torch.manual_seed(2)
    transformers.Qwen2ForSequenceClassification(settings).save_pretrained(folders["value"])
    return folders


def value_model() -> TransformerDecoder:
    with torch.device("meta"):
        return classifier_model(
            1,
            "torchtune.models.qwen2.qwen2",
            vocab_size=SIZES["vocab_size"],
            num_layers=SIZES["num_hidden_layers"],
            num_heads=SIZES["num_attention_heads"],
            num_kv_heads=SIZES["num_key_value_heads"],
            embed_dim=SIZES["hidden_size"],
            intermediate_dim=SIZES["intermediate_size"],
            max_seq_len=256,
            rope_base=10_000.0,
        )


def make_store(sources: dict[str, Path], output_dir: Path) -> CheckpointStore:
    return CheckpointStore({name: {"checkpoint_dir": path} for name, path in sources.items()}, output_dir)


def load_both(store: CheckpointStore, *conversions: Any) -> dict[str, TransformerDecoder]:
    models = {"policy": build(store.source().checkpoint_dir, *conversions), "value": value_model()}
    for name, model in models.items():
        store.load_model(model, name=name)
    return models


def train(models: dict[str, TransformerDecoder]) -> torch.optim.Optimizer:
    """One step of one optimizer over both models."""
    trained = []
    for model in models.values():
        trained += [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    sum(model(some_tokens()).float().square().mean() for model in models.values()).backward()
    optimizer.step()
    return optimizer


def test_two_trained_models_resume_and_load_elsewhere(sources, tmp_path):
    store = make_store(sources, tmp_path / "run")
    models = load_both(store)
    optimizer = train(models)
    with pytest.raises(CheckpointError, match="trains a parameter that is in none of the models"):
        store.save("step_0", models["policy"], state={"optimizer": optimizer, "progress": {}})
    saved = store.save("step_1", models, state={"optimizer": optimizer, "progress": {"step": 1}})
    assert verify_checkpoint(saved)
    assert read(saved / "value" / "config.json")["architectures"] == ["Qwen2ForSequenceClassification"]

    again = make_store(sources, tmp_path / "run")
    resumed = load_both(again)
    trained = []
    for model in resumed.values():
        trained += model.parameters()
    resumed_optimizer = torch.optim.AdamW(trained, lr=0.1)
    resume(again, resumed, optimizer=resumed_optimizer)
    for name, model in models.items():
        assert same_bits(model.state_dict(), resumed[name].state_dict()), name
    for parameter, resumed_parameter in zip(optimizer.param_groups[0]["params"], trained, strict=True):
        assert torch.equal(optimizer.state[parameter]["exp_avg"], resumed_optimizer.state[resumed_parameter]["exp_avg"])

    in_transformers = transformers.AutoModelForSequenceClassification.from_pretrained(saved / "value").eval()
    with torch.no_grad():
        values = models["value"].eval()(some_tokens())[:, -1]
        values_in_transformers = in_transformers(some_tokens()).logits
    torch.testing.assert_close(values, values_in_transformers, rtol=1e-4, atol=1e-5)
    with pytest.raises(CheckpointError, match="the checkpoint has a trained model 'value', this run has none"):
        resume(again, resumed["policy"], optimizer=resumed_optimizer)
    # A run that starts from this checkpoint carries the small files of the policy, not those of the value model.
    next_run = FullModelHFCheckpointer(saved, output_dir=tmp_path / "next")
    assert not (next_run.save("epoch_0", models["policy"]) / "value").exists()


def test_each_model_has_its_contents(sources, tmp_path):
    store = make_store(sources, tmp_path / "run")
    models = load_both(store, LoRA(rank=2, alpha=4))
    optimizer = train(models)
    state = {"optimizer": optimizer, "progress": {}}
    contents = {"policy": "adapter", "value": "model"}
    with pytest.raises(CheckpointError, match="contents: the model 'value' is missing"):
        store.save("step_1", models, contents={"policy": "adapter"}, state=state)
    with pytest.raises(CheckpointError, match="checkpoints would hold the adapter alone"):
        store.save("step_1", models, contents="adapter", state=state)
    store.check_contents(models, contents=contents)
    saved = store.save("step_1", models, contents=contents, state=state)
    assert (saved / "adapter_model.safetensors").is_file()
    assert not (saved / "model.safetensors").exists()
    assert (saved / "value" / "model.safetensors").is_file()
    resumed = load_both(store, LoRA(rank=2, alpha=4))
    resume(store, resumed, optimizer=train(resumed))
    for name, model in models.items():
        assert same_bits(model.state_dict(), resumed[name].state_dict()), name


def test_merged_weights_alone_cannot_be_resumed(sources, tmp_path):
    store, model = started(sources["policy"], LoRA(rank=2, alpha=4), output=tmp_path / "run")
    with pytest.raises(CheckpointError, match="a resume needs the adapter"):
        store.save("epoch_0", model, contents="merged", state={"progress": {}})
    saved = store.save("epoch_0", model, contents="merged")
    assert not (saved / "adapter").exists()
    assert (saved / "model.safetensors").is_file()
    for contents in ("all", ("model", "adapter"), (), ("model", "merged")):
        with pytest.raises(CheckpointError, match="cannot be saved: choose"):
            store.save("epoch_1", model, contents=contents)


def test_changed_frozen_model_is_refused_on_resume(sources, tmp_path):
    def start(reference: Path | None) -> FullModelHFCheckpointer:
        checkpointer = FullModelHFCheckpointer(sources["policy"], output_dir=tmp_path / "run")
        if reference is not None:
            node = {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": str(reference)}
            checkpointer.add_source("reference", config.instantiate(node))
        return checkpointer

    checkpointer = start(sources["reference"])
    policy, reference = build(sources["policy"]), build(sources["reference"])
    checkpointer.load_model(policy)
    checkpointer.load_model(reference, name="reference")
    assert not same_bits(policy.state_dict(), reference.state_dict())
    saved = checkpointer.save("step_1", policy, state={"progress": {}})
    assert not (saved / "reference").exists()
    moved = shutil.copytree(sources["reference"], tmp_path / "moved")
    assert start(moved).find_resume_point().path == saved
    for source, what in ((sources["policy"], "differ"), (None, "this run has none")):
        with pytest.raises(CheckpointError, match=what) as caught:
            start(source).find_resume_point()
        assert "'reference' model" in str(caught.value)
    (saved / "state" / "models.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"models\.json was changed|models\.json has 2 bytes"):
        start(moved).find_resume_point()


def test_an_adapter_resumes_on_its_base_weights_alone(sources, tmp_path):
    def start(base: Path) -> FullModelHFCheckpointer:
        return FullModelHFCheckpointer(base, output_dir=tmp_path / "run")

    checkpointer, policy = started(sources["policy"], LoRA(rank=2, alpha=4), output=tmp_path / "run")
    saved = checkpointer.save("step_1", policy, contents="adapter", state={"progress": {}})
    moved = shutil.copytree(sources["policy"], tmp_path / "moved")
    (moved / "adapter_model.safetensors").write_bytes(b"")  # no base weights
    point = start(moved).find_resume_point()
    assert point.path == saved
    for attempt in (
        lambda other: other.find_resume_point(),
        lambda other: other.check_resume(None),
        lambda other: other.resume(point, policy, {"progress": {}}),
    ):
        with pytest.raises(CheckpointError, match="its adapter was trained on the weights in") as caught:
            attempt(start(sources["reference"]))
        assert all(str(sources[name]) in str(caught.value) for name in ("policy", "reference"))


def test_invalid_sources_are_refused(sources, tmp_path):
    store = CheckpointStore({"policy": ModelSource(sources["policy"])}, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"'reference' has no source \(there are: policy\)"):
        store.load_model(build(sources["policy"]), name="reference")
    for name, source, what in (
        ("policy", store, "already has a model 'policy'"),
        ("state", store, "cannot be called 'state'"),
        ("reference", str(sources["reference"]), "is a str"),
    ):
        with pytest.raises(CheckpointError, match=what):
            store.add_source(name, source)


@pytest.mark.parametrize("name", ["step_5_ema", "best", "../epoch_1", "epoch_1\n", 7, None])
def test_names_that_no_resume_finds_are_refused(name, sources, tmp_path):
    store = CheckpointStore({"policy": ModelSource(sources["policy"])}, tmp_path / "run")
    model = build(sources["policy"])
    store.load_model(model)
    with pytest.raises(CheckpointError, match="is not the name of a checkpoint: use epoch_N or step_N"):
        store.save(name, model, optional=True)
    assert not (tmp_path / "run").exists()


class Asked(LoRA):
    """Counts how often it is asked which parameters are its own, and how weights are stored."""

    calls = 0

    def owned_parameters(self, model):
        self.calls += 1
        return super().owned_parameters(model)

    def stored_weights(self, model):
        self.calls += 1
        return super().stored_weights(model)


def test_a_save_asks_a_conversion_once(sources, tmp_path):
    conversion = Asked(rank=2, alpha=4)
    store, model = started(sources["policy"], conversion, output=tmp_path / "run")
    conversion.calls = 0
    store.save("epoch_0", model, contents=("adapter", "merged"), state={"progress": {}})
    assert conversion.calls == 2
    store.close()


def calls_of_a_save(folder: Path, layers: int, *conversions: Any) -> tuple[int, int]:
    """Number of calls of the library's functions, comprehensions aside, and of the weights that are written."""
    store, model = started(write_folder(folder / "in", "qwen3", num_hidden_layers=layers), *conversions)
    contents = "adapter" if conversions else "model"
    library = str(Path(torchtune.__file__).parent)
    count = 0
    store.save("epoch_0", model, contents=contents)  # imports, and expands the weight maps

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        code = frame.f_code
        count += event == "call" and code.co_filename.startswith(library) and not code.co_name.startswith("<")

    sys.setprofile(note)
    try:
        saved = store.save("epoch_1", model, contents=contents)
    finally:
        sys.setprofile(None)
    return count, sum(len(load_file(path)) for path in saved.glob("*.safetensors"))


@pytest.mark.parametrize("conversions", [[], [LoRA(rank=2, alpha=4)]], ids=["full", "lora"])
def test_loading_a_weight_calls_few_functions(conversions, tmp_path):
    (calls, weights), (more_calls, more_weights) = (
        calls_of_a_save(tmp_path / str(layers), layers, *conversions) for layers in (1, 3)
    )
    assert (more_calls - calls) / (more_weights - weights) <= 16


def test_a_new_head_is_trained_or_refused(sources, tmp_path):
    store = make_store({"policy": sources["policy"]}, tmp_path)
    folder = str(sources["policy"])
    with torch.device("meta"):
        full, adapted = (
            classifier_model(1, "torchtune.models.from_hf_config", checkpoint_dir=folder) for _ in range(2)
        )
    apply_conversions(adapted, [LoRA(rank=2, alpha=4)])
    store.load_model(full)
    assert full.output.weight.requires_grad
    assert not full.output.weight.is_meta
    with pytest.raises(CheckpointError, match=r"never trained: .*train_modules: \[output\]"):
        store.load_model(adapted)
    with torch.device("meta"):
        reward_model = classifier_model(1, "torchtune.models.from_hf_config", checkpoint_dir=folder)
        apply_conversions(reward_model, [LoRA(rank=2, alpha=4, train_modules=["score"])])
    store.load_model(reward_model)
    assert reward_model.output.weight.requires_grad
    assert reward_model.output.weight.std() > 0
