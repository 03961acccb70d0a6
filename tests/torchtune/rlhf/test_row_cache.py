"""Datasets of which some rows are read, with their numbers."""

import numpy as np

from torchtune.data import BatchLoader
from torchtune.datasets import MixedDataset, PackedDataset
from torchtune.rlhf._row_cache import SelectedRows, WithRowNumbers

ROWS = [{"tokens": [number, number], "labels": [number, -100]} for number in range(8)]


def test_selected_rows_of_a_mixture_are_read_once_each():
    mixture = MixedDataset({"small": ROWS[:2], "large": ROWS[2:]}, {"small": 1, "large": 1})
    selected = SelectedRows(mixture, np.array([1, 7]))
    loader = BatchLoader(selected, batch_size=1, collate_fn=list, shuffle=False, seed=0)
    assert [(row["row"], row["tokens"]) for ((row,),) in loader] == [(1, [1, 1]), (7, [7, 7])]


def test_numbered_rows_keep_the_order_of_their_dataset():
    mixture = MixedDataset({"small": ROWS[:2], "large": ROWS[2:]}, {"small": 1, "large": 1})
    numbered = WithRowNumbers(mixture)
    settings = {"batch_size": 3, "collate_fn": list, "shuffle": True, "seed": 4}
    loader, plain = (BatchLoader(dataset, **settings) for dataset in (numbered, mixture))
    assert loader.examples_per_epoch == plain.examples_per_epoch == 12
    for (numbered_batch,), (batch,) in zip(loader, plain, strict=True):
        assert [row["tokens"] for row in numbered_batch] == [row["tokens"] for row in batch]
    assert loader.state_dict() == plain.state_dict()
    packs = WithRowNumbers(PackedDataset(ROWS, max_seq_len=4))
    assert [document["row"] for document in packs[3]] == [3, 3]
    assert packs.is_packed
