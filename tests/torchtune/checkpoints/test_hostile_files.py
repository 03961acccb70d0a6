"""Crafted files of weights: refused in one sentence that names the file, before anything large is made of them."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.torchtune.checkpoints.small import build, load, read, refusal
from tests.work import at_most
from torchtune.checkpoints import FullModelHFCheckpointer, GGUFFile, ModelSource

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "copy"))


def _refusal(action: Any) -> str:
    with at_most(2 * 10**6, mib=64):
        text = refusal(action)
    assert len(text) < 1000, text
    return text


def _load(folder: Path) -> str:
    model = build(folder)
    return _refusal(lambda: FullModelHFCheckpointer(folder).load_model(model))


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": [1, 2]}, "weight_map"),
        ({"weight_map": {"a": 3}}, "weight_map"),
        ([], "list"),
        ({"weight_map": {"a": "../../etc/passwd"}}, "'../../etc/passwd', which is not a file of this folder"),
        ({"weight_map": {"a": "/etc/passwd"}}, "'/etc/passwd', which is not a file of this folder"),
        ({"weight_map": {"a": "x/../../y.safetensors"}}, "not a file of this folder"),
        ({"weight_map": {"a": "x\0.safetensors"}}, "not a file of this folder"),
        ({"weight_map": {"a": "x" * 5000}}, "not a file of this folder"),
        ({"weight_map": {"a": "."}}, "lacks"),
        ("[" * 200_000, INDEX),
    ],
)
def test_index_of_wrong_types_or_outside_files_is_refused(folder, index, words):
    (folder / INDEX).write_text(index if isinstance(index, str) else json.dumps(index))
    assert words in _load(folder)


def test_files_that_are_links_are_read_as_the_cache_of_the_hub_has_them(folder, tmp_path):
    blob = tmp_path / "blobs" / "0123"
    blob.parent.mkdir()
    (folder / "model.safetensors").rename(blob)
    (folder / "model.safetensors").symlink_to(blob)
    load(folder)


def _safetensors(entry: dict[str, Any]) -> bytes:
    header = json.dumps({"lm_head.weight": {"dtype": "F32", **entry}}).encode()
    return struct.pack("<Q", len(header)) + header + b"\0" * 4


@pytest.mark.parametrize(
    "content",
    [
        b"(" * 100,  # a pickle that ends inside a value
        b".",  # one of an empty stack
        b"\x80\x02]q\x07a.",
        b"PK\x05\x06\x01\x00\x01\x00" + bytes(14),  # an archive of several disks
        bytes(500),
    ],
)
def test_file_that_torch_save_has_not_written_is_refused(folder, content):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    assert "pytorch_model.bin cannot be read as a file of tensors" in _load(folder)


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 2**40) + b"{}",  # a header longer than its file
        b"\xff" * 4096,
        _safetensors({"shape": [2**40, 2**40], "data_offsets": [0, 4]}),
        _safetensors({"shape": [1], "data_offsets": [0, 2**62]}),
    ],
)
def test_safetensors_header_beyond_the_file_is_refused(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    assert "is not a whole safetensors file" in _load(folder)


def test_config_of_sizes_beyond_the_files_is_refused(folder):
    """Its sizes are compared with those of the file before anything is allocated."""
    config = read(folder / "config.json")
    config |= {"hidden_size": 2**20, "intermediate_size": 2**22, "head_dim": 2**14, "vocab_size": 2**28}
    (folder / "config.json").write_text(json.dumps(config))
    assert "1048576" in _load(folder)


def test_pattern_of_a_billion_shards_is_refused():
    files = {"filename_format": "model-{}-of-{}.safetensors", "max_filename": "99999999999"}
    assert "max_filename" in _refusal(lambda: ModelSource("/nowhere", files).open())


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def _gguf(metadata: bytes = b"", tensors: bytes = b"", *, entries: int = 1, count: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, count, entries) + metadata + tensors


_KEY = _text(b"general.architecture")
_TENSOR = _text(b"token_embd.weight")


@pytest.mark.parametrize(
    "content",
    [
        _gguf(_KEY + struct.pack("<IIQ", 9, 4, 2**40)),  # an array of 2^40 numbers
        _gguf(_KEY + struct.pack("<IIQ", 9, 0, 2**23 - 1)),  # longer than the file
        _gguf(_KEY + struct.pack("<IQ", 8, 2**60)),  # a text
        _gguf(struct.pack("<Q", 2**63)),  # a key
        _gguf(_KEY + struct.pack("<IIQ", 9, 9, 1) * 400),  # arrays in arrays
        _gguf(entries=2**60),
        _gguf(entries=0, count=2**60),
        _gguf(tensors=_TENSOR + struct.pack("<I", 2**31), entries=0, count=1),
        _gguf(tensors=_TENSOR + struct.pack("<IQQIQ", 2, 2**62, 2**62, 0, 0), entries=0, count=1),
        _gguf(tensors=_TENSOR + struct.pack("<IQIQ", 1, 4, 0, 2**62), entries=0, count=1),
        b"GGUF" + b"\xff" * 64,
        b"",
    ],
)
def test_gguf_header_beyond_the_file_is_refused(tmp_path, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert f"{path} is not a whole GGUF file" in _refusal(lambda: GGUFFile(path))


def test_gguf_sizes_beyond_the_file_are_refused(tmp_path):
    import gguf

    path = tmp_path / "model.gguf"
    for key, value in {
        "embedding_length": 2**31 - 2,
        "block_count": 2**31 - 1,
        "feed_forward_length": 2**31 - 1,
    }.items():
        writer = gguf.GGUFWriter(path, "llama")
        sizes = {"embedding_length": 8, "block_count": 1, "feed_forward_length": 8, "context_length": 8, key: value}
        for name, size in {**sizes, "attention.head_count": 2}.items():
            writer.add_uint32(f"llama.{name}", size)
        writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        writer.add_tensor("token_embd.weight", np.zeros((4, 8), dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        assert str(path) in _refusal(lambda: GGUFFile(path).description)
