"""Every tokenizer that a config names, from ``tune validate`` to tokenized conversations."""

import functools
from pathlib import Path

import pytest
import yaml

from tests.tiny import CHATS, write_conversations, write_tokenizer
from tests.tiny_images import image_text_model, qwen3_vl_config, write_image_checkpoint
from tests.torchtune.models.tokenizer_files import write_bpe, write_ranks, write_sentencepiece, write_tekken
from tests.torchtune.tokenizers.chat_templates_mistral import CONTROL
from torchtune.config import instantiate, load_and_check
from torchtune.tokenizers._patterns import CL100K_PATTERN

CONFIGS = Path(__file__).parents[3] / "recipes" / "configs"
HF = "torchtune.tokenizers.hf_tokenizer"
_PIECES = {"path": "{}/tokenizer.model"}
_MERGES = {"path": "{}/vocab.json", "merges_file": "{}/merges.txt"}
# Tokenizer -> the files that it is given.
FILES: dict[str, dict[str, str]] = {
    "torchtune.models.gemma.gemma_tokenizer": _PIECES,
    "torchtune.models.llama2.llama2_tokenizer": _PIECES,
    "torchtune.models.llama3.llama3_tokenizer": {"path": "{}/ranks.tiktoken"},
    "torchtune.models.llama3_2_vision.llama3_2_vision_transform": {"path": "{}/ranks.tiktoken"},
    "torchtune.models.mistral.mistral_tokenizer": _PIECES,
    "torchtune.models.mistral.mistral_instruct_tokenizer": {"path": "{}/tekken.json"},
    "torchtune.models.phi3.phi3_mini_tokenizer": _PIECES,
    "torchtune.models.phi4.phi4_tokenizer": {"vocab_path": "{}/vocab.json", "merges_path": "{}/merges.txt"},
    "torchtune.models.qwen2.qwen2_tokenizer": _MERGES,
    "torchtune.models.qwen2_5.qwen2_5_tokenizer": _MERGES,
    "torchtune.models.qwen3.qwen3_tokenizer": _MERGES,
    "torchtune.models.image_text_transform": {"path": "{}/images"},
    HF: {"path": "{}"},
}


@functools.cache
def used() -> dict[str, Path]:
    """Tokenizer -> the first config that trains with it."""
    found: dict[str, Path] = {}
    for path in sorted(CONFIGS.rglob("*.yaml")):
        cfg = yaml.load(path.read_text(), yaml.CSafeLoader)
        if "tokenizer" in cfg and "dataset" in cfg:
            found.setdefault(cfg["tokenizer"]["_component_"], path)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizers")
    write_bpe(folder)
    write_ranks(folder / "ranks.tiktoken")
    write_tekken(folder / "tekken.json", CONTROL, pattern=CL100K_PATTERN)
    write_sentencepiece(folder / "tokenizer.model")
    write_tokenizer(folder)
    write_image_checkpoint(image_text_model(qwen3_vl_config()), folder / "images")
    write_conversations(folder / "chats.jsonl", count=6)
    return folder


def write_config(folder: Path, config: Path, tokenizer: str, files: dict[str, str]) -> Path:
    """The config with a tokenizer's files and conversations of our own."""
    cfg = yaml.safe_load(config.read_text())
    cfg["tokenizer"] = {"_component_": tokenizer, "max_seq_len": 256, **files}
    cfg["dataset"] = {**CHATS, "source": str(folder / "chats.jsonl")}
    written = folder / f"{tokenizer.rpartition('.')[2]}.yaml"
    written.write_text(yaml.safe_dump(cfg))
    return written


def test_the_table_names_every_tokenizer_of_the_configs():
    assert used().keys() <= FILES.keys()


@pytest.mark.parametrize("tokenizer", FILES, ids=lambda name: name.rpartition(".")[2])
def test_from_a_config_to_tokens(tokenizer, folder, tune):
    path = used().get(tokenizer, used()[HF])
    files = {name: file.format(folder) for name, file in FILES[tokenizer].items()}
    written = write_config(folder, path, tokenizer, files)
    result = tune("validate", str(written))
    assert result.code == 0, result.err
    cfg = load_and_check(str(written), [])
    made = instantiate(cfg.tokenizer)
    dataset = instantiate(cfg.dataset, made)
    assert len(dataset) == 6
    for row in dataset:
        labels = [label for label in row["labels"] if label != -100]
        assert any(label in made.stop_tokens for label in labels), "the end of the turn is trained"
        assert max(row["tokens"]) < made.vocab_size


def test_what_is_missing_is_said_before_a_file_is_opened(folder, tune):
    tokenizer = "torchtune.models.qwen3.qwen3_tokenizer"
    written = write_config(folder, used()[tokenizer], tokenizer, {"path": "/nothing/vocab.json", "merge_file": "x"})
    result = tune("validate", str(written))
    assert result.code == 2
    assert "merges_file" in result.err
