"""Checkpoints in an object store: complete when the marker is there, nothing lost when a part fails."""

import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from torch import nn

from tests.torchtune.checkpoints.faulty_store import FaultyFileSystem
from tests.torchtune.checkpoints.ranks import run
from tests.torchtune.checkpoints.small import load, write_folder
from torchtune.checkpoints import FullModelHFCheckpointer, ResumePoint, _bucket
from torchtune.utils import UserError


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses, and no fault of the test before."""
    FaultyFileSystem.reset()
    monkeypatch.setattr(_bucket, "_PAUSE_AT_END", 0.01)
    monkeypatch.setattr("torchtune.utils._remote_folder._PAUSES", (0.01, 0.01))


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """The folder behind the object store."""
    return tmp_path / "bucket"


def start(source: Path, output: Path, bucket: Path, *, resume: bool = False, **options):
    """Return the checkpointer of a run that has begun, and its resume point."""
    checkpointer = FullModelHFCheckpointer(str(source), output_dir=str(output), upload=f"faulty://{bucket}", **options)
    return checkpointer, checkpointer.open_output_dir(None, resume=resume)


def refusal(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Return the sentence with which a call is refused."""
    with pytest.raises(UserError) as caught:
        call(*args, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def save(checkpointer: FullModelHFCheckpointer, step: int, model: nn.Module, *, resumable: bool = True) -> Path:
    state = {"progress": {"seed": 1, "global_step": step}} if resumable else None
    return checkpointer.save(f"step_{step}", model, state=state)


def save_run(source: Path, output: Path, bucket: Path, model: nn.Module, steps=(2, 4), **options) -> None:
    """Save and upload checkpoints, as a run that was stopped."""
    checkpointer, _ = start(source, output, bucket, **options)
    for step in steps:
        save(checkpointer, step, model)
    checkpointer.close()


def resume(source: Path, output: Path, bucket: Path) -> ResumePoint | None:
    checkpointer, point = start(source, output, bucket, resume=True)
    checkpointer.close()
    return point


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir()}


def test_upload_has_all_files_checksums_and_last_the_marker(source, model, tmp_path, bucket):
    save_run(source, tmp_path / "run", bucket, model, steps=[2])
    local = files_of(tmp_path / "run" / "step_2")
    remote = files_of(bucket / "step_2")
    manifest = json.loads(remote.pop(".manifest.json"))["files"]
    assert remote == local
    for name in local.keys() - {".complete"}:
        expected = {"size": len(local[name]), "sha256": hashlib.sha256(local[name]).hexdigest()}
        assert manifest[name] == expected
    assert [Path(path).name for path in FaultyFileSystem.written[-2:]] == [".manifest.json", ".complete"]


def test_run_on_a_fresh_machine_goes_on_from_the_bucket(source, model, tmp_path, bucket):
    save_run(source, tmp_path / "run", bucket, model)
    checkpointer, point = start(source, tmp_path / "fresh", bucket, resume=True)
    assert point.path == tmp_path / "fresh" / "step_4"
    assert point.progress["global_step"] == 4
    assert files_of(point.path) == files_of(tmp_path / "run" / "step_4")
    save(checkpointer, 6, model)
    checkpointer.close()
    assert json.loads((bucket / "step_6" / ".complete").read_text())["saves"] == 3
    assert names_in(bucket) == {"step_2", "step_4", "step_6"}


