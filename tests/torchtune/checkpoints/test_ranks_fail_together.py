"""What goes wrong on one rank is said on all of them, and nobody waits."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from tests.torchtune.checkpoints import ranks
from tests.torchtune.checkpoints.small import build, leave_free, same_bits, stored, write_folder
from torchtune.checkpoints import FullModelHFCheckpointer
from torchtune.training import ParallelDims
from torchtune.utils import UserError, get_logger


def fails(run: Callable[[], Any], *words: str) -> None:
    """One sentence with these words, the same on every rank."""
    try:
        run()
    except UserError as error:
        text = str(error)
    else:
        raise AssertionError(f"nothing failed where {words} was expected")
    assert all(word in text for word in words), text
    assert text.endswith("."), text
    assert "\n" not in text, text
    texts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert len(set(texts)) == 1, texts


def loading(source: Path) -> Callable[[], None]:
    return lambda: FullModelHFCheckpointer(source).load_model(ranks.shard(build(source), "fsdp"))


def bad_sources(folder: Path) -> None:
    """A shard that is cut, one that is missing, a folder that one of the machines lacks, another model."""
    fails(loading(folder / "cut"), "model-00002", "is not a whole safetensors file")
    fails(loading(folder / "missing"), "lacks model-00002")
    source = folder / ("source" if dist.get_rank() == 0 else "nowhere")
    model = ranks.shard(build(folder / "source"), "fsdp")
    fails(lambda: FullModelHFCheckpointer(source).load_model(model), "Rank 1: ", "nowhere")
    model = ranks.shard(build(folder / "source"), "fsdp")
    fails(lambda: FullModelHFCheckpointer(folder / "other").load_model(model), "vocabulary of 322")


def damaged_checkpoints(folder: Path) -> None:
    """Complete by its marker, but files of it are gone or cut; and a run that had something else to save."""
    store, model, state = started(folder, folder / "run")
    saved = store.save("step_1", model, state=state)
    for name in ("state/rank_1.safetensors", "model.safetensors", "state/state.json", ".complete"):
        file_bytes = (saved / name).read_bytes()
        dist.barrier()
        if dist.get_rank() == 0:
            (saved / name).write_bytes(file_bytes[: len(file_bytes) // 2])
        dist.barrier()
        fails(lambda: store.resume(store.find_resume_point(), model, state), "step_1")
        if dist.get_rank() == 0:
            (saved / name).write_bytes(file_bytes)
        dist.barrier()
    store.resume(store.find_resume_point(), model, state)
    fails(lambda: store.resume(store.find_resume_point(), model, state | {"loader": {}}), "the other has not")
    fails(lambda: store.check_output_dir(resume=False), "already holds a run")
    rank_state = state | {"progress": {"step": object() if dist.get_rank() == 1 else 1}}
    fails(lambda: store.save("step_2", model, state=rank_state), "Rank 1: ", "cannot be saved")
    rank_state = state | {"more": {"x": torch.ones(2 + dist.get_rank())}}
    fails(lambda: store.save("step_2", model, state=rank_state), "differ between ranks")
    if dist.get_rank() == 1:
        model.norm.scale.data.to_local()[0] = float("inf")
    fails(lambda: store.save("step_2", model, state=state), "NaN or infinite, such as 'norm.scale'")
    assert sorted(path.name for path in (folder / "run").iterdir()) == ["step_1"]


def started(folder: Path, output: Path) -> tuple[FullModelHFCheckpointer, Any, dict[str, Any]]:
    model = ranks.shard(build(folder / "source"), "fsdp")
    store = FullModelHFCheckpointer(folder / "source", output_dir=output, keep_last_n_checkpoints=1)
    store.load_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return store, model, {"optimizer": optimizer, "progress": {"step": 1}}


def full_disk(folder: Path) -> None:
    """The save fails, or if it may, is only warned of; what was complete stays so, and the next one finds room."""
    disk = folder / "disk"
    store, model, state = started(folder, disk / "run")
    first = store.save("step_1", model, state=state)
    before = stored(first)
    dist.barrier()
    if dist.get_rank() == 0:
        leave_free(disk, 100_000)
    dist.barrier()
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    get_logger().addHandler(handler)
    fails(lambda: store.save("step_2", model, state=state), "No space left", "nothing that was saved before is lost")
    store.save("step_2", model, state=state, optional=True)
    store.save("step_2", model, state=state, optional=True, async_save=True)
    store.close()
    expected = 2 if dist.get_rank() == 0 else 0
    assert len(warnings) == expected, warnings
    assert all("step_2 was not saved, training goes on: No space left" in text for text in warnings), warnings
    store.save("step_2", model, state=state, async_save=True)
    fails(lambda: store.save("step_3", model, state=state), "No space left")
    store.save("step_3", model, state=state, async_save=True)
    fails(store.close, "No space left")
    store.close()
    dist.barrier()
    assert sorted(path.name for path in (disk / "run").iterdir()) == ["step_1"]
    assert same_bits(stored(first), before)
    dist.barrier()
    if dist.get_rank() == 0:
        (disk / "filler").unlink()
    dist.barrier()
    store.save("step_2", model, state=state, async_save=True)
    store.close()
    assert store.find_resume_point().path.name == "step_2"
    dist.barrier()
    assert sorted(path.name for path in (disk / "run").iterdir()) == ["step_2"]


def a_mistake_of_ours(folder: Path) -> None:
    """What is no mistake of the user keeps its traceback where it happened; the others do not wait for that rank."""
    store, model, state = started(folder, folder / "other_run")

    class Broken(dict):
        def items(self) -> Any:
            raise RuntimeError("broken")

    rank_state = state | {"values": Broken() if dist.get_rank() == 1 else {}}
    expected = "broken" if dist.get_rank() == 1 else r"Rank 1 failed \(RuntimeError: broken\)\."
    with pytest.raises(RuntimeError, match=f"^{expected}$"):
        store.save("step_1", model, state=rank_state)


def other_settings(folder: Path) -> None:
    """The command lines of two machines differ; folders and what is logged may."""
    is_first = dist.get_rank() == 0
    store = FullModelHFCheckpointer(folder / "source", output_dir=folder / "settings_run")
    settings = {
        "model": {"_component_": "mine", "lora_rank": 8, "hidden": [2, 3]},
        "tokenizer": {"path": "/first/tokenizer" if is_first else "/second/tokenizer"},
        "resume_from_checkpoint": False,
        "log_level": "INFO" if is_first else "DEBUG",
    }
    assert store.open_output_dir(OmegaConf.create(settings), resume=False) is None
    store.close()
    rank_settings = {**settings, "model": {**settings["model"], "lora_rank": 8 if is_first else 16}}
    words = ("model.lora_rank is 8 on rank 0 and 16 on rank 1", "the same command line")
    fails(lambda: store.open_output_dir(OmegaConf.create(rank_settings), resume=False), *words)
    rank_settings = {**settings, "resume_from_checkpoint": is_first}
    words = ("resume_from_checkpoint is True on rank 0 and False on rank 1",)
    fails(lambda: store.open_output_dir(OmegaConf.create(rank_settings), resume=is_first), *words)
    rank_settings = settings if is_first else {**settings, "max_steps": 3}
    words = ("max_steps is not set on rank 0 and 3 on rank 1",)
    fails(lambda: store.open_output_dir(OmegaConf.create(rank_settings), resume=False), *words)


def other_sizes(folder: Path) -> None:
    """Each machine's sizes fit the processes, but they are not the same."""
    os.environ.update(MASTER_ADDR="nobody", MASTER_PORT="0")  # torchrun's; the processes have met already
    sizes = {"dp_shard": -1} if dist.get_rank() == 0 else {"dp_shard": 1, "tp": 2}
    words = ("data_parallel_shard_dim is 1 on one rank and 2 on another", "the same command line")
    fails(lambda: ParallelDims.start(ranks.CPU, **sizes), *words)


def test_failure_of_one_rank_ends_the_call_on_all(tmp_path, disk):
    write_folder(tmp_path / "source", num_hidden_layers=2)
    write_folder(tmp_path / "other", num_hidden_layers=2, vocab_size=322)
    for name in ("cut", "missing"):
        write_folder(tmp_path / name, num_hidden_layers=2, max_shard_size="40KB")
        (second,) = (tmp_path / name).glob("model-00002-*")
        os.truncate(second, second.stat().st_size // 2) if name == "cut" else second.unlink()
    assert disk == tmp_path / "disk"
    ranks.run(
        2, [bad_sources, damaged_checkpoints, full_disk, a_mistake_of_ours, other_settings, other_sizes], tmp_path
    )
