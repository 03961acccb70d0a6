"""Weights of turns, rows and parts: from the file to the batch."""

import itertools

import numpy as np
import pytest
import torch

from tests.tiny import write_checkpoint, write_lines
from torchtune.data import (
    Batch,
    BatchLoader,
    DataError,
    OpenAIToMessages,
    collate_documents,
    collate_preference,
    padded_collate_packed,
    padded_collate_sft,
)
from torchtune.datasets import (
    MixedDataset,
    PackedDataset,
    SFTDataset,
    chat_dataset,
    classification_dataset,
    embedding_dataset,
    kto_dataset,
    preference_dataset,
    reranking_dataset,
    text_completion_dataset,
)
from torchtune.tokenizers import hf_tokenizer

QUESTION = {"role": "user", "content": "Where is cat 1?"}
ANSWER = {"role": "assistant", "content": "On mat 1."}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, tied=False)
    return str(folder)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return hf_tokenizer(folder, max_seq_len=256)


def dataset_of(tokenizer, *rows, **settings):
    return SFTDataset(source=rows, message_transform=OpenAIToMessages(), model_transform=tokenizer, **settings)


def texts_by_weight(tokenizer, row):
    """Return weight -> text of the labels with this weight."""
    labels = np.asarray(row["labels"])
    weights = np.asarray(row.get("label_weights", np.ones(len(labels))))
    texts = {}
    for weight in sorted(set(weights[labels != -100].tolist())):
        ids = labels[(labels != -100) & (weights == weight)].tolist()
        texts[weight] = tokenizer.decode(ids, skip_special_tokens=True)
    return texts


def test_tokens_of_a_turn_have_its_weight(tokenizer):
    row = {"messages": [QUESTION, {**ANSWER, "weight": 0.25}, QUESTION, {"role": "assistant", "content": "Gone."}]}
    weighted = dataset_of(tokenizer, row)[0]
    assert texts_by_weight(tokenizer, weighted) == {0.25: "On mat 1.", 1.0: "Gone."}
    plain = dataset_of(tokenizer, {"messages": [QUESTION, ANSWER, *row["messages"][2:]]})[0]
    assert "label_weights" not in plain
    assert weighted["tokens"] == plain["tokens"]
    assert weighted["labels"] == plain["labels"]


def test_weight_of_a_row_is_a_factor_of_its_turns(tokenizer):
    row = {"messages": [QUESTION, {**ANSWER, "weight": 0.5}, QUESTION, {"role": "assistant", "content": "Gone."}]}
    rows = [{**row, "weight": 4, "importance": 2}]
    assert texts_by_weight(tokenizer, dataset_of(tokenizer, *rows)[0]) == {2.0: "On mat 1.", 4.0: "Gone."}
    by_importance = dataset_of(tokenizer, *rows, weight_column="importance")[0]
    assert texts_by_weight(tokenizer, by_importance) == {1.0: "On mat 1.", 2.0: "Gone."}
    unread = dataset_of(tokenizer, *rows, weight_column=None)[0]
    assert texts_by_weight(tokenizer, unread) == {0.5: "On mat 1.", 1.0: "Gone."}


def test_column_weight_of_texts_is_not_a_weight(tokenizer):
    row = dataset_of(tokenizer, {"messages": [QUESTION, ANSWER], "weight": "4 kg"})[0]
    assert "label_weights" not in row


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (-1, "column 'weight' .* has weight -1: a weight is a number of at least 0"),
        (0, "column 'weight' is 0, so nothing is trained on"),
    ],
)
def test_row_that_no_weight_can_train_is_refused(tokenizer, weight, words):
    with pytest.raises(DataError, match=words):
        dataset_of(tokenizer, {"messages": [QUESTION, ANSWER], "weight": weight})


