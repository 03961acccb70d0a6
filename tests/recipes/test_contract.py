"""The contract suite: what every training recipe promises, on every training recipe."""

import math
import shutil

import pytest
import torch

from tests.recipes import checks
from tests.recipes.checks import GRADIENT
from tests.recipes.runs import ADAPTERS, TRAINING, WEIGHTS, read_log, resume, set_up, start
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX
from torchtune.training import LossScaler


@pytest.fixture(scope="module", params=TRAINING)
def name(request):
    return request.param


def test_accumulation_changes_nothing(name, tmp_path):
    checks.accumulation_changes_nothing(name, tmp_path)


def test_packing_changes_nothing(name, tmp_path):
    checks.packing_changes_nothing(name, tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"loss__num_output_chunks": 64}, id="many-chunks"),
        pytest.param({"enable_activation_checkpointing": True}, id="activation-checkpointing"),
        pytest.param({"optimizer_in_bwd": True}, id="optimizer-in-backward"),
    ],
)
def test_setting_changes_nothing(name, tmp_path, settings):
    checks.split_changes_nothing(name, tmp_path, {"batch_size": 4}, {"batch_size": 4, **settings})


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["lora_finetune_distributed"], indirect=True)
def test_compilation_changes_nothing(name, backend, tmp_path, monkeypatch):
    """Inductor's C++ takes half a minute: the row is left to ``make test ALL=1``; ``test_compile.py`` has a layer."""
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", backend)
    checks.split_changes_nothing(name, tmp_path, {"batch_size": 4}, {"batch_size": 4, "compile": True})


def test_losses_follow_plain_torch(name, tmp_path):
    """Three clipped steps of SGD log the losses of a loop over ``transformers``' model, and its gradient norms.

    Adapters change nothing before the first step.
    """
    from transformers import AutoModelForCausalLM

    settings = {**GRADIENT, "max_steps_per_epoch": 3, "batch_size": 2, "gradient_accumulation_steps": 2}
    settings |= {"optimizer": {"_component_": "torch.optim.SGD", "lr": 0.3}, "clip_grad_norm": 0.5}
    run_here = start(name, tmp_path, **settings)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    rows = run_here.recipe.loader.dataset
    for step in range(3 if name in WEIGHTS else 1):
        total = torch.zeros(())
        count = 0
        for row in (rows[index] for index in range(4 * step, 4 * step + 4)):
            labels = torch.as_tensor(row["labels"])
            logits = model(torch.as_tensor(row["tokens"])[None]).logits[0]
            total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            count += int((labels != CROSS_ENTROPY_IGNORE_IDX).sum())
        (total / count).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        record = run_here.records[step]
        assert record["loss"] == pytest.approx(total.item() / count, abs=1e-4, rel=0)
        if name in WEIGHTS:
            assert record["grad_norm"] == pytest.approx(norm.item(), abs=1e-3, rel=0)


def test_resume_equals_uninterrupted(name, tmp_path):
    checks.resume_equals_uninterrupted(name, tmp_path, dtype="bf16" if name.endswith("distributed") else "fp32")


@pytest.mark.parametrize(
    ("name", "precision"),
    [("full_finetune_distributed", "fp32_master"), ("lora_finetune_single_device", "param_dtype")],
    indirect=["name"],
)
def test_resume_in_every_precision(name, tmp_path, precision):
    checks.resume_equals_uninterrupted(name, tmp_path, dtype="bf16", optimizer_precision=precision)


def test_resume_in_float16(name, tmp_path, monkeypatch):
    """The first steps overflow, and the scale of the loss goes on where it was."""
    monkeypatch.setattr(LossScaler, "START", 2.0**19)
    monkeypatch.setattr(LossScaler, "STEPS_TO_DOUBLE", 2)
    run = checks.resume_equals_uninterrupted(name, tmp_path, dtype="fp16")
    assert 0 < run.recipe.guard.num_skipped < 10
    assert 1.0 < run.recipe.scaler.factor < 2.0**19
    assert run.losses[12] < run.losses[1] - 0.3


@pytest.mark.parametrize("method", ["dpo", "grpo", "ppo", "knowledge_distillation"])
def test_every_method_trains_in_float16_and_resumes(method, tmp_path, monkeypatch):
    """Steps overflow before a save and after it; the scale goes on where it was, and each skipped step is named."""
    monkeypatch.setattr(LossScaler, "START", 2.0**20)
    monkeypatch.setattr(LossScaler, "STEPS_TO_DOUBLE", 1)
    settings = {"dtype": "fp16", "batch_size": 2, "max_steps_per_epoch": 6, "save_every_n_steps": 2}
    settings["checkpointer__keep_last_n_checkpoints"] = 20
    run = start(method, tmp_path, **settings)
    assert all(parameter.dtype == torch.float16 for parameter in run.recipe.model.parameters())
    resumed = resume(method, tmp_path, run, 2, **settings)
    skipped = {record["step"]: record["reason"] for record in run.lines("skipped_steps.jsonl")}
    skipped_later = {record["step"]: record["reason"] for record in resumed.lines("skipped_steps.jsonl")}
    assert len(skipped) == run.recipe.guard.num_skipped < 6
    assert all("its gradient overflows fp16; the loss scale is" in reason for reason in skipped.values())
    assert skipped_later == {step: reason for step, reason in skipped.items() if step > 2}
    assert skipped_later
    assert resumed.recipe.scaler.factor == run.recipe.scaler.factor


def test_resume_with_optimizer_in_backward(name, tmp_path):
    checks.resume_equals_uninterrupted(
        name, tmp_path, optimizer_in_bwd=True, gradient_accumulation_steps=1, batch_size=4
    )


