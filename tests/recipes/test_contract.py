"""The contract suite: what every training recipe promises, on every training recipe."""

import math
import shutil

import pytest
import torch

from tests.recipes import checks
from tests.recipes.checks import GRADIENT, is_close
from tests.recipes.runs import ADAPTERS, TRAINING, WEIGHTS, read_log, set_up, start
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX
from torchtune.utils import UserError


@pytest.fixture(scope="module", params=TRAINING)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_accumulation_changes_nothing(name, tmp_path):
    checks.accumulation_changes_nothing(name, tmp_path)


def test_packing_changes_nothing(name, tmp_path):
    checks.packing_changes_nothing(name, tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"loss__num_output_chunks": 1}, id="one-chunk"),
        pytest.param({"loss__num_output_chunks": 64}, id="many-chunks"),
        pytest.param({"enable_activation_checkpointing": True}, id="activation-checkpointing"),
        pytest.param({"optimizer_in_bwd": True}, id="optimizer-in-backward"),
        pytest.param({"log_every_n_steps": 1, "log_peak_memory_stats": False}, id="logging"),
    ],
)
def test_setting_changes_nothing(name, tmp_path, settings):
    checks.setting_changes_nothing(name, tmp_path, settings)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["lora_finetune_distributed"], indirect=True)
def test_compilation_changes_nothing(name, backend, tmp_path, monkeypatch):
    """Inductor's C++ takes half a minute: the row is left to ``make test ALL=1``; ``test_compile.py`` has a layer."""
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", backend)
    checks.setting_changes_nothing(name, tmp_path, {"compile": True})


def test_documents_restart_positions(name, tmp_path):
    """In every batch the positions of a document count from 0."""
    recipe = start(name, tmp_path, train=False, dataset__packed=True).recipe
    packs = [batch for batches in recipe.loader for batch in batches]
    assert any(len(pack["documents"].lengths) > 1 for pack in packs), "packs hold documents"
    for pack in packs:
        expected = torch.cat([torch.arange(length) for length in pack["documents"].lengths])
        assert torch.equal(pack["input_pos"].flatten(), expected), "positions restart with every document"


def test_end_of_turn_is_trained(name, tmp_path):
    """Every assistant turn has its end token among the labels, once."""
    recipe = start(name, tmp_path, train=False, shuffle=False).recipe
    stop = recipe.tokenizer.stop_tokens[0]
    lines = (tmp_path / "data.jsonl").read_text().splitlines()
    turns = sum(line.count('"role": "assistant"') for line in lines)
    labels = torch.cat([batch["labels"].flatten() for batches in recipe.loader for batch in batches])
    assert 0 < turns == int((labels == stop).sum()), "every assistant turn has its end among the labels, once"


def test_loss_equals_transformers(name, tmp_path):
    """The first loss is the one that ``transformers`` computes for the same labels, shifted once."""
    from transformers import AutoModelForCausalLM

    run_ = start(name, tmp_path, batch_size=24, **GRADIENT)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32)
    dataset = start(name, tmp_path, train=False).recipe.loader.dataset
    total, count = 0.0, 0
    for index in range(len(dataset)):
        tokens, labels = (torch.as_tensor(dataset[index][key]) for key in ("tokens", "labels"))
        unshifted = torch.cat([torch.tensor([CROSS_ENTROPY_IGNORE_IDX]), labels[:-1]])
        trained = int((unshifted != CROSS_ENTROPY_IGNORE_IDX).sum())
        with torch.no_grad():
            loss = model(input_ids=tokens[None], labels=unshifted[None]).loss
        total, count = total + loss.item() * trained, count + trained
    assert abs(run_.losses[1] - total / count) <= 1e-5, "the first loss is that of transformers"


@pytest.mark.parametrize("name", WEIGHTS, indirect=True)
def test_losses_follow_plain_torch(name, tmp_path):
    """Three clipped steps of SGD log the losses of a loop over ``transformers``' model, and its gradient norms."""
    from transformers import AutoModelForCausalLM

    settings = {**GRADIENT, "max_steps_per_epoch": 3, "batch_size": 2, "gradient_accumulation_steps": 2}
    settings |= {"optimizer": {"_component_": "torch.optim.SGD", "lr": 0.3}, "clip_grad_norm": 0.5}
    ours = start(name, tmp_path, **settings)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    rows = ours.recipe.loader.dataset
    for step in range(3):
        total = torch.zeros(())
        for row in (rows[index] for index in range(4 * step, 4 * step + 4)):
            logits = model(torch.as_tensor(row["tokens"])[None]).logits[0]
            total = total + torch.nn.functional.cross_entropy(logits, torch.as_tensor(row["labels"]), reduction="sum")
        labels = sum(
            int((torch.as_tensor(rows[4 * step + i]["labels"]) != CROSS_ENTROPY_IGNORE_IDX).sum()) for i in range(4)
        )
        (total / labels).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        record = ours.records[step]
        assert abs(record["loss"] - total.item() / labels) <= 1e-4, f"loss of step {step + 1}"
        assert abs(record["grad_norm"] - norm.item()) <= 1e-3, f"norm of step {step + 1}"


