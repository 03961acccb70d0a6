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
    return [{"tokens": [first + i] * length, "labels": [first + i] * length} for i in range(count)]


def mixture(sizes, **how):
    starts = itertools.accumulate((size for size, _ in sizes), initial=0)
    names = [f"d{number}" for number in range(len(sizes))]
    parts = {name: rows(size, start) for name, (size, _), start in zip(names, sizes, starts, strict=False)}
    return MixedDataset(parts, {name: weight for name, (_, weight) in zip(names, sizes, strict=True)}, **how)


def visits(of, shuffle=True, epoch=0):
    """The order of an epoch, and how often it comes to each example of each dataset."""
    order = of.order(5, epoch, shuffle)
    assert len(order) == of.examples_per_epoch
    times = np.bincount(order, minlength=len(of))
    return order, np.split(times, np.cumsum(of.sizes)[:-1])


@given(sizes=SIZES, shuffle=st.booleans())
@settings(max_examples=40, deadline=None)
def test_stop_decides_when_an_epoch_ends(sizes, shuffle):
    _, times = visits(mixture(sizes, stop="all"), shuffle)
    assert all((part == 1).all() for part in times)
    _, times = visits(mixture(sizes, stop="first"), shuffle)
    assert all(part.max() <= 1 for part in times)
    assert any(part.min() == 1 for part in times)
    _, times = visits(mixture(sizes, stop="repeat"), shuffle)
    assert all(part.min() >= 1 and np.ptp(part) <= 1 for part in times)
    assert any(part.max() == 1 for part in times)


@given(sizes=SIZES, shuffle=st.booleans())
@settings(max_examples=30, deadline=None)
def test_every_stretch_of_an_epoch_is_in_proportion(sizes, shuffle):
    of = mixture(sizes)
    order, _ = visits(of, shuffle)
    source = np.searchsorted(np.cumsum(of.sizes), order, side="right")
    total = math.fsum(weight for _, weight in sizes)
    for number, (_, weight) in enumerate(sizes):
        seen = np.concatenate([[0], np.cumsum(source == number)])
        assert np.abs(seen - weight / total * np.arange(len(seen))).max() <= len(sizes) + 1


def test_weights_and_temperature_are_those_of_the_formula():
    of = MixedDataset({"a": rows(10), "b": rows(90)}, temperature=2.0)
    share = math.sqrt(10) / (math.sqrt(10) + math.sqrt(90))  # sizes are the default of weights
    assert of.examples_per_epoch == 90 + math.ceil(90 * share / (1 - share))
    weighted = MixedDataset({"a": rows(10), "b": rows(90)}, weights={"b": 1, "a": 1})
    assert weighted.examples_per_epoch == 180
    order = visits(weighted, shuffle=False)[0]
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
        how = {"batch_size": 4 // size, "accumulation_steps": 2, "shuffle": True, "seed": 3, "collate_fn": list}
        return BatchLoader(mixture(sizes, stop=stop), rank=rank, world_size=size, **how)

    def steps(of):
        steps_seen = []
        while of.epoch < 2:
            steps_seen += [(of.epoch, batches) for batches in of]
        return steps_seen

    uninterrupted = steps(loader())
    first = loader(0, world)
    walk = itertools.islice(itertools.chain.from_iterable(itertools.repeat(first)), min(taken, len(uninterrupted)))
    done = sum(1 for _ in walk)
    ranks = []
    for rank in range(world):
        resumed = loader(rank, world)
        resumed.load_state_dict(first.state_dict())
        ranks.append(steps(resumed))
    assert len(ranks[0]) == len(uninterrupted) - done
    for (epoch, expected), *parts in zip(uninterrupted[done:], *ranks, strict=True):
        tokens = []
        for rank_epoch, batches in parts:
            assert rank_epoch == epoch
            for example in itertools.chain(*batches):
                if example["labels"][0] != -100:
                    tokens.append(example["tokens"][0])
        assert sorted(tokens) == sorted(example["tokens"][0] for example in itertools.chain(*expected))
    if len(uninterrupted) > 2:  # epochs of one step may have the same order
        first_epoch = [batches for epoch, batches in uninterrupted if epoch == 0]
        second_epoch = [batches for epoch, batches in uninterrupted if epoch == 1]
        assert first_epoch != second_epoch


@pytest.mark.parametrize(
    ("how", "words"),
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
def test_invalid_mixtures_are_refused(how, words):
    with pytest.raises(DataError, match=words):
        mixed_dataset(None, **{"datasets": {"a": rows(2), "b": rows(2)}, **how})


def test_names_of_datasets_may_be_numbers():
    of = MixedDataset({2023: rows(10), 2024: rows(90)}, weights={2024: 1, 2023: 1})
    assert of.names == ("2023", "2024")
    assert of.examples_per_epoch == 180


def test_another_mixture_does_not_continue_a_run():
    def loader(weight):
        return BatchLoader(
            mixture([(5, weight), (5, 1.0)]), batch_size=1, collate_fn=list, shuffle=True, seed=0, max_steps_per_epoch=2
        )

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
    of = MixedDataset({"a": rows(3, 1, 4), "b": rows(2, 5, 4), "c": rows(1, 9, 4)})
    batch = collate_documents([of[index] for index in (0, 4, 2, 3, 0, 1)])
    batch.labels[0, ::3] = -100
    loss = {
        "chunked": lambda: LinearCrossEntropyLoss(num_output_chunks=3),
        "every position": lambda: LinearCrossEntropyLoss(num_output_chunks=3, mask_ignored_tokens=False),
        "plain": lambda: nn.CrossEntropyLoss(reduction="none"),
        "mean alone": nn.CrossEntropyLoss,
    }[kind]()
    step_metrics = StepMetrics()
    loss_fn = setup_loss(loss, model)
    with step_metrics.by_source(batch) as row_losses:
        total, _ = loss_fn.sum_and_count(hidden, batch.labels, model.output, row_losses=row_losses)
    step_metrics.add_loss(total)
    metrics = step_metrics.total([total.item(), *step_metrics.new_sums(ParallelDims())])
    logits = hidden.detach().double() @ model.output.weight.detach().double().T
    every = nn.functional.cross_entropy(logits[0], batch.labels[0], reduction="none")
    source = batch.per_token["source"][0]
    expected = {
        f"loss/{name}": float(every[(source == i) & (batch.labels[0] >= 0)].mean()) for i, name in enumerate("ab")
    }
    losses = {name: value for name, value in metrics.items() if name.startswith("loss/")}
    assert losses == pytest.approx({} if kind == "mean alone" else expected, rel=1e-5)  # float32; of c there is nothing
