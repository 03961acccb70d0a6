"""What all tests share."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_cache_of_rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Rows that tests prepare do not go to the user's cache, nor come from it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHTUNE_CACHE", str(tmp_path_factory.mktemp("torchtune_cache")))
        yield
