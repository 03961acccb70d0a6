"""Memory statistics: peaks of the process and of devices."""

import mmap

import torch

from torchtune import training
from torchtune.training import memory
from torchtune.utils import ObserverGuard

CPU = torch.device("cpu")


def test_peak_of_resident_memory_can_be_reset_and_logged(caplog):
    training.get_memory_stats(CPU)
    with mmap.mmap(-1, 64 * 2**20) as block:  # a tensor may lie in memory that an earlier test has left to the heap
        block[:: mmap.PAGESIZE] = bytes(len(block) // mmap.PAGESIZE)
        with_block = training.get_memory_stats(CPU)["peak_memory_resident"]
    training.reset_memory_stats(CPU)
    after = training.get_memory_stats(CPU)["peak_memory_resident"]
    assert with_block - after > 0.05
    training.cleanup_before_training()
    with caplog.at_level("INFO", logger="torchtune"):
        training.log_memory_stats({"peak_memory_resident": 1.5}, message="Now:")
    assert caplog.messages == ["Now:\n\tpeak memory resident: 1.50 GiB"]


def test_a_device_without_statistics_is_warned_of_once(monkeypatch, caplog):
    monkeypatch.setattr(memory, "_guard", ObserverGuard("memory figures"))
    for _ in range(2):
        assert training.get_memory_stats(torch.device("meta")) == {}
    (message,) = caplog.messages
    assert "no memory statistics for device type 'meta'" in message
