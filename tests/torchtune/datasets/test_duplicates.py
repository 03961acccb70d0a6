"""The setting drop_duplicates."""

import logging

import pytest

from torchtune.data import DataError
from torchtune.datasets import (
    PackedDataset,
    kto_dataset,
    preference_dataset,
    pretokenized_dataset,
    prompt_dataset,
    text_completion_dataset,
)

ROWS = [{"text": text} for text in ("the cat", "the dog", "the cat", "the cat", "a bird")]


def test_rows_that_repeat_an_earlier_row_are_dropped_and_counted(tokenizer, caplog):
    caplog.set_level(logging.INFO)
    data = text_completion_dataset(tokenizer, ROWS, drop_duplicates=True)
    assert [tokenizer.decode(list(data[index]["tokens"])) for index in range(3)] == ["the cat", "the dog", "a bird"]
    assert [data.origins(index)[0]["row"] for index in range(3)] == [0, 1, 4]
    assert "2 rows that repeat an earlier row are dropped" in caplog.text
    assert len(text_completion_dataset(tokenizer, ROWS)) == 5


def test_rows_with_other_labels_or_weights_are_no_duplicates(tokenizer):
    ids = [5, 40, 7]
    rows = [{"input_ids": ids}, {"input_ids": ids, "labels": [-100, -100, 7]}, {"input_ids": ids, "weights": [1, 1, 2]}]
    assert len(pretokenized_dataset(tokenizer, rows * 2, drop_duplicates=True)) == 3


def test_packs_have_no_duplicates(tokenizer):
    settings = {"packed": True, "split_across_pack": False, "max_seq_len": 32}
    packs = text_completion_dataset(tokenizer, ROWS, drop_duplicates=True, **settings)
    assert isinstance(packs, PackedDataset)
    assert sum(len(packs[index]) for index in range(len(packs))) == 3


def test_rows_that_more_than_tokens_tell_apart_are_refused(tokenizer):
    pair = {"prompt": "Who?", "chosen": "a cat", "rejected": "no"}
    label = {"prompt": "Who?", "completion": "a cat", "label": True}
    for builder, row in ((preference_dataset, pair), (kto_dataset, label), (prompt_dataset, {"prompt": "Who?"})):
        with pytest.raises(DataError, match="drop_duplicates compares tokens and labels"):
            builder(tokenizer, source=[row], drop_duplicates=True)
