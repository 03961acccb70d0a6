"""Defaults of datasets, and the wrapper of any other object with examples."""

import pickle

import numpy as np
import pytest

from torchtune.data import BatchLoader, ExampleDataset, WrappedDataset, as_example_dataset

ROWS = [{"tokens": [7] * length, "labels": [7] * length} for length in (3, 1, 2)]


class Squares(ExampleDataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return {"tokens": [index] * index, "labels": [index] * index}


class Described:
    """A user's dataset that tells everything about itself."""

    is_stream = True
    is_packed = True
    fingerprint = "v1"
    mixture = "one 1"
    num_images = 4
    examples_per_epoch = 6
    image_tokens = np.array([2, 0, 1])
    lengths = (3, 1, 2)
    color = "red"

    def __init__(self):
        self.calls = []

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return ROWS[index]

    def order(self, seed, epoch, shuffle):
        return np.array([2, 1, 0, 0, 1, 2])

    def origins(self, index):
        return [{"source": "mine", "line": index + 1}]

    def begin(self, seed, *, shuffle):
        self.calls.append(("begin", seed, shuffle))

    def state_at(self, index):
        return {"index": index}

    def go_to(self, state):
        self.calls.append(("go_to", state))

    def read_ahead(self, indices):
        self.calls.append(("read_ahead", indices))


@pytest.mark.parametrize("dataset", [Squares(), as_example_dataset([*ROWS, *ROWS[:2]])])
def test_a_dataset_of_rows_alone_has_defaults(dataset):
    assert not dataset.is_stream
    assert not dataset.is_packed
    assert not dataset.on_reading
    assert [dataset.fingerprint, dataset.mixture, dataset.num_images, dataset.examples_per_epoch] == [None] * 4
    assert [dataset.known_lengths, dataset.longest, dataset.conversations()] == [None] * 3
    assert [list(dataset.dropped), dataset.num_truncated, dataset.omitted] == [[], 0, ""]
    assert dataset.measure().tolist() == [len(dataset[index]["tokens"]) for index in range(5)]
    assert dataset.row_datasets() == [dataset]
    assert dataset.origins(3) == [{"row": 3}]
    assert dataset.images(0) == []
    assert dataset.token_row(2) == dataset[2]
    assert dataset.state_at(3) == {}
    assert dataset.order(5, 1, shuffle=False).tolist() == [0, 1, 2, 3, 4]
    assert sorted(dataset.order(5, 1, shuffle=True)) == [0, 1, 2, 3, 4]
    assert dataset.order(5, 1, shuffle=True).tolist() != dataset.order(5, 2, shuffle=True).tolist()
    dataset.limit_rows(1)
    dataset.begin(0, shuffle=True)
    assert len(dataset) == 5


def test_only_a_wrapped_dataset_may_have_images_that_it_does_not_count():
    assert not Squares().may_have_images
    assert as_example_dataset(ROWS).may_have_images
    assert WrappedDataset(Described()).may_have_images
    assert not WrappedDataset(Squares()).may_have_images
    assert WrappedDataset(WrappedDataset(ROWS)).may_have_images


def test_facts_of_a_users_dataset_are_used():
    described = Described()
    dataset = as_example_dataset(described)
    assert dataset.is_stream
    assert dataset.is_packed
    assert [dataset.fingerprint, dataset.mixture, dataset.num_images, dataset.examples_per_epoch] == [
        "v1", "one 1", 4, 6,
    ]  # fmt: skip
    assert dataset.known_lengths.tolist() == dataset.measure().tolist() == [3, 1, 2]
    assert dataset.longest == 3
    assert dataset.image_tokens.tolist() == [2, 0, 1]
    assert dataset.order(0, 0, shuffle=True).tolist() == [2, 1, 0, 0, 1, 2]
    assert dataset.origins(1) == [{"source": "mine", "line": 2}]
    assert dataset.state_at(4) == {"index": 4}
    dataset.begin(3, shuffle=False)
    dataset.go_to({"index": 4})
    dataset.read_ahead([1, 2])
    assert described.calls == [("begin", 3, False), ("go_to", {"index": 4}), ("read_ahead", [1, 2])]
    assert dataset.color == "red"
    assert not hasattr(dataset, "size")


def test_a_wrapper_of_a_dataset_describes_it():
    inner = Squares()
    wrapped = WrappedDataset(inner)
    assert wrapped.row_datasets() == [inner]
    assert wrapped.known_lengths is None
    assert as_example_dataset(inner) is inner


def test_a_wrapped_dataset_is_pickled():
    wrapped = pickle.loads(pickle.dumps(as_example_dataset(ROWS)))
    assert [wrapped[0], len(wrapped)] == [ROWS[0], 3]


def test_a_loader_takes_a_list():
    loader = BatchLoader(ROWS, batch_size=1, collate_fn=list, shuffle=False, seed=0)
    assert [step for (step,) in loader] == [[row] for row in ROWS]
    assert loader.rows() == [{"row": 2}]
    assert "dataset_digest" not in loader.state_dict()["fingerprint"]
    reversed_loader = loader.derive(dataset=list(reversed(ROWS)))
    reversed_loader.set_epoch(0)
    assert [step for (step,) in reversed_loader] == [[row] for row in reversed(ROWS)]
