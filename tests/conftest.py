"""What all tests share."""

import gc
import logging
from collections.abc import Iterator

import pytest

# Collecting imports thousands of modules and makes thousands of tests, and all of it stays: see the hook below.
gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: one that began last would leave the other processes without work."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Garbage is looked for again, less often, and not in what was there before the first test."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)  # of 700, on which a quarter of the suite's time went
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def own_cache_of_rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Rows that tests prepare do not go to the user's cache, nor come from it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHTUNE_CACHE", str(tmp_path_factory.mktemp("torchtune_cache")))
        yield


@pytest.fixture(autouse=True)
def logger_as_it_was() -> None:
    """A recipe that runs in the test process, or in a fixture of a file before, sets the level and the handlers."""
    logger = logging.getLogger("torchtune")
    logger.setLevel(logging.NOTSET)
    logger.handlers[:], logger.propagate = [], True
