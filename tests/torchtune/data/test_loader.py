"""Order, position and sharing of steps."""

import itertools
import random

import numpy as np
import pytest
import torch

from torchtune.data import BatchLoader, DataError, collate_documents


def loader(size=23, **settings):
    settings = {"batch_size": 2, "accumulation_steps": 2, "shuffle": True, "seed": 5, "collate_fn": list} | settings
    return BatchLoader(list(range(size)), **settings)


def flat(steps):
    """All examples of some steps, in order."""
    examples = []
    for step in steps:
        for batch in step:
            examples += batch
    return examples


def test_an_epoch_holds_every_example_once():
    steps = list(loader())
    sizes = [list(map(len, step)) for step in steps]
    assert sizes == [[2, 2]] * 5 + [[2, 1]]
    assert sorted(flat(steps)) == list(range(23))
    assert flat(steps) != list(range(23))


def test_epochs_and_seeds_have_orders_of_their_own():
    first_loader = loader()
    first = flat(first_loader)
    second = flat(first_loader)
    assert first_loader.epoch == 2
    assert first != second
    assert first == flat(loader())
    assert first != flat(loader(seed=6))


def test_order_of_a_seed_never_changes():
    """A resumed run must find the order of the run that was killed, on any version of any package."""
    assert flat(loader(8)) == [2, 7, 5, 0, 4, 3, 6, 1]
    assert flat(loader(8, seed=2**40 + 1)) == [1, 5, 0, 3, 4, 7, 6, 2]


def test_length_counts_optimizer_steps():
    assert len(loader()) == 6
    assert len(loader(24)) == 6
    assert len(loader(25)) == 7
    assert len(loader(max_steps_per_epoch=4)) == 4
    assert len(list(loader(max_steps_per_epoch=4))) == 4
    assert len(loader(max_steps_per_epoch=40)) == 6


@pytest.mark.parametrize("steps", range(14))
def test_loader_resumes_at_any_step(steps):
    """After any number of steps a new loader with the state yields what the first one still yields."""

    def rest(of, epochs):
        remaining_steps = []
        while of.epoch < epochs:
            remaining_steps += [(of.epoch, step) for step in of]
        return remaining_steps

    first = loader()
    taken = 0
    while taken < steps:
        for _ in itertools.islice(first, steps - taken):
            taken += 1
        if first._step == len(first):
            list(first)  # ends the epoch
    second = loader()
    second.load_state_dict(first.state_dict())
    assert rest(second, 4) == rest(first, 4)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("size", [23, 24, 25, 31, 33])
def test_ranks_share_the_steps_of_one(world_size, size):
    data = [{"tokens": [i], "labels": [i]} for i in range(size)]

    def steps(accumulation_steps, world_size, rank):
        settings = {"batch_size": 2, "collate_fn": collate_documents, "shuffle": True, "seed": 3}
        settings |= {"accumulation_steps": accumulation_steps, "world_size": world_size, "rank": rank}
        return list(BatchLoader(data, **settings))

    def labelled(step):
        labels = torch.cat([batch["labels"].flatten() for batch in step])
        return sorted(labels[labels >= 0].tolist())

    alone = steps(4, 1, 0)
    ranks = [steps(4 // world_size, world_size, rank) for rank in range(world_size)]
    for step, parts in zip(alone, zip(*ranks, strict=True), strict=True):
        assert len({len(part) for part in parts}) == 1, "ranks do different numbers of forward passes"
        assert sorted(itertools.chain(*map(labelled, parts))) == labelled(step)


def test_the_smallest_batch_is_known_before_it_comes():
    for rows, size, ranks, steps in itertools.product((1, 5, 12, 13), (1, 3, 4), (1, 2, 3), (1, 2)):
        loaders = [
            BatchLoader(
                [{"labels": [0]}] * rows,
                batch_size=size,
                collate_fn=list,
                shuffle=False,
                seed=0,
                accumulation_steps=steps,
                rank=rank,
                world_size=ranks,
            )
            for rank in range(min(rows, ranks))
        ]
        sizes = []
        for loader_of_rank in loaders:
            for step in loader_of_rank:
                sizes += map(len, step)
        smallest = min(sizes)
        assert loaders[0].smallest_batch == smallest, (rows, size, ranks, steps)


def test_a_rank_without_examples_gets_one_without_labels():
    data = [{"tokens": [i, i], "labels": [i, -100]} for i in range(5)]
    settings = {"batch_size": 2, "collate_fn": collate_documents, "shuffle": False, "seed": 0, "world_size": 2}
    labels = []
    for rank in range(2):
        *_, (last_batch,) = BatchLoader(data, rank=rank, **settings)
        labels.append(last_batch["labels"].tolist())
    assert labels == [[[4, -100]], [[-100, -100]]]
    packs = [[data[0], data[1]]] * 3
    (batch,) = list(BatchLoader(packs, rank=1, **{**settings, "batch_size": 1}))[-1]
    assert (batch["labels"] == -100).all()
    assert len(batch["documents"].lengths) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"size": 24}, "number of examples .* was 23, now 24"),
        ({"batch_size": 3}, "examples per step .* was 4, now 6"),
        ({"seed": 6}, "seed was 5, now 6"),
        ({"shuffle": False}, "shuffle was True, now False"),
    ],
)
def test_position_of_other_data_or_order_is_refused(change, words):
    state = loader().state_dict()
    with pytest.raises(DataError, match=words):
        loader(**change).load_state_dict(state)


