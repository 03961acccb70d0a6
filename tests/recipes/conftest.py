"""What the tests of recipes share."""

import pytest

from tests.recipes.killing import Forker, shared_forker


@pytest.fixture(scope="session")
def forker() -> Forker:
    """A process that has imported everything, and forks recipes."""
    return shared_forker()
