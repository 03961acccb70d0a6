"""Simulations leave nothing behind that real process groups of the same size would meet."""

from pathlib import Path

import torch

from tests.torchtune.checkpoints import ranks
from tests.torchtune.checkpoints.small import build, load, logits, write_folder
from torchtune.checkpoints import FullModelHFCheckpointer
from torchtune.estimate._simulate import simulated_cluster


def load_sharded(folder: Path) -> torch.nn.Module:
    model = ranks.shard(build(folder), "data")
    FullModelHFCheckpointer(str(folder)).load_model(model)
    return model.eval()


def computes_as_alone(folder: Path) -> None:
    torch.testing.assert_close(logits(load_sharded(folder)), logits(load(folder)), rtol=0, atol=1e-5)


def test_two_real_ranks_after_two_simulated_ones(tmp_path):
    """DTensor would gather with the simulated group, which sends nothing."""
    folder = write_folder(tmp_path, "llama")
    with simulated_cluster(2, 2):
        logits(load_sharded(folder))
    ranks.run(2, [computes_as_alone], folder)
