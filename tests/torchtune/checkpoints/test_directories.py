"""Which directories count, which one a run goes on from, which are removed, and what is never overwritten."""

import json
import zlib
from pathlib import Path

import pytest
from torch import nn

from tests.torchtune.checkpoints.small import refusal
from torchtune.checkpoints import FullModelHFCheckpointer


def checkpointer(source: Path, output: Path, **options) -> FullModelHFCheckpointer:
    return FullModelHFCheckpointer(source, output_dir=output, **options)


@pytest.fixture
def store(source: Path, tmp_path: Path) -> FullModelHFCheckpointer:
    return checkpointer(source, tmp_path)


def save(store: FullModelHFCheckpointer, name: str, model: nn.Module, *, resumable: bool = True) -> Path:
    step = int(name.partition("_")[2])
    return store.save(name, model, state={"progress": {"seed": 1, "global_step": step}} if resumable else None)


def test_a_new_folder_may_be_used(source, tmp_path):
    store = checkpointer(source, tmp_path / "new" / "run")
    store.check_output_dir(resume=False)
    store.check_output_dir(resume=True)
    assert store.find_resume_point() is None
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made_is_refused_and_logs_alone_are_no_run(source, tmp_path):
    (tmp_path / "notes").write_text("a file")
    text = refusal(checkpointer(source, tmp_path / "notes" / "run").check_output_dir, resume=False)
    assert str(tmp_path / "notes") in text
    assert "choose another output_dir" in text
    assert "is a file" in refusal(checkpointer(source, tmp_path / "notes").check_output_dir, resume=False)
    (tmp_path / "logs").mkdir()
    checkpointer(source, tmp_path).check_output_dir(resume=False)


@pytest.mark.parametrize("folder", ["/proc/run", "/dev/null/run", "x" * 300, "new/" + "x" * 300])
def test_a_folder_that_only_looks_writable_is_refused_before_the_run(source, tmp_path, folder):
    """Root may write anywhere, but /proc takes no folders; a name may be too long for the file system."""
    store = checkpointer(source, tmp_path / folder)
    assert "choose another output_dir" in refusal(store.check_output_dir, resume=False)
    assert not list(tmp_path.iterdir())


def test_a_run_is_not_overwritten(store, model):
    save(store, "step_2", model)
    text = refusal(store.check_output_dir, resume=False)
    assert "step_2" in text
    assert "resume_from_checkpoint=True" in text
    assert "another output_dir" in text
    store.check_output_dir(resume=True)


@pytest.mark.parametrize("below", ["", "out", "a/b"])
def test_the_source_is_not_written_into(source, below):
    text = refusal(checkpointer(source, source / below).check_output_dir, resume=False)
    assert "inside checkpoint_dir" in text


@pytest.mark.parametrize("keep", [0, -1])
def test_number_of_kept_checkpoints_is_at_least_one(source, tmp_path, keep):
    assert "at least 1" in refusal(checkpointer, source, tmp_path, keep_last_n_checkpoints=keep)


def test_resume_point_is_the_newest_by_time_not_by_number(store, model):
    for name in ("step_9", "step_10", "epoch_0"):
        save(store, name, model)
        assert store.find_resume_point().path.name == name
    assert store.find_resume_point().progress == {"seed": 1, "global_step": 0}


def test_last_n_are_kept(store, model, tmp_path):
    store.keep_last_n_checkpoints = 2
    for step in (8, 9, 10, 11):
        save(store, f"step_{step}", model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_11"]
    store.keep_last_n_checkpoints = 1
    save(store, "epoch_0", model)
    assert [path.name for path in tmp_path.iterdir()] == ["epoch_0"]


def test_all_epochs_and_three_steps_are_kept_by_default(store, model, tmp_path, caplog):
    """All of epochs, three of steps. It is said once."""
    for number in range(1, 6):
        save(store, f"step_{number}", model)
        save(store, f"epoch_{number}", model)
    left = [f"epoch_{number}" for number in range(1, 6)] + ["step_3", "step_4", "step_5"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    assert sum("the last 3 are kept" in record.getMessage() for record in caplog.records) <= 1
    store.keep_last_n_checkpoints = 100
    save(store, "step_6", model)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*left, "step_6"]


def test_folder_without_a_marker_is_no_checkpoint(store, model):
    store.keep_last_n_checkpoints = 1
    save(store, "step_1", model)
    newer = save(store, "step_2", model)
    (newer / ".complete").rename(newer / "elsewhere")
    assert "nothing to resume" in refusal(store.find_resume_point)
    # … but what is there is not written over either
    assert "already holds a run" in refusal(store.check_output_dir, resume=False)
    save(store, "step_3", model)
    assert store.find_resume_point().path.name == "step_3"
    assert newer.exists(), "only complete checkpoints are pruned"


def test_finished_run_cannot_be_resumed(store, model):
    save(store, "step_1", model)
    save(store, "step_2", model, resumable=False)
    assert "finished (step_2)" in refusal(store.find_resume_point)


def test_leftovers_of_a_killed_save_are_cleared(store, model, tmp_path):
    save(store, "step_1", model)
    for name in (".step_2.0123abcd.tmp", ".step_1.0123abcd.old.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".notes.tmp").write_text("mine")
    assert store.find_resume_point().path.name == "step_1"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".notes.tmp", "step_1"]


def test_checkpoint_is_restored_after_a_kill_between_two_renames(store, model, tmp_path):
    save(store, "step_1", model).rename(tmp_path / ".step_1.0123abcd.old.tmp")
    (tmp_path / ".step_1.89abcdef.tmp").mkdir()
    assert store.find_resume_point().path.name == "step_1"
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


@pytest.mark.parametrize("name", ["best", "step_", "../step_1", "step_1/x"])
def test_name_that_no_resume_finds_is_refused(source, model, tmp_path, name):
    with pytest.raises(ValueError, match="epoch_N or step_N"):
        checkpointer(source, tmp_path).save(name, model)


def test_checkpoint_has_the_documented_files(source, model, tmp_path):
    folder = save(checkpointer(source, tmp_path), "step_1", model)
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == [
        ".complete",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "state/rank_0.safetensors",
        "state/state.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    marker = json.loads((folder / ".complete").read_text())
    needed = ("model.safetensors", "state/rank_0.safetensors", "state/state.json")
    assert marker.pop("files") == {name: (folder / name).stat().st_size for name in needed}
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".complete"]
    sums = {str(path.relative_to(folder)): f"{zlib.crc32(path.read_bytes()):08x}" for path in files}
    assert marker == {"saves": 1, "resumable": True, "crc32": sums}
    modes = {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}
    assert len(modes) == 1, "all files have the permissions of the user's umask"
