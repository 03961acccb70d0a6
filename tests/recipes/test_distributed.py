"""The distributed recipes on two processes, forked, which saves the imports; test_kill.py starts them by torchrun."""

import os
import shutil
import signal

import pytest
import torch

from tests.recipes.killing import said as said_by
from tests.recipes.killing import wait_for
from tests.recipes.runs import RECIPES, read_log, start, write_config
from tests.tiny import read_lines, write_lines
from tests.tiny_images import (
    gemma4_unified_config,
    image_text_model,
    qwen3_vl_config,
    write_image_checkpoint,
    write_pictures,
)
from tests.tiny_vision import write_vision_checkpoint

SETTINGS = {"clip_grad_norm": 1.0, "log_level": "INFO"}


def close(found, wanted, steps):
    assert found.keys() == steps
    assert {step: found[step] for step in steps} == pytest.approx({s: wanted[s] for s in steps}, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_two_processes_train_as_one_and_resume_in_another_arrangement(kind, forker, tmp_path):
    alone = start(f"{kind}_finetune_single_device", tmp_path, clip_grad_norm=1.0, batch_size=4).losses
    settings = {**SETTINGS, "batch_size": 2, "save_every_n_steps": 2}
    settings |= {"dataset_val": "${dataset}", "run_val_every_n_steps": 2}  # a save that follows a forward pass alone
    run = forker.run_on_two(f"{kind}_finetune_distributed", tmp_path, **settings)
    close(run.losses, alone, set(range(1, 7)))
    assert run.said.count("Metrics are written to") == 1, "one process speaks"
    assert run.said.count("2 processes =") == 1

    for name in ("step_6", "step_4"):
        shutil.rmtree(run.output_dir / name)
    settings |= {"resume_from_checkpoint": True, "tensor_parallel_dim": 2, "batch_size": 4}
    forker.run_on_two(f"{kind}_finetune_distributed", tmp_path, **settings, output_dir=run.output_dir)
    close({step: loss for step, loss in run.losses.items() if step > 2}, alone, {3, 4, 5, 6})


def test_two_processes_train_in_float16_as_one(forker, tmp_path):
    """Both see the overflows of all gradients, and have the same scale of the loss."""
    loss = {"_component_": "tests.recipes.faulty.FaultyLoss", "rank": 1, "inf": [3]}
    settings = {**SETTINGS, "dtype": "fp16"}
    run = forker.run_on_two("full_finetune_distributed", tmp_path, **settings, batch_size=2, loss=loss)
    alone = start("full_finetune_single_device", tmp_path, **settings, batch_size=4, loss={**loss, "rank": 0})
    assert run.losses == pytest.approx(alone.losses, rel=2e-3)
    for compared in (run, alone):
        (record,) = compared.lines("skipped_steps.jsonl")
        assert (record["step"], "overflows fp16; the loss scale is 32768" in record["reason"]) == (3, True)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")
def test_shards_in_host_memory_train_as_those_on_the_device(forker, tmp_path):
    """Copies of shards in pairs: the norm of gradients in host memory is reduced by groups of both dimensions."""
    alone = start("full_finetune_single_device", tmp_path, clip_grad_norm=1.0, batch_size=4, device="cpu").losses
    settings = {**SETTINGS, "batch_size": 1, "data_parallel_replicate_dim": 2, "fsdp_cpu_offload": True}
    close(forker.run_on(4, "full_finetune_distributed", tmp_path, **settings, device="cuda").losses, alone, set(alone))


def test_optimizer_in_backward_steps_on_shards_as_on_the_whole(forker, tmp_path):
    """Each parameter steps when its gradient is reduced; a step that is not finite on one rank is left out on both."""
    loss = {"_component_": "tests.recipes.faulty.FaultyLoss", "rank": 1, "nan": [3]}
    run = forker.run_on_two("full_finetune_distributed", tmp_path, optimizer_in_bwd=True, loss=loss)
    alone = start(
        "full_finetune_single_device", tmp_path, loss={**loss, "rank": 0}, batch_size=4, optimizer_in_bwd=True
    ).losses
    close({step: loss for step, loss in run.losses.items() if step != 3}, alone, {1, 2, 4, 5, 6})


def test_nan_or_infinite_gradient_of_one_rank_is_skipped_by_all_ranks(forker, tmp_path):
    """A NaN, then an infinite gradient, on rank 1: both processes leave the step out, and name its rows."""
    loss = {"_component_": "tests.recipes.faulty.FaultyLoss", "rank": 1, "nan": [2], "inf": [4]}
    settings = {**SETTINGS, "batch_size": 2, "save_every_n_minutes": 1e-6, "enable_async_checkpointing": True}
    settings["checkpointer__keep_last_n_checkpoints"] = 20
    run = forker.run_on_two("full_finetune_distributed", tmp_path, **settings, loss=loss)
    alone = start("full_finetune_single_device", tmp_path, loss={**loss, "rank": 0}, batch_size=4, clip_grad_norm=1.0)
    close({step: loss for step, loss in run.losses.items() if step != 2}, alone.losses, {1, 3, 4, 5, 6})
    skipped, expected = (compared.lines("skipped_steps.jsonl") for compared in (run, alone))
    assert [record["step"] for record in skipped] == [record["step"] for record in expected] == [2, 4]
    assert skipped[0]["rows"] == expected[0]["rows"][2:], "rank 1 has the second half of the NaN's step"
    assert skipped[1]["rows"] == expected[1]["rows"], "an infinite gradient could be anyone's"
    assert run.said.count("Step 2 was skipped because its loss is nan") == 1
    assert run.said.count("held training up") == 5
    assert len(list(run.output_dir.glob("step_*/.complete"))) == 5


def test_a_signal_to_one_process_stops_all_after_a_save(forker, tmp_path):
    output_dir = tmp_path / "output"
    config = write_config("full_finetune_distributed", tmp_path, output_dir, **SETTINGS, batch_size=2, epochs=400)
    _, pid = forker.start("full_finetune_distributed", config, ranks=2)
    log = output_dir / "logs" / "log.jsonl"
    assert wait_for(lambda: log.exists() and log.read_text().count("\n") > 2, [pid]), said_by(config)
    os.kill(pid, signal.SIGTERM)
    assert forker.wait() == [75, 75], said_by(config)
    assert "Traceback" not in config.with_suffix(".out").read_text()
    (saved,) = output_dir.glob("step_*")
    assert (saved / ".complete").exists()
    assert saved.name == f"step_{read_log(output_dir)[-1]['step']}"


def test_two_processes_train_on_images_as_one(forker, tmp_path):
    """In the first step one rank has text alone, and the other an image: both must run the encoder."""
    write_vision_checkpoint(tmp_path / "checkpoint")
    settings = {
        "dataset": {"_component_": "tests.tiny_vision.Rows"},
        "collate_fn": "torchtune.data.padded_collate_tiled_images_and_mask",
        "lr_scheduler": None,
        "shuffle": False,
        "clip_grad_norm": 1.0,
    }
    alone = start("full_finetune_single_device", tmp_path, **settings, batch_size=2).losses
    settings |= {"batch_size": 1, "enable_activation_checkpointing": True}
    close(forker.run_on_two("full_finetune_distributed", tmp_path, **settings).losses, alone, {1, 2, 3})


@pytest.mark.parametrize(
    ("config", "way"),
    [
        (qwen3_vl_config, "rows"),
        (qwen3_vl_config, "packed"),
        (qwen3_vl_config, "cached"),
        (gemma4_unified_config, "rows"),
    ],
)
def test_two_processes_train_on_image_tokens_as_one(config, way, forker, tmp_path):
    """In a step one rank has text alone, and the other an image: both must run the sharded tower.

    So they must if the features of an image are cached on one rank, and not on the other.
    """
    write_image_checkpoint(image_text_model(config()), tmp_path / "checkpoint")
    count = 6 if way == "packed" else 3
    settings = write_pictures(tmp_path, count=count)
    rows = read_lines(tmp_path / "pictures.jsonl")
    turns = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "text " * 6}]
    text = {"image": None, "conversations": turns}
    lines = []
    for i, row in enumerate(rows):
        if way == "cached":
            lines += [row, text, row, rows[i - 1]]
        else:
            lines += [row, text]
    write_lines(tmp_path / "pictures.jsonl", lines)
    settings["dataset"]["packed"] = way == "packed"
    settings["tokenizer"]["max_seq_len"] = 60
    model = {"_component_": "torchtune.models.image_text_model", "checkpoint_dir": str(tmp_path / "checkpoint")}
    model["vision_tower"] = "frozen" if way == "cached" else "full"
    settings |= {"model": model, "lr_scheduler": None, "shuffle": False}
    settings |= {"collate_fn": "torchtune.data.collate_documents", "clip_grad_norm": 1.0, "epochs": 1}
    alone = start("full_finetune_single_device", tmp_path, **settings, batch_size=2).losses
    settings["image_cache"] = str(tmp_path / "features") if way == "cached" else None
    settings |= {"batch_size": 1, "enable_activation_checkpointing": True}
    for _ in range(2 if way == "cached" else 1):
        close(forker.run_on_two("full_finetune_distributed", tmp_path, **settings).losses, alone, set(alone))
    assert len(list(tmp_path.glob("features/*/*"))) == (count if way == "cached" else 0)
    assert len(alone) >= 2


def test_ranks_may_log_other_names_in_another_order(forker, tmp_path):
    """By name they are added up, not by place; what one rank logs in some steps alone is a mean over these."""
    name = "full_finetune_distributed"
    source = (RECIPES / f"{name}.py").read_text()
    line = "        batch = batch.to(self.device, non_blocking=True)\n"
    assert source.count(line) == 1
    rank = "self.dims.data_rank"
    both = f"[('one', (1.0, 1)), ('two', (2.0, 1))][:: 1 - 2 * {rank}]"
    log = f"self.step_metrics.log_mean(dict({both}))"
    logged = f"{rank} == 1 and self.global_step % 2 and self.step_metrics.log_mean({{'seldom': (6.0, 2)}})"
    recipe = tmp_path / "mine.py"
    recipe.write_text(source.replace(line, f"{line}        {log}\n        {logged}\n"))
    records = forker.run_on_two(name, tmp_path, recipe=recipe).records
    assert [(record["one"], record["two"]) for record in records] == [(1.0, 2.0)] * len(records)
    assert [record.get("seldom") for record in records[:4]] == [None, 3.0, None, 3.0]
