"""Rows of queries with passages and with candidates: texts, pairs, lists of pairs, and what cannot be trained on."""

import pytest

from tests.tiny import write_tokenizer
from torchtune.data import DataError, collate_preference, collate_reranking
from torchtune.datasets import embedding_dataset, format_of, reranking_dataset
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
def tokenizer(tokenizer_folder):
    return hf_tokenizer(str(tokenizer_folder), max_seq_len=16)


@pytest.fixture(scope="module")
def pair_tokenizer(tokenizer_folder):
    return hf_tokenizer(str(tokenizer_folder), max_seq_len=64)


def texts_of(example, tokenizer):
    texts = [example["query"], example["positive"], *example["negatives"]]
    return [tokenizer.decode(tokens, skip_special_tokens=False) for tokens in texts]


def test_texts_of_a_row_are_tokenized_apart(tokenizer):
    rows = [
        {"query": "who sees", "positive": "the cat sees", "negatives": ["one dog", "red bird"]},
        {"query": "why", "positive": "a", "negatives": "not a list"},
        {"query": "where", "positive": "big"},
    ]
    data = embedding_dataset(tokenizer, source=rows)
    assert texts_of(data[0], tokenizer) == ["who sees", "the cat sees", "one dog", "red bird"]
    assert texts_of(data[1], tokenizer) == ["why", "a", "not a list"]
    assert data[2]["negatives"] == []


def test_texts_of_a_row_are_shown_apart(tokenizer):
    data = embedding_dataset(tokenizer, source=[{"query": "who", "positive": "cat", "negatives": ["dog"]}])
    texts = document_texts(data.token_row(0))
    assert [title for title, _, _ in texts] == ["query", "positive", "negative"]
    assert [list(tokens) for _, tokens, _ in texts] == [data[0]["query"], data[0]["positive"], *data[0]["negatives"]]


def test_columns_instructions_and_eos_are_settings(tokenizer):
    rows = [{"anchor": "who", "positive": "cat", "negative": "dog"}]
    data = embedding_dataset(
        tokenizer,
        source=rows,
        column_map={"query": "anchor", "positive": "positive", "negatives": "negative"},
        query_instruction="query: ",
        document_instruction="text: ",
        add_eos=True,
    )
    assert texts_of(data[0], tokenizer) == ["query: who<|im_end|>", "text: cat<|im_end|>", "text: dog<|im_end|>"]


def test_texts_are_truncated_with_their_eos(tokenizer):
    rows = [{"query": "the cat " * 40, "positive": "a"}]
    for add_eos in (False, True):
        data = embedding_dataset(tokenizer, source=rows, add_eos=add_eos, max_seq_len=6)
        assert len(data[0]["query"]) == 6
        assert (data[0]["query"][-1] == tokenizer.eos_id) is add_eos
    assert data.num_truncated == 1


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"query": "who", "positive": "cat", "negatives": ["dog", "cat"]}, "negative 1 equals the positive"),
        ({"query": "who", "positive": "cat " * 40, "negatives": ["cat " * 50]}, "within max_seq_len=16"),
        ({"query": "who", "negatives": ["dog"]}, "no column 'positive'"),
        ({"query": "who", "positive": None}, "column 'positive' holds nothing"),
        ({"query": "who", "positive": " "}, "column 'positive' has an empty text"),
        ({"query": "who", "positive": "cat", "negatives": [3]}, "'negatives' must hold a text or a list of texts"),
    ],
)
def test_row_that_cannot_be_trained_on_is_named(row, words, tokenizer):
    rows = [{"query": "why", "positive": "a"}, row]
    with pytest.raises(DataError, match=f"row 1: .*{words}"):
        embedding_dataset(tokenizer, source=rows)


def test_named_column_of_negatives_must_be_there(tokenizer):
    columns = {"query": "query", "positive": "positive", "negatives": "hard"}
    with pytest.raises(DataError, match="no column 'hard'"):
        embedding_dataset(tokenizer, source=[{"query": "who", "positive": "cat"}], column_map=columns)


def test_streaming_is_refused(tokenizer):
    with pytest.raises(DataError, match="leave out streaming"):
        embedding_dataset(tokenizer, source=[{"query": "who", "positive": "cat"}], streaming=True)


@pytest.fixture(scope="module")
def ending_folder(tmp_path_factory):
    """A tokenizer that ends texts with another token than EOS, as that of Qwen3-Embedding."""
    from tokenizers import Tokenizer, processors

    folder = tmp_path_factory.mktemp("ending")
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_texts_end_as_the_files_of_the_tokenizer_say(ending_folder, caplog):
    from transformers import AutoTokenizer

    tokenizer = hf_tokenizer(str(ending_folder), max_seq_len=6)
    rows = [{"query": "who", "positive": "the cat " * 9}]
    reference = AutoTokenizer.from_pretrained(ending_folder)
    data = embedding_dataset(tokenizer, source=rows)
    assert data[0]["query"] == reference("who")["input_ids"]
    assert data[0]["positive"] == reference(rows[0]["positive"], truncation=True, max_length=6)["input_ids"]
    assert data[0]["query"][-1] == 0
    assert embedding_dataset(tokenizer, source=rows, add_eos=False)[0]["query"] == data[0]["query"][:-1]


