"""Checkpoints that are missing, damaged, or of another model: one sentence with file, tensor, shapes and a way out."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.torchtune.checkpoints.small import SIZES, build, load, read, refusal, write_folder
from torchtune.checkpoints import CheckpointError, FormattedCheckpointFiles, FullModelHFCheckpointer
from torchtune.models.llama3_2 import llama3_2
from torchtune.models.qwen2 import qwen2
from torchtune.utils import UserError

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_folder(tmp_path_factory.mktemp("sharded"), max_shard_size="50KB")
    assert len(list(folder.glob("model-*.safetensors"))) >= 3
    return folder


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[Path], Path]:
    return lambda folder: Path(shutil.copytree(folder, tmp_path / "copy"))


def refused(folder: Path, model: nn.Module | None = None, **options: Any) -> str:
    """What loading a folder says; the folder's own model by default."""
    model = build(folder) if model is None else model
    return refusal(lambda: FullModelHFCheckpointer(folder, **options).load_model(model))


def some_shard(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[1]


def test_missing_folder_weights_or_model_are_named(source, tmp_path):
    text = refused(tmp_path / "nowhere", build(source))
    assert f"no folder {tmp_path / 'nowhere'}" in text
    assert "tune download" in text
    assert "holds no weights" in refused(tmp_path, build(source))
    assert "carries no ModelSpec" in refused(source, nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "checkpoint_files"),
        ({"filename_format": "model-{}.safetensors", "max_filename": "00002"}, "checkpoint_files"),
        (["model-00001.safetensors"], "model-00001.safetensors"),
        (["model-00001.safetensors"], "the folder holds model.safetensors"),
    ],
)
def test_wrong_checkpoint_files_are_named(source, files, words):
    assert words in refused(source, checkpoint_files=files)


def test_mixed_formats_are_refused(sharded, copy):
    folder = copy(sharded)
    torch.save({}, folder / "more.bin")
    text = refused(folder, checkpoint_files=[some_shard(folder).name, "more.bin"])
    assert ".bin, .safetensors" in text


@pytest.mark.parametrize("listed", [False, True])
def test_missing_shard_is_named(sharded, copy, listed):
    folder = copy(sharded)
    names = sorted(path.name for path in folder.glob("model-*.safetensors"))
    some_shard(folder).unlink()
    text = refused(folder, checkpoint_files=names if listed else None)
    assert names[1] in text
    assert ("check checkpoint_dir" if listed else "download the checkpoint again") in text


@pytest.mark.parametrize("left", [0, 4, 100, 0.5, 0.999])
def test_truncated_shard_is_named(sharded, copy, left):
    folder = copy(sharded)
    shard = some_shard(folder)
    content = shard.read_bytes()
    shard.write_bytes(content[: int(left * len(content)) if left < 1 else left])
    text = refused(folder)
    assert str(shard) in text
    assert "again" in text


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"vocab_size": 400}, ["lm_head.weight", "[320, 32]", "[400, 32]", "vocabulary of 320"]),
        ({"intermediate_size": 64}, ["mlp.down_proj.weight", "[32, 48]", "[32, 64]"]),
        ({"hidden_size": 64}, ["lm_head.weight", "[320, 32]", "[320, 64]"]),
        ({"num_hidden_layers": 4}, ["lacks the tensor 'model.layers.3.", "4 layers"]),
        ({"num_hidden_layers": 2}, ["'model.layers.2.", "has no place", "2 layers"]),
        ({"num_attention_heads": 8, "head_dim": 4, "num_key_value_heads": 4}, ["4 heads (2 of", "8 (4)"]),
        ({"tie_word_embeddings": True}, ["differs", "tie_word_embeddings=False"]),
    ],
)
def test_model_of_other_sizes_is_refused(source, tmp_path, sizes, words):
    config = {**SIZES, "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-6, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = refused(source, build(tmp_path))
    assert str(source) in text
    assert [word for word in words if word not in text] == [], text


def test_checkpoint_of_another_family_is_refused(source, copy):
    options = {"num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32, "max_seq_len": 256}
    with torch.device("meta"):
        model = qwen2(vocab_size=320, intermediate_dim=48, **options)
    text = refused(source, model)
    assert "LlamaForCausalLM" in text
    assert "'qwen2'" in text
    folder = copy(source)
    config = read(folder / "config.json")
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["SomethingNew"]}))
    assert "SomethingNew" in refused(folder, build(source))


def test_model_type_is_checked(source):
    for model_type in ("LLAMA3", "LLAMA3_2"):
        load(source, model_type=model_type)
    assert "model_type: QWEN3" in refused(source, model_type="QWEN3")
    assert "model_type: 'LLAMA9' is not one of " in refused(source, model_type="LLAMA9")


def test_config_that_differs_where_no_shape_shows_it_is_logged(source, caplog):
    """A builder with another rotary base fits every tensor and computes something else."""
    with torch.device("meta"):
        model = llama3_2(
            vocab_size=320, num_layers=3, num_heads=4, num_kv_heads=2, embed_dim=32, max_seq_len=256,
            intermediate_dim=48, norm_eps=1e-6, tie_word_embeddings=False,
        )  # fmt: skip
    FullModelHFCheckpointer(source).load_model(model)
    text = caplog.text
    assert "rope_base = 10000.0" in text
    assert "500000" in text
    assert "rope_scaling" in text
    assert "norm_eps" not in text


@pytest.mark.parametrize(
    ("pattern", "largest", "words"),
    [("model-{}-of.safetensors", "2", "twice"), ("m-{}-{}", "two", "digits"), ("m-{}-{}", 2, "digits")],
)
def test_malformed_pattern_of_shards_is_refused(pattern, largest, words):
    with pytest.raises(CheckpointError, match=words):
        FormattedCheckpointFiles(pattern, largest)


def test_pattern_gives_the_names_of_shards():
    files = FormattedCheckpointFiles.from_dict({"filename_format": "m-{}-of-{}.bin", "max_filename": "0003"})
    assert files.build_checkpoint_filenames() == [f"m-000{n}-of-0003.bin" for n in (1, 2, 3)]
    with pytest.raises(CheckpointError, match="filename_format and max_filename"):
        FormattedCheckpointFiles.from_dict({"filename_format": "m-{}-of-{}.bin"})


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_a_json_file_that_gives_a_key_two_values_is_refused(sharded, copy, name):
    """Python keeps the last of them silently."""
    folder = copy(sharded)
    model = build(folder)
    file = folder / name
    key, value = next(iter(json.loads(file.read_text()).items()))
    text = file.read_text().lstrip().removeprefix("{")
    file.write_text(f'{{"{key}": ["other"], {text}')
    with pytest.raises(UserError, match=f"{name}: the key '{key}' has two values"):
        FullModelHFCheckpointer(folder).load_model(model)
    file.write_text(f'{{"{key}": {json.dumps(value)}, {text}')
    FullModelHFCheckpointer(folder).load_model(model)
