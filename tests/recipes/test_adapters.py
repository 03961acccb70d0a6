"""Recipes and adapters: nothing that is trained may be missing from what is saved."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import torchtune
from tests.recipes.runs import resume, start
from tests.tiny import write_checkpoint, write_conversations
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
    torch.testing.assert_close(rows, old.mean(dim=0).expand(2, -1))

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
    full = start("full_finetune_single_device", tmp_path, **ADDED, train=False).recipe.model.tok_embeddings.weight
    assert full.shape[0] == 330
    assert torch.equal(full[:tokens], old[:tokens])
    torch.testing.assert_close(full[tokens : tokens + 2], mean.expand(2, -1))
    run = start("lora_finetune_single_device", tmp_path, **ADDED)
    rows = run.trained["tok_embeddings.new_rows"]
    assert len(rows) == 330 - tokens
    assert not torch.isclose(rows[:2], mean).all(dim=1).any()


def test_new_tokens_without_trained_rows_are_refused(tmp_path):
    write_thoughts(tmp_path)
    with pytest.raises(UserError, match=r"<think>, </think> are not tokens of the checkpoint.*resize_token_embeddings"):
        start("lora_finetune_single_device", tmp_path, tokenizer__add_tokens=TOKENS, train=False)
