"""The device on which the tests run recipes."""

import os

# `make test DEVICE=cuda` sets it; children and forks of the tests' process have it too.
DEVICE = os.environ.get("TORCHTUNE_TEST_DEVICE", "cpu")
