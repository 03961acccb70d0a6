"""Rows of texts with labels."""

import pytest

from tests.tiny import write_checkpoint, write_lines
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, BatchLoader, DataError, collate_documents, padded_collate_sft
from torchtune.datasets import ClassificationTask, classification_dataset
from torchtune.tokenizers import hf_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return hf_tokenizer(str(write_checkpoint(tmp_path_factory.mktemp("checkpoint"))), max_seq_len=64)


def rows_of(*labels):
    return [{"text": f"the cat sees {number}", "label": label} for number, label in enumerate(labels)]


def last_labels(dataset):
    return [dataset[index]["labels"][-1] for index in range(len(dataset))]


@pytest.mark.parametrize(
    ("labels", "problem_type", "names", "numbers"),
    [
        (["spam", "ham", "spam"], "single_label_classification", ("ham", "spam"), [1, 0, 1]),
        ([10, 2, 10], "single_label_classification", ("2", "10"), [1, 0, 1]),
        ([True, False], "single_label_classification", ("false", "true"), [1, 0]),
        ([["b", "a"], [], ["a"]], "multi_label_classification", ("a", "b"), [2, 0, 1]),
        ([0.5, -1, 2.0, 0.5], "regression", (), [1, 0, 2, 1]),
    ],
)
def test_labels_say_problem_type_and_classes(tokenizer, labels, problem_type, names, numbers):
    dataset = classification_dataset(tokenizer, rows_of(*labels))
    assert dataset.task == ClassificationTask(problem_type, names)
    assert last_labels(dataset) == numbers


def test_only_the_last_token_has_a_label(tokenizer):
    row = classification_dataset(tokenizer, rows_of("a", "b"))[1]
    assert row["tokens"] == tokenizer.encode("the cat sees 1", add_eos=False)
    assert row["labels"] == [CROSS_ENTROPY_IGNORE_IDX] * (len(row["tokens"]) - 1) + [1]


def test_eos_ends_a_text_if_it_is_asked_for(tokenizer):
    row = classification_dataset(tokenizer, rows_of("a", "b"), add_eos=True)[0]
    assert row["tokens"][-1] == tokenizer.eos_id


def test_conversation_is_rendered_by_the_chat_template(tokenizer):
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "one cat"}]
    rows = [{"messages": messages, "label": label} for label in ("a", "b")]
    row = classification_dataset(tokenizer, rows, column="messages")[0]
    expected, _ = tokenizer.tokenize_messages(messages)
    assert row["tokens"] == list(expected)


def test_long_text_is_cut_before_its_label_is_set(tokenizer):
    rows = [{"text": "the cat " * 100, "label": label} for label in ("a", "b")]
    row = classification_dataset(tokenizer, rows, max_seq_len=8)[1]
    assert len(row["tokens"]) == 8
    assert row["labels"][-1] == 1


def test_setting_names_and_orders_the_classes(tokenizer):
    dataset = classification_dataset(tokenizer, rows_of("a", "b"), labels=["b", "c", "a"])
    assert dataset.task.class_names == ("b", "c", "a")
    assert last_labels(dataset) == [1, 0]  # numbers of the distinct targets, classes 0 and 2
    assert dataset.targets == [(0.0,), (2.0,)]


def test_problem_type_can_make_whole_numbers_a_regression(tokenizer):
    dataset = classification_dataset(tokenizer, rows_of(1, 5), problem_type="regression")
    assert dataset.targets == [(1.0,), (5.0,)]


def test_numbers_in_a_table_are_those_of_a_regression(tokenizer, tmp_path):
    """Every cell is a text."""
    (tmp_path / "prices.csv").write_text("text,label\nthe cat,1.5\na red one,-2\n")
    path = str(tmp_path / "prices.csv")
    data = classification_dataset(tokenizer, "csv", data_files=path, problem_type="regression")
    assert data.targets == [(-2.0,), (1.5,)]
    assert [data[row]["labels"][-1] for row in range(2)] == [1, 0]
    (tmp_path / "prices.csv").write_text("text,label\nthe cat,1.5\na red one,much\n")
    with pytest.raises(DataError, match="row 1: the label 'much' is not a number, as a regression needs"):
        classification_dataset(tokenizer, "csv", data_files=path, problem_type="regression")


