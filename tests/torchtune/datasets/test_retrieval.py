"""Rows of queries with passages: their texts, and what cannot be trained on."""

import pytest

from tests.tiny import write_tokenizer
from torchtune.data import DataError
from torchtune.datasets import embedding_dataset
from torchtune.tokenizers import document_texts, hf_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return hf_tokenizer(str(folder), max_seq_len=16)


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


def test_end_is_named_and_another_one_is_warned_of(ending_folder, tokenizer, caplog):
    rows = [{"query": "who", "positive": "cat"}]
    with caplog.at_level("INFO", logger="torchtune"):
        embedding_dataset(tokenizer, source=rows)
        assert not [text for text in caplog.messages if "end" in text]
        embedding_dataset(hf_tokenizer(str(ending_folder)), source=rows)
        assert "Texts end with <|endoftext|>, as the tokenizer's files say." in caplog.messages
        embedding_dataset(tokenizer, source=rows, add_eos=True)
    assert any("add_eos=True ends texts otherwise than the tokenizer's files" in text for text in caplog.messages)
