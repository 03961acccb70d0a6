"""What goes wrong around a run on two processes: the right thing is done, and one sentence says what it was."""

import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.runs import after_each_step, class_of, load_recipe, read_log, write_config
from tests.torchtune.training.checkpointing import ranks
from torchtune.config import load_and_check
from torchtune.utils import UserError, get_logger

NAME = "full_finetune_distributed"
DISK = 6 * 2**20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(path)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"mounting a small file system is not permitted here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def train(config: Path, *overrides: str, inject: str = "") -> None:
    """Run the recipe in this process; ``inject`` is done after each step."""
    os.environ |= {"MASTER_ADDR": "given", "MASTER_PORT": "0"}  # the process group is there
    folder = config.parent / f"rank_{os.environ['RANK']}"
    folder.mkdir(exist_ok=True)
    module = load_recipe(NAME, folder, after_each_step(inject) if inject else None)
    cfg = load_and_check(config, overrides, module.recipe_main)
    recipe = class_of(module)(cfg)
    recipe.setup(cfg)
    try:
        recipe.train()
    finally:
        recipe.cleanup()


def refused(run: Callable[[], None], *words: str) -> None:
    """It ends with one sentence that holds these words."""
    with pytest.raises(UserError) as caught:
        run()
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert text.endswith("."), text
    assert "\n" not in text, text


def on_two(case: Callable[..., None], *arguments: Any) -> None:
    """Run a case on two processes; the last argument is the folder of the run."""
    bound = partial(case, *arguments[:-1])
    bound.__name__ = case.__name__
    ranks.run(2, [bound], arguments[-1])


def full_disk(config: Path, disk: Path, behind: bool, folder: Path) -> None:
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    get_logger().addHandler(handler)
    fill = f"from tests.recipes.faulty import fill; fill(self, {str(disk)!r}, first=3, last=7)"
    train(config, f"enable_async_checkpointing={behind}", inject=fill)
    said = [text for text in warnings if "was not saved" in text]
    assert len(said) == (2 if os.environ["RANK"] == "0" else 0), warnings
    assert all("training goes on: No space left" in text for text in said), said


