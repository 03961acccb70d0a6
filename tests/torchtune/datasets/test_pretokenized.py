"""Rows of token ids."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import torchtune
from tests.tiny import write_checkpoint, write_lines
from torchtune.data import DataError, collate_documents
from torchtune.datasets import PackedDataset, pretokenized_dataset
from torchtune.tokenizers import hf_tokenizer

IDS = [5, 40, 7, 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, tied=False)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return hf_tokenizer(str(folder), max_seq_len=64)


@pytest.mark.parametrize(
    ("columns", "labels"),
    [
        ({}, [40, 7, 9, -100]),
        ({"labels": [-100, -100, 7, 9]}, [-100, 7, 9, -100]),
        ({"labels": [5, -100, 7, 8]}, [-100, 7, 8, -100]),
        ({"completion_mask": [0, 0, 1, 1]}, [-100, 7, 9, -100]),
        ({"assistant_masks": [1, 0, 0, 1]}, [-100, -100, 9, -100]),
        ({"attention_mask": [1, 1, 1, 1], "token_type_ids": [0, 0, 0, 0]}, [40, 7, 9, -100]),
    ],
)
def test_labels_are_those_of_the_next_token(tokenizer, columns, labels):
    row = pretokenized_dataset(tokenizer, [{"input_ids": IDS, **columns}])[0]
    assert row == {"tokens": IDS, "labels": labels}


def test_loss_is_that_of_transformers(tokenizer, folder):
    labels = [-100, -100, 7, 9]
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = reference(input_ids=torch.tensor([IDS]), labels=torch.tensor([labels])).loss
    batch = collate_documents([pretokenized_dataset(tokenizer, [{"input_ids": IDS, "labels": labels}])[0]])
    model, _ = torchtune.load(folder, device="cpu", dtype=torch.float32)
    logits = model(**batch.model_inputs())
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)


def test_weights_are_those_of_the_tokens(tokenizer):
    row = {"input_ids": IDS, "weights": [0.0, 1.0, 0.5, 2.0]}
    assert pretokenized_dataset(tokenizer, [row])[0]["label_weights"] == [1.0, 0.5, 2.0, 1.0]


def test_long_rows_are_cut_or_split(tokenizer):
    cut = pretokenized_dataset(tokenizer, [{"input_ids": IDS}], max_seq_len=3)[0]
    assert cut == {"tokens": [5, 40, 7], "labels": [40, 7, -100]}
    packs = pretokenized_dataset(tokenizer, [{"input_ids": IDS}], max_seq_len=3, packed=True, split_across_pack=True)
    assert isinstance(packs, PackedDataset)
    assert [document["labels"].tolist() for (document,) in packs] == [[40, 7, 9], [-100]]


def test_columns_of_other_names_are_read_also_in_streams(tokenizer, tmp_path):
    write_lines(tmp_path / "rows.jsonl", [{"ids": IDS, "targets": [-100, -100, 7, 9]}] * 2)
    columns = {"input_ids": "ids", "labels": "targets"}
    for streaming in (False, True):
        data = pretokenized_dataset(tokenizer, str(tmp_path / "rows.jsonl"), columns, streaming=streaming)
        if streaming:
            data.begin(0, shuffle=False)
        assert np.asarray(data[1]["labels"]).tolist() == [-100, 7, 9, -100]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"tokens": IDS}, "there is no column 'input_ids'"),
        ({"input_ids": None}, "column 'input_ids' holds nothing"),
        ({"input_ids": "5 40"}, "tokens must be a list of token ids"),
        ({"input_ids": [[5, 40]]}, "flat"),
        ({"input_ids": [5, 10**6]}, "token id 1000000 is not below 316"),
        ({"input_ids": IDS, "labels": [1]}, "4 tokens but 1 labels"),
        ({"input_ids": IDS, "labels": [-1] * 4}, "label -1 is neither a token id nor -100"),
        ({"input_ids": IDS, "labels": [-100] * 4}, "no label is left"),
        ({"input_ids": IDS, "completion_mask": [1]}, "column 'completion_mask' must have a 0 or a 1"),
        ({"input_ids": IDS, "attention_mask": [1, 1, 0, 0]}, "column 'attention_mask' has zeros, which mark padding"),
        ({"input_ids": IDS, "weights": [-1, 1, 1, 1]}, "label_weights must be numbers of at least 0"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_refused(tokenizer, row, words):
    with pytest.raises(DataError, match=words):
        pretokenized_dataset(tokenizer, [row])
