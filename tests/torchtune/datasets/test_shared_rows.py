"""Rows that are in two datasets."""

import numpy as np
import pytest

from torchtune.datasets import ConcatDataset, PackedDataset, count_shared_rows
from torchtune.datasets._token_store import TokenStore, digest_tokens, make_batch


def make_rows(*texts):
    return [{"tokens": list(tokens), "labels": [*tokens[1:], -100]} for tokens in texts]


@pytest.mark.parametrize(
    ("held_out", "training", "shared"),
    [
        ([(1, 2, 3)], [(7,), (1, 2, 3)], 1),
        ([(1, 2, 3), (1, 2, 3), (4,)], [(1, 2, 3)], 2),
        ([(1, 2)], [(1, 2, 0), (0, 1, 2), (2, 1), (1,), (12,)], 0),  # zeros, order and ends matter
        ([(3, 1)], [(1, 3), (2, 2), (4,)], 0),  # the same sum
    ],
)
def test_rows_with_the_same_tokens_are_counted(held_out, training, shared):
    assert count_shared_rows(make_rows(*held_out), make_rows(*training)) == (shared, len(held_out))


def test_packs_and_lists_are_compared_by_their_rows():
    rows = make_rows((1, 2), (3, 4, 5), (6,))
    packed = PackedDataset(rows[:2], max_seq_len=8)
    assert count_shared_rows(packed, ConcatDataset([rows[1:2], rows[2:]])) == (1, 2)


def test_answers_of_a_pair_are_not_exchanged():
    def pair(chosen, rejected):
        row = {}
        for side, ids in (("chosen", chosen), ("rejected", rejected)):
            row |= {f"{side}_input_ids": ids, f"{side}_labels": ids}
        return row

    assert count_shared_rows([pair([1], [2])], [pair([2], [1])]) == (0, 1)
    assert count_shared_rows([pair([1], [2])], [pair([1], [2])]) == (1, 1)


def test_datasets_that_cannot_be_compared_give_none():
    class Stream(list):
        is_stream = True

    class Pictures(list):
        num_images = 3

    rows = make_rows((1, 2))
    for dataset in (Stream(rows), Pictures(rows), make_rows((1,)) * 20_001):
        assert count_shared_rows(rows, dataset) is None


def test_digests_of_stored_rows_are_those_of_the_rows():
    generator = np.random.default_rng(1)
    texts = [generator.integers(0, 9, length).astype(np.int32) for length in (4, 0, 7, 1, 3, 3)]
    batches = []
    for part in (texts[:2], texts[2:]):
        no_weights = [np.empty(0, np.float32)] * len(part)
        batches.append(make_batch({"rows.tokens": part, "rows.labels": part, "rows.label_weights": no_weights}))
    store = TokenStore(batches)
    alone = [digest_tokens(text, np.array([0, len(text)]))[0] for text in texts]
    assert store.digests().tolist() == alone
    assert len(set(alone)) == len(texts)