def test_changed_content_is_refused():
    class Data(list):
        fingerprint = 1

    settings = {"batch_size": 1, "shuffle": True, "seed": 0, "collate_fn": list}
    state = BatchLoader(Data([1, 2]), **settings).state_dict()
    Data.fingerprint = 2
    with pytest.raises(DataError, match="content of the dataset was 1, now 2"):
        BatchLoader(Data([1, 2]), **settings).load_state_dict(state)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"size": 0}, "empty"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"max_steps_per_epoch": 0}, "max_steps_per_epoch"),
        ({"rank": 2, "world_size": 2}, "rank 2"),
    ],
)
def test_loader_settings_below_one_are_refused(settings, words):
    with pytest.raises(DataError, match=words):
        loader(**settings)


def test_seeking_is_immediate():
    read = []

    class Data:
        def __len__(self):
            return 1_000

        def __getitem__(self, index):
            read.append(index)
            return torch.tensor(index)

    batch_loader = BatchLoader(Data(), batch_size=1, shuffle=True, seed=0, collate_fn=list)
    batch_loader.load_state_dict({**batch_loader.state_dict(), "epoch": 7, "step": 900})
    next(iter(batch_loader))
    assert len(read) == 1


class Noisy:
    """Examples that are drawn at random whenever they are asked for."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        drawn = [index, int(torch.randint(1000, (1,))), int(np.random.randint(1000)), random.randrange(1000)]
        return {"tokens": drawn, "labels": drawn}


def test_a_step_that_is_loaded_ahead_moves_neither_the_position_nor_what_is_random():
    def make():
        return BatchLoader(Noisy(), batch_size=2, collate_fn=lambda rows: rows, shuffle=True, seed=3)

    plain = list(make())
    ahead = make()
    steps = []
    states = []
    torch.manual_seed(5)
    for batches in ahead:
        steps.append(batches)
        before = ahead.state_dict()
        rows = ahead.rows()
        upcoming = ahead.peek()
        assert (ahead.state_dict(), ahead.rows()) == (before, rows)
        assert (upcoming is None) == ahead.at_epoch_end == (len(steps) == 3)
        states.append(before)
    assert steps == plain
    assert int(torch.randint(1000, (1,))) == int(torch.randint(1000, (1,), generator=torch.manual_seed(5)))
    assert [(state["epoch"], state["step"]) for state in states] == [(0, 1), (0, 2), (1, 0)]
    resumed = make()
    resumed.load_state_dict(states[0])
    assert list(resumed) == plain[1:]
    assert list(resumed) != plain, "another epoch draws anew"
