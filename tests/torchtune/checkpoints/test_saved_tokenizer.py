"""A checkpoint holds the tokenizer, chat template and stop tokens that trained, not those of the base."""

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import transformers
from peft import AutoPeftModelForCausalLM
from tokenizers import AddedToken, Tokenizer

import torchtune
from tests.tiny import write_checkpoint
from tests.torchtune.checkpoints.small import randomize_adapter
from torchtune._facade import adapted_copy
from torchtune.checkpoints import CheckpointStore, checkpoint_contents
from torchtune.checkpoints._small_files import add_pad_token
from torchtune.data import DataError
from torchtune.models import from_hf_config
from torchtune.modules.conversion import apply_conversions
from torchtune.modules.peft import LoRA
from torchtune.tokenizers import hf_tokenizer
from torchtune.training import fit_vocabulary

CHAT = [{"role": "user", "content": "the red cat"}, {"role": "assistant", "content": "sees"}]
VOCABULARY = 316  # tokens of the base
OTHER_TEMPLATE = (
    "{% for turn in messages %}<|im_start|>[{{ turn['role'] }}] {{ turn['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>[assistant] {% endif %}"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base"))


def saved_with(tokenizer, base: Path, folder: Path, *, lora: bool = False) -> Path:
    """Save the base's model, as a run with ``tokenizer`` does."""
    store = CheckpointStore({"policy": {"checkpoint_dir": base}}, folder / "run")
    model = from_hf_config(base)
    if lora:
        apply_conversions(model, [LoRA(2, 4)])
    store.load_model(model)
    contents = checkpoint_contents(model, merge=True)
    path = store.save("epoch_0", model, contents=contents, tokenizer=tokenizer)
    store.close()
    return path


def edit(path: Path, **values: object) -> None:
    """Set keys of a JSON file; None deletes a key."""
    content = json.loads(path.read_text()) if path.is_file() else {}
    content.update(values)
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def ids_in_transformers(folder: Path) -> list[int]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=False)


