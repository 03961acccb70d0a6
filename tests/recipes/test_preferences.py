"""What the recipes of preferences have of their own: a reference, pairs as terms of a step, scores."""

import math

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid

from tests.devices import DEVICE
from tests.recipes.runs import PREFERENCE, resume, start
from tests.tiny import read_lines, write_checkpoint, write_lines
from torchtune.checkpoints import complete_directories
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX
from torchtune.estimate import plan_data
from torchtune.modules.loss import LossError
from torchtune.rlhf import _reference
from torchtune.rlhf._reference import Reference
from torchtune.utils import UserError

FULL, LORA = "full_dpo_single_device", "lora_dpo_single_device"
SGD = {"optimizer": {"_component_": "torch.optim.SGD", "lr": 1.0}, "lr_scheduler": None, "shuffle": False}
LABELLED = {"source": [{"prompt": "a", "completion": str(good), "label": good} for good in (True, False)]}
TEXTS = {"source": [{"text": "the cat"}]}
HEAD = {"_component_": "torchtune.modules.classifier_model", "num_classes": 1}


def other_model(folder, **options):
    """A checkpointer of another model of the same sizes."""
    write_checkpoint(folder / "other", seed=1, **options)
    return {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": str(folder / "other")}


def log_prob(model, row, side):
    """The log-prob of an answer by a model of ``transformers``, from all logits; its labels are shifted."""
    tokens = torch.as_tensor(row[f"{side}_input_ids"])
    labels = torch.as_tensor(row[f"{side}_labels"])
    all_log_probs = torch.log_softmax(model(tokens[None]).logits[0], -1)  # [s, v]
    token_log_probs = all_log_probs.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return token_log_probs[labels != CROSS_ENTROPY_IGNORE_IDX].sum()


@pytest.mark.parametrize("reference", ["checkpoint", "other"])
def test_losses_follow_a_plain_loop_over_transformers(reference, tmp_path):
    """With another model as the reference, the pairs have weights."""
    from transformers import AutoModelForCausalLM

    start(FULL, tmp_path, train=False)  # makes data and checkpoint
    weights = [1.0] * 12
    if reference == "other":
        weights = [0.25, 1.0, 3.0, 0.5, 1.0, 1.0, 1.0, 1.0, 2.0, 0.5, 0.125, 8.0]
        weighted_pairs = []
        for pair, weight in zip(read_lines(tmp_path / "pairs.jsonl"), weights, strict=True):
            weighted_pairs.append({**pair, "weight": weight})
        write_lines(tmp_path / "pairs.jsonl", weighted_pairs)
    settings = {**SGD, "batch_size": 2, "gradient_accumulation_steps": 2, "clip_grad_norm": 0.5}
    settings["optimizer"] = {"_component_": "torch.optim.SGD", "lr": 0.3}
    if reference == "other":
        settings["ref_checkpointer"] = other_model(tmp_path)
    run = start(FULL, tmp_path, **settings)

    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32)
    frozen = AutoModelForCausalLM.from_pretrained(tmp_path / reference, dtype=torch.float32)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.3)
    rows = run.recipe.loader.dataset
    for step in range(3):
        margins = []
        for index in range(4 * step, 4 * step + 4):
            row = rows[index]
            with torch.no_grad():
                reference_margin = log_prob(frozen, row, "chosen") - log_prob(frozen, row, "rejected")
            policy_margin = log_prob(policy, row, "chosen") - log_prob(policy, row, "rejected")
            margins.append(policy_margin - reference_margin)
        losses = -logsigmoid(0.1 * torch.stack(margins))  # DPO's, whose beta is 0.1
        weights_of_step = torch.tensor(weights[4 * step : 4 * step + 4])
        loss = (weights_of_step * losses).sum() / weights_of_step.sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        record = run.records[step]
        assert record["loss"] == pytest.approx(loss.item(), abs=1e-5)
        assert record["grad_norm"] == pytest.approx(norm.item(), abs=1e-3)
        assert record["rewards/margins"] == pytest.approx(0.1 * torch.stack(margins).mean().item(), abs=1e-5)
    if reference == "other":  # adapters, too, are not compared with their base
        assert start(LORA, tmp_path, **settings).losses[1] == pytest.approx(run.losses[1], abs=1e-6)
        cached = start(FULL, tmp_path, **settings, reference_cache=str(tmp_path / "kept"))
        assert cached.losses == pytest.approx(run.losses, abs=1e-5)