def test_packs_hold_the_same_rows(tokenizer):
    rows = rows_of(*"abcabcab")
    packed = classification_dataset(tokenizer, rows, packed=True, max_seq_len=16)
    alone = classification_dataset(tokenizer, rows)
    documents = []
    for pack in packed:
        documents += [(document["tokens"].tolist(), int(document["labels"][-1])) for document in list(pack)]
    assert sorted(documents) == sorted((row["tokens"], row["labels"][-1]) for row in alone)


def test_rows_of_a_file_are_cached_with_their_labels(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHTUNE_CACHE", str(tmp_path / "cache"))
    file = write_lines(tmp_path / "rows.jsonl", rows_of("a", "b", "a"))
    first, second = (classification_dataset(tokenizer, "json", data_files=str(file)) for _ in range(2))
    assert last_labels(first) == last_labels(second) == [0, 1, 0]
    assert first.fingerprint == second.fingerprint


def test_fingerprint_changes_with_the_order_of_the_classes(tokenizer):
    rows = rows_of("a", "b")
    first, second = (classification_dataset(tokenizer, rows, labels=labels) for labels in (["a", "b"], ["b", "a"]))
    assert first.fingerprint != second.fingerprint


@pytest.mark.parametrize("collate", [collate_documents, lambda rows: padded_collate_sft(rows, padding_idx=0)])
def test_classes_that_equal_the_last_tokens_are_not_taken_for_unshifted_labels(tokenizer, collate):
    # The ids of a class and of the token at its position are equal in both rows.
    rows = [{"tokens": [7, 8, number], "labels": [-100, -100, number]} for number in (1, 2)]
    loader = BatchLoader(rows, batch_size=2, collate_fn=collate, shuffle=False, seed=0)
    (batch,) = next(iter(loader))
    assert sorted(batch["labels"][batch["labels"] >= 0].tolist()) == [1, 2]


@pytest.mark.parametrize(
    ("labels", "settings", "message"),
    [
        (["a", 1], {}, "the labels are of mixed types, texts .such as 'a'. and whole numbers .such as 1."),
        (["a", ["b"]], {}, "mixed types, texts .* and lists"),
        (["a", None], {}, "column 'label' holds nothing, not a class"),
        ([float("nan"), 1.0], {}, "column 'label' holds nan"),
        ([["a", 0.5], ["b"]], {}, "a list with 0.5, which names no class"),
        (["a", "b"], {"labels": ["a", "c"]}, "row 1: the class 'b' is not one of a, c: add it to labels"),
        (["a", "b"], {"labels": ["a", "b", "a"]}, "labels has 'a' twice"),
        ([0.5, 1.0], {"labels": ["a"]}, "labels names classes, but a regression has none"),
        (["a", "b"], {"problem_type": "regression"}, "row 0: the label 'a' is not a number"),
        (["a", "b"], {"problem_type": "classes"}, "problem_type is 'classes': choose one of"),
        (["a", "b"], {"column": "body"}, "there is no column 'body'"),
        (["a", "b"], {"streaming": True}, "leave out streaming"),
    ],
)
def test_labels_that_say_nothing_are_refused(tokenizer, labels, settings, message):
    with pytest.raises(DataError, match=message):
        classification_dataset(tokenizer, rows_of(*labels), **settings)


def test_rows_without_a_label_are_skipped_if_asked_for(tokenizer):
    dataset = classification_dataset(tokenizer, rows_of("a", None, "b", "a"), on_bad_row="skip")
    assert dataset.values == ["a", "b", "a"]
    dataset.limit_rows(100)
    assert last_labels(dataset) == [0, 1, 0]


def test_rows_that_are_too_long_leave_the_labels_of_the_others(tokenizer):
    rows = rows_of("a", "b", "c", "a")
    rows[1]["text"] *= 5
    dataset = classification_dataset(tokenizer, rows, on_bad_row="skip")
    dataset.limit_rows(len(dataset[0]["tokens"]) + 1)
    assert dataset.values == ["a", "c", "a"]
    assert last_labels(dataset) == [0, 2, 0]