@pytest.mark.parametrize("untrained", ["mat", "<|im_end|>"])  # a control token in a text is plain text
def test_part_of_a_turn_that_is_not_trained_on_has_no_label(tokenizer, untrained):
    parts = [{"type": "text", "text": "On "}, {"type": "text", "text": untrained, "train": False}]
    content = [*parts, {"type": "text", "text": " 1."}]
    row = dataset_of(tokenizer, {"messages": [QUESTION, {"role": "assistant", "content": content}]})[0]
    answer = {"role": "assistant", "content": f"On {untrained} 1."}
    full_row = dataset_of(tokenizer, {"messages": [QUESTION, answer]})[0]
    assert row["tokens"] == full_row["tokens"]
    assert texts_by_weight(tokenizer, row) == {1.0: "On  1."}
    is_label = np.asarray(row["labels"]) != -100
    assert (np.asarray(row["labels"])[is_label] == np.asarray(full_row["labels"])[is_label]).all()


def test_part_of_a_text_that_the_template_changes_is_refused(folder):
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | upper }}<|im_end|>\n{% endfor %}"
    tokenizer = hf_tokenizer(folder, chat_template=template)
    content = [{"type": "text", "text": "On mat 1."}, {"type": "text", "text": " Or not.", "train": False}]
    with pytest.raises(DataError, match=r"turn 1 .*train: false.* cannot be located"):
        dataset_of(tokenizer, {"messages": [QUESTION, {"role": "assistant", "content": content}]})


@pytest.mark.parametrize("truncation_type", ["left", "right"])
def test_truncated_rows_keep_the_weights_of_their_remaining_tokens(folder, truncation_type):
    turns = [QUESTION, {**ANSWER, "loss_scale": 0.25}, QUESTION, {**ANSWER, "weight": 3}]
    full_row = dataset_of(hf_tokenizer(folder), {"messages": turns})[0]
    cut = dataset_of(hf_tokenizer(folder, max_seq_len=60, truncation_type=truncation_type), {"messages": turns})[0]
    assert len(cut["tokens"]) == 60
    if truncation_type == "left":
        assert cut["label_weights"] == full_row["label_weights"][-60:]
    else:  # the last label is that of the token which ends the row
        assert cut["label_weights"][:58] == full_row["label_weights"][:58]


def test_packs_and_batches_carry_the_weights(tokenizer):
    rows = [{"messages": [QUESTION, ANSWER], "weight": weight} for weight in (0.5, 1, 3)]
    packs = PackedDataset(dataset_of(tokenizer, *rows), max_seq_len=256)
    batch = collate_documents([packs[index] for index in range(len(packs))])
    labels = batch.num_labels // 3
    weights = batch.label_weights[batch.labels != -100]
    assert sorted(weights.tolist()) == [0.5] * labels + [1.0] * labels + [3.0] * labels
    assert batch.num_terms == labels * 4.5
    padded = batch.pad_to_multiple(16)
    shards = [padded.split(rank, 2) for rank in range(2)]
    assert sum(shard.num_terms for shard in shards) == batch.num_terms


def test_pieces_of_a_split_row_keep_their_weights(tokenizer):
    rows = [{"messages": [QUESTION, {**ANSWER, "weight": 0.5}, QUESTION, ANSWER]}]
    packs = PackedDataset(dataset_of(tokenizer, *rows), max_seq_len=8, split_across_pack=True)
    row = dataset_of(tokenizer, *rows)[0]
    documents = itertools.chain.from_iterable(packs)
    weights = torch.cat([document["label_weights"] for document in documents])
    assert weights.tolist() == row["label_weights"]


@pytest.mark.parametrize("packed", [False, True])
def test_mixture_of_data_with_and_without_weights_weighs_the_former_alone(tokenizer, packed):
    weighted = dataset_of(tokenizer, {"messages": [QUESTION, ANSWER], "weight": 3})
    plain = dataset_of(tokenizer, {"messages": [QUESTION, ANSWER]})
    mixture = MixedDataset({"weighted": weighted, "plain": plain})
    rows = PackedDataset(mixture, max_seq_len=256) if packed else mixture
    batch = collate_documents([rows[index] for index in range(len(rows))])
    assert batch.num_terms == 2 * batch.num_labels


