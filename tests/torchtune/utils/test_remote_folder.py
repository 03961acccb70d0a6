"""Folders of object stores that are fetched into the cache: once, whole, and again when they have changed."""

import os
from pathlib import Path

import pytest

from tests.tiny import write_tokenizer
from tests.torchtune.checkpoints.faulty_store import FaultyFileSystem
from torchtune.tokenizers import hf_tokenizer
from torchtune.utils import UserError, _remote_folder, local_path


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FaultyFileSystem.reset()
    monkeypatch.setattr(_remote_folder, "_PAUSES", (0.01, 0.01))
    monkeypatch.setenv("TORCHTUNE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with two files."""
    (tmp_path / "model" / "sub").mkdir(parents=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "sub" / "weights").write_bytes(b"weights")
    return tmp_path / "model"


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    paths: list[str] = []
    FaultyFileSystem.fault = staticmethod(lambda operation, path: operation == "read" and paths.append(path))
    return paths


def test_local_path_stays_as_it_is(tmp_path):
    assert local_path("models/mine", "checkpoint_dir") == Path("models/mine")
    assert local_path(tmp_path, "checkpoint_dir") == tmp_path


def test_folder_is_fetched_once_and_again_when_it_has_changed(model, monkeypatch):
    reads = count_reads(monkeypatch)
    folder = local_path(f"faulty://{model}", "checkpoint_dir")
    assert (folder / "sub" / "weights").read_bytes() == b"weights"
    assert local_path(f"faulty://{model}/", "checkpoint_dir") == folder
    assert len(reads) == 2
    (model / "sub" / "weights").write_bytes(b"other")
    (model / "config.json").unlink()
    assert local_path(f"faulty://{model}", "checkpoint_dir") == folder
    assert (folder / "sub" / "weights").read_bytes() == b"other"
    assert not (folder / "config.json").exists()


def test_file_is_fetched_with_its_folder(model, monkeypatch):
    path = local_path(f"faulty://{model}/config.json", "tokenizer.path")
    assert path.read_text() == "{}"
    assert path.parent == local_path(f"faulty://{model}", "tokenizer.path")


def test_folder_without_files_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"^checkpoint_dir: faulty://.*/nothing holds no files: correct the path"):
        local_path(f"faulty://{tmp_path}/nothing", "checkpoint_dir")


def test_fetch_that_fails_leaves_nothing_and_is_made_later(model, tmp_path):
    def fault(operation: str, path: str) -> None:
        if operation == "read" and path.endswith("weights"):
            raise OSError("Connection reset by peer")

    FaultyFileSystem.fault = staticmethod(fault)
    with pytest.raises(UserError, match=r"cannot be read \(sub/weights\) \(OSError: Connection reset by peer\)"):
        local_path(f"faulty://{model}", "checkpoint_dir")
    assert not list((tmp_path / "cache").rglob("config.json"))
    FaultyFileSystem.reset()
    assert (local_path(f"faulty://{model}", "checkpoint_dir") / "config.json").exists()


def test_connection_that_fails_once_is_tried_again(model):
    failures = [OSError("Connection reset by peer")]

    def fault(operation: str, path: str) -> None:
        if operation == "read" and failures:
            raise failures.pop()

    FaultyFileSystem.fault = staticmethod(fault)
    assert (local_path(f"faulty://{model}", "checkpoint_dir") / "config.json").read_text() == "{}"


def test_service_that_gives_a_part_of_a_file_is_noticed(model, monkeypatch):
    def truncate(operation: str, path: str) -> None:
        if operation == "read":
            os.truncate(path, 1)

    FaultyFileSystem.fault = staticmethod(truncate)
    with pytest.raises(UserError, match=r"gave 1 of \d bytes of"):
        local_path(f"faulty://{model}", "checkpoint_dir")


def test_tokenizer_is_read_from_a_url(tmp_path):
    (tmp_path / "model").mkdir()
    write_tokenizer(tmp_path / "model")
    local = hf_tokenizer(str(tmp_path / "model"))
    for url in (f"faulty://{tmp_path}/model", f"faulty://{tmp_path}/model/tokenizer.json"):
        assert hf_tokenizer(url).encode("the cat") == local.encode("the cat")
