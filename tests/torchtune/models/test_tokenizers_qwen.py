"""Qwen's tokenizers: ids, layouts, masks."""

import json
from pathlib import Path

import pytest

from tests.torchtune.models.tokenizer_files import write_bpe
from torchtune.data import ChatMLTemplate, DataError, Message, mask_messages
from torchtune.models.qwen2._tokenizer import QWEN2_SPECIAL_TOKENS, Qwen2Tokenizer, qwen2_tokenizer
from torchtune.models.qwen2_5._tokenizer import QWEN2_5_SPECIAL_TOKENS, Qwen2_5Tokenizer, qwen2_5_tokenizer
from torchtune.models.qwen3._tokenizer import QWEN3_SPECIAL_TOKENS, Qwen3Tokenizer, qwen3_tokenizer
from torchtune.tokenizers import GPT2BaseTokenizer

CHAT = [
    Message("system", "You are a helpful assistant."),
    Message("user", "What is the sky?"),
    Message("assistant", "blue"),
    Message("user", "And the cat?"),
    Message("assistant", "small"),
]
mask_messages(CHAT, "train_on_assistant")
TOOLS = [
    Message("user", "Where?"),
    Message("assistant", '{"name": "f"}', ipython=True),
    Message("ipython", "one"),
    Message("ipython", "two"),
    Message("assistant", "big"),
]
OPEN = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nWhat is the sky?<|im_end|>\n"
    "<|im_start|>assistant\nblue<|im_end|>\n<|im_start|>user\nAnd the cat?<|im_end|>\n<|im_start|>assistant\nsmall"
)
FAMILY = (Qwen2Tokenizer, Qwen2_5Tokenizer, Qwen3Tokenizer)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return write_bpe(tmp_path_factory.mktemp("qwen"))


def test_special_tokens() -> None:
    assert sorted(QWEN2_SPECIAL_TOKENS.values()) == list(range(151643, 151646))
    assert sorted(QWEN2_5_SPECIAL_TOKENS.values()) == list(range(151643, 151665))
    assert sorted(QWEN3_SPECIAL_TOKENS.values()) == list(range(151643, 151669))
    assert QWEN3_SPECIAL_TOKENS["<think>"] == 151667


@pytest.mark.parametrize("cls", FAMILY)
def test_layout(cls: type[Qwen2Tokenizer], files: tuple[str, str]) -> None:
    tokenizer = cls(*files)
    tokens, mask = tokenizer.tokenize_messages(CHAT)
    assert tokens == [*tokenizer.encode(OPEN, add_eos=False), 151645]
    assert tokenizer.decode(tokens) == OPEN + "<|im_end|>"
    trained = tokenizer.decode([t for t, m in zip(tokens, mask, strict=True) if not m])
    assert trained == "<|im_start|>assistant\nblue<|im_end|>\n<|im_start|>assistant\nsmall<|im_end|>"
    assert tokenizer({"messages": CHAT}, inference=True)["tokens"] == tokens[:-1]
    with pytest.warns(FutureWarning, match="use add_end_tokens"):
        assert tokenizer.tokenize_messages(CHAT, add_eos=False)[0] == tokens[:-1]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (None, 151645, 151643)
    assert tokenizer.stop_tokens == [151645, 151643]
    assert tokenizer.vocab_size == max(tokenizer.special_tokens.values()) + 1


def test_tools(files: tuple[str, str]) -> None:
    call = (
        "<|im_start|>user\nWhere?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "f"}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nbig<|im_end|>"
    )
    for cls in FAMILY[1:]:
        tokens, _ = cls(*files).tokenize_messages(TOOLS)
        assert cls(*files).decode(tokens) == call
        assert (151665 in tokens) == (cls is Qwen3Tokenizer)
    plain = Qwen2Tokenizer(*files).tokenize_messages(TOOLS)[0]
    assert Qwen2Tokenizer(*files).decode(plain) == (
        '<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n{"name": "f"}<|im_end|>\nonetwo'
        "<|im_start|>assistant\nbig<|im_end|>"
    )


