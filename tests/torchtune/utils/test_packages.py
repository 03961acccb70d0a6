"""Optional packages, and the version of torch."""

import logging
import sys
from importlib.metadata import version

import pytest

from torchtune.utils import UserError, hide_import_warnings, require, torch_version_ge


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


def test_only_import_warnings_of_missing_kernels_are_hidden(caplog):
    logger = logging.getLogger("torchao")
    with hide_import_warnings("torchao.optim"):
        logger.warning("Failed to load kernels.so")
        logger.warning("this version is broken")
    logger.warning("Failed to load it later")
    with hide_import_warnings("other"):
        logger.warning("Failed to load something")
    assert [record.message.split()[-1] for record in caplog.records] == ["broken", "later", "something"]