def test_a_shared_prompt_is_computed_once_and_changes_nothing(tmp_path):
    """With adapters, micro-batches and recomputed activations; the plain loop above has answers one by one."""
    settings = {**SGD, "batch_size": 3, "gradient_accumulation_steps": 2, "enable_activation_checkpointing": True}
    shared = start(LORA, tmp_path, **settings, share_prefix=None)
    apart = start(LORA, tmp_path, **settings, share_prefix=False)
    assert shared.losses == pytest.approx(apart.losses, abs=1e-6)
    for figure in ("rewards/margins", "log_probs/chosen", "log_probs/chosen_per_token", "grad_norm"):
        assert shared.figure(figure) == pytest.approx(apart.figure(figure), rel=1e-5, abs=1e-5), figure
    for name, value in apart.trained.items():
        torch.testing.assert_close(shared.trained[name], value, atol=1e-5, rtol=0)
    shared_batch, _ = next(iter(shared.recipe.loader))
    plain_batch, _ = next(iter(apart.recipe.loader))
    assert plain_batch.documents.max_length == shared_batch.documents.max_length
    assert plain_batch.documents.num_prefixes == 0
    assert shared_batch.documents.num_prefixes == 3  # one for each pair
    assert shared_batch.num_tokens < 0.8 * plain_batch.num_tokens
    rows = apart.recipe.loader.dataset
    num_tokens = sum(len(row["chosen_input_ids"]) + len(row["rejected_input_ids"]) for row in rows)
    assert f"{len(rows)} rows, {num_tokens:,} tokens, " in dict(plan_data(apart.recipe.cfg))["data"]


@pytest.mark.parametrize("name", PREFERENCE)
def test_the_first_loss_is_ln_2_and_a_reference_computed_once_changes_nothing(name, tmp_path):
    settings = {"batch_size": 3, "epochs": 2, "dataset_val": "${dataset}", "run_val_every_n_steps": 4}
    cache = {"reference_cache": str(tmp_path / "kept")}
    uncached = start(name, tmp_path, **settings)
    once = start(name, tmp_path, **settings, **cache)
    assert abs(uncached.losses[1] - math.log(2)) <= 1e-6
    assert once.losses == pytest.approx(uncached.losses, abs=1e-5)
    assert once.figure("val_rewards/margins") == pytest.approx(uncached.figure("val_rewards/margins"), abs=1e-4)
    assert uncached.losses[8] < uncached.losses[1] - 0.05
    (file,) = (tmp_path / "kept").iterdir()
    written = file.stat().st_mtime_ns
    again = start(name, tmp_path, **settings, **cache)
    assert again.losses == once.losses
    assert file.stat().st_mtime_ns == written, "computed once"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(UserError, match="its checksum is another one: delete it"):
        start(name, tmp_path, **settings, **cache, train=False)


@pytest.mark.parametrize("kind", ["new adapter", "trained adapter", "all weights"])
def test_a_resumed_run_keeps_the_reference_of_its_start(kind, tmp_path):
    """Not the weights that it goes on with, and for a trained adapter not the base without it."""
    name = LORA
    if kind == "all weights":
        name = FULL
    settings = {"epochs": 2, "batch_size": 6, "save_every_n_steps": 2}
    if kind == "trained adapter":
        earlier = start(LORA, tmp_path, batch_size=6, epochs=2, save_adapter_weights_only=True)
        settings["checkpointer__adapter_checkpoint"] = str(earlier.output_dir / "epoch_1" / "adapter_model.safetensors")
    uninterrupted = start(name, tmp_path, **settings)
    assert abs(uninterrupted.losses[1] - math.log(2)) <= 1e-6
    resume(name, tmp_path, uninterrupted, 2, **settings)


@pytest.mark.parametrize("kind", ["another model", "its own start"])
def test_a_resume_with_another_reference_is_refused(kind, tmp_path):
    start(FULL, tmp_path, train=False)
    settings = {"batch_size": 6, "save_every_n_steps": 1, "checkpointer__keep_last_n_checkpoints": 2}
    if kind == "another model":
        settings["ref_checkpointer"] = other_model(tmp_path)
    run = start(FULL, tmp_path, **settings)
    (run.output_dir / "step_2" / ".complete").unlink()
    again = {**settings, "output_dir": run.output_dir, "resume_from_checkpoint": True}
    changed_model = "checkpoint"
    if kind == "another model":
        changed_model = "other"
    write_checkpoint(tmp_path / changed_model, seed=2)
    with pytest.raises(UserError, match=r"whose 'reference' model was .* and the weights in .* differ from it"):
        start(FULL, tmp_path, **again)


