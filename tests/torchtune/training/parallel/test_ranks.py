"""What a process asks of torchrun's environment."""

import torch

from torchtune import training


def test_a_process_of_torchrun_is_distributed(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert not training.is_distributed()
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    assert training.is_distributed()
    assert training.get_distributed_backend("cpu") == "gloo"
    assert training.get_distributed_backend("cuda", offload_ops_to_cpu=True) == "cuda:nccl,cpu:gloo"


def test_restart_is_read_from_torchruns_count(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert not training.is_restart()
    for count, expected in (("0", False), ("1", True)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        assert training.is_restart() is expected


def test_threads_are_shared_among_ranks(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    try:
        training.set_torch_num_threads()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
