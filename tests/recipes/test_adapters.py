"""Recipes and adapters: nothing that is trained may be missing from what is saved."""

import json
import shutil

import pytest
from safetensors.torch import load_file

from tests.recipes.runs import resume, start
from tests.tiny import write_checkpoint, write_conversations
from torchtune.checkpoints import CheckpointError


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
    whole = start(name, tmp_path, **options)
    model = whole.recipe.model
    rows = whole.trained["tok_embeddings.new_rows"]
    assert rows.shape == (1, 32)
    assert not (rows == model.tok_embeddings.weight[first:]).any()  # its start
    saved = load_file(whole.output_dir / "step_8" / "adapter_model.safetensors")
    assert saved["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"].shape == rows.shape
    config = json.loads((whole.output_dir / "step_8" / "config.json").read_text())
    assert config["vocab_size"] == first + 1
    resume(name, tmp_path, whole, 8, **options)
