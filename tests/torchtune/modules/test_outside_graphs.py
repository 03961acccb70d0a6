"""Functions that stay out of compiled graphs."""

import torch
import torch._dynamo.testing
from torch import Tensor

from torchtune.modules._outside_graphs import outside_graphs
from torchtune.modules.loss import LinearCrossEntropyLoss


def test_it_runs_uncompiled_inside_what_is_compiled():
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


def test_a_loss_compiled_as_a_whole_by_a_user_is_the_same():
    torch.manual_seed(0)
    projection = torch.nn.Linear(8, 16, bias=False)
    model = torch.nn.Module()
    model.output, model.skip_output_layer = projection, False
    loss = LinearCrossEntropyLoss()
    loss.set_model_output(model)
    hidden, labels = torch.randn(2, 5, 8, requires_grad=True), torch.randint(0, 16, (2, 5))
    expected = loss(hidden, labels)
    compiled = torch.compile(loss, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden, labels), expected)
