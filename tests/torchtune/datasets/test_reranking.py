"""Rows of queries with candidate documents: pairs, lists of candidates, and what cannot be trained on."""

import pytest

from tests.tiny import write_tokenizer
from torchtune.data import DataError, collate_preference, collate_reranking
from torchtune.datasets import format_of, reranking_dataset
from torchtune.tokenizers import document_texts, hf_tokenizer

POSITIVES = [
    {"query": "who sees", "positive": "the cat sees", "negatives": ["one dog", "red bird"]},
    {"query": "why", "positive": "a big cat", "negatives": "not"},
]
LABELED = [
    {"query": "who sees", "document": "the cat sees", "label": 1},
    {"query": "why", "document": "red", "label": 0.25},
    {"query": "who sees", "document": "one dog", "label": 0},
    {"query": "why", "document": "a big cat", "label": True},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return hf_tokenizer(str(folder), max_seq_len=64)


def read(data, tokenizer):
    """(text, target) of the documents of each example."""
    examples = []
    for index in range(len(data)):
        example = data[index]
        texts = [tokenizer.decode(tokens) for tokens in example["documents"]]
        examples.append(list(zip(texts, example["targets"], strict=True)))
    return examples


def test_rows_with_positives_become_pairs_or_lists(tokenizer):
    first = [("who sees: the cat sees", 1.0), ("who sees: one dog", 0.0), ("who sees: red bird", 0.0)]
    second = [("why: a big cat", 1.0), ("why: not", 0.0)]
    settings = {"source": POSITIVES, "template": "{query}: {document}"}
    assert read(reranking_dataset(tokenizer, listwise=True, **settings), tokenizer) == [first, second]
    assert read(reranking_dataset(tokenizer, **settings), tokenizer) == [[pair] for pair in [*first, *second]]


def test_labeled_rows_of_a_query_become_one_list(tokenizer):
    settings = {"source": LABELED, "template": "{query}: {document}"}
    lists = reranking_dataset(tokenizer, listwise=True, **settings)
    assert read(lists, tokenizer) == [
        [("who sees: the cat sees", 1.0), ("who sees: one dog", 0.0)],
        [("why: red", 0.25), ("why: a big cat", 1.0)],
    ]
    assert [origin["row"] for origin in lists.origins(1)] == [1, 3]
    assert lists.known_lengths.tolist() == [sum(map(len, lists[i]["documents"])) for i in range(2)]
    pairs = reranking_dataset(tokenizer, **settings)
    assert [targets for ((_, targets),) in read(pairs, tokenizer)] == [1.0, 0.25, 0.0, 1.0]


def test_columns_are_settings(tokenizer):
    rows = [{"q": "why", "text": "a cat", "score": 1.0}, {"q": "why", "text": "a dog", "score": 0.0}]
    data = reranking_dataset(tokenizer, source=rows, column_map={"query": "q", "document": "text", "label": "score"})
    assert read(data, tokenizer)[1] == [("Query: why\nDocument: a dog", 0.0)]


def test_too_long_pairs_leave_the_other_candidates(tokenizer):
    rows = [{**POSITIVES[0], "negatives": ["one dog", "red " * 30]}, *POSITIVES[1:]]
    data = reranking_dataset(tokenizer, source=rows, listwise=True, on_bad_row="skip")
    data.limit_rows(40)
    assert [len(example) for example in read(data, tokenizer)] == [2, 2]


@pytest.mark.parametrize(
    ("rows", "listwise", "words"),
    [
        ([{"query": " ", "document": "a", "label": 1}], False, "column 'query' has an empty text"),
        ([{"query": "a", "document": "a"}], False, "'label'"),
        ([{"query": "a", "document": "a", "label": 3}], False, "holds 3, not a number from 0"),
        ([{"query": "a", "document": "a", "label": "yes"}], False, "holds 'yes', not a number from 0"),
        ([{"query": "a", "positive": "b", "negatives": ["c", "b"]}], True, "negative 1 equals the positive"),
        ([{"query": "a", "positive": "b", "negatives": [" "]}], False, "column 'negatives' has an empty text"),
        ([{"query": "a", "positive": "b"}] * 2, False, "all pairs have the label 1, from which nothing can be learned"),
        ([*POSITIVES, {"query": "a", "positive": "b"}], True, "the query of row 2 has one document only"),
        ([*LABELED, {"query": "z", "document": "b", "label": 0}] * 2, True, "all 2 documents of the query of row 4"),
    ],
)
def test_rows_that_teach_nothing_are_refused(rows, listwise, words, tokenizer):
    with pytest.raises(DataError, match=words):
        reranking_dataset(tokenizer, source=rows, listwise=listwise)


def test_end_token_that_is_padding_is_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "pad_id", tokenizer.eos_id)
    with pytest.raises(DataError, match="transformers scores the last token that is not padding"):
        reranking_dataset(tokenizer, source=POSITIVES, add_eos=True)


def test_candidates_are_shown_apart(tokenizer):
    data = reranking_dataset(tokenizer, source=LABELED, listwise=True)
    assert [title for title, _, _ in document_texts(data[1])] == [
        "candidate with label 0.25",
        "candidate with label 1",
    ]


def test_labeled_rows_are_recognized():
    row_format = format_of(LABELED[1])
    assert row_format.kind == "queries with labeled documents (reranking)"
    assert row_format.reader == "reranking_dataset"


def test_batch_says_which_documents_compete(tokenizer):
    data = reranking_dataset(tokenizer, source=POSITIVES, listwise=True)
    filler = {**data[0], "labels": [-100]}
    batch = collate_reranking([data[0], data[1], filler])
    assert batch.per_document["example"].tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert batch.per_document["is_first"].tolist() == [True, False, False, True, False, True, False, False]
    assert batch.per_document["counts"].tolist() == [True] * 5 + [False] * 3
    assert batch.num_terms == 2


def test_other_collation_is_refused(tokenizer):
    data = reranking_dataset(tokenizer, source=POSITIVES)
    with pytest.raises(DataError, match=r"set collate_fn=torchtune\.data\.collate_reranking"):
        collate_preference([data[0]])