def test_truncation(files: tuple[str, str]) -> None:
    whole, mask = Qwen2Tokenizer(*files).tokenize_messages(CHAT)
    for length in (1, 5, 30):
        assert Qwen2Tokenizer(*files, max_seq_len=length).tokenize_messages(CHAT) == (
            [*whole[: length - 1], 151645],
            [*mask[: length - 1], True],
        )
        left = Qwen2Tokenizer(*files, max_seq_len=length, truncation_type="left").tokenize_messages(CHAT)[0]
        assert left == whole[-length:]


def test_ids_equal_those_of_transformers(files: tuple[str, str], tmp_path: Path) -> None:
    """The same vocabulary, pattern and normalisation as the released fast tokenizers."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    from torchtune.models.qwen2._tokenizer import PRETOKENIZE_REGEX

    reference = Tokenizer(models.BPE.from_file(*files))
    reference.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated")
    reference.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer = Qwen2Tokenizer(*files)
    for text in ("I'm here, they'LL see 123 cats\n\n  and   more", "e\u0301 = é", "你好\r\nжизнь 🙂", "  \t x"):
        assert tokenizer.encode(text, add_eos=False) == reference.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text, add_eos=False)) == reference.normalizer.normalize_str(text)
    assert tokenizer.encode("red<|im_end|>") == [*tokenizer.encode("red"), 151645]
    text = tokenizer.encode_text("red<|im_end|>", add_eos=False)
    assert max(text) < 151643
    assert tokenizer.decode(text) == "red<|im_end|>"


def test_builders(files: tuple[str, str], tmp_path: Path) -> None:
    assert qwen2_tokenizer(files[0]).tokenize_messages(CHAT) == qwen2_tokenizer(*files).tokenize_messages(CHAT)
    assert isinstance(qwen2_5_tokenizer(*files, max_seq_len=8), Qwen2_5Tokenizer)
    assert isinstance(qwen3_tokenizer(*files, errors="replace"), Qwen3Tokenizer)
    special = tmp_path / "tokenizer.json"
    entries = [{"content": t, "id": 600 + i} for i, t in enumerate(QWEN2_SPECIAL_TOKENS)]
    special.write_text(json.dumps({"added_tokens": entries}))
    assert qwen3_tokenizer(*files, special_tokens_path=str(special)).stop_tokens == [602, 600]
    template = qwen2_tokenizer(*files, prompt_template={"user": ("<", ">")})
    assert "<|im_start|>user\n<What is the sky?><|im_end|>" in template.decode(template.tokenize_messages(CHAT)[0])
    with pytest.raises(DataError, match="writes ChatML itself"):
        Qwen2Tokenizer(*files, prompt_template=ChatMLTemplate())
    with pytest.raises(DataError, match="prompt_template: 'user' needs two texts"):
        qwen2_tokenizer(*files, prompt_template={"user": "x"})


def test_broken_files(files: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="There is no vocabulary file"):
        qwen2_tokenizer(str(tmp_path / "vocab.json"))
    with pytest.raises(DataError, match="There is no merges file"):
        qwen2_tokenizer(files[0], str(tmp_path / "merges.txt"))
    bad = tmp_path / "bad"
    bad.write_text('{"a": 1,')
    with pytest.raises(DataError, match="is broken at line 1"):
        qwen2_tokenizer(str(bad), files[1])
    bad.write_text("[1]")
    with pytest.raises(DataError, match="not a mapping token -> id"):
        qwen2_tokenizer(str(bad), files[1])
    bad.write_text("#version: 0.2\na b c\n")
    with pytest.raises(DataError, match="broken at line 2"):
        qwen2_tokenizer(files[0], str(bad))
    bad.write_text("zq qz\n")
    with pytest.raises(DataError, match="take both files from the same checkpoint"):
        qwen2_tokenizer(files[0], str(bad))


def test_gpt2_base(files: tuple[str, str]) -> None:
    tokenizer = GPT2BaseTokenizer(*files, bos_id=1, eos_id=2)
    ids = tokenizer.encode("red blue 你好")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids[1:-1]) == "red blue 你好"
    assert tokenizer.bpe("red").replace(" ", "") == "red"
    assert tokenizer.vocab_size == 400