def test_a_reward_model_learns_to_rank_and_transformers_reads_it(tmp_path):
    from transformers import AutoModelForSequenceClassification

    start(FULL, tmp_path, train=False)
    settings = {"loss": {"_component_": "torchtune.rlhf.loss.RewardLoss"}, "batch_size": 6, "epochs": 6}
    base = {"base_model_path": "torchtune.models.from_hf_config", "checkpoint_dir": str(tmp_path / "checkpoint")}
    run = start(FULL, tmp_path, **settings, model={**HEAD, **base})
    assert run.figure("rewards/accuracies")[-1] == 1.0
    assert run.losses[12] < 0.5 < run.losses[1]
    (saved,) = run.output_dir.glob("epoch_5")
    reference = AutoModelForSequenceClassification.from_pretrained(saved, dtype=torch.float32)
    row = run.recipe.loader.dataset[0]
    tokens = torch.tensor(row["chosen_input_ids"])[None]
    run.recipe.model.eval().cpu()
    with torch.no_grad():
        score = run.recipe.model(tokens)[0, -1]
        torch.testing.assert_close(reference(tokens).logits[0], score, atol=1e-5, rtol=0)


def test_a_reward_model_is_trained_with_an_adapter_and_resumed(tmp_path):
    """Only adapter and head are trained; the merged checkpoint has them, and a resume reads both."""
    from transformers import AutoModelForSequenceClassification

    start(LORA, tmp_path, train=False)
    base = {"base_model_path": "torchtune.models.from_hf_config", "checkpoint_dir": str(tmp_path / "checkpoint")}
    lora = {"_component_": "torchtune.modules.peft.LoRA", "rank": 4, "alpha": 8, "train_modules": ["score"]}
    settings = {"loss": {"_component_": "torchtune.rlhf.loss.RewardLoss"}, "batch_size": 6, "epochs": 6}
    settings |= {"model": {**HEAD, **base}, "model_converters": [lora], "save_every_n_steps": 9, "optimizer__lr": 0.01}
    run = start(LORA, tmp_path, **settings)
    assert run.losses[12] < 0.9 * run.losses[1]
    trained = set()
    for group in run.recipe.optimizer.param_groups:
        trained.update(id(parameter) for parameter in group["params"])
    names = {name for name, parameter in run.recipe.model.named_parameters() if id(parameter) in trained}
    assert "output.weight" in names
    assert all("lora_" in name for name in names - {"output.weight"})
    saved = complete_directories(run.output_dir)[-1]
    reference = AutoModelForSequenceClassification.from_pretrained(saved, dtype=torch.float32)
    tokens = torch.tensor(run.recipe.loader.dataset[0]["chosen_input_ids"])[None]
    with torch.no_grad():
        score = run.recipe.model.eval()(tokens.to(DEVICE))[0, -1].cpu()
        torch.testing.assert_close(reference(tokens).logits[0], score, atol=1e-5, rtol=0)
    resume(LORA, tmp_path, run, 9, **settings)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        (FULL, {"loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"}}, "is not a preference loss"),
        ("full_finetune_single_device", {"loss": {"_component_": "torchtune.rlhf.loss.DPOLoss"}}, "DPOLoss"),
        (FULL, {"loss": {"_component_": "torchtune.rlhf.loss.RewardLoss"}}, "needs a model with one output"),
        (
            FULL,
            {"loss": {"_component_": "torchtune.rlhf.loss.SimPOLoss"}, "reference_cache": "x"},
            "needs no reference",
        ),
        (LORA, {"loss": {"_component_": "torchtune.rlhf.loss.KTOLoss"}}, "kto_dataset"),
        (LORA, {"dataset": {**LABELLED, "_component_": "torchtune.datasets.kto_dataset"}}, "DPOLoss compares pairs"),
        (LORA, {"dataset": {**TEXTS, "_component_": "torchtune.datasets.text_completion_dataset"}}, "so it is no pair"),
        (FULL, {"loss": {"_component_": "torchtune.rlhf.loss.SimPOLoss", "beta": 0}}, "SimPOLoss: beta is 0"),
        (LORA, {"loss": {"_component_": "torchtune.rlhf.loss.OnPolicyDistillationLoss"}}, "run a recipe of GRPO"),
        (FULL, {"loss": {"_component_": "torchtune.rlhf.loss.PPOLoss"}}, "run the recipe ppo"),
        (LORA, {"loss__beta": math.nan}, "loss.beta: must be a number, not nan"),
        (LORA, {"reference_cache": "/dev/null/x"}, "reference_cache: /dev/null/x cannot be written to"),
        (LORA, {"loss": {"_component_": "torchtune.rlhf.loss.KTOLoss"}, "batch_size": 11}, "1: set another batch_size"),
    ],
)
def test_data_or_model_that_does_not_fit_the_loss_is_refused_in_one_sentence(name, settings, words, tmp_path):
    with pytest.raises((LossError, UserError), match=words):
        start(name, tmp_path, **settings, train=False)


