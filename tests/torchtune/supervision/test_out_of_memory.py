"""What a run says when memory runs out: never a setting that is set already, or that the recipe does not have."""

import pickle
import re
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from torchtune import supervision, training
from torchtune._recipe_registry import find_config
from torchtune.config import load_and_check
from torchtune.supervision._out_of_memory import _as_overrides, _suggest_changes
from torchtune.utils import Activity

CONFIGS = {
    "smol/135M_full_single_device": "full_finetune_single_device",
    "smol/135M_lora_single_device": "lora_finetune_single_device",
    "llama3_1/8B_full": "full_finetune_distributed",
    "llama3_1/8B_lora": "lora_finetune_distributed",
}


CARELESS = (
    "device=cpu",
    "batch_size=4",
    "gradient_accumulation_steps=2",
    "tokenizer.max_seq_len=2048",
    "clip_grad_norm=1.0",
)


def settings(config, *overrides):
    return load_and_check(find_config(config), overrides, import_module(f"recipes.{CONFIGS[config]}").recipe_main)


def activity(*shape):
    current = Activity(step=6)
    current.shape = shape or None
    return current


def explained(error, cfg, dims=None, **given):
    with (
        pytest.raises(supervision.OutOfMemoryError) as caught,
        supervision.explain_out_of_memory(cfg, activity(2, 4096), dims or training.ParallelDims(), **given),
    ):
        error()
    assert isinstance(caught.value.__cause__, RuntimeError | MemoryError)
    return str(caught.value)


def raise_torch_error():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def allocate_a_tensor():
    torch.empty(2**50)


def allocate_a_list():
    bytearray(2**60)


@pytest.mark.parametrize("error", [raise_torch_error, allocate_a_tensor, allocate_a_list])
def test_every_out_of_memory_error_becomes_one_sentence(error, tmp_path):
    cfg = settings("smol/135M_full_single_device", f"output_dir={tmp_path}", *CARELESS)
    message = explained(error, cfg)
    assert re.match(
        r"There is not enough memory for (the GPU of )?the process in step 7 with a batch of 2 x 4096 tok", message
    )
    assert re.search(r"at the peak.*\): set ", message)
    advice = (
        "set enable_activation_checkpointing=True, or batch_size=1 gradient_accumulation_steps=8, or "
        "tokenizer.max_seq_len=1024"
    )
    assert advice in message
    assert "\n" not in message


def test_errors_that_are_not_of_memory_are_raised_unchanged():
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with (
        pytest.raises(RuntimeError) as caught,
        supervision.explain_out_of_memory(SimpleNamespace(), activity(), training.ParallelDims()),
    ):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["enable_activation_checkpointing=False", "batch_size=8"],
        ["enable_activation_checkpointing=True", "batch_size=1", "dtype=fp32", "tokenizer.max_seq_len=2048"],
        ["optimizer_in_bwd=True", "gradient_accumulation_steps=1", "clip_grad_norm=null", "batch_size=4"],
    ],
    ids=["as shipped", "careless", "careful", "in backward"],
)
def test_advised_settings_are_valid_and_change_the_config(config, overrides):
    cfg = settings(config, *overrides)
    sizes = {}
    if "single" not in config:
        sizes = {"dp_shard": 4, "world_size": 4}
    suggestions = list(_suggest_changes(cfg, activity(1, 2048), training.ParallelDims(**sizes), "device"))
    assert suggestions
    for changes in suggestions:
        changed = settings(config, *overrides, *_as_overrides(changes).split())
        for key, value in changes.items():
            assert _at(changed, key) == value
        first_key = next(iter(changes))
        assert _at(cfg, first_key) != _at(changed, first_key)


def _at(cfg, key):
    section, _, name = key.partition(".")
    return getattr(cfg, section).get(name) if name else getattr(cfg, key)


def test_advice_leaves_out_settings_that_are_used_already():
    def said(config, *overrides, phase="training", **sizes):
        doing = activity(1, 512)
        doing.phase = phase
        return [
            _as_overrides(changes)
            for changes in _suggest_changes(
                settings(config, *overrides), doing, training.ParallelDims(**sizes), "device"
            )
        ]

    small = ("device=cpu", "enable_activation_checkpointing=True", "batch_size=1", "clip_grad_norm=1.0")
    assert said("smol/135M_full_single_device", *small, "dtype=bf16") == ["tokenizer.max_seq_len=256"]
    assert said("smol/135M_lora_single_device", *small, "tokenizer.max_seq_len=128", "dtype=bf16") == []
    assert said("smol/135M_full_single_device", *small, "batch_size_val=4", "dtype=bf16", phase="validation") == [
        "batch_size_val=1",
        "tokenizer.max_seq_len=256",
    ]
    fixed = ("data_parallel_replicate_dim=2", "data_parallel_shard_dim=1", "tensor_parallel_dim=2")
    sizes = {"dp_replicate": 2, "dp_shard": 1, "tp": 2, "world_size": 4}
    assert said("llama3_1/8B_lora", *small, *fixed, "tokenizer.max_seq_len=128", **sizes) == [
        "data_parallel_replicate_dim=1 data_parallel_shard_dim=-1",
        "fsdp_cpu_offload=True",
    ]


def test_advice_is_given_for_settings_of_any_type():
    cfg = {"batch_size": 2, "gradient_accumulation_steps": 3, "output_dir": "/nowhere"}
    assert "set batch_size=1 gradient_accumulation_steps=6" in explained(raise_torch_error, cfg)
    assert "no setting would need less" in explained(raise_torch_error, {"output_dir": "/nowhere"})


def test_watch_run_explains_out_of_memory(tmp_path):
    cfg = SimpleNamespace(hang_timeout_minutes=1.0, batch_size=1, output_dir=str(tmp_path))
    throughput = supervision.Throughput()
    with (
        pytest.raises(supervision.OutOfMemoryError),
        supervision.watch_run(cfg, training.ParallelDims(), throughput, cfg.hang_timeout_minutes),
    ):
        allocate_a_tensor()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("record_history", [False, True])
def test_snapshot_of_device_memory_is_written(record_history, tmp_path):
    cfg = settings("smol/135M_full_single_device", f"output_dir={tmp_path}", "device=cuda")
    tensors = []

    def fill():
        tensors.append(torch.empty(2**20, device="cuda"))
        torch.empty(2**50, device="cuda")

    message = explained(fill, cfg, record_history=record_history)
    path = tmp_path / "memory" / "rank_0_step_7.pickle"
    assert "free): set enable_activation_checkpointing=True" in message
    assert message.endswith(f"; what filled it is in {path}.")
    snapshot = pickle.loads(path.read_bytes())
    assert sum(segment["allocated_size"] for segment in snapshot["segments"]) >= 2**22
    assert any(snapshot["device_traces"]) == record_history