def test_resume_equals_uninterrupted(name, tmp_path):
    checks.resume_equals_uninterrupted(name, tmp_path, dtype="bf16" if name.endswith("distributed") else "fp32")


@pytest.mark.parametrize(
    ("name", "precision"),
    [("full_finetune_distributed", "fp32_master"), ("lora_finetune_single_device", "param_dtype")],
    indirect=["name"],
)
def test_resume_in_every_precision(name, tmp_path, precision):
    checks.resume_equals_uninterrupted(name, tmp_path, dtype="bf16", optimizer_precision=precision)


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
        ours, theirs = trained.recipe.model(tokens), model(tokens).logits
    assert is_close(theirs, ours, 1e-4), "what was saved computes what was trained"


def test_schedule_runs_over_all_epochs(name, tmp_path):
    """Two epochs of six steps: the rate warms up for two steps, and falls along a cosine to the last one."""
    lrs = start(name, tmp_path, epochs=2, batch_size=4).lrs
    expected = [0.01 / 3, 0.02 / 3, *(0.005 * (1 + math.cos(math.pi * step / 10)) for step in range(10))]
    assert list(lrs) == list(range(1, 13)), "every step logs its learning rate"
    close = all(abs(lrs[step] - rate) <= 1e-9 for step, rate in enumerate(expected, start=1))
    assert close, "the learning rate follows the schedule over all epochs"


def test_one_epoch_saves_its_steps(name, tmp_path):
    run = start(name, tmp_path, save_every_n_steps=5)
    saved = sorted(path.name for path in run.output_dir.glob("step_*"))
    assert saved == ["step_10", "step_12", "step_5"]
    assert all((run.output_dir / step / ".complete").exists() for step in saved)


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
    whole = start(name, tmp_path, **settings, batch_size=24, max_steps_per_epoch=1)
    data = {
        "_component_": "torchtune.datasets.chat_dataset",
        "source": "json",
        "data_files": str(tmp_path / "data.jsonl"),
        "conversation_column": "messages",
        "conversation_style": "openai",
    }
    settings |= {"dataset_val": data, "batch_size_val": 5, "run_val_every_n_steps": 6}
    validated = {r["step"]: r["val_loss"] for r in start(name, tmp_path, **settings).records if "val_loss" in r}
    assert list(validated) == [6, 12], "validation runs when it is due"
    assert abs(validated[6] - whole.losses[1]) <= 1e-6, "the validation loss is the mean over all labels"


def test_validation_leaves_training_alone(name, tmp_path):
    """A run that validates logs the losses of one that does not, dropout included."""
    converter = {"_component_": "torchtune.modules.peft.LoRA", "rank": 4, "alpha": 8, "dropout": 0.3}
    settings = {"max_steps_per_epoch": 4, "model_converters": [converter] if name in ADAPTERS else []}
    plain = start(name, tmp_path, **settings)
    data = plain.recipe.cfg.dataset
    validating = start(name, tmp_path, **settings, dataset_val=dict(data), run_val_every_n_steps=1)
    assert plain.losses == validating.losses, "validation changes no loss"


def test_training_learns(name, tmp_path):
    """Six epochs take more than a nat off the loss."""
    losses = start(name, tmp_path, epochs=6, batch_size=8).losses
    assert losses[max(losses)] < losses[1] - 1.0, "six epochs lower the loss by more than 1"


def test_an_output_folder_that_holds_a_run_is_refused(name, tmp_path):
    run = start(name, tmp_path, batch_size=8)
    with pytest.raises(UserError, match="resume_from_checkpoint"):
        start(name, tmp_path, batch_size=8, output_dir=run.output_dir)


def test_max_steps_per_epoch(name, tmp_path):
    run = start(name, tmp_path, epochs=2, max_steps_per_epoch=3)
    assert list(run.losses) == [1, 2, 3, 4, 5, 6]
