"""Folders of transformers through our model and back: the same bits, loaded by transformers again."""

import json
import shutil

import pytest
import torch
from transformers import AutoTokenizer

from tests.torchtune.checkpoints.small import (
    SHAPES,
    close,
    in_transformers,
    load,
    logits,
    read,
    same_bits,
    started,
    stored,
    write_folder,
)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, torch.float32) for shape in SHAPES), *((shape, torch.bfloat16) for shape in ("llama_tied", "gpt_oss"))],
)
def test_round_trip_is_exact(shape, dtype, tmp_path):
    source = write_folder(tmp_path / "in", shape, dtype)
    checkpointer, model = started(source, dtype=dtype)
    saved = checkpointer.save("epoch_0", model)
    assert same_bits(stored(source), stored(saved))
    hf_source, again = (in_transformers(folder, dtype="auto") for folder in (source, saved))
    assert again.dtype == dtype
    assert same_bits(hf_source.state_dict(), again.state_dict())
    # In float32: what bfloat16 rounds away may send a token to another expert.
    close(logits(load(saved)), logits(in_transformers(saved, dtype=torch.float32)))


@pytest.mark.parametrize("shape", ["llama_tied", "qwen2"])
def test_shards_are_indexed_and_limited_in_size(shape, tmp_path):
    source = write_folder(tmp_path / "in", shape, max_shard_size="30KB")
    assert len(list(source.glob("model-*.safetensors"))) > 3
    checkpointer, model = started(source)
    saved = checkpointer.save("epoch_0", model, max_shard_bytes=40_000)
    files = sorted(saved.glob("model*.safetensors"))
    index = read(saved / "model.safetensors.index.json")
    tensors = stored(saved)
    assert len(files) > 3
    assert index["weight_map"].keys() == tensors.keys()
    assert set(index["weight_map"].values()) == {file.name for file in files}
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    largest = max(t.numel() * t.element_size() for t in tensors.values())
    assert max(file.stat().st_size for file in files) < max(40_000, largest) + 20_000
    assert same_bits(stored(source), tensors)
    assert same_bits(in_transformers(source).state_dict(), in_transformers(saved).state_dict())
    single_file = checkpointer.save("epoch_1", model)
    assert [file.name for file in single_file.glob("*.safetensors*")] == ["model.safetensors"]


def test_listed_files_and_name_patterns_are_read(tmp_path):
    source = write_folder(tmp_path / "in", max_shard_size="30KB")
    names = sorted(path.name for path in source.glob("model-*.safetensors"))
    expected = load(source).state_dict()
    count = names[0].removesuffix(".safetensors").rpartition("-")[2]
    formatted = {"filename_format": "model-{}-of-{}.safetensors", "max_filename": count}
    (source / "model.safetensors.index.json").unlink()
    for files in (list(reversed(names)), formatted):
        assert same_bits(load(source, checkpoint_files=files).state_dict(), expected)


def test_small_files_of_the_source_are_carried(tmp_path):
    source = write_folder(tmp_path / "in")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "LICENSE").write_text("licence")
    (source / "modeling_custom.py").write_text("x = 1")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("{{ tools }}")
    carried = {
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
        "LICENSE",
        "modeling_custom.py",
        "additional_chat_templates/tool.jinja",
    }
    for left in (
        ".gitattributes",
        ".cache/huggingface/download/x.json",
        "pytorch_model.bin",
        "extra.safetensors",
        "extra.gguf",
        "pytorch_model.bin.index.json",
        "epoch_0/config.json",
        "step_7/tokenizer.json",
        "torchtune_config.yaml",
        "adapter_config.json",
        "state/state.json",
        "state/state.safetensors",
        "adapter/adapter_config.json",
        "recipe_state.pt",
    ):
        path = source / left
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    with (source / "large.json").open("wb") as file:
        file.truncate(101 * 2**20)
    checkpointer, model = started(source, checkpoint_files=["model.safetensors"])
    saved = checkpointer.save("epoch_0", model)
    files = {str(path.relative_to(saved)) for path in saved.rglob("*") if path.is_file()}
    assert files == carried | {"config.json", "model.safetensors", ".complete"}
    for name in carried:
        assert (saved / name).read_bytes() == (source / name).read_bytes()
    assert AutoTokenizer.from_pretrained(saved).eos_token == "<|im_end|>"
    assert in_transformers(saved).generation_config.eos_token_id == 2


def test_saved_config_has_the_vocabulary_and_dtype_of_the_saved_weights(tmp_path):
    source = write_folder(tmp_path / "in", "qwen2_tied")
    config = read(source / "config.json") | {"task_specific_params": {"kept": True}}
    (source / "config.json").write_text(json.dumps(config))
    checkpointer, model = started(source, dtype=torch.bfloat16)
    with torch.no_grad():
        grown = torch.cat([model.tok_embeddings.weight, torch.zeros(8, 32, dtype=torch.bfloat16)])
    model.tok_embeddings.weight = torch.nn.Parameter(grown)
    saved = checkpointer.save("epoch_0", model)
    assert read(saved / "config.json") == config | {"vocab_size": 328, "dtype": "bfloat16"}
    assert {tensor.dtype for tensor in stored(saved).values()} == {torch.bfloat16}
    assert in_transformers(saved).get_input_embeddings().weight.shape == (328, 32)


@pytest.mark.parametrize("left", ["all but the config", "nothing"])
def test_a_save_does_not_need_the_source(left, tmp_path):
    """A long run must not fail at its end because somebody tidied up the folder of the base model."""
    source = write_folder(tmp_path / "in", "qwen3")
    checkpointer, model = started(source)
    (source / "config.json").unlink()
    if left == "nothing":
        shutil.rmtree(source)
    close(logits(in_transformers(checkpointer.save("epoch_0", model))), logits(model))


def test_checkpoint_in_the_middle_of_a_run_is_a_base_for_another(tmp_path):
    """A checkpoint in the middle of a run is a model folder too; its training state is not passed on."""
    source = write_folder(tmp_path / "in")
    first, model = started(source)
    middle = first.save("step_1", model, state={"progress": {"step": 1}}, cfg={"recipe": "x"})
    second, again = started(middle, output=tmp_path / "second")
    saved = second.save("step_2", again, state={"progress": {"step": 2}})
    assert second.find_resume_point().progress == {"step": 2}
    last = second.save("epoch_0", again)
    assert same_bits(stored(source), stored(last))
    assert not (last / "state").exists()
    assert not (saved / "torchtune_config.yaml").exists()
