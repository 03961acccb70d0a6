"""Datasets of which some rows are read, with their numbers, and caches by row that two ranks fill."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.torchtune.checkpoints import ranks
from torchtune.data import Batch, BatchLoader, ExampleDataset, collate_documents, collate_preference
from torchtune.datasets import MixedDataset, PackedDataset
from torchtune.modules.loss import LikeliestTokens
from torchtune.rlhf import _log_prob_cache
from torchtune.rlhf._log_prob_cache import (
    CacheError,
    SelectedRows,
    TeacherCache,
    WithRowNumbers,
    _cached_log_probs,
    fill_and_use_cache,
)
from torchtune.training import ParallelDims

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


class Rows(ExampleDataset):
    """Examples with a fingerprint, as a cache needs them."""

    fingerprint = "rows"

    def __init__(self, rows):
        self._rows = rows

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        return self._rows[index]


def load(rows, collate, dims):
    return BatchLoader(
        Rows(rows),
        batch_size=1,
        collate_fn=collate,
        shuffle=False,
        seed=0,
        rank=dims.data_rank,
        world_size=dims.data_size,
    )


def start_dims() -> ParallelDims:
    """Return the dims of two ranks with different examples."""
    dims = ParallelDims(dp_shard=2, world_size=2)
    dims.build_mesh("cpu")
    return dims


PAIRS = [
    {
        "chosen_input_ids": [number, 1],
        "chosen_labels": [-100, 1],
        "rejected_input_ids": [number, 2],
        "rejected_labels": [-100, 2],
    }
    for number in range(8)
]
# What the reference below says of each pair.
LOG_PROBS = [[number + 0.5, number] for number in range(8)]


def cache_pairs(folder: Path, dims: ParallelDims) -> tuple[list[list[float]], int]:
    """Return the cached log-probs of all pairs, and the number of batches that this rank computed for them."""
    num_batches = 0

    def score(batch: Batch) -> Tensor:
        nonlocal num_batches
        num_batches += 1
        dims.any(False)  # as in a sharded model, every batch is a collective
        return batch.per_document["row"] + 0.5 * batch.per_document["is_chosen"]

    log_probs = _cached_log_probs(load(PAIRS, collate_preference, dims), score, folder, "reference", 1, dims)
    return log_probs.tolist(), num_batches


def machines_without_a_common_folder(folder: Path) -> None:
    dims = start_dims()
    own_folder = folder / f"reference_{dims.data_rank}"
    own_folder.mkdir()
    assert cache_pairs(own_folder, dims) == (LOG_PROBS, 4)
    # Only the first rank has written: the other rank takes its values and computes nothing.
    assert len(list(own_folder.iterdir())) == (1 if dims.is_main else 0)
    assert cache_pairs(own_folder, dims) == (LOG_PROBS, 0)


def machine_with_an_older_file(folder: Path) -> None:
    dims = start_dims()
    own_folder = folder / f"older_{dims.data_rank}"
    own_folder.mkdir()
    if not dims.is_main:
        (complete,) = (folder / "reference_0").iterdir()
        shutil.copy(complete, own_folder)
    assert cache_pairs(own_folder, dims) == (LOG_PROBS, 4), "all ranks compute what the first rank lacks"


def machines_with_a_common_folder(folder: Path) -> None:
    dims = start_dims()
    common_folder = folder / "common"
    common_folder.mkdir(exist_ok=True)
    assert cache_pairs(common_folder, dims) == (LOG_PROBS, 4)
    assert cache_pairs(common_folder, dims) == (LOG_PROBS, 0)


def damaged_file_of_the_first_rank(folder: Path) -> None:
    dims = start_dims()
    if dims.is_main:
        (path,) = (folder / "reference_0").iterdir()
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(CacheError, match=r"reference_0/.*its checksum is another one"):
        cache_pairs(folder / f"reference_{dims.data_rank}", dims)


def test_ranks_with_different_reference_files_use_those_of_the_first_rank(tmp_path):
    cases = [
        machines_without_a_common_folder,
        machine_with_an_older_file,
        machines_with_a_common_folder,
        damaged_file_of_the_first_rank,
    ]
    ranks.run(2, cases, tmp_path)


def cache_predictions(folder: Path, dims: ParallelDims) -> int:
    """Return the number of batches that the teacher saw on this rank."""
    num_batches = 0

    def likeliest(batch: Batch) -> LikeliestTokens:
        nonlocal num_batches
        num_batches += 1
        num_labels = int((batch.labels >= 0).sum())
        return LikeliestTokens(torch.zeros(num_labels, 1, dtype=torch.int64), torch.zeros(num_labels, 2), 16)

    loader = load(ROWS, collate_documents, dims)
    cache = TeacherCache(folder, loader.dataset, {"teacher": "a"}, k=1)
    fill_and_use_cache(loader, cache, likeliest, first_position=0, epochs=1, dims=dims)
    return num_batches


def teacher_of_separate_folders(folder: Path) -> None:
    dims = start_dims()
    common_folder = folder / "teacher"
    assert cache_predictions(common_folder, dims) == 4
    dims.any(False)  # barrier: both ranks have read the files
    assert cache_predictions(common_folder, dims) == 0
    own_folder = common_folder if dims.is_main else folder / "empty"
    with pytest.raises(CacheError, match=r"teacher_cache: .* has other rows on another rank: .* share"):
        cache_predictions(own_folder, dims)


def first_teacher_cache_of_separate_folders(folder: Path) -> None:
    dims = start_dims()
    own_folder = folder / f"teacher_{dims.data_rank}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_log_prob_cache, "_SECONDS_TO_SEE", 0.2)
        with pytest.raises(CacheError, match=r"not all machines see .*: set it to a folder that they share"):
            cache_predictions(own_folder, dims)
    assert list(own_folder.glob("*")) == []


def test_a_teacher_cache_that_differs_between_ranks_is_refused_on_all(tmp_path):
    ranks.run(2, [teacher_of_separate_folders, first_teacher_cache_of_separate_folders], tmp_path)
