"""The loss shape of every architecture trains: copying the token that stands there is learnt in 20 steps."""

import copy
from typing import Any

import pytest
import torch

from tests.torchtune.models.conftest import ARCHITECTURES
from torchtune.data import Documents
from torchtune.modules.loss import LinearCrossEntropyLoss

DOCUMENTS = Documents.from_lengths((20, 9, 27, 8))


@pytest.mark.parametrize("pair", ARCHITECTURES, indirect=True)
def test_a_copying_task_lowers_the_loss_by_half(pair: Any) -> None:
    """Fresh texts at every step, packed as the recipes pack them; a label is the token that stands in its place."""
    model = copy.deepcopy(pair.model).train()
    loss_fn = LinearCrossEntropyLoss()
    loss_fn.set_model_output(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(21):
        tokens = torch.randint(1, 20, (1, 64), generator=generator)
        loss = loss_fn(model(tokens, documents=DOCUMENTS, input_pos=DOCUMENTS.positions().view(1, -1)), tokens)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[20] <= losses[0] / 2, losses
