"""Every tokenizer is built from its own kind of file, and refuses another kind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import write_tokenizer
from tests.torchtune.models.tokenizer_files import write_bpe, write_ranks, write_sentencepiece, write_tekken
from tests.torchtune.tokenizers.chat_templates_mistral import CONTROL
from torchtune.data import DataError, Message
from torchtune.models.gemma import gemma_tokenizer
from torchtune.models.llama2 import llama2_tokenizer
from torchtune.models.llama3 import llama3_tokenizer
from torchtune.models.mistral import mistral_instruct_tokenizer, mistral_tokenizer
from torchtune.models.phi3 import phi3_mini_tokenizer
from torchtune.models.phi4 import phi4_tokenizer
from torchtune.models.qwen2 import qwen2_tokenizer
from torchtune.models.qwen2_5 import qwen2_5_tokenizer
from torchtune.models.qwen3 import qwen3_tokenizer
from torchtune.tokenizers import CL100K_PATTERN, hf_tokenizer

# Kind of file -> its name in the folder.
KINDS = {
    "pieces": "tokenizer.model",
    "ranks": "ranks.model",
    "tekken.json": "tekken.json",
    "tokenizer.json": "tokenizer.json",
    "vocab.json": "vocab.json",
    "merges": "merges.txt",
    "pointer": "pointer.model",
}
# Builder -> (kinds that it reads, how it is called with the folder and a file).
BUILDERS: dict[Callable[..., Any], tuple[tuple[str, ...], Callable[[Any, Path, str], Any]]] = {
    **dict.fromkeys(
        (llama2_tokenizer, mistral_tokenizer, gemma_tokenizer, phi3_mini_tokenizer),
        (("pieces",), lambda builder, folder, file: builder(file)),
    ),
    llama3_tokenizer: (("ranks",), lambda builder, folder, file: builder(file)),
    mistral_instruct_tokenizer: (("pieces", "tekken.json"), lambda builder, folder, file: builder(file)),
    hf_tokenizer: (("tokenizer.json",), lambda builder, folder, file: builder(file)),
    **dict.fromkeys(
        (qwen2_tokenizer, qwen2_5_tokenizer, qwen3_tokenizer, phi4_tokenizer),
        (("vocab.json",), lambda builder, folder, file: builder(file, str(folder / "merges.txt"))),
    ),
}
CHAT = [Message("user", "red?", masked=True), Message("assistant", "blue")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kinds")
    write_tekken(folder / "tekken.json", CONTROL, pattern=CL100K_PATTERN)
    write_ranks(folder / "ranks.model")
    write_bpe(folder)
    write_sentencepiece(folder / "tokenizer.model", control_symbols=CONTROL[3:10])
    write_tokenizer(folder)
    (folder / "pointer.model").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 2183982\n")
    return folder


@pytest.mark.parametrize("builder", BUILDERS, ids=lambda builder: builder.__name__)
def test_vocabularies_of_each_kind_are_read(builder, folder):
    reads, call = BUILDERS[builder]
    for kind, name in KINDS.items():
        if kind in reads:
            tokens, mask = call(builder, folder, str(folder / name)).tokenize_messages(CHAT)
            assert len(tokens) == len(mask) > mask.count(False) > 0
        else:
            with pytest.raises(DataError, match=f"file .*{name} ") as error:
                call(builder, folder, str(folder / name))
            assert str(error.value).count("\n") == 0


def test_merges_file_of_another_kind_is_refused(folder):
    with pytest.raises(DataError, match=r"tokenizer\.json is broken at line 1"):
        phi4_tokenizer(str(folder / "vocab.json"), str(folder / "tokenizer.json"))
    with pytest.raises(DataError, match=r"vocab\.json has no 'added_tokens'"):
        qwen2_tokenizer(str(folder / "vocab.json"), special_tokens_path=str(folder / "vocab.json"))


def test_folder_without_tokenizer_json_is_refused(folder, tmp_path):
    with pytest.raises(DataError, match=r"There is no tokenizer file .*tokenizer.json: download it\.$"):
        hf_tokenizer(str(tmp_path))
    for name in ("tokenizer.model", "tekken.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(DataError, match=r"tokenizer.json, but tekken.json, tokenizer.model"):
        hf_tokenizer(str(tmp_path))


@pytest.mark.parametrize("builder", BUILDERS, ids=lambda builder: builder.__name__)
@pytest.mark.parametrize("text", [["red", "blue"], b"red", 5, None], ids=str)
def test_encode_refuses_a_list_of_texts(builder, folder, text):
    reads, call = BUILDERS[builder]
    for kind in reads:
        with pytest.raises(DataError, match=f"takes one text, not {type(text).__name__}"):
            call(builder, folder, str(folder / KINDS[kind])).encode(text)


def test_a_tokenizer_config_that_gives_a_key_two_values_is_refused(tmp_path):
    write_tokenizer(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text('{"eos_token": "<|im_end|>", "eos_token": "<|end|>"}')
    with pytest.raises(DataError, match=r"tokenizer_config\.json: the key 'eos_token' has two values"):
        hf_tokenizer(str(tmp_path / "tokenizer.json"))