def damage(bucket: Path, kind: str) -> None:
    file = bucket / "step_4" / "model.safetensors"
    if kind == "half-written":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif kind == "changed":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    elif kind == "missing":
        file.unlink()
    elif kind == "no manifest":
        (bucket / "step_4" / ".manifest.json").unlink()
    elif kind == "manifest that leaves the folder":
        content = {"files": {"../../stolen": {"size": 1, "sha256": "0"}}}
        (bucket / "step_4" / ".manifest.json").write_text(json.dumps(content))
    elif kind == "half a marker":
        marker = bucket / "step_4" / ".complete"
        marker.write_bytes(marker.read_bytes()[:20])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("half-written", "model.safetensors has"),
        ("changed", "was changed since it was uploaded"),
        ("missing", "model.safetensors is missing"),
        ("no manifest", "manifest.json is missing"),
        ("manifest that leaves the folder", "manifest.json is damaged"),
        ("half a marker", ".complete is damaged: step_4 does not count"),
    ],
)
def test_damaged_checkpoint_of_the_bucket_is_named_and_the_one_before_used(
    source, model, tmp_path, bucket, caplog, kind, words
):
    save_run(source, tmp_path / "run", bucket, model)
    damage(bucket, kind)
    point = resume(source, tmp_path / "fresh", bucket)
    assert point.path == tmp_path / "fresh" / "step_2"
    assert names_in(tmp_path / "fresh") == {"step_2"}
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert words in errors[0]
    assert f"faulty://{bucket}/step_4" in errors[0]


def test_damaged_checkpoint_without_one_before_ends_the_run(source, model, tmp_path, bucket):
    save_run(source, tmp_path / "run", bucket, model, steps=[4])
    damage(bucket, "half-written")
    text = refusal(start, source, tmp_path / "fresh", bucket, resume=True)
    assert "checkpointer.upload" in text
    assert "there is no checkpoint before it" in text


def test_save_after_a_damaged_one_is_newer_than_that(source, model, tmp_path, bucket):
    save_run(source, tmp_path / "run", bucket, model)
    damage(bucket, "changed")
    checkpointer, _ = start(source, tmp_path / "fresh", bucket, resume=True)
    save(checkpointer, 3, model)
    checkpointer.close()
    assert json.loads((bucket / "step_3" / ".complete").read_text())["saves"] == 3
    assert resume(source, tmp_path / "third", bucket).path.name == "step_3"


def test_upload_without_marker_does_not_count_and_is_removed_later(source, model, tmp_path, bucket):
    save_run(source, tmp_path / "run", bucket, model)
    (bucket / "step_4" / ".complete").unlink()
    checkpointer, point = start(source, tmp_path / "fresh", bucket, resume=True)
    assert point.path.name == "step_2"
    save(checkpointer, 3, model)
    checkpointer.close()
    assert names_in(bucket) == {"step_2", "step_3"}


def test_upload_replaces_what_a_killed_one_of_its_name_has_left(source, model, tmp_path, bucket):
    (bucket / "step_2").mkdir(parents=True)
    (bucket / "step_2" / "left").write_text("half")
    save_run(source, tmp_path / "run", bucket, model, steps=[2])
    assert not (bucket / "step_2" / "left").exists()


def test_checkpoint_that_was_not_uploaded_before_a_kill_is_uploaded_by_the_resume(source, model, tmp_path, bucket):
    save_run(source, tmp_path / "run", bucket, model)
    shutil.rmtree(bucket / "step_4")
    assert resume(source, tmp_path / "run", bucket).path.name == "step_4"
    assert (bucket / "step_4" / ".complete").is_file()


def test_newer_checkpoint_of_the_bucket_comes_before_an_older_one_here(source, model, tmp_path, bucket):
    save_run(source, tmp_path / "run", bucket, model)
    shutil.copytree(tmp_path / "run" / "step_2", tmp_path / "second" / "step_2")
    assert resume(source, tmp_path / "second", bucket).path.name == "step_4"


def test_damaged_checkpoint_here_is_replaced_from_the_bucket(source, model, tmp_path, bucket, caplog):
    save_run(source, tmp_path / "run", bucket, model)
    file = tmp_path / "run" / "step_4" / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:100])
    assert resume(source, tmp_path / "run", bucket).path.name == "step_4"
    assert file.read_bytes() == content
    assert "step_4 is downloaded again" in caplog.text


