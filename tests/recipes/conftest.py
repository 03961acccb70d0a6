"""What the tests of recipes share."""

from collections.abc import Iterator

import pytest

from tests.recipes.killing import Forker


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    """A process that has imported everything, and forks recipes."""
    forker = Forker()
    yield forker
    forker.close()
