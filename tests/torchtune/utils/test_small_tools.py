"""Devices, optional packages, versions, logging and deprecation."""

import logging
import os
import sys
from importlib.metadata import version

import pytest
import torch

from torchtune.data import Documents
from torchtune.utils import (
    DeviceSupport,
    FrozenIntegers,
    UserError,
    batch_to_device,
    deprecate_parameter,
    deprecated,
    get_device,
    get_logger,
    get_world_size_and_rank,
    hide_import_warnings,
    log_once,
    log_rank_zero,
    require,
    torch_version_ge,
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


def test_require_names_the_extra():
    assert require("json", extra="x", purpose="It") is sys.modules["json"]
    with pytest.raises(UserError, match=r"WandBLogger needs the package 'no_such_thing'.*'torchtune\[wandb\]'"):
        require("no_such_thing.sub", extra="wandb", purpose="WandBLogger")


def test_require_does_not_hide_a_broken_package(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("import what_it_needs")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="what_it_needs"):
        require("broken_package", extra="x", purpose="It")


def test_torch_version_is_compared_by_numbers():
    numbers = version("torch").split("+")[0]
    assert torch_version_ge(numbers)
    assert torch_version_ge("2.2")
    assert not torch_version_ge("99.0.1")


def test_rank_zero_logs_and_once_messages_come_once(caplog, monkeypatch):
    logger = get_logger("INFO")
    with caplog.at_level(logging.INFO, logger="torchtune"):
        log_rank_zero(logger, "first rank")
        for _ in range(3):
            log_once(logger, "once and for all")
        monkeypatch.setenv("RANK", "1")
        log_rank_zero(logger, "second rank")
    assert [record.message for record in caplog.records] == ["first rank", "once and for all"]


def test_a_deprecated_class_stays_a_class():
    @deprecated("Use B.")
    class A:
        def __init__(self, x):
            self.x = x

    assert isinstance(A, type)
    with pytest.warns(FutureWarning, match=r"A is deprecated and will be removed\. Use B\."):
        assert A(3).x == 3


def test_a_deprecated_function_and_parameter():
    @deprecated()
    def f():
        return 1

    @deprecate_parameter("old", "Use new.")
    def g(new=0, old=None):
        return new

    with pytest.warns(FutureWarning, match="f is deprecated"):
        assert f() == 1
    assert g(2) == 2
    with pytest.warns(FutureWarning, match="old is deprecated for g"):
        g(2, 3)


def test_empty_documents_are_refused():
    for lengths in ([], [2, 0]):
        with pytest.raises(ValueError, match="at least one token"):
            Documents.from_lengths(lengths)


def test_only_import_warnings_of_missing_kernels_are_hidden(caplog):
    logger = logging.getLogger("torchao")
    with hide_import_warnings("torchao.optim"):
        logger.warning("Failed to load kernels.so")
        logger.warning("this version is broken")
    logger.warning("Failed to load it later")
    with hide_import_warnings("other"):
        logger.warning("Failed to load something")
    assert [record.message.split()[-1] for record in caplog.records] == ["broken", "later", "something"]


def test_integers_are_frozen_where_a_release_of_torch_asks_them_for_gradients():
    """PyTorch 2.11 makes the shard of every parameter with gradients first, and takes them away after that."""
    with FrozenIntegers():
        assert not torch.zeros(2, dtype=torch.int8).requires_grad_().requires_grad
        assert torch.zeros(2).requires_grad_().requires_grad
    with pytest.raises(RuntimeError, match="floating point"):
        torch.zeros(2, dtype=torch.int8).requires_grad_()