def test_chosen_template_is_in_the_checkpoint(base, tmp_path):
    tokenizer = hf_tokenizer(str(base), chat_template=OTHER_TEMPLATE)
    path = saved_with(tokenizer, base, tmp_path)
    assert json.loads((path / "tokenizer_config.json").read_text())["chat_template"] == OTHER_TEMPLATE
    assert ids_in_transformers(path) == tokenizer.tokenize_messages(CHAT)[0]
    assert torchtune.load(path)[1].tokenize_messages(CHAT) == tokenizer.tokenize_messages(CHAT)
    assert (path / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("lora", [False, True])
def test_tokenizer_of_another_folder_replaces_all_files_of_the_base(lora, base, tmp_path):
    source, tokenizer_folder = shutil.copytree(base, tmp_path / "source"), shutil.copytree(base, tmp_path / "other")
    (source / "vocab.json").write_text("{}")  # of the base's tokenizer alone
    (source / "preprocessing.txt").write_text("a note")
    backend = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    backend.add_special_tokens([AddedToken("<tag>", special=True)])
    backend.save(str(tokenizer_folder / "tokenizer.json"))
    edit(tokenizer_folder / "tokenizer_config.json", chat_template=OTHER_TEMPLATE)
    path = saved_with(hf_tokenizer(str(tokenizer_folder)), source, tmp_path, lora=lora)
    folders = [path, path / "adapter"] if lora else [path]
    for folder in folders:
        assert (folder / "tokenizer.json").read_bytes() == (tokenizer_folder / "tokenizer.json").read_bytes()
        assert hf_tokenizer(str(folder)).special_tokens["<tag>"] == VOCABULARY
        assert ids_in_transformers(folder) == hf_tokenizer(str(tokenizer_folder)).tokenize_messages(CHAT)[0]
    assert not (path / "vocab.json").exists()
    assert (path / "preprocessing.txt").read_text() == "a note"


@pytest.mark.parametrize(
    ("published", "eos"),
    [
        ({"eos_token_id": 0, "temperature": 0.7}, [0, 2]),  # as in a base model: its text ends otherwise than a turn
        ({"eos_token_id": [0, 2]}, [0, 2]),
        ({"eos_token_id": 2}, 2),
        (None, [0, 2]),
    ],
)
def test_turn_ends_that_were_trained_end_a_generation(published, eos, base, tmp_path):
    source = shutil.copytree(base, tmp_path / "source")
    edit(source / "config.json", eos_token_id=0, bos_token_id=1, pad_token_id=None)
    edit(source / "tokenizer_config.json", eos_token="<|endoftext|>" if isinstance(eos, list) else "<|im_end|>")
    (source / "generation_config.json").unlink()
    if published is not None:
        edit(source / "generation_config.json", **published)
    path = saved_with(hf_tokenizer(str(source)), source, tmp_path)
    settings = json.loads((path / "generation_config.json").read_text())
    assert settings == {**(published or {"bos_token_id": 1}), "eos_token_id": eos}
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert model.generation_config.eos_token_id == eos
    assert json.loads((path / "config.json").read_text())["eos_token_id"] == 0


class Words:
    """A tokenizer of a user's own, which cannot write its files."""

    vocab_size = 320
    max_seq_len = None
    special_tokens: ClassVar[dict[str, int]] = {}


class Broken(Words):
    def save_files(self, folder):
        (Path(folder) / "tokenizer.json").write_text("{")
        raise KeyError("vocabulary")


class Own(Words):
    stop_tokens = (7,)

    def save_files(self, folder):
        (Path(folder) / "words.txt").write_text("a b")


@pytest.mark.parametrize(
    ("tokenizer", "reason"), [(Words(), "Words has no method save_files"), (Broken(), "Broken raised KeyError")]
)
def test_tokenizer_that_cannot_be_saved_is_named_before_the_run_and_in_the_folder(
    tokenizer, reason, base, tmp_path, caplog
):
    store = CheckpointStore({"policy": {"checkpoint_dir": base}}, tmp_path / "run")
    with caplog.at_level(logging.WARNING):
        store.check_contents(from_hf_config(base), tokenizer=tokenizer)
    assert reason in caplog.text
    path = saved_with(tokenizer, base, tmp_path)
    assert reason in (path / "TOKENIZER_MISSING.md").read_text()
    assert not list(path.glob("tokenizer*.json"))
    with pytest.raises(DataError, match=r"TOKENIZER_MISSING\.md in that folder says why"):
        hf_tokenizer(str(path))
    # A later run with a working tokenizer, which starts from this checkpoint.
    again = saved_with(hf_tokenizer(str(base)), path, tmp_path / "again")
    assert (again / "tokenizer.json").is_file()
    assert not (again / "TOKENIZER_MISSING.md").exists()


def test_users_tokenizer_writes_its_files(base, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        CheckpointStore({"policy": {"checkpoint_dir": base}}).check_contents(from_hf_config(base), tokenizer=Own())
    assert not caplog.text
    path = saved_with(Own(), base, tmp_path)
    assert (path / "words.txt").is_file()
    assert not (path / "tokenizer.json").exists()
    assert json.loads((path / "generation_config.json").read_text())["eos_token_id"] == [2, 7]


@pytest.fixture
def adapter_with_new_tokens(base, tmp_path) -> Path:
    """Folder of an adapter alone, trained together with two tokens that the base does not have."""
    tokenizer_folder = shutil.copytree(base, tmp_path / "other")
    backend = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    backend.add_special_tokens([AddedToken("<a>", special=True), AddedToken("<b>", special=True)])
    backend.save(str(tokenizer_folder / "tokenizer.json"))
    tokenizer = hf_tokenizer(str(tokenizer_folder))
    model, _ = torchtune.load(base, adapter=LoRA(2, 4), device="cpu")
    fit_vocabulary(model, tokenizer, resize=True)
    randomize_adapter(model)
    torch.nn.init.normal_(model.tok_embeddings.new_rows)
    return torchtune.save(model, tmp_path / "adapter", tokenizer=tokenizer)


@torch.no_grad()
def test_adapter_with_new_tokens_is_read_by_peft_and_by_load(base, adapter_with_new_tokens):
    model, tokenizer = torchtune.load(adapter_with_new_tokens, device="cpu")
    tokens = torch.tensor([tokenizer.encode("the <a> cat<b>", add_bos=False, add_eos=False)])
    assert {VOCABULARY, VOCABULARY + 1} < set(tokens[0].tolist())
    expected = model(tokens)
    # AutoPeftModel enlarges the base for the tokenizer in the adapter's folder.
    peft_model = AutoPeftModelForCausalLM.from_pretrained(adapter_with_new_tokens)
    torch.testing.assert_close(peft_model(tokens).logits, expected, atol=1e-4, rtol=1e-4)
    plain, plain_tokenizer = torchtune.load(base, device="cpu")
    torch.testing.assert_close(adapted_copy(plain, adapter_with_new_tokens)(tokens), expected)
    assert plain.tok_embeddings.weight.shape[0] == plain_tokenizer.vocab_size == VOCABULARY
    adapted, saved_tokenizer = torchtune.load(base, adapter=adapter_with_new_tokens, device="cpu")
    torch.testing.assert_close(adapted(tokens), expected)
    assert saved_tokenizer.vocab_size == VOCABULARY + 2


def test_facade_saves_the_tokenizer_of_load_or_another(base, tmp_path):
    model, _ = torchtune.load(base)
    tokenizer = hf_tokenizer(str(base), chat_template=OTHER_TEMPLATE)
    assert (
        ids_in_transformers(torchtune.save(model, tmp_path / "a")) == hf_tokenizer(str(base)).tokenize_messages(CHAT)[0]
    )
    path = torchtune.save(model, tmp_path / "b", tokenizer=tokenizer)
    assert ids_in_transformers(path) == tokenizer.tokenize_messages(CHAT)[0]


@pytest.mark.parametrize(
    ("special_tokens", "pad_id"),
    [
        ({"<s>": 1, "</s>": 2}, 1),  # BOS: no text ends with it
        ({"<s>": 1, "</s>": 2, "<|reserved_0|>": 7}, 7),
        ({"<s>": 1, "</s>": 2, "<pad>": 5, "<unk>": 0}, 5),
        ({"<|endoftext|>": 2}, None),
    ],
)
def test_classifier_whose_tokenizer_pads_with_eos_has_another_padding_token(special_tokens, pad_id, tmp_path, caplog):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"pad_token": "</s>"}')
    tokenizer = SimpleNamespace(pad_id=2, eos_id=2, bos_id=1, stop_tokens=[2], special_tokens=special_tokens)
    add_pad_token(tokenizer, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()).get("pad_token_id") == pad_id
    pad_token = json.loads((tmp_path / "tokenizer_config.json").read_text())["pad_token"]
    assert special_tokens.get(pad_token) == pad_id
    assert ("transformers reads the classifier in batches of one text only" in caplog.text) == (pad_id is None)
