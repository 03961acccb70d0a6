"""Damage that happens after a save: it is found before it is trained on, and a run that nobody watches goes on."""

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.torchtune.checkpoints.small import build, leave_free, load, randomize_adapter, same_bits, stored
from tests.work import largest_file
from torchtune._cli import tune
from torchtune.checkpoints import CheckpointError, FullModelHFCheckpointer, checkpoints_in, verify_checkpoint
from torchtune.modules.peft import LoRA
from torchtune.utils import UserError


@pytest.fixture
def run(source: Path, model: nn.Module, tmp_path: Path) -> FullModelHFCheckpointer:
    """A run with the checkpoints step_1 and step_2."""
    store = FullModelHFCheckpointer(source, output_dir=tmp_path / "run")
    for step in (1, 2):
        state = {"momentum": {"x": torch.full((1000,), float(step))}, "progress": {"seed": 1, "global_step": step}}
        store.save(f"step_{step}", model, state=state)
    store.close()
    return store


def flip(path: Path) -> None:
    """Turn one bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 1
    path.write_bytes(content)


def no_object(path: Path) -> None:
    path.write_text("[]")


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "bit in weights": ("model.safetensors", flip, "was changed since it was saved"),
    "bit in state": ("state/rank_0.safetensors", flip, "was changed since it was saved"),
    "bit in index": ("state/state.json", flip, "was changed since it was saved"),
    "cut": ("model.safetensors", lambda path: os.truncate(path, 1000), "has 1,000 bytes instead of"),
    "gone": ("state/rank_0.safetensors", Path.unlink, "is missing"),
    "marker": (".complete", no_object, "is damaged"),
    "marker of wrong types": (".complete", lambda p: p.write_text('{"saves": [1], "resumable": 3}'), "is damaged"),
    "marker that leaves": (".complete", lambda p: p.write_text(p.read_text().replace("model.", "../m.")), "is damaged"),
    "marker of infinite saves": (".complete", lambda p: p.write_text('{"saves": 1e999, "resumable": true}'), "damaged"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_resume_falls_back_to_the_checkpoint_before_a_damaged_one(run, source, caplog, kind):
    name, harm, words = DAMAGES[kind]
    harm(run.output_dir / "step_2" / name)
    caplog.clear()
    point = run.find_resume_point()
    assert point.path.name == "step_1"
    (message,) = (record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR)
    assert words in message
    assert f"step_2/{name}" in message
    again = build(source)
    state = {"momentum": {}, "progress": {}}
    run.load_model(again)
    run.resume(point, again, state)
    assert bool((state["momentum"]["x"] == 1).all())
    # … and the run writes it anew
    run.save("step_2", again, state=state)
    run.close()
    assert run.find_resume_point().path.name == "step_2"


def test_resume_without_an_intact_checkpoint_is_refused(run):
    for step in (1, 2):
        flip(run.output_dir / f"step_{step}" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"step_1.*no checkpoint before it.*begins anew\.$"):
        run.find_resume_point()


def test_configs_of_a_checkpoint_may_be_edited(run):
    """A resume does not need it; `verify` tells."""
    path = run.output_dir / "step_2" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text())))
    assert run.find_resume_point().path.name == "step_2"
    with pytest.raises(CheckpointError, match=r"config\.json was changed since it was saved"):
        verify_checkpoint(run.output_dir / "step_2")


def test_verify_names_damaged_files(run, monkeypatch, capsys):
    """All of a run: one is whole, one has two damaged files."""
    folder = run.output_dir
    flip(folder / "step_2" / "model.safetensors")
    (folder / "step_2" / "tokenizer.json").unlink()
    monkeypatch.setattr(sys, "argv", ["tune", "checkpoint", "verify", str(folder)])
    with pytest.raises(SystemExit) as stop:
        tune.main()
    output = capsys.readouterr()
    assert stop.value.code == 2
    files = [path for path in (folder / "step_1").rglob("*") if path.is_file() and path.name != ".complete"]
    size = sum(path.stat().st_size for path in files)
    assert output.out == f"{folder / 'step_1'} is whole: {len(files)} files, {size:,} bytes.\n"
    damaged, last = output.err.splitlines()
    assert damaged.startswith(
        f"error: {folder / 'step_2'} is damaged: {folder / 'step_2'}/model.safetensors was changed"
    )
    assert f"{folder / 'step_2'}/tokenizer.json is missing" in damaged
    assert last == f"error: 1 of 2 checkpoints of {folder} are damaged: use another one."
    with pytest.raises(CheckpointError, match=r"is not a folder: give a checkpoint \(epoch_N or step_N\)"):
        checkpoints_in(folder / "nowhere")


def test_limit_of_file_sizes_is_explained(source, model, tmp_path):
    """`ulimit -f`: the system refuses the write with EFBIG."""
    store = FullModelHFCheckpointer(source, output_dir=tmp_path)
    with largest_file(50_000), pytest.raises(UserError, match=r"larger than a file may be.*ulimit -f.*\.$"):
        store.save("step_1", model)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("below", [".", "run"])
def test_output_dir_that_is_a_dangling_link_is_refused(source, tmp_path, below):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    store = FullModelHFCheckpointer(source, output_dir=tmp_path / "link" / below)
    with pytest.raises(CheckpointError, match=r"link is a link to .*gone, which is not there: .*\.$"):
        store.check_output_dir(resume=False)


def test_folder_in_use_by_another_process_is_refused(run, source):
    """While somebody saves, or holds the folder for a run, what looks like leftovers is left alone."""
    half = run.output_dir / ".step_3.0123abcd.tmp"
    half.mkdir()
    code = (
        "import sys; from pathlib import Path; from torchtune.utils import FolderLock\n"
        "FolderLock(Path(sys.argv[1])).acquire(); print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(run.output_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        acts = (run.find_resume_point, run.lock_output_dir, lambda: run.save("step_3", load(source)))
        for act in (*acts, lambda: run.check_output_dir(resume=True)):
            with pytest.raises(UserError, match=rf"in use by another run \(process {process.pid} on .*\.$"):
                act()
        assert half.exists()
    assert run.find_resume_point().path.name == "step_2"
    assert not half.exists()


def test_removed_output_folder_is_made_again(run, model):
    run.lock_output_dir()
    shutil.rmtree(run.output_dir)
    run.save("step_3", model, state={"progress": {}})
    run.close()
    assert [path.name for path in run.output_dir.iterdir()] == ["step_3"]


def save(store: FullModelHFCheckpointer, name: str, model: nn.Module, **options) -> Path:
    state = {"momentum": {"x": torch.ones(10_000)}, "progress": {"step": 1}}
    return store.save(name, model, state=state, **options)


@pytest.mark.parametrize("adapter", [False, True])
def test_full_disk_keeps_the_previous_checkpoint(disk, source, adapter):
    conversions = [LoRA(rank=2, alpha=4)] if adapter else []
    contents = ("adapter", "merged") if adapter else "model"
    model = load(source, *conversions)
    if adapter:
        randomize_adapter(model)
    store = FullModelHFCheckpointer(source, output_dir=disk / "run", keep_last_n_checkpoints=1)
    first = save(store, "step_1", model, contents=contents)
    before = stored(first)
    needed = sum(path.stat().st_size + 4096 for path in first.rglob("*"))
    for part in range(10):
        filler = leave_free(disk, needed * part // 10)
        with pytest.raises(UserError, match=r"^No space left.*free some space.*$"):
            save(store, "step_2", model, contents=contents)
        assert sorted(path.name for path in (disk / "run").iterdir()) == ["step_1"]
        filler.unlink()
    assert same_bits(stored(first), before)
    # … and with room again the run goes on from there
    point = store.find_resume_point()
    assert point.path == first
    again = load(source, *conversions)
    store.resume(point, again, {"momentum": {}, "progress": {}})
    assert same_bits(again.state_dict(), model.state_dict())
    save(store, "step_2", again, contents=contents)
    assert store.find_resume_point().path.name == "step_2"
