"""Weights in other files: torch.save under Hugging Face's, Meta's and our own names."""

import os
import pickle
from pathlib import Path

import pytest
import torch

from tests.torchtune.checkpoints.small import load, same_bits, stored, write_folder
from torchtune.checkpoints import CheckpointError
from torchtune.checkpoints._weight_files import open_weight_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose safetensors file is gone; what it held is in :func:`expected`."""
    return write_folder(tmp_path / "in", "llama_tied")


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
def test_torch_files_are_read(folder, shards, zipped):
    expected = load(folder).state_dict()
    tensors = list(stored(folder).items())
    (folder / "model.safetensors").unlink()
    for number in range(shards):
        name = "pytorch_model.bin" if shards == 1 else f"pytorch_model-{number + 1:05d}-of-{shards:05d}.bin"
        torch.save(dict(tensors[number::shards]), folder / name, _use_new_zipfile_serialization=zipped)
    assert same_bits(load(folder).state_dict(), expected)


def test_location_of_a_file_with_a_single_tensor_is_its_folder(tmp_path):
    torch.save({"weight": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert open_weight_files([tmp_path / "pytorch_model.bin"]).location() == tmp_path


class _RunsCode:
    """Unpickling makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def test_code_in_a_pickle_is_refused(folder, tmp_path):
    marker = tmp_path / "made"
    torch.save({"model.norm.weight": _RunsCode(marker)}, folder / "evil.bin")
    (folder / "evil.pt").write_bytes(pickle.dumps(_RunsCode(marker), protocol=2))
    for name in ("evil.bin", "evil.pt"):
        with pytest.raises(CheckpointError, match="cannot be read as a file of tensors") as caught:
            load(folder, checkpoint_files=[name])
        assert name in str(caught.value)
        assert "weights_only" not in str(caught.value)  # torch's own text advises to run the code
    assert not marker.exists()


def test_torch_file_without_tensors_is_refused(folder):
    for value, words in (
        ({"model": {"a": torch.ones(1)}}, "a dict, where a tensor"),
        ({"epoch": 3}, "a int, where"),
        ([1], "list"),
    ):
        torch.save(value, folder / "odd.pt")
        with pytest.raises(CheckpointError, match=words):
            load(folder, checkpoint_files=["odd.pt"])


def test_cut_torch_file_is_refused(folder):
    torch.save(stored(folder), folder / "whole.bin")
    content = (folder / "whole.bin").read_bytes()
    for cut in [0, 1, 3, 100, *range(1000, len(content), len(content) // 20)]:
        (folder / "cut.bin").write_bytes(content[:cut])
        with pytest.raises(CheckpointError, match=r"cut\.bin cannot be read as a file of tensors"):
            load(folder, checkpoint_files=["cut.bin"])


def test_files_with_parts_of_tensors_are_refused(folder):
    """Meta's larger models come as several files with parts of every tensor."""
    model = load(folder)
    tensors = dict(model.spec.weight_map("meta").to_external(model.state_dict().items(), model.description))
    for number in range(2):
        torch.save(tensors, folder / f"consolidated.{number:02d}.pth")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"in both .*consolidated\.00\.pth and .*consolidated\.01\.pth"):
        load(folder)
