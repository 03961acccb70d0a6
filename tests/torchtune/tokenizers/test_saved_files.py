"""A tokenizer writes the files from which it is loaded again, with its chat template and new tokens."""

import json
import shutil
from pathlib import Path

import pytest
import transformers
from tokenizers import AddedToken

from tests.tiny import CHAT_TEMPLATE, write_checkpoint
from torchtune.data import DataError
from torchtune.tokenizers import GPT2BaseTokenizer, SavableTokenizer, hf_tokenizer

CHAT = [{"role": "user", "content": "the red cat"}, {"role": "assistant", "content": "sees"}]
VOCABULARY = 316  # tokens of the base
OTHER_TEMPLATE = (
    "{% for turn in messages %}<|im_start|>[{{ turn['role'] }}] {{ turn['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>[assistant] {% endif %}"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base"))


def ids_in_transformers(folder: Path) -> list[int]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=False)


def test_template_is_written_in_its_published_form(base, tmp_path):
    template_folder = shutil.copytree(base, tmp_path / "other")
    (template_folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (template_folder / "additional_chat_templates").mkdir()
    (template_folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    unchanged_folder = tmp_path / "kept"
    replaced = tmp_path / "replaced"
    for folder in (unchanged_folder, replaced):
        folder.mkdir()
    hf_tokenizer(str(template_folder)).save_files(unchanged_folder)
    assert (unchanged_folder / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    assert (unchanged_folder / "additional_chat_templates" / "tool_use.jinja").is_file()
    hf_tokenizer(str(template_folder), chat_template=OTHER_TEMPLATE).save_files(replaced)
    assert (replaced / "chat_template.jinja").read_text() == OTHER_TEMPLATE
    assert "chat_template" not in json.loads((replaced / "tokenizer_config.json").read_text())
    assert not (replaced / "additional_chat_templates").exists()
    assert ids_in_transformers(replaced) == hf_tokenizer(str(replaced)).tokenize_messages(CHAT)[0]


def test_replaced_templates_are_removed_from_a_folder_that_holds_other_files(base, tmp_path):
    folder = tmp_path / "out"
    templates = folder / "additional_chat_templates"
    templates.mkdir(parents=True)
    (templates / "tool_use.jinja").write_text("{{ tools }}")
    (templates / "notes.md").write_text("Where the templates are from.")
    hf_tokenizer(str(base), chat_template=OTHER_TEMPLATE).save_files(folder)
    assert [path.name for path in templates.iterdir()] == ["notes.md"]
    assert list(hf_tokenizer(str(folder)).chat_templates) == ["default"]


def test_tokens_that_were_added_in_memory_are_saved(base, tmp_path):
    tokenizer = hf_tokenizer(str(base))
    tokenizer.base_tokenizer.tokenizer.add_special_tokens([AddedToken("<new>", special=True)])
    tokenizer.save_files(tmp_path)
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert reader.encode("a<new>", add_special_tokens=False)[-1] == VOCABULARY


def test_tokenizer_is_saved_after_its_folder_is_gone(base, tmp_path):
    deleted_folder = shutil.copytree(base, tmp_path / "other")
    tokenizer = hf_tokenizer(str(deleted_folder))
    shutil.rmtree(deleted_folder)
    (tmp_path / "out").mkdir()
    tokenizer.save_files(tmp_path / "out")
    assert hf_tokenizer(str(tmp_path / "out")).tokenize_messages(CHAT) == tokenizer.tokenize_messages(CHAT)


def test_vocabulary_of_another_format_is_copied_with_the_files_beside_it(tmp_path):
    published = tmp_path / "published"
    folder = tmp_path / "out"
    for path in (published, folder):
        path.mkdir()
    (published / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    (published / "merges.txt").write_text("a b\n")
    (published / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (published / "model.safetensors").write_text("")
    tokenizer = GPT2BaseTokenizer(str(published / "vocab.json"), str(published / "merges.txt"))
    assert isinstance(tokenizer, SavableTokenizer)
    tokenizer.save_files(folder)
    assert {path.name for path in folder.iterdir()} == {"vocab.json", "merges.txt", "chat_template.jinja"}
    (published / "vocab.json").unlink()
    with pytest.raises(DataError, match=r"vocab\.json is gone or was changed"):
        tokenizer.save_files(folder)


def test_added_tokens_have_the_ids_that_transformers_reads(base, tmp_path):
    """Texts of the data that spell them are encoded to them; a token of the files keeps its id."""
    tokenizer = hf_tokenizer(str(base), add_tokens=["<think>", "</think>", "<|im_end|>"])
    assert tokenizer.new_tokens == ["<think>", "</think>"]
    assert tokenizer.vocab_size == VOCABULARY + 2
    text = "the <think>red</think> cat<|im_end|>"
    ids = tokenizer.encode(text, add_bos=False, add_eos=False)
    assert (ids.count(VOCABULARY), ids.count(VOCABULARY + 1)) == (1, 1)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    turns = [CHAT[0], {"role": "assistant", "content": "<think>red</think> cat"}]
    tokens = tokenizer({"messages": turns})["tokens"]
    assert tokens.count(VOCABULARY) == 1

    tokenizer.save_files(tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert reference.encode(text, add_special_tokens=False) == ids
    assert reference.apply_chat_template(turns, return_dict=False) == tokens
    again = hf_tokenizer(str(tmp_path), add_tokens=["<think>", "</think>"])
    assert again.new_tokens == []
    assert again({"messages": turns})["tokens"] == tokens


def test_descriptions_of_added_tokens_are_encoded_in_the_vocabulary_of_the_files(base):
    """Also if a description spells another new token; of a token that the files have, there is nothing to describe."""
    plain = hf_tokenizer(str(base))
    added = {"<think>": "the red cat", "</think>": None, "<plan>": "the <think>", "<|im_end|>": "an end"}
    tokenizer = hf_tokenizer(str(base), add_tokens=added)
    assert tokenizer.new_tokens == ["<think>", "</think>", "<plan>"]
    assert tokenizer.described_tokens == {
        "<think>": plain.encode("the red cat", add_bos=False, add_eos=False),
        "<plan>": plain.encode("the <think>", add_bos=False, add_eos=False),
    }


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ("<think>", "give a list of tokens"),
        ([""], "'' is not a token"),
        ([3], "3 is not a token"),
        ({"<think>": " "}, "the description of '<think>' is ' ': give a text"),
        ({"<think>": ["a", "b"]}, r"the description of '<think>' is \['a', 'b'\]: give a text"),
    ],
)
def test_token_that_cannot_be_added_is_refused(base, tokens, message):
    with pytest.raises(DataError, match=message):
        hf_tokenizer(str(base), add_tokens=tokens)
