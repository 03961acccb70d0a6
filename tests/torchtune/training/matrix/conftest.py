"""The runs of the cells that a file has tests of."""

import pytest
import torch

from tests.tiny import write_checkpoint
from tests.torchtune.training.matrix.checks import Runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("matrix")
    write_checkpoint(folder / "model")
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    runs = Runs(folder, [item.callspec.params["cell"] for item in items])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")
        yield runs
    torch._dynamo.reset()