def test_loader_counts_weights_as_terms(tokenizer):
    rows = [{"messages": [QUESTION, ANSWER], "weight": 0.5}, {"messages": [QUESTION, ANSWER]}]
    loader = BatchLoader(
        dataset_of(tokenizer, *rows), batch_size=2, collate_fn=collate_documents, shuffle=False, seed=0
    )
    _, num_labels, num_terms = loader.peek_counts()
    assert num_terms == 0.75 * num_labels


def test_collate_functions_without_weights_refuse_them(tokenizer):
    example = dataset_of(tokenizer, {"messages": [QUESTION, ANSWER], "weight": 2})[0]
    for collate in (padded_collate_sft, lambda examples: padded_collate_packed([examples])):
        with pytest.raises(DataError, match="weights of turns other than 0 and 1"):
            collate([example])


def test_label_weights_of_a_users_rows_must_fit_the_labels():
    example = {"tokens": [1, 2, 3], "labels": [2, 3, -100], "label_weights": [1.0, 2.0]}
    with pytest.raises(DataError, match="3 labels, but label_weights of shape"):
        collate_documents([example])


def test_preference_data_refuses_weights_between(tokenizer):
    pair = {"chosen": [QUESTION, {**ANSWER, "weight": 0.5}], "rejected": [QUESTION, ANSWER]}
    with pytest.raises(DataError, match=r"turn 1 has weight 0\.5, but preference data takes turns only as a whole"):
        preference_dataset(tokenizer, source=[pair])


def pair(**columns):
    return {"prompt": "Where?", "chosen": "Here.", "rejected": "No.", **columns}


def test_pair_has_the_weight_of_its_row(tokenizer):
    rows = [pair(weight=0.5), pair(weight=1), pair()]
    weights = [row.get("weight") for row in preference_dataset(tokenizer, source=rows)]
    assert weights == [0.5, None, None]
    weights = [row.get("weight") for row in preference_dataset(tokenizer, source=rows, weight_column=None)]
    assert weights == [None, None, None]


def test_weights_of_a_table_are_read(tokenizer, tmp_path):
    """Every cell of a table is a text; an empty cell, or a text that is no number, is not a weight."""
    path = tmp_path / "rows.csv"
    path.write_text("prompt,chosen,rejected,weight\na,b,c,0.5\na,d,c,2e1\na,e,c,\na,f,c,4 kg\n")
    weights = [row.get("weight") for row in preference_dataset(tokenizer, source=str(path))]
    assert weights == [0.5, 20.0, None, None]


def test_labeled_answer_has_the_weight_of_its_row(tokenizer):
    rows = [
        {"prompt": "Where?", "completion": "Here.", "label": True, "importance": 3},
        {"prompt": "Where?", "completion": "No.", "label": False, "importance": 1},
    ]
    data = kto_dataset(tokenizer, source=rows, weight_column="importance")
    assert [row.get("weight") for row in data] == [3.0, None]
    assert "label_weights" not in data[0]


def test_weights_of_pairs_are_counted_in_the_batch(tokenizer):
    rows = [pair(weight=0.5), pair(weight=2), pair()]
    batch = collate_preference([*preference_dataset(tokenizer, source=rows)])
    assert batch.per_document["weight"].tolist() == [0.5, 2.0, 1.0] * 2  # of both answers
    assert batch.num_terms == 3.5
    unweighted = collate_preference([*preference_dataset(tokenizer, source=[pair(), pair(weight=1)])])
    assert "weight" not in unweighted.per_document
    assert unweighted.num_terms == 2


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, -1], "column 'weight' .* has weight -1: a weight is a number of at least 0"),
        ([1, 0], "column 'weight' is 0, so nothing is trained on: leave the row out"),
        ([0, 0], "column 'weight' is 0"),
        ([1, float("inf")], "has weight inf"),
    ],
)
def test_pairs_of_weight_0_and_below_are_refused(tokenizer, weights, message):
    with pytest.raises(DataError, match=message):
        preference_dataset(tokenizer, source=[pair(weight=weight) for weight in weights])