def test_two_processes_train_as_one_however_they_share_the_work(forker, tmp_path):
    """Frozen copies of shards are the reference; log-probs of split sequences add up."""
    settings = {"clip_grad_norm": 1.0, "shuffle": False, "max_steps_per_epoch": 2}
    runs = [("full", "data_parallel_shard_dim"), ("full", "context_parallel_dim"), ("lora", "tensor_parallel_dim")]
    single_process_runs = {}
    for kind in ("full", "lora"):
        single_process_runs[kind] = start(f"{kind}_dpo_single_device", tmp_path, **settings, batch_size=6)
    for kind, split in runs:
        batch_size = 6  # of the process: only data parallelism divides the batch of a step
        if split == "data_parallel_shard_dim":
            batch_size = 3
        run = forker.run_on_two(f"{kind}_dpo_distributed", tmp_path, **settings, **{split: 2}, batch_size=batch_size)
        single_process = single_process_runs[kind]
        assert run.losses == pytest.approx(single_process.losses, rel=1e-5), (kind, split)
        for figure in ("rewards/margins", "rewards/accuracies", "log_probs/chosen", "grad_norm"):
            assert run.figure(figure) == pytest.approx(single_process.figure(figure), abs=1e-4), (kind, split)


def test_the_reference_keeps_the_start_of_modules_that_are_trained_whole(tmp_path):
    """Without adapters in use it would be the base with trained norms."""
    lora = {"_component_": "torchtune.modules.peft.LoRA", "rank": 4, "alpha": 8, "train_modules": ["norm"]}
    recipe = start(LORA, tmp_path, model_converters=[lora], max_steps_per_epoch=3).recipe
    before = load_file(tmp_path / "checkpoint" / "model.safetensors")["model.norm.weight"]
    trained = recipe.model.norm.scale.detach().cpu()
    assert not torch.equal(trained, before)
    with recipe.reference._reference_weights() as reference:
        assert torch.equal(reference.norm.scale.detach().cpu(), before)
    assert torch.equal(recipe.model.norm.scale.detach().cpu(), trained)


def test_the_reference_has_no_dropout(tmp_path):
    """That of an adapter which changes what the model says, so that it is not the base alone."""
    lora = {"_component_": "torchtune.modules.peft.LoRA", "rank": 4, "alpha": 8, "dropout": 0.5}
    recipe = start(LORA, tmp_path, train=False, model_converters=[lora]).recipe
    with torch.no_grad():
        for name, parameter in recipe.model.named_parameters():
            if "lora_b" in name:
                torch.nn.init.normal_(parameter)
    batch = next(iter(recipe.loader))[0].to(recipe.device)
    reference = Reference(recipe.loss_fn, recipe.model.train(), recipe.dims)
    first, second = (reference(batch).log_probs for _ in range(2))
    assert torch.equal(first, second)


def test_a_reference_that_is_not_the_start_of_the_run_is_refused(tmp_path, monkeypatch):
    """The first loss is no longer ln 2, and the run says so before it trains."""
    earlier = start(LORA, tmp_path, batch_size=6, epochs=2, save_adapter_weights_only=True)
    adapter = {"checkpointer__adapter_checkpoint": str(earlier.output_dir / "epoch_1" / "adapter_model.safetensors")}
    monkeypatch.setattr(_reference, "equals_base", lambda *_: True)  # so it would be switched off
    with pytest.raises(UserError, match="at the first step the two differ"):
        start(LORA, tmp_path, batch_size=6, **adapter)
