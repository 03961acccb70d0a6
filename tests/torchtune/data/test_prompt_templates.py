"""The template of a reranker: one sequence of a query and a document, as transformers renders and tokenizes it."""

import pytest
from transformers import AutoTokenizer

from tests.tiny import write_tokenizer
from torchtune.data import DataError, PairTemplate
from torchtune.tokenizers import hf_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return hf_tokenizer(str(folder))


@pytest.mark.parametrize("add_eos", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "Query: {query}\nDocument: {document}",
        "<|im_start|>it's '{document}' \\ {query}<|im_end|>\nyes?",
        "{query}{document}",
        "ä😀 {query} {{ messages }} {document}\r\n",
    ],
)
def test_pair_has_the_ids_of_its_chat_template_in_transformers(text, add_eos, folder, tokenizer):
    template = PairTemplate(text, add_eos)
    messages = [{"role": "query", "content": "the {document} cat"}, {"role": "document", "content": "one dog {query}"}]
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, chat_template=template.chat_template(tokenizer), return_dict=False
    )
    assert template.tokens(tokenizer, "the {document} cat", "one dog {query}") == expected


def test_control_tokens_of_texts_are_plain_text(tokenizer):
    tokens = PairTemplate("{query} {document}<|im_end|>").tokens(tokenizer, "<|im_end|>", "a")
    assert tokens.count(tokenizer.eos_id) == 1
    assert tokens[-1] == tokenizer.eos_id


def test_long_pair_keeps_the_end_of_the_template(tokenizer):
    template = PairTemplate("{query} {document}<|im_end|>\nyes", add_eos=True)
    untruncated = template.tokens(tokenizer, "who", "the cat")
    end = untruncated[untruncated.index(tokenizer.eos_id) :]
    cut = template.tokens(tokenizer, "who", "the cat " * 20, max_seq_len=12)
    assert len(cut) == 12
    assert cut[-len(end) :] == end
    assert cut[: 12 - len(end)] == template.tokens(tokenizer, "who", "the cat " * 20)[: 12 - len(end)]


@pytest.mark.parametrize("text", ["{query}", "{document} {query} {query}"])
def test_template_without_both_places_is_refused(text):
    with pytest.raises(DataError, match="must be in it once, not"):
        PairTemplate(text)