def test_skipped_rows_of_weight_0_leave_the_others(tokenizer):
    rows = [pair(weight=0), pair(weight=2)]
    data = preference_dataset(tokenizer, source=rows, on_bad_row="skip")
    assert [row["weight"] for row in data] == [2.0]


@pytest.mark.parametrize(("column", "value"), [("train", False), ("loss_weight", 2), ("masked", True)])
@pytest.mark.parametrize("is_pair", [True, False])
def test_columns_that_look_like_a_weight_are_said(tokenizer, caplog, column, value, is_pair):
    if is_pair:
        preference_dataset(tokenizer, source=[pair(**{column: value})])
    else:
        dataset_of(tokenizer, {"messages": [QUESTION, ANSWER], column: value})
    assert f"Rows have a column '{column}', which does not change what is trained on" in caplog.text


def test_weight_of_a_users_pair_is_at_least_0(tokenizer):
    (example,) = preference_dataset(tokenizer, source=[pair()])
    with pytest.raises(DataError, match="An example has weight -2"):
        collate_preference([{**example, "weight": -2}])


@pytest.mark.parametrize(
    ("dataset", "row"),
    [
        (embedding_dataset, {"query": "cat", "positive": "one cat"}),
        (reranking_dataset, {"query": "cat", "positive": "one cat", "negatives": ["dog"]}),
        (classification_dataset, {"text": "cat", "label": "animal"}),
        (text_completion_dataset, {"text": "cat"}),
    ],
)
def test_datasets_that_read_no_weights_of_rows_say_so(tokenizer, caplog, dataset, row):
    assert len(dataset(tokenizer, source=[{**row, "weight": 0.5}]))
    assert "column 'weight', which a dataset" in caplog.text
    assert "does not read: every row counts once" in caplog.text


def test_weights_move_with_the_batch():
    weights = torch.tensor([[0.5, 2.0, 1.0]])
    batch = Batch(torch.tensor([[1, 2, 3]]), torch.tensor([[2, -100, 4]]), per_token={"label_weights": weights})
    assert batch.to("cpu").label_weights.tolist() == weights.tolist()
    assert batch.num_terms == 1.5


def test_shipped_builder_passes_the_weight_column_on(tokenizer):
    rows = [{"messages": [QUESTION, ANSWER], "weight": 2}]
    settings = {"conversation_column": "messages", "conversation_style": "openai"}
    row = chat_dataset(tokenizer, source=rows, weight_column=None, **settings)[0]
    assert "label_weights" not in row


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("column", ["weight", "value"])
def test_streamed_rows_keep_their_weights(tokenizer, tmp_path, packed, column):
    rows = [{"messages": [QUESTION, ANSWER], column: weight} for weight in (0.5, 1, 3)]
    write_lines(tmp_path / "rows.jsonl", rows)
    settings = {"conversation_column": "messages", "conversation_style": "openai", "streaming": True}
    settings["weight_column"] = column
    stream = chat_dataset(tokenizer, source=str(tmp_path / "rows.jsonl"), packed=packed, **settings)
    stream.begin(0, shuffle=False)
    num_examples = 1 if packed else 3
    batch = collate_documents([stream[index] for index in range(num_examples)])
    assert batch.num_terms == pytest.approx(batch.num_labels * 1.5)


def test_data_show_tells_of_weights(tune, folder, tmp_path):
    rows = [{"messages": [QUESTION, ANSWER], "weight": weight} for weight in (0.25, 1, 3)]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    result = tune("data", "show", path, "--tokenizer", folder)
    assert result.code == 0, result.err
    assert "2 rows have other weights than 1 (0.25 to 3)" in result.out
    assert "trained on, between [[ and ]], weight 0.25" in result.out


def test_data_show_tells_of_weights_of_pairs(tune, folder, tmp_path):
    rows = [{"prompt": "Where?", "chosen": "Here.", "rejected": "No.", "weight": weight} for weight in (1, 0.5, 2)]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    result = tune("data", "show", path, "--tokenizer", folder)
    assert result.code == 0, result.err
    assert "2 rows have other weights than 1 (0.5 to 2)" in result.out
    assert "not read" not in result.err
