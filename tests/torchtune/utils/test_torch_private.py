"""Private functions of torch, in every release that is supported."""

import pytest
import torch

from torchtune.utils import FrozenIntegers


def test_integers_are_frozen_where_a_release_of_torch_asks_them_for_gradients():
    """PyTorch 2.11 makes the shard of every parameter with gradients first, and takes them away after that."""
    with FrozenIntegers():
        assert not torch.zeros(2, dtype=torch.int8).requires_grad_().requires_grad
        assert torch.zeros(2).requires_grad_().requires_grad
    with pytest.raises(RuntimeError, match="floating point"):
        torch.zeros(2, dtype=torch.int8).requires_grad_()
