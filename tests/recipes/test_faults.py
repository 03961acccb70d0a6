"""What goes wrong around a run on two processes: the right thing is done, and one sentence says what it was."""

import logging
import os
import shutil
from functools import partial

import pytest

from tests.recipes.runs import read_log, set_up, write_config
from tests.torchtune.checkpoints import ranks
from torchtune.utils import UserError, get_logger

NAME = "full_finetune_distributed"


def train(config, *overrides):
    """Run the recipe in this process."""
    os.environ |= {"MASTER_ADDR": "given", "MASTER_PORT": "0"}  # the process group is there
    folder = config.parent / f"rank_{os.environ['RANK']}"
    folder.mkdir(exist_ok=True)
    recipe, _ = set_up(NAME, folder, config, *overrides)
    try:
        recipe.train()
    finally:
        recipe.cleanup()


def refused(run, *words):
    """It ends with one sentence that holds these words."""
    with pytest.raises(UserError) as caught:
        run()
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert text.endswith("."), text
    assert "\n" not in text, text


def on_two(case, *arguments):
    """Run a case on two processes; the last argument is the folder of the run."""
    bound = partial(case, *arguments[:-1])
    bound.__name__ = case.__name__
    ranks.run(2, [bound], arguments[-1])


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A run with a checkpoint after steps 2 and 4: its config, and where it wrote."""
    folder = tmp_path_factory.mktemp("interrupted")
    config = write_config(NAME, folder, folder / "output", batch_size=2, save_every_n_steps=2)
    ranks.run(2, [lambda _: train(config)], folder)
    shutil.rmtree(folder / "output" / "step_6")
    return config, folder / "output"


def resumed(config, output, path, folder):
    errors = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: errors.append(record.getMessage())
    get_logger().addHandler(handler)
    train(config, "resume_from_checkpoint=True", f"output_dir={output}")
    if os.environ["RANK"] == "0":
        (message,) = [text for text in errors if "step_4" in text]
        assert str(path) in message, message
        assert "the run goes on from the checkpoint before, step_2" in message, message


@pytest.mark.parametrize(("file", "left"), [("model.safetensors", None), ("state/rank_1.safetensors", 0.5)])
def test_a_checkpoint_marked_complete_with_a_missing_or_cut_file_is_passed_over(interrupted, tmp_path, file, left):
    """Complete by its marker, but a file of it is gone, or not whole: the one before is resumed, and the file named."""
    config, output = interrupted
    copy = tmp_path / "output"
    shutil.copytree(output, copy)
    path = copy / "step_4" / file
    content = path.read_bytes()
    path.unlink()
    if left is not None:
        path.write_bytes(content[: int(left * len(content))])
    on_two(resumed, config, copy, path, tmp_path)
    assert [record["step"] for record in read_log(copy) if "loss" in record][-4:] == [3, 4, 5, 6]


def test_incomplete_checkpoint_is_not_resumed(interrupted, tmp_path):
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


def cut_weights(config, folder):
    refused(lambda: train(config), "model.safetensors", "is not a whole safetensors file")


def lacking_data(config, folder):
    """The data lie on the first machine alone: rank 1 says so and leaves; rank 0 does not wait for it."""
    first = os.environ["RANK"] == "0"
    os.chdir(config.parent if first else folder)
    if first:
        with pytest.raises(RuntimeError, match=r"[Cc]onnection|Rank 1"):
            train(config, "dataset.data_files=data.jsonl")
    else:
        refused(lambda: train(config, "dataset.data_files=data.jsonl"), "data.jsonl")
    os._exit(0)


def on_copies_of_data(config, folder, rows, *overrides):
    """Each machine has its own file; that of rank 1 has fewer or other rows."""
    machine_folder = folder / f"machine_{os.environ['RANK']}"
    machine_folder.mkdir()
    lines = (config.parent / "data.jsonl").read_text().splitlines(keepends=True)
    (machine_folder / "data.jsonl").write_text("".join(lines if os.environ["RANK"] == "0" else [*rows, *lines[12:]]))
    os.chdir(machine_folder)
    refused(
        lambda: train(config, "dataset.data_files=data.jsonl", *overrides),
        "Rank 1 reads other training data than rank 0",
        "24 examples an epoch there, 12 here" if not (rows or overrides) else "other examples",
    )
    os._exit(0)


def fewer_rows(config, folder):
    on_copies_of_data(config, folder, [])


def other_rows(config, folder):
    lines = (config.parent / "data.jsonl").read_text().splitlines(keepends=True)
    on_copies_of_data(config, folder, lines[:12][::-1])


def shorter_stream(config, folder):
    on_copies_of_data(config, folder, [], "dataset.streaming=True", "max_steps_per_epoch=4")


@pytest.mark.parametrize(
    "case",
    [cut_weights, lacking_data, fewer_rows, other_rows, shorter_stream],
    ids=lambda case: case.__name__,
)
def test_a_run_that_cannot_start_saves_nothing(case, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    config = write_config(NAME, source, tmp_path / "output", batch_size=2)
    if case is cut_weights:
        path = source / "checkpoint" / "model.safetensors"
        os.truncate(path, path.stat().st_size // 2)
    on_two(case, config, tmp_path)
    assert not list((tmp_path / "output").glob("*_?"))