def test_the_end_of_texts_is_logged_and_another_than_that_of_the_tokenizer_warned_of(ending_folder, tokenizer, caplog):
    rows = [{"query": "who", "positive": "cat"}]
    with caplog.at_level("INFO", logger="torchtune"):
        embedding_dataset(tokenizer, source=rows)
        assert not [text for text in caplog.messages if "end" in text]
        embedding_dataset(hf_tokenizer(str(ending_folder)), source=rows)
        assert "Texts end with <|endoftext|>, as the tokenizer's files say." in caplog.messages
        embedding_dataset(tokenizer, source=rows, add_eos=True)
    assert any("add_eos=True ends texts otherwise than the tokenizer's files" in text for text in caplog.messages)


def pairs_of(data, tokenizer):
    """(text, target) of the documents of each example."""
    examples = []
    for index in range(len(data)):
        example = data[index]
        texts = [tokenizer.decode(tokens) for tokens in example["documents"]]
        examples.append(list(zip(texts, example["targets"], strict=True)))
    return examples


def test_rows_with_positives_become_pairs_or_lists(pair_tokenizer):
    first = [("who sees: the cat sees", 1.0), ("who sees: one dog", 0.0), ("who sees: red bird", 0.0)]
    second = [("why: a big cat", 1.0), ("why: not", 0.0)]
    settings = {"source": POSITIVES, "template": "{query}: {document}"}
    assert pairs_of(reranking_dataset(pair_tokenizer, listwise=True, **settings), pair_tokenizer) == [first, second]
    assert pairs_of(reranking_dataset(pair_tokenizer, **settings), pair_tokenizer) == [
        [pair] for pair in [*first, *second]
    ]


def test_labeled_rows_of_a_query_become_one_list(pair_tokenizer):
    settings = {"source": LABELED, "template": "{query}: {document}"}
    lists = reranking_dataset(pair_tokenizer, listwise=True, **settings)
    assert pairs_of(lists, pair_tokenizer) == [
        [("who sees: the cat sees", 1.0), ("who sees: one dog", 0.0)],
        [("why: red", 0.25), ("why: a big cat", 1.0)],
    ]
    assert [origin["row"] for origin in lists.origins(1)] == [1, 3]
    assert lists.known_lengths.tolist() == [sum(map(len, lists[i]["documents"])) for i in range(2)]
    pairs = reranking_dataset(pair_tokenizer, **settings)
    assert [targets for ((_, targets),) in pairs_of(pairs, pair_tokenizer)] == [1.0, 0.25, 0.0, 1.0]


def test_columns_of_pairs_are_settings(pair_tokenizer):
    rows = [{"q": "why", "text": "a cat", "score": 1.0}, {"q": "why", "text": "a dog", "score": 0.0}]
    data = reranking_dataset(
        pair_tokenizer, source=rows, column_map={"query": "q", "document": "text", "label": "score"}
    )
    assert pairs_of(data, pair_tokenizer)[1] == [("Query: why\nDocument: a dog", 0.0)]


def test_too_long_pairs_leave_the_other_candidates(pair_tokenizer):
    rows = [{**POSITIVES[0], "negatives": ["one dog", "red " * 30]}, *POSITIVES[1:]]
    data = reranking_dataset(pair_tokenizer, source=rows, listwise=True, on_bad_row="skip")
    data.limit_rows(40)
    assert [len(example) for example in pairs_of(data, pair_tokenizer)] == [2, 2]


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
def test_rows_that_teach_nothing_are_refused(rows, listwise, words, pair_tokenizer):
    with pytest.raises(DataError, match=words):
        reranking_dataset(pair_tokenizer, source=rows, listwise=listwise)


def test_end_token_that_is_padding_is_refused(pair_tokenizer, monkeypatch):
    monkeypatch.setattr(pair_tokenizer, "pad_id", pair_tokenizer.eos_id)
    with pytest.raises(DataError, match="transformers scores the last token that is not padding"):
        reranking_dataset(pair_tokenizer, source=POSITIVES, add_eos=True)


def test_candidates_are_shown_apart(pair_tokenizer):
    data = reranking_dataset(pair_tokenizer, source=LABELED, listwise=True)
    assert [title for title, _, _ in document_texts(data[1])] == [
        "candidate with label 0.25",
        "candidate with label 1",
    ]


def test_format_of_labeled_pairs_is_recognized():
    row_format = format_of(LABELED[1])
    assert row_format.kind == "queries with labeled documents (reranking)"
    assert row_format.reader == "reranking_dataset"


def test_batch_says_which_documents_compete(pair_tokenizer):
    data = reranking_dataset(pair_tokenizer, source=POSITIVES, listwise=True)
    filler = {**data[0], "labels": [-100]}
    batch = collate_reranking([data[0], data[1], filler])
    assert batch.per_document["example"].tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert batch.per_document["is_first"].tolist() == [True, False, False, True, False, True, False, False]
    assert batch.per_document["counts"].tolist() == [True] * 5 + [False] * 3
    assert batch.num_terms == 2


def test_candidates_name_their_collate_function_to_that_of_preferences(pair_tokenizer):
    data = reranking_dataset(pair_tokenizer, source=POSITIVES)
    with pytest.raises(DataError, match=r"set collate_fn=torchtune\.data\.collate_reranking"):
        collate_preference([data[0]])
