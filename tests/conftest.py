"""What all tests share."""

import gc
import logging
import os
import sys
from collections import Counter
from dataclasses import dataclass

import pytest

from tests.devices import DEVICE, put_tensors_on_device
from torchtune.utils import log_once

# Collecting imports thousands of modules and makes thousands of tests, and all of it stays: see the hook below.
gc.disable()


# Tests that are long tables of similar rows -> of how many rows one is tried, from the first. `make test ALL=1` tries
# every row; a test without rows, and the first row of each, is always tried.
EVERY = {
    "test_instruction_sets": 2,
    "examples/test_quickstart_post_training": 2,
    "recipes/test_distributed": 2,
    "torchtune/_cli/test_run": 2,
    "torchtune/datasets/test_row_cache": 2,
    "torchtune/generation/test_continuous_batch": 2,
    "torchtune/modules/low_precision/test_float8_training": 2,
    "torchtune/modules/low_precision/test_quantize_base": 2,
    "benchmarks/test_bench_gpu": 5,
    "benchmarks/test_run_gpu": 3,
    "recipes/test_contract": 4,
    "recipes/test_image_text": 3,
    "recipes/test_kill": 4,
    "recipes/test_older_recipes": 2,
    "recipes/test_several_machines": 2,
    "recipes/test_survival": 2,
    "recipes/test_trl": 3,
    "torchtune/_cli/test_torchrun": 2,
    "torchtune/config/test_whole_configs": 3,
    "torchtune/models/test_hostile_config": 3,
    "torchtune/models/test_image_text.py::test_adapters_are_those_of_peft": 3,
    "torchtune/models/test_image_text.py::test_decoding_a_batch": 3,
    "torchtune/models/test_left_out_fields": 12,
    "torchtune/models/test_parity.py::test_cached_greedy": 3,
    "torchtune/models/test_parity.py::test_logits_equal_in_bfloat16": 2,
    "torchtune/models/test_parity.py::test_packed_documents": 2,
    "torchtune/models/test_parity_adapters": 3,
    "torchtune/models/test_sizes": 4,
    "torchtune/modules/moe/test_balance": 4,
    "torchtune/modules/kernels/test_attention.py::test_flex_attention": 3,
    "torchtune/checkpoints/test_adapters.py::test_fused": 2,
    "torchtune/checkpoints/test_gguf": 2,
    "torchtune/checkpoints/test_state": 2,
    "torchtune/training/matrix/test_matrix": 8,
    "torchtune/training/optim/test_prepare_optimizer": 2,
    "torchtune/training/parallel/test_families": 3,
    "torchtune/training/parallel/test_watchdog": 2,
    "torchtune/estimate/test_extrapolate": 8,
    "torchtune/estimate/test_equals_real": 5,
    "torchtune/training/test_compile": 2,
}


if DEVICE != "cpu":
    put_tensors_on_device()


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--all-rows``: what ``make test ALL=1`` adds."""
    parser.addoption("--all-rows", action="store_true", help="try every row of the tests that are long tables")


def _sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out rows of long tables."""
    kept_items = []
    left = []
    seen = Counter()
    for item in items:
        name = item.nodeid.removeprefix("tests/").partition("[")[0]
        every = next((number for start, number in EVERY.items() if name.startswith(start)), 1)
        (left if seen[name] % every else kept_items).append(item)
        seen[name] += 1
    items[:] = kept_items
    config.hook.pytest_deselected(items=left)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with slow tests come first: one that began last would leave the other processes without work."""
    if not config.getoption("--all-rows") and len({item.path for item in items}) > 20:  # a file by itself is run whole
        _sample(config, items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Garbage is looked for again, less often, and not in what was there before the first test."""
    gc.freeze()
    gc.set_threshold(20_000)  # of 700, on which a quarter of the suite's time went
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def own_cache_of_rows(tmp_path_factory):
    """Rows that tests prepare do not go to the user's cache, nor come from it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHTUNE_CACHE", str(tmp_path_factory.mktemp("torchtune_cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def files_without_sync():
    """No test loses power: to wait for the disk would take half of the time of a short run that saves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(scope="session")
def imported_aside():
    """Children of ``tune export`` and ``tune selfcheck`` fork from a process that has imported what most need."""
    from tests.recipes.killing import import_aside

    import_aside()


@pytest.fixture(autouse=True)
def logger_as_it_was():
    """Forget what an earlier test of the same process left: level, handlers, and messages that come once."""
    logger = logging.getLogger("torchtune")
    logger.setLevel(logging.NOTSET)
    logger.handlers[:] = []
    logger.propagate = True
    log_once.cache_clear()


@dataclass
class Result:
    """What a command did."""

    code: int
    out: str
    err: str


@pytest.fixture
def tune(capsys, monkeypatch):
    """``tune("ls")`` runs the command line and returns its exit code and output."""
    from torchtune._cli.tune import main

    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["tune", *map(str, arguments)])
        capsys.readouterr()
        code: int | str | None = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Result(int(code or 0), captured.out, captured.err)

    return run
