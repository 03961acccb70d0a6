"""Mixtures: proportions, exhaustion, the same order for any number of processes, losses by dataset."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchtune.data import BatchLoader, DataError, collate_documents, collate_preference
from torchtune.datasets import MixedDataset, PackedDataset, mixed_dataset
from torchtune.modules.loss import LinearCrossEntropyLoss, setup_loss
from torchtune.supervision import StepMetrics
from torchtune.training import ParallelDims

SIZES = st.lists(st.tuples(st.integers(1, 40), st.floats(0.05, 20)), min_size=1, max_size=4)


def rows(count, first=0, length=1):
    """Rows that consist of their number, from ``first`` on."""
    return [{"tokens": [number] * length, "labels": [number] * length} for number in range(first, first + count)]


def make_mixture(sizes, **options):
    """Datasets d0, d1 … of these sizes and weights, whose rows are numbered through."""
    datasets = {}
    weights = {}
    first = 0
    for number, (size, weight) in enumerate(sizes):
        datasets[f"d{number}"] = rows(size, first)
        weights[f"d{number}"] = weight
        first += size
    return MixedDataset(datasets, weights, **options)


def visits(mixture, shuffle=True, epoch=0):
    """The order of an epoch, and for each dataset how often the epoch comes to each of its examples."""
    order = mixture.order(5, epoch, shuffle)
    assert len(order) == mixture.examples_per_epoch
    times = np.bincount(order, minlength=len(mixture))
    return order, np.split(times, np.cumsum(mixture.sizes)[:-1])


@given(sizes=SIZES, shuffle=st.booleans())
@settings(max_examples=40, deadline=None)
def test_stop_decides_when_an_epoch_ends(sizes, shuffle):
    _, times = visits(make_mixture(sizes, stop="all"), shuffle)
    for times_of_dataset in times:
        assert (times_of_dataset == 1).all()

    _, times = visits(make_mixture(sizes, stop="first"), shuffle)
    assert all(times_of_dataset.max() <= 1 for times_of_dataset in times)
    assert any(times_of_dataset.min() == 1 for times_of_dataset in times), "one dataset is exhausted"

    _, times = visits(make_mixture(sizes, stop="repeat"), shuffle)
    for times_of_dataset in times:
        assert times_of_dataset.min() >= 1
        assert np.ptp(times_of_dataset) <= 1, "no example comes again before all others have come"
    assert any(times_of_dataset.max() == 1 for times_of_dataset in times), "one dataset is not repeated"


@given(sizes=SIZES, shuffle=st.booleans())
@settings(max_examples=30, deadline=None)
def test_every_stretch_of_an_epoch_is_in_proportion(sizes, shuffle):
    mixture = make_mixture(sizes)
    order, _ = visits(mixture, shuffle)
    datasets = np.searchsorted(np.cumsum(mixture.sizes), order, side="right")  # dataset of each example
    total = math.fsum(weight for _, weight in sizes)
    for number, (_, weight) in enumerate(sizes):
        count = np.concatenate([[0], np.cumsum(datasets == number)])  # after each example of the epoch
        expected = weight / total * np.arange(len(count))
        assert np.abs(count - expected).max() <= len(sizes) + 1


def test_weights_and_temperature_are_those_of_the_formula():
    mixture = MixedDataset({"a": rows(10), "b": rows(90)}, temperature=2.0)
    share = math.sqrt(10) / (math.sqrt(10) + math.sqrt(90))  # sizes are the default of weights
    assert mixture.examples_per_epoch == 90 + math.ceil(90 * share / (1 - share))
    weighted = MixedDataset({"a": rows(10), "b": rows(90)}, weights={"b": 1, "a": 1})
    assert weighted.examples_per_epoch == 180
    order, _ = visits(weighted, shuffle=False)
    assert order[:6].tolist() == [0, 10, 1, 11, 2, 12]


@given(
    sizes=SIZES,
    stop=st.sampled_from(["first", "all", "repeat"]),
    taken=st.integers(0, 12),
    world=st.sampled_from([1, 2, 4]),
)
@settings(max_examples=30, deadline=None)
def test_a_resumed_run_and_any_number_of_processes_see_the_same_steps(sizes, stop, taken, world):
    def loader(rank=0, size=1):
        options = {"batch_size": 4 // size, "accumulation_steps": 2, "shuffle": True, "seed": 3, "collate_fn": list}
        return BatchLoader(make_mixture(sizes, stop=stop), rank=rank, world_size=size, **options)

    def steps(loader):
        """(epoch, micro-batches) of the steps of two epochs, from where the loader stands."""
        steps_of_epochs = []
        while loader.epoch < 2:
            for batches in loader:
                steps_of_epochs.append((loader.epoch, batches))
        return steps_of_epochs

    uninterrupted = steps(loader())
    stopped = loader(0, world)
    endless = itertools.chain.from_iterable(itertools.repeat(stopped))
    num_taken = 0
    for _ in itertools.islice(endless, min(taken, len(uninterrupted))):
        num_taken += 1
    steps_of_ranks = []
    for rank in range(world):
        resumed = loader(rank, world)
        resumed.load_state_dict(stopped.state_dict())
        steps_of_ranks.append(steps(resumed))
    assert len(steps_of_ranks[0]) == len(uninterrupted) - num_taken
    for (epoch, expected), *same_step in zip(uninterrupted[num_taken:], *steps_of_ranks, strict=True):
        tokens = []
        for epoch_of_rank, batches in same_step:
            assert epoch_of_rank == epoch
            for example in itertools.chain(*batches):
                if example["labels"][0] != -100:  # else it fills the batch of a rank that has too few
                    tokens.append(example["tokens"][0])
        assert sorted(tokens) == sorted(example["tokens"][0] for example in itertools.chain(*expected))
    if len(uninterrupted) > 2:  # epochs of one step may have the same order
        first_epoch = [batches for epoch, batches in uninterrupted if epoch == 0]
        second_epoch = [batches for epoch, batches in uninterrupted if epoch == 1]
        assert first_epoch != second_epoch


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"weights": {"a": 1}}, "'b' has no weight"),
        ({"weights": {"a": 1, "b": 1, "c": 1}}, "'c' is no dataset of the mixture"),
        ({"weights": {"a": 0, "b": 1}}, "a has 0: a weight is above 0"),
        ({"temperature": 0}, "temperature must be above 0"),
        ({"datasets": {}}, "mixture is empty"),
        ({"weights": {"a": "much", "b": 1}}, "weights: a has much: a weight is above 0"),
        ({"weights": {"a": None, "b": 1}}, "weights: a has None: a weight is above 0"),
        ({"weights": [1, 2]}, "weights is a list: give a number for the name of each dataset"),
    ],
)
def test_invalid_mixtures_are_refused(settings, words):
    with pytest.raises(DataError, match=words):
        mixed_dataset(None, **{"datasets": {"a": rows(2), "b": rows(2)}, **settings})


def test_names_of_datasets_may_be_numbers():
    mixture = MixedDataset({2023: rows(10), 2024: rows(90)}, weights={2024: 1, 2023: 1})
    assert mixture.names == ("2023", "2024")
    assert mixture.examples_per_epoch == 180


def test_another_mixture_does_not_continue_a_run():
    def loader(weight):
        mixture = make_mixture([(5, weight), (5, 1.0)])
        return BatchLoader(mixture, batch_size=1, collate_fn=list, shuffle=True, seed=0, max_steps_per_epoch=2)

    with pytest.raises(DataError, match=r"the mixture was d0 0\.66.*, now d0 0\.75"):
        loader(3).load_state_dict(loader(2).state_dict())


def test_packs_and_pairs_keep_their_source():
    packs = {
        "a": PackedDataset(Rows(rows(4, 0, 3)), max_seq_len=6),
        "b": PackedDataset(Rows(rows(4, 4, 2)), max_seq_len=6),
    }
    batch = collate_documents([MixedDataset(packs)[index] for index in (0, 3)])
    assert batch.sources == ("a", "b")
    assert batch.per_token["source"].tolist() == [[0] * 6 + [1] * 2]
    pair = {}
    for side in ("chosen", "rejected"):
        pair |= {f"{side}_input_ids": [1, 2], f"{side}_labels": [2, -100]}
    batch = collate_preference([MixedDataset({"a": [pair], "b": [pair]})[1]])
    assert batch.per_document["source"].tolist() == [1, 1]


class Rows(list):
    pass


class Model(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.output = nn.Linear(8, vocabulary, bias=False)


@pytest.mark.parametrize("kind", ["chunked", "every position", "plain", "mean alone"])
def test_losses_by_dataset_are_those_of_the_formula(kind):
    torch.manual_seed(0)
    model = Model(16)
    hidden = torch.randn(1, 24, 8, requires_grad=True)
    mixture = MixedDataset({"a": rows(3, 1, 4), "b": rows(2, 5, 4), "c": rows(1, 9, 4)})
    batch = collate_documents([mixture[index] for index in (0, 4, 2, 3, 0, 1)])  # of a and b
    batch.labels[0, ::3] = -100
    loss = {
        "chunked": LinearCrossEntropyLoss(num_output_chunks=3),
        "every position": LinearCrossEntropyLoss(num_output_chunks=3, mask_ignored_tokens=False),
        "plain": nn.CrossEntropyLoss(reduction="none"),
        "mean alone": nn.CrossEntropyLoss(),
    }[kind]
    step_metrics = StepMetrics()
    loss_fn = setup_loss(loss, model)
    with step_metrics.by_source(batch) as row_losses:
        total, _ = loss_fn.sum_and_count(hidden, batch.labels, model.output, row_losses=row_losses)
    step_metrics.add_loss(total)
    metrics = step_metrics.total([total.item(), *step_metrics.new_sums(ParallelDims())])
    losses = {name: value for name, value in metrics.items() if name.startswith("loss/")}

    expected = {}
    if kind != "mean alone":  # of a mean over all labels, no part is known
        logits = hidden.detach().double() @ model.output.weight.detach().double().T
        token_losses = nn.functional.cross_entropy(logits[0], batch.labels[0], reduction="none")
        is_labeled = batch.labels[0] >= 0
        for number, name in enumerate("ab"):
            is_of_dataset = batch.per_token["source"][0] == number
            expected[f"loss/{name}"] = float(token_losses[is_of_dataset & is_labeled].mean())
    assert losses == pytest.approx(expected, rel=1e-5)  # in float32