@pytest.mark.parametrize("behind", [False, True], ids=["at once", "behind"])
def test_a_full_disk_costs_checkpoints_and_no_run(disk: Path, tmp_path: Path, behind: bool) -> None:
    output_dir = disk / "run"
    logger = {"metric_logger__log_dir": str(tmp_path / "logs"), "log_level": "WARNING"}
    config = write_config(NAME, tmp_path, output_dir, save_every_n_steps=3, epochs=2, batch_size=2, **logger)
    on_two(full_disk, config, disk, behind, tmp_path)
    assert sorted(path.name for path in output_dir.glob("step_*")) == ["step_12", "step_9"]
    assert [record["step"] for record in read_log(tmp_path) if "loss" in record] == list(range(1, 13))


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run with a checkpoint after steps 2 and 4: its config, and where it wrote."""
    folder = tmp_path_factory.mktemp("interrupted")
    config = write_config(NAME, folder, folder / "output", batch_size=2, save_every_n_steps=2)
    ranks.run(2, [lambda _: train(config)], folder)
    shutil.rmtree(folder / "output" / "step_6")
    return config, folder / "output"


def resumed(config: Path, output: Path, path: Path, folder: Path) -> None:
    errors: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: errors.append(record.getMessage())
    get_logger().addHandler(handler)
    train(config, "resume_from_checkpoint=True", f"output_dir={output}")
    if os.environ["RANK"] == "0":
        (said,) = [text for text in errors if "step_4" in text]
        assert str(path) in said, said
        assert "the run goes on from the checkpoint before, step_2" in said, said


@pytest.mark.parametrize("file", ["model.safetensors", "state/rank_1.safetensors", "state/state.json"])
@pytest.mark.parametrize("left", [None, 0.5], ids=["missing", "cut"])
def test_a_marker_that_promises_too_much(
    interrupted: tuple[Path, Path], tmp_path: Path, file: str, left: float | None
) -> None:
    """Complete by its marker, but a file of it is gone, or not whole: the one before is resumed, and the file named."""
    config, output = interrupted
    copy = tmp_path / "output"
    shutil.copytree(output, copy)
    path = copy / "step_4" / file
    whole = path.read_bytes()
    path.unlink()
    if left is not None:
        path.write_bytes(whole[: int(left * len(whole))])
    on_two(resumed, config, copy, path, tmp_path)
    assert [record["step"] for record in read_log(copy) if "loss" in record][-4:] == [3, 4, 5, 6]


def test_what_is_half_written_is_not_picked_up(interrupted: tuple[Path, Path], tmp_path: Path) -> None:
    config, output = interrupted
    copy = tmp_path / "output"
    shutil.copytree(output, copy)
    (copy / "step_4" / ".complete").unlink()
    shutil.copytree(copy / "step_4", copy / ".step_6.0123abcd.tmp")
    ranks.run(
        2,
        [lambda _: train(config, "resume_from_checkpoint=True", f"output_dir={copy}", "save_every_n_steps=2")],
        tmp_path,
    )
    steps = [record["step"] for record in read_log(copy) if "loss" in record]
    assert steps[-4:] == [3, 4, 5, 6]
    assert not list(copy.glob(".step*"))
    assert all((copy / f"step_{step}" / ".complete").exists() for step in (2, 4, 6))


def cut_weights(config: Path, folder: Path) -> None:
    refused(lambda: train(config), "model.safetensors", "is not a whole safetensors file")


def wrong_size(config: Path, folder: Path) -> None:
    refused(lambda: train(config, "data_parallel_shard_dim=4"), "= 4, but there are 2 processes")


def lacking_data(config: Path, folder: Path) -> None:
    """The data lie on the first machine alone: rank 1 says so and leaves; rank 0 does not wait for it."""
    first = os.environ["RANK"] == "0"
    os.chdir(config.parent if first else folder)
    if first:
        with pytest.raises(RuntimeError, match=r"[Cc]onnection|Rank 1"):
            train(config, "dataset.data_files=data.jsonl")
    else:
        refused(lambda: train(config, "dataset.data_files=data.jsonl"), "data.jsonl")
    os._exit(0)


def on_copies_of_data(config: Path, folder: Path, rows: list[str], *overrides: str) -> None:
    """Each machine has its own file; that of rank 1 has fewer or other rows."""
    own = folder / f"machine_{os.environ['RANK']}"
    own.mkdir()
    lines = (config.parent / "data.jsonl").read_text().splitlines(keepends=True)
    (own / "data.jsonl").write_text("".join(lines if os.environ["RANK"] == "0" else [*rows, *lines[12:]]))
    os.chdir(own)
    refused(
        lambda: train(config, "dataset.data_files=data.jsonl", *overrides),
        "Rank 1 reads other training data than rank 0",
        "24 examples an epoch there, 12 here" if not (rows or overrides) else "other examples",
    )
    os._exit(0)


def fewer_rows(config: Path, folder: Path) -> None:
    on_copies_of_data(config, folder, [])


def other_rows(config: Path, folder: Path) -> None:
    lines = (config.parent / "data.jsonl").read_text().splitlines(keepends=True)
    on_copies_of_data(config, folder, lines[:12][::-1])


def shorter_stream(config: Path, folder: Path) -> None:
    on_copies_of_data(config, folder, [], "dataset.streaming=True", "max_steps_per_epoch=4")


@pytest.mark.parametrize(
    "case",
    [cut_weights, wrong_size, lacking_data, fewer_rows, other_rows, shorter_stream],
    ids=lambda case: case.__name__,
)
def test_nothing_begins_that_cannot(case: Callable[..., None], tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    config = write_config(NAME, source, tmp_path / "output", batch_size=2)
    if case is cut_weights:
        path = source / "checkpoint" / "model.safetensors"
        os.truncate(path, path.stat().st_size // 2)
    on_two(case, config, tmp_path)
    assert not list((tmp_path / "output").glob("*_?"))
