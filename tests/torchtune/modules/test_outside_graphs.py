"""Functions that stay out of compiled graphs."""

import torch
import torch._dynamo.testing
from torch import Tensor

from torchtune.modules._outside_graphs import outside_graphs


def test_function_outside_graphs_runs_uncompiled_in_a_compiled_caller():
    compiling: list[bool] = []

    @outside_graphs
    def inside(x: Tensor, *, add: float) -> Tensor:
        """Kept."""
        compiling.append(torch.compiler.is_compiling())
        return x + add

    assert inside.__doc__ == "Kept."
    backend = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda x: inside(x * 2, add=1.0).sin(), backend=backend)
    x = torch.ones(3)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), (x * 2 + 1).sin())
    assert compiling == [False] * 3
    assert backend.frame_count == 2  # before and after it, each compiled once