def test_export_equals_trained(name, tmp_path):
    """What was saved, loaded by ``transformers``, computes what the trained model computes."""
    from transformers import AutoModelForCausalLM

    trained = start(name, tmp_path)
    (saved,) = trained.output_dir.glob("epoch_*")
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    tokens = torch.arange(3, 40)[None]
    trained.recipe.model.eval()
    trained.recipe.model.skip_output_layer = False
    with torch.no_grad():
        logits = trained.recipe.model(tokens.to(trained.recipe.device)).cpu()
        torch.testing.assert_close(model(tokens).logits, logits, atol=1e-4, rtol=0)


def test_schedule_runs_over_all_epochs(name, tmp_path):
    """Two epochs of six steps: the rate warms up for two steps, and falls along a cosine to the last one."""
    lrs = start(name, tmp_path, epochs=2, batch_size=4).lrs
    expected = [0.01 / 3, 0.02 / 3, *(0.005 * (1 + math.cos(math.pi * step / 10)) for step in range(10))]
    assert lrs == pytest.approx(dict(enumerate(expected, start=1)), abs=1e-9)


def test_one_epoch_saves_its_steps(name, tmp_path):
    run = start(name, tmp_path, save_every_n_steps=5)
    assert sorted(path.parent.name for path in run.output_dir.glob("step_*/.complete")) == [
        "step_10",
        "step_12",
        "step_5",
    ]


def test_keeps_the_last_checkpoints(name, tmp_path):
    run = start(name, tmp_path, epochs=4, batch_size=8, checkpointer__keep_last_n_checkpoints=2)
    assert sorted(path.name for path in run.output_dir.glob("epoch_*")) == ["epoch_2", "epoch_3"]


def test_saved_config_runs_again_unchanged(name, tmp_path):
    run = start(name, tmp_path, batch_size=4, seed=None)
    (saved,) = run.output_dir.glob("epoch_*/torchtune_config.yaml")
    copy = tmp_path / "again.yaml"
    shutil.copy(saved, copy)
    again = tmp_path / "again"
    overrides = [f"output_dir={again}", f"checkpointer.output_dir={again}", f"metric_logger.log_dir={again}/logs"]
    recipe, _ = set_up(name, tmp_path, copy, *overrides)
    recipe.train()
    recipe.cleanup()
    assert [r["loss"] for r in read_log(again) if "loss" in r] == list(run.losses.values())


def test_validation_is_the_mean_over_labels(name, tmp_path):
    """Batches of different label counts give the validation loss of the whole data set at once."""
    settings = {"optimizer": {"_component_": "torch.optim.SGD", "lr": 0.0}, "lr_scheduler": None, "shuffle": False}
    full_batch = start(name, tmp_path, **settings, batch_size=24, max_steps_per_epoch=1)
    settings |= {"dataset_val": "${dataset}", "batch_size_val": 5, "run_val_every_n_steps": 6}
    validated = {r["step"]: r["val_loss"] for r in start(name, tmp_path, **settings).records if "val_loss" in r}
    assert list(validated) == [6, 12]
    assert validated[6] == pytest.approx(full_batch.losses[1], abs=1e-6, rel=0)


def test_validation_leaves_training_alone(name, tmp_path):
    """A run that validates logs the losses of one that does not, dropout included."""
    converter = {"_component_": "torchtune.modules.peft.LoRA", "rank": 4, "alpha": 8, "dropout": 0.3}
    settings = {"max_steps_per_epoch": 4, "model_converters": [converter] if name in ADAPTERS else []}
    plain = start(name, tmp_path, **settings)
    validating = start(name, tmp_path, **settings, dataset_val="${dataset}", run_val_every_n_steps=1)
    assert plain.losses == validating.losses


def test_max_steps_per_epoch(name, tmp_path):
    run = start(name, tmp_path, epochs=2, max_steps_per_epoch=3)
    assert list(run.losses) == [1, 2, 3, 4, 5, 6]


def test_max_steps_ends_the_run_whatever_its_epochs(name, tmp_path):
    """Epochs of three steps: the second one is cut. The schedule ends with the run, and a resumed run with it."""
    settings = {
        "epochs": 1,
        "batch_size": 8,
        "max_steps": 5,
        "save_every_n_steps": 0.4,
        "checkpointer__keep_last_n_checkpoints": 9,
        "dataset_val": "${dataset}",
        "run_val_every_n_steps": "epoch",
    }
    run = start(name, tmp_path, **settings)
    expected = [0.01 / 3, 0.02 / 3, *(0.005 * (1 + math.cos(math.pi * step / 3)) for step in range(3))]
    assert run.lrs == pytest.approx(dict(enumerate(expected, start=1)), abs=1e-9)
    assert [record["step"] for record in run.records if "val_loss" in record] == [3, 5]
    saved = sorted(path.parent.name for path in run.output_dir.glob("*/.complete"))
    assert saved == ["step_2", "step_4", "step_5"]
    resume(name, tmp_path, run, 4, **settings)


def test_accuracy_and_entropy_of_predictions_are_logged(name, tmp_path):
    """Of steps and validations; an untrained model is as unsure as it can be."""
    settings = {"dataset_val": "${dataset}", "run_val_every_n_steps": 2, "max_steps": 2, "batch_size": 4}
    first, _, validation = start(name, tmp_path, **settings).records
    for record, prefix in ((first, ""), (validation, "val_")):
        assert 0 <= record[f"{prefix}token_accuracy"] < 0.5
        assert 0 < record[f"{prefix}entropy"] <= math.log(512)