def test_bucket_with_a_run_is_not_overwritten(source, model, tmp_path, bucket):
    save_run(source, tmp_path / "run", bucket, model)
    text = refusal(start, source, tmp_path / "fresh", bucket)
    assert "already holds a run (step_4)" in text
    assert "resume_from_checkpoint=True" in text


def test_start_by_mistake_does_not_stop_the_uploads_of_a_run(source, model, tmp_path, bucket):
    checkpointer, _ = start(source, tmp_path / "run", bucket)
    save(checkpointer, 2, model)
    deadline = time.monotonic() + 20
    while not (bucket / "step_2" / ".complete").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    refusal(start, source, tmp_path / "fresh", bucket)
    save(checkpointer, 4, model, resumable=False)
    checkpointer.close()
    assert names_in(bucket) == {"step_2", "step_4"}


def test_finished_run_in_the_bucket_is_not_resumed(source, model, tmp_path, bucket):
    checkpointer, _ = start(source, tmp_path / "run", bucket)
    save(checkpointer, 4, model, resumable=False)
    checkpointer.close()
    assert "is finished (step_4)" in refusal(start, source, tmp_path / "fresh", bucket, resume=True)
    assert not (tmp_path / "fresh" / "step_4").exists()


def refuse(operation: str, error: Exception):
    def fault(attempted: str, path: str) -> None:
        if attempted == operation:
            raise error

    return fault


@pytest.mark.parametrize(
    ("operation", "error", "words"),
    [
        ("write", PermissionError("Forbidden"), "check the credentials"),
        ("write", FileNotFoundError("The specified bucket does not exist"), "check that the bucket exists"),
        ("list", RuntimeError("Could not connect to the endpoint URL"), "the network"),
    ],
)
def test_bucket_that_cannot_be_used_is_refused_before_training(source, tmp_path, bucket, operation, error, words):
    FaultyFileSystem.fault = staticmethod(refuse(operation, error))
    text = refusal(start, source, tmp_path / "run", bucket)
    assert f"checkpointer.upload: faulty://{bucket}" in text
    assert words in text


def test_bucket_that_is_gone_for_a_while_gets_the_checkpoints_later(source, model, tmp_path, bucket, caplog):
    checkpointer, _ = start(source, tmp_path / "run", bucket)
    FaultyFileSystem.fault = staticmethod(refuse("write", OSError("Service unavailable")))
    save(checkpointer, 2, model)
    deadline = time.monotonic() + 20
    while "not uploaded yet" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "step_2 is saved in" in caplog.text
    assert "Service unavailable" in caplog.text
    FaultyFileSystem.reset()
    save(checkpointer, 4, model)
    checkpointer.close()
    markers = [Path(path).parent.name for path in FaultyFileSystem.written if path.endswith(".complete")]
    assert markers == ["step_4", "step_2"]  # the newest first


@pytest.mark.parametrize("resumable", [False, True])
def test_finished_run_that_could_not_be_uploaded_fails_and_a_stopped_one_says_so(
    source, model, tmp_path, bucket, caplog, resumable
):
    checkpointer, _ = start(source, tmp_path / "run", bucket)
    FaultyFileSystem.fault = staticmethod(refuse("write", PermissionError("Access Denied")))
    save(checkpointer, 4, model, resumable=resumable)
    if resumable:
        checkpointer.close()
        text = caplog.text
    else:
        text = refusal(checkpointer.close)
    assert "step_4 could not be uploaded" in text
    assert f"nothing is lost as long as {tmp_path / 'run'} exists" in text
    assert (tmp_path / "run" / "step_4" / ".complete").is_file()
    checkpointer.close()  # again, as recipes do


def slow_weights(operation: str, path: str) -> None:
    if operation == "write" and path.endswith("model.safetensors"):
        time.sleep(0.5)


