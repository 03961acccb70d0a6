"""What the tests of recipes share."""

import pytest

from tests.recipes.killing import shared_forker


@pytest.fixture(scope="session")
def forker():
    """A process that has imported everything, and forks recipes."""
    return shared_forker()
