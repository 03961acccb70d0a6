"""Sharded models generate, and compute losses of logits, as one process does."""

from tests.tiny import write_checkpoint
from tests.torchtune.training.parallel.test_compositions import launch


def test_sharded_models_generate_the_same_as_one_process(tmp_path):
    for tied in (True, False):
        write_checkpoint(tmp_path / f"tied_{tied}", tied=tied)
    launch("generation.ranks", 2, tmp_path)