def test_end_of_a_run_waits_for_the_upload_with_a_line_of_progress(
    source, model, tmp_path, bucket, caplog, monkeypatch
):
    monkeypatch.setattr(_bucket, "_LOG_EVERY", 0.0)
    caplog.set_level(logging.INFO)
    checkpointer, _ = start(source, tmp_path / "run", bucket)
    FaultyFileSystem.fault = staticmethod(slow_weights)
    save(checkpointer, 4, model)
    checkpointer.close()
    assert (bucket / "step_4" / ".complete").is_file()
    assert f"Uploading step_4 to faulty://{bucket}: 0.00 of 0.00 GB, 1 checkpoints left" in caplog.text


def test_run_that_fails_uploads_what_it_has_saved(source, model, tmp_path, bucket):
    checkpointer, _ = start(source, tmp_path / "run", bucket)
    FaultyFileSystem.fault = staticmethod(slow_weights)
    save(checkpointer, 4, model)
    with pytest.raises(ZeroDivisionError), closing(checkpointer):
        _ = 1 / 0
    assert (bucket / "step_4" / ".complete").is_file()


def test_checkpoint_is_not_removed_here_while_it_is_uploaded(source, model, tmp_path, bucket):
    checkpointer, _ = start(source, tmp_path / "run", bucket, keep_last_n_checkpoints=1)
    FaultyFileSystem.fault = staticmethod(slow_weights)
    save(checkpointer, 2, model)
    deadline = time.monotonic() + 20
    while not (bucket / "step_2").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    save(checkpointer, 4, model)
    save(checkpointer, 6, model)
    assert names_in(tmp_path / "run") >= {"step_2", "step_6"}
    assert "step_4" not in names_in(tmp_path / "run")
    FaultyFileSystem.reset()
    checkpointer.close()
    assert names_in(bucket) == {"step_6"}


def test_checkpoint_that_is_saved_again_while_it_is_uploaded_is_uploaded_as_a_whole(source, model, tmp_path, bucket):
    checkpointer, _ = start(source, tmp_path / "run", bucket)
    FaultyFileSystem.fault = staticmethod(slow_weights)
    save(checkpointer, 2, model)
    deadline = time.monotonic() + 20
    while not (bucket / "step_2").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    save(checkpointer, 2, model)
    FaultyFileSystem.reset()
    checkpointer.close()
    local_files = files_of(tmp_path / "run" / "step_2")
    uploaded_files = files_of(bucket / "step_2")
    del uploaded_files[_bucket.MANIFEST]
    assert uploaded_files == local_files
    point = resume(source, tmp_path / "fresh", bucket)
    assert point.path.name == "step_2"


