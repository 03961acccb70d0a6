"""Recipes and adapters: nothing that is trained may be missing from what is saved."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import torchtune
from tests.recipes.runs import resume, start
from tests.tiny import write_checkpoint, write_conversations, write_pairs
from torchtune.checkpoints import CheckpointError
from torchtune.tokenizers import hf_tokenizer
from torchtune.utils import UserError


def test_a_full_recipe_refuses_adapters_before_it_trains(tmp_path):
    lora = [{"_component_": "torchtune.modules.peft.LoRA", "rank": 2, "alpha": 4}]
    with pytest.raises(CheckpointError, match=r"q_proj\.lora_a\.weight.*lora_finetune_single_device"):
        start("full_finetune_single_device", tmp_path, train=False, model_converters=lora)


def test_lora_trains_the_rows_of_new_tokens_and_resumes(tmp_path):
    """A tokenizer with more tokens than the checkpoint: its rows move, are in every adapter, and go on bit for bit."""
    source = write_checkpoint(tmp_path / "checkpoint")
    data = write_conversations(tmp_path / "data.jsonl")
    tokenizer = shutil.copytree(source, tmp_path / "tokenizer")
    settings = json.loads((tokenizer / "tokenizer.json").read_text())
    first = len(settings["model"]["vocab"])
    added = {"content": "<new>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    settings["added_tokens"].append({"id": first, **added, "special": False})
    (tokenizer / "tokenizer.json").write_text(json.dumps(settings))
    data.write_text(data.read_text().replace("cat", "<new>"))
    name = "lora_finetune_single_device"
    options = {"tokenizer__path": str(tokenizer), "resize_token_embeddings": True, "save_every_n_steps": 8}
    full_run = start(name, tmp_path, **options)
    model = full_run.recipe.model
    rows = full_run.trained["tok_embeddings.new_rows"]
    assert rows.shape == (1, 32)
    assert not (rows == model.tok_embeddings.weight[first:]).any()  # its start
    saved = load_file(full_run.output_dir / "step_8" / "adapter_model.safetensors")
    assert saved["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"].shape == rows.shape
    config = json.loads((full_run.output_dir / "step_8" / "config.json").read_text())
    assert config["vocab_size"] == first + 1
    resume(name, tmp_path, full_run, 8, **options)


def write_thoughts(folder, **options):
    """A checkpoint, and conversations with a thought between two new tokens."""
    data = write_conversations(folder / "data.jsonl")
    data.write_text(data.read_text().replace("cat", "<think>one</think>"))
    return write_checkpoint(folder / "checkpoint", **options)


TOKENS = ["<think>", "</think>"]
ADDED = {"tokenizer__add_tokens": TOKENS, "resize_token_embeddings": True}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["full_finetune_single_device", "lora_finetune_single_device"])
def test_tokens_of_the_config_are_trained_saved_and_resumed(name, tied, tmp_path):
    base = write_thoughts(tmp_path, tied=tied)
    first = json.loads((base / "config.json").read_text())["vocab_size"]
    old = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    fresh = start(name, tmp_path, **ADDED, train=False).recipe.model
    rows = getattr(fresh.tok_embeddings, "new_rows", fresh.tok_embeddings.weight[first:])
    torch.testing.assert_close(rows.cpu(), old.mean(dim=0).expand(2, -1))

    full_run = start(name, tmp_path, **ADDED, save_every_n_steps=8)
    resume(name, tmp_path, full_run, 8, **ADDED)
    saved = full_run.output_dir / "step_12"
    reference = AutoModelForCausalLM.from_pretrained(saved)
    tokenizer = AutoTokenizer.from_pretrained(saved)
    assert tokenizer.convert_tokens_to_ids(TOKENS) == [first, first + 1]
    embedding = reference.get_input_embeddings().weight
    assert embedding.shape[0] == first + 2
    assert not torch.equal(embedding[first], embedding[first + 1]), "they are trained, each for itself"
    model, _ = torchtune.load(saved, device="cpu", dtype="fp32")
    tokens = torch.tensor([tokenizer.encode("the <think>one</think>")])
    torch.testing.assert_close(model(tokens), reference(tokens).logits, rtol=1e-4, atol=1e-4)


def test_rows_that_pad_the_vocabulary_are_taken_by_new_tokens(tmp_path):
    """Their values mean nothing: they begin as the mean of the rows of tokens, and are trained with an adapter, too."""
    base = write_thoughts(tmp_path, vocab_size=330)
    tokens = hf_tokenizer(str(base)).vocab_size
    old = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    mean = old[:tokens].mean(dim=0)
    model = start("full_finetune_single_device", tmp_path, **ADDED, train=False).recipe.model
    full = model.tok_embeddings.weight.cpu()
    assert full.shape[0] == 330
    assert torch.equal(full[:tokens], old[:tokens])
    torch.testing.assert_close(full[tokens : tokens + 2], mean.expand(2, -1))
    run = start("lora_finetune_single_device", tmp_path, **ADDED)
    rows = run.trained["tok_embeddings.new_rows"].cpu()
    assert len(rows) == 330 - tokens
    assert not torch.isclose(rows[:2], mean).all(dim=1).any()


def test_new_tokens_without_trained_rows_are_refused(tmp_path):
    write_thoughts(tmp_path)
    with pytest.raises(UserError, match=r"<think>, </think> are not tokens of the checkpoint.*resize_token_embeddings"):
        start("lora_finetune_single_device", tmp_path, tokenizer__add_tokens=TOKENS, train=False)


def write_base_with_tokens(folder, base, **options):
    """A checkpoint whose tokenizer has the new tokens already, with rows for them."""
    tokenizer = hf_tokenizer(str(base), add_tokens=TOKENS)
    write_checkpoint(folder, vocab_size=tokenizer.vocab_size, **options)
    tokenizer.save_files(folder)


POST_TRAINING = [
    "full_dpo_single_device",
    "lora_dpo_single_device",
    "lora_grpo_single_device",
    "ppo_full_finetune_single_device",
    "knowledge_distillation_single_device",
]


@pytest.mark.parametrize("name", POST_TRAINING)
def test_tokens_of_the_config_are_trained_by_every_method(name, tmp_path):
    base = write_thoughts(tmp_path)
    first = json.loads((base / "config.json").read_text())["vocab_size"]
    for other in ("teacher", "reward"):
        write_base_with_tokens(tmp_path / other, base, seed=1, is_reward=other == "reward")
    write_pairs(tmp_path / "pairs.jsonl")
    pairs = (tmp_path / "pairs.jsonl").read_text().replace("cat", "<think>one</think>")
    (tmp_path / "pairs.jsonl").write_text(pairs)
    settings = {**ADDED, "save_every_n_steps": 2, "max_steps_per_epoch": 3, "epochs": 1}
    if "ppo" in name:
        settings["reward_and_value_model__checkpoint_dir"] = str(tmp_path / "reward")
    whole = start(name, tmp_path, **settings)
    assert len(whole.losses) == 3
    resume(name, tmp_path, whole, 2, **settings)
    saved = whole.output_dir / "step_3"
    assert AutoTokenizer.from_pretrained(saved).convert_tokens_to_ids(TOKENS) == [first, first + 1]
    rows = AutoModelForCausalLM.from_pretrained(saved).get_input_embeddings().weight[first:]
    assert len(rows) == 2
    mean = load_file(base / "model.safetensors")["model.embed_tokens.weight"].mean(dim=0)
    assert not torch.isclose(rows, mean).all(dim=1).any(), "they are trained"


def test_reference_has_the_new_tokens_of_the_policy(tmp_path):
    """Rows that its checkpoint lacks begin as those of the policy, and rows that it has are kept."""
    base = write_thoughts(tmp_path)
    first = json.loads((base / "config.json").read_text())["vocab_size"]
    write_base_with_tokens(tmp_path / "trained", base, seed=1)
    source = {"_component_": "torchtune.training.FullModelHFCheckpointer"}
    settings = {**ADDED, "max_steps_per_epoch": 1, "epochs": 1}
    same = start(
        "full_dpo_single_device", tmp_path, ref_checkpointer={**source, "checkpoint_dir": str(base)}, **settings
    )
    assert same.losses[1] == pytest.approx(math.log(2), abs=1e-6)
    settings |= {"model__checkpoint_dir": str(tmp_path / "trained"), "tokenizer__path": str(tmp_path / "trained")}
    settings |= {"checkpointer__checkpoint_dir": str(tmp_path / "trained")}
    model = start("full_dpo_single_device", tmp_path, train=False, **settings).recipe.model
    rows = load_file(tmp_path / "trained" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(model.tok_embeddings.weight[first:].cpu(), rows[first:])


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        (
            "knowledge_distillation_single_device",
            {},
            "teacher_checkpointer: the teacher does not know <think>, </think>",
        ),
        (
            "lora_grpo_single_device",
            {"loss": {"_component_": "torchtune.rlhf.loss.OnPolicyDistillationLoss"}, "rewards": []},
            "ref_checkpointer: the teacher does not know <think>, </think> of tokenizer.add_tokens",
        ),
        (
            "ppo_full_finetune_single_device",
            {},
            "reward_checkpointer: the reward model does not know <think>|value_chec",
        ),
    ],
)
def test_frozen_models_without_the_new_tokens_are_refused(name, settings, words, tmp_path):
    base = write_thoughts(tmp_path)
    if "grpo" in name:
        other = write_checkpoint(tmp_path / "other", seed=1)
        source = {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": str(other)}
        settings = {**settings, "ref_checkpointer": source}
    assert base.exists()
    with pytest.raises(UserError, match=words):
        start(name, tmp_path, train=False, **ADDED, **settings)
