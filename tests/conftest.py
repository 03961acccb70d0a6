"""What all tests share."""

import logging
from collections.abc import Iterator

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: one that began last would leave the other process without work."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session", autouse=True)
def own_cache_of_rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Rows that tests prepare do not go to the user's cache, nor come from it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHTUNE_CACHE", str(tmp_path_factory.mktemp("torchtune_cache")))
        yield


@pytest.fixture(autouse=True)
def logger_as_it_was() -> Iterator[None]:
    """A recipe that runs in the test process sets the level and the handlers of the library's logger."""
    logger = logging.getLogger("torchtune")
    level, handlers, propagate = logger.level, list(logger.handlers), logger.propagate
    yield
    logger.setLevel(level)
    logger.handlers[:], logger.propagate = handlers, propagate