def test_dry_run_finds_the_checkpoint_of_the_bucket_and_downloads_no_weights(source, model, tmp_path, bucket):
    save_run(source, tmp_path / "run", bucket, model)
    (bucket / "step_4" / "torchtune_config.yaml").write_text("optimizer: {_component_: torch.optim.AdamW, lr: 0.1}\n")

    def check(cfg: dict[str, Any], output: Path) -> None:
        checkpointer = FullModelHFCheckpointer(str(source), output_dir=str(output), upload=f"faulty://{bucket}")
        checkpointer.check_resume(cfg)

    settings = {"optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.1}}
    check(settings, tmp_path / "fresh")
    settings["optimizer"]["_component_"] = "torch.optim.SGD"
    text = refusal(check, settings, tmp_path / "fresh")
    assert "optimizer._component_ was torch.optim.AdamW and is torch.optim.SGD now" in text
    assert not (tmp_path / "fresh").exists()


def test_dry_run_says_that_the_run_in_the_bucket_is_finished_or_the_bucket_gone(source, model, tmp_path, bucket):
    checkpointer, _ = start(source, tmp_path / "run", bucket)
    save(checkpointer, 4, model, resumable=False)
    checkpointer.close()
    fresh = FullModelHFCheckpointer(str(source), output_dir=str(tmp_path / "fresh"), upload=f"faulty://{bucket}")
    assert "is finished (step_4), there is nothing to resume" in refusal(fresh.check_resume, {})
    FaultyFileSystem.fault = staticmethod(refuse("list", PermissionError("Forbidden")))
    assert "cannot be listed (PermissionError" in refusal(fresh.check_resume, {})


def test_service_that_loses_bytes_is_noticed_at_once(source, model, tmp_path, bucket):
    checkpointer, _ = start(source, tmp_path / "run", bucket)
    FaultyFileSystem.lost_bytes = {"model.safetensors": 7}
    save(checkpointer, 4, model, resumable=False)
    assert "loses data" in refusal(checkpointer.close)
    assert not (bucket / "step_4" / ".complete").exists()


def test_connection_that_ends_while_downloading_ends_the_run_and_not_in_an_older_checkpoint(
    source, model, tmp_path, bucket
):
    save_run(source, tmp_path / "run", bucket, model)

    def fault(operation: str, path: str) -> None:
        if operation == "read" and path.endswith("model.safetensors"):
            raise OSError("Connection reset by peer")

    FaultyFileSystem.fault = staticmethod(fault)
    text = refusal(start, source, tmp_path / "fresh", bucket, resume=True)
    assert "Connection reset by peer" in text
    assert names_in(tmp_path / "fresh") == set()


def test_old_checkpoints_are_removed_here_and_there_but_not_the_best(source, model, tmp_path, bucket):
    checkpointer, _ = start(source, tmp_path / "run", bucket, keep_last_n_checkpoints=1)
    records = [{"checkpoint": "step_4", "step": 4, "value": 1.0}]
    (tmp_path / "run" / "best.json").write_text(json.dumps({"keep_best": "val_loss", "best": records}))
    for step in (2, 4, 6, 8):
        save(checkpointer, step, model)
    checkpointer.close()
    assert names_in(bucket) == {"step_4", "step_8"}
    checkpointer, point = start(source, tmp_path / "fresh", bucket, resume=True, keep_last_n_checkpoints=1)
    assert point.path.name == "step_8"
    save(checkpointer, 10, model)
    checkpointer.close()
    assert names_in(bucket) == names_in(tmp_path / "fresh") == {"step_4", "step_10"}


def test_run_stops_uploading_where_another_has_begun(source, model, tmp_path, bucket):
    first, _ = start(source, tmp_path / "first", bucket)
    save(first, 2, model)
    assert list(first._uploader.finish()) is not None
    second, _ = start(source, tmp_path / "second", bucket, resume=True)
    save(first, 4, model, resumable=False)
    assert "another run uploads to" in refusal(first.close)
    second.close()
    assert names_in(bucket) == {"step_2"}


def test_unknown_file_system_and_missing_package_are_named(source, tmp_path, monkeypatch):
    def check(upload: str) -> str:
        checkpointer = FullModelHFCheckpointer(str(source), output_dir=str(tmp_path / "run"), upload=upload)
        return refusal(checkpointer.check_output_dir, resume=False)

    text = check("s4://bucket/run")
    assert "write it like s3://bucket/run" in text
    assert "cannot be opened (ConnectionRefusedError" in check("ftp://127.0.0.1:1/run")
    for protocol, package, extra in (("s3", "s3fs", "s3"), ("gs", "gcsfs", "gcs"), ("gcs", "gcsfs", "gcs")):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(_registry, protocol, raising=False)
        assert f"pip install 'torchtune[{extra}]'" in check(f"{protocol}://bucket/run")


@pytest.mark.parametrize("url", ["gs://bucket/run", "hf://owner/name/run", "memory://run"])
def test_every_file_system_of_fsspec_takes_and_gives_checkpoints(source, model, tmp_path, monkeypatch, url):
    """Of Google and of the hub by a file system that holds their files in memory, with their names."""
    protocol = url.partition("://")[0]

    class InMemory(MemoryFileSystem):
        store: ClassVar[dict[str, Any]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]

    InMemory.protocol = protocol
    monkeypatch.setitem(_registry, protocol, InMemory)
    first = FullModelHFCheckpointer(str(source), output_dir=str(tmp_path / "first"), upload=url)
    first.open_output_dir(None, resume=False)
    save(first, 4, model)
    first.close()
    fresh = FullModelHFCheckpointer(str(source), output_dir=str(tmp_path / "fresh"), upload=url)
    point = fresh.open_output_dir(None, resume=True)
    fresh.close()
    assert point.path == tmp_path / "fresh" / "step_4"
    assert files_of(tmp_path / "fresh" / "step_4") == files_of(tmp_path / "first" / "step_4")


def test_save_of_older_recipes_does_not_leave_the_upload_out(source, tmp_path, bucket):
    checkpointer, _ = start(source, tmp_path / "run", bucket)
    text = refusal(checkpointer.save_checkpoint, {"model": {}}, 0)
    assert "save_checkpoint does not upload" in text


def _save_until_killed(source: Path, output: Path, bucket: Path, model: nn.Module, is_uploading: Any) -> None:
    checkpointer, _ = start(source, output, bucket, resume=True)
    save(checkpointer, 2, model)
    while not (bucket / "step_2" / ".complete").exists():
        time.sleep(0.01)

    def hang(operation: str, path: str) -> None:
        if operation == "write" and path.endswith("model.safetensors"):
            Path(path).write_bytes(b"half")
            is_uploading.set()
            time.sleep(60)

    FaultyFileSystem.fault = staticmethod(hang)
    save(checkpointer, 4, model)
    checkpointer.close()


def test_kill_in_an_upload_loses_nothing(source, model, tmp_path, bucket):
    context = multiprocessing.get_context("fork")
    is_uploading = context.Event()
    arguments = (source, tmp_path / "run", bucket, model, is_uploading)
    process = context.Process(target=_save_until_killed, args=arguments)
    process.start()
    assert is_uploading.wait(60)
    process.kill()
    process.join()
    assert (bucket / "step_4" / "model.safetensors").read_bytes() == b"half"
    assert resume(source, tmp_path / "fresh", bucket).path.name == "step_2"
    assert resume(source, tmp_path / "run", bucket).path.name == "step_4"
    assert resume(source, tmp_path / "third", bucket).path.name == "step_4"


def _save_on_two_ranks(folder: Path) -> None:
    checkpointer, _ = start(folder / "source", folder / "run", folder / "bucket")
    save(checkpointer, 2, load(folder / "source"))
    checkpointer.close()
    assert (folder / "bucket" / "step_2" / ".complete").is_file()


def _resume_on_two_ranks(folder: Path) -> None:
    checkpointer, point = start(folder / "source", folder / "fresh", folder / "bucket", resume=True)
    assert point.path == folder / "fresh" / "step_2"
    assert point.progress["global_step"] == 2
    checkpointer.close()


def _different_buckets(folder: Path) -> None:
    rank = os.environ["RANK"]
    with pytest.raises(UserError, match=r"upload is .*bucket0 on rank 0 and .*bucket1 on rank 1"):
        start(folder / "source", folder / "other", folder / f"bucket{rank}")


def _different_folders(folder: Path) -> None:
    machine = folder / f"machine{os.environ['RANK']}"
    machine.mkdir()
    os.chdir(machine)
    with pytest.raises(UserError, match=r"ranks disagree about the newest checkpoint of .*rank 1 sees none"):
        start(folder / "source", Path("run"), folder / "bucket", resume=True)


def test_two_ranks_upload_once_resume_together_and_have_to_agree(tmp_path):
    write_folder(tmp_path / "source")
    run(2, [_save_on_two_ranks, _resume_on_two_ranks, _different_buckets, _different_folders], tmp_path)
