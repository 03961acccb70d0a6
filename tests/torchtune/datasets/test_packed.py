"""Every token once, nothing padded, packs nearly full."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtune.data import DataError, collate_documents
from torchtune.datasets import PackedDataset
from torchtune.datasets._packed import best_fit


class Rows(list):
    """Rows in which every token of the whole data is another number."""

    @classmethod
    def of(cls, lengths):
        rows = cls()
        token = 0
        for length in lengths:
            tokens = list(range(token, token + length))
            rows.append({"tokens": tokens, "labels": [*tokens[1:], -100]})
            token += length
        return rows


lengths_of_rows = st.lists(st.integers(1, 50), min_size=1, max_size=60)


@given(lengths=lengths_of_rows, split=st.booleans())
@settings(max_examples=60, deadline=None)
def test_packs_have_every_token_once(lengths, split):
    packed = PackedDataset(Rows.of(lengths), max_seq_len=50, split_across_pack=split)
    batches = [collate_documents([packed[i]]) for i in range(len(packed))]
    tokens = torch.cat([batch["tokens"].flatten() for batch in batches])
    assert sorted(tokens.tolist()) == list(range(sum(lengths)))
    for batch, length in zip(batches, packed.lengths, strict=True):
        assert batch["tokens"].shape == (1, length)
        assert length <= 50
        expected = torch.cat([torch.arange(n) for n in batch["documents"].lengths])
        assert torch.equal(batch["input_pos"][0], expected)
    if not split:
        lengths_of_packs = [batch["documents"].lengths for batch in batches]
        assert sorted(itertools.chain(*lengths_of_packs)) == sorted(lengths)
    else:
        assert all(length == 50 for length in packed.lengths[:-1])


@given(lengths=lengths_of_rows)
@settings(max_examples=30, deadline=None)
def test_labels_stay_those_of_the_rows(lengths):
    """A cut does not lose the label at its place: it is the first token of the next piece."""
    rows = Rows.of(lengths)
    expected = {}  # token -> label
    for row in rows:
        expected |= zip(row["tokens"], row["labels"], strict=True)
    for split in (False, True):
        packed = PackedDataset(rows, max_seq_len=50, split_across_pack=split)
        for i in range(len(packed)):
            for document in packed[i]:
                for token, label in zip(document["tokens"].tolist(), document["labels"].tolist(), strict=True):
                    assert expected[token] == label


def test_packs_are_nearly_full_and_always_the_same():
    lengths = np.random.RandomState(0).lognormal(5, 0.8, 20_000).astype(int).clip(8, 2048)
    packs = best_fit(lengths, 2048)
    assert lengths.sum() / (len(packs) * 2048) > 0.995
    assert sorted(itertools.chain(*packs)) == list(range(20_000))
    assert packs == best_fit(lengths, 2048)
    assert [pack[0] for pack in packs] == sorted(pack[0] for pack in packs)


def test_fill_of_packs_is_logged(caplog):
    with caplog.at_level("INFO", logger="torchtune"):
        packed = PackedDataset(Rows.of([6, 5, 4, 3, 2]), max_seq_len=10)
    assert packed.fill == 1.0
    assert "Packed 5 examples into 2 packs of up to 10 tokens, 100.0 % full." in caplog.text


def test_row_longer_than_a_pack_is_refused():
    with pytest.raises(DataError, match=r"2 rows are longer than max_seq_len=4 .*\(rows 1, 2, counted from 0\)"):
        PackedDataset(Rows.of([4, 5, 6]), max_seq_len=4)


def test_max_packs_keeps_the_first_packs():
    packed = PackedDataset(Rows.of([4, 4, 4]), max_seq_len=4, max_packs=2)
    assert len(packed) == 2
    with pytest.raises(DataError, match="empty"):
        PackedDataset(Rows.of([]), max_seq_len=4)
