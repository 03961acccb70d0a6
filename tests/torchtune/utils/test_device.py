"""Device names, and where tensors are put."""

import os

import pytest
import torch

from torchtune.data import Documents
from torchtune.utils import (
    DeviceSupport,
    UserError,
    batch_to_device,
    computes_on_cpu,
    get_device,
    get_world_size_and_rank,
    launches_kernels,
    simulated,
)


def test_a_run_on_cpu_bounds_the_caches_of_kernels_unless_the_user_does(monkeypatch):
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    get_device("cpu")
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "128"
    assert os.environ["LRU_CACHE_CAPACITY"] == "7"


def test_unknown_device_name_is_refused():
    assert get_device("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match="'gpu' is not a device name: use one of cpu, cuda"):
        get_device("gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the error of a machine without CUDA")
def test_a_missing_device_is_explained():
    with pytest.raises(UserError, match=r"'cuda' was asked for, but torch .* finds no cuda device here: set device="):
        get_device("cuda")


def test_device_type_selects_the_communication_backend():
    assert DeviceSupport.from_type("cuda").communication_backend == "nccl"
    with pytest.raises(ValueError, match="Unknown device type 'tpu'"):
        DeviceSupport.from_type("tpu")


def test_tensors_on_cpu_stand_for_an_accelerators_in_a_simulation():
    cpu = torch.device("cpu")
    others = [torch.device("cuda"), torch.device("mps")]
    assert [computes_on_cpu(device) for device in (cpu, *others)] == [True, False, False]
    assert [launches_kernels(device) for device in (cpu, *others)] == [False, True, False]
    with simulated():
        assert [computes_on_cpu(device) for device in (cpu, *others)] == [False, False, False]
        assert [launches_kernels(device) for device in (cpu, *others)] == [True, True, False]


def test_without_processes_the_world_is_one():
    assert get_world_size_and_rank() == (1, 0)


def test_batch_to_device_moves_what_can_be_moved():
    documents = Documents.from_lengths([2, 1])
    batch = {"tokens": torch.zeros(3), "nested": {"x": torch.zeros(1)}, "documents": documents, "name": "kept"}
    batch_to_device(batch, torch.device("meta"))
    assert batch["tokens"].is_meta
    assert batch["nested"]["x"].is_meta
    assert batch["documents"].cu_seqlens.is_meta
    assert batch["name"] == "kept"
