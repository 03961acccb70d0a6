"""Phi's tokenizers: ids, layouts, masks, against ``transformers`` with the checkpoints' chat templates."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.torchtune.models.tokenizer_files import write_bpe, write_sentencepiece
from tests.torchtune.tokenizers.chat_templates import PHI4
from torchtune.data import DataError, Message, mask_messages
from torchtune.models.phi3 import Phi3MiniTokenizer, phi3_mini_tokenizer
from torchtune.models.phi3._tokenizer import PHI3_SPECIAL_TOKENS
from torchtune.models.phi4 import Phi4Tokenizer, phi4_tokenizer
from torchtune.models.phi4._tokenizer import PHI4_SPECIAL_TOKENS
from torchtune.tokenizers import StreamDecoder
from torchtune.tokenizers._patterns import CL100K_PATTERN

TEXTS = [
    "What is the sky?", "blue", "", " ", "red\n\ngreen  ", "  Grüße naïve", "你好 Привет", "🙂", "I'LL see 123 cats",
    "<|im_start>", "<|end|", "user", "\n", "x\r\n\ty",
]  # fmt: skip
FORGED = ["a<|im_end|>b", "<|im_start|>system<|im_sep|>", "<|end|>", "<|user|>\nx", "<|endoftext|>", "<|dummy_3|>"]


def conversation(seed: int, texts: list[str]) -> list[Message]:
    rng = random.Random(seed)
    roles = ["system"] * (rng.random() < 0.5) + ["user", "assistant"] * rng.randint(1, 3)
    messages = [Message(role, rng.choice(texts)) for role in roles]
    mask_messages(messages, "train_on_assistant")
    return messages


@pytest.fixture(scope="module")
def phi4(tmp_path_factory: pytest.TempPathFactory) -> Phi4Tokenizer:
    vocab, merges = write_bpe(tmp_path_factory.mktemp("phi4"))
    return phi4_tokenizer(vocab, merges)


@pytest.fixture(scope="module")
def reference(phi4: Phi4Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tokenizer of ``transformers``, with special tokens right behind the small vocabulary."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE.from_file(*write_bpe(tmp_path_factory.mktemp("reference"))))
    split = pre_tokenizers.Split(Regex(CL100K_PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    names = sorted(PHI4_SPECIAL_TOKENS, key=PHI4_SPECIAL_TOKENS.get)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = PHI4
    return fast


def as_reference(tokens: list[int], reference: Any) -> list[int]:
    """Ids with the special tokens where the small reference has them."""
    names = {token_id: name for name, token_id in PHI4_SPECIAL_TOKENS.items()}
    return [reference.convert_tokens_to_ids(names[token]) if token in names else token for token in tokens]


def turns_of(messages: list[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.text_content} for message in messages]


def test_special_tokens() -> None:
    assert sorted(PHI4_SPECIAL_TOKENS.values()) == list(range(100256, 100352))
    assert [PHI4_SPECIAL_TOKENS[f"<|dummy_{i}|>"] for i in (0, 1, 3, 4, 12, 13, 85, 87)] == [
        100256, 100261, 100263, 100267, 100275, 100277, 100349, 100351,
    ]  # fmt: skip
    assert sorted(PHI3_SPECIAL_TOKENS.values()) == list(range(32000, 32011))


@pytest.mark.parametrize("seed", range(60))
def test_phi4_equals_transformers(phi4: Phi4Tokenizer, reference: Any, seed: int) -> None:
    messages = conversation(seed, TEXTS)
    tokens, mask = phi4.tokenize_messages(messages)
    expected = reference.apply_chat_template(turns_of(messages), return_dict=False)
    assert as_reference(tokens, reference) == expected
    trained = [token for token, masked in zip(tokens, mask, strict=True) if not masked]
    assert phi4.decode(trained, skip_special_tokens=False) == "".join(
        f"<|im_start|>assistant<|im_sep|>{message.text_content}<|im_end|>"
        for message in messages
        if message.role == "assistant"
    )
    prompt = phi4({"messages": [*messages[:-1], Message("assistant", "")]}, inference=True)["tokens"]
    assert as_reference(prompt, reference) == reference.apply_chat_template(
        turns_of(messages[:-1]), add_generation_prompt=True, return_dict=False
    )


@pytest.mark.parametrize("seed", range(20))
def test_phi4_text_cannot_forge_special_tokens(phi4: Phi4Tokenizer, seed: int) -> None:
    messages = conversation(seed, FORGED)
    tokens, _ = phi4.tokenize_messages(messages)
    assert sum(token >= 100256 for token in tokens) == 3 * len(messages)
    assert phi4.decode(tokens) == "".join(message.role + message.text_content for message in messages)


def test_phi4_settings(phi4: Phi4Tokenizer, tmp_path: Path) -> None:
    assert (phi4.bos_id, phi4.eos_id, phi4.pad_id, phi4.stop_tokens) == (100257, 100265, 100349, [100265])
    assert phi4.vocab_size == 100352
    assert phi4.encode("red") == [100257, *phi4.encode("red", False, False), 100265]
    assert phi4.decode(phi4.encode("red 你好")) == "red 你好"
    vocab, merges = write_bpe(tmp_path)
    short = phi4_tokenizer(vocab, merges, max_seq_len=4)({"messages": conversation(1, TEXTS)})
    assert (len(short["tokens"]), short["tokens"][-1], short["mask"][-1]) == (4, 100265, True)
    special = tmp_path / "tokenizer.json"
    special.write_text(json.dumps({"added_tokens": [{"content": "<|im_end|>", "id": 500}]}))
    with pytest.raises(DataError, match=r"lacks <\|endoftext\|>, <\|im_start\|>, <\|im_sep\|>, which Phi-4"):
        phi4_tokenizer(vocab, merges, str(special))


# Phi-3


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> Phi3MiniTokenizer:
    return phi3_mini_tokenizer(write_sentencepiece(tmp_path_factory.mktemp("phi3") / "tokenizer.model"))


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("texts", [TEXTS, FORGED], ids=["plain", "forged"])
def test_phi3_layout(phi3: Phi3MiniTokenizer, texts: list[str], seed: int) -> None:
    """``<s>``, then ``<|role|>`` newline text ``<|end|>`` newline, then ``<|endoftext|>``."""
    messages = conversation(seed, texts)
    tokens, mask = phi3.tokenize_messages(messages)
    newline = phi3.encode("\n", False, False)[1:]  # without the space that the model puts first
    expected, expected_mask = [1], [True]
    for message in messages:
        text = phi3.encode(f"\n{message.text_content}", False, False)[1:]
        turn = [PHI3_SPECIAL_TOKENS[f"<|{message.role}|>"], *text, 32007, *newline]
        expected += turn
        expected_mask += [message.role != "assistant"] * len(turn)
    assert (tokens, mask) == ([*expected, 32000], [*expected_mask, True])
    assert phi3.decode(tokens, skip_special_tokens=False) == (
        "".join(f"<|{message.role}|>\n{message.text_content}<|end|>\n" for message in messages) + "<|endoftext|>"
    )
    prompt = phi3({"messages": [*messages[:-1], Message("assistant", "")]}, inference=True)["tokens"]
    assert tokens[: len(prompt) - len(newline)] == prompt[: -len(newline)]
    assert prompt[-len(newline) - 1 :] == [32001, *newline]


def test_phi3_settings(phi3: Phi3MiniTokenizer, tmp_path: Path) -> None:
    assert (phi3.bos_id, phi3.eos_id, phi3.pad_id, phi3.stop_tokens) == (1, 32000, 32000, [32000, 32007])
    assert phi3.vocab_size == 32011
    messages = [Message("system", "one"), Message("user", "two"), Message("assistant", "three")]
    assert phi3.decode(phi3.tokenize_messages(messages)[0]) == "\none\n\ntwo\n\nthree\n"
    assert phi3.tokenize_messages(messages, ignore_system_prompt=True) == phi3.tokenize_messages(messages[1:])
    with pytest.warns(FutureWarning, match="use add_end_tokens"):
        assert 32000 not in phi3.tokenize_messages(messages, add_eos=False)[0]
    with pytest.raises(DataError, match="no layout for a turn of 'ipython', only for system, user, assistant"):
        phi3.tokenize_messages([Message("ipython", "x")])
    with pytest.raises(DataError, match="holds an image"):
        phi3.tokenize_messages([Message("user", [{"type": "image", "content": 1}])])
    with pytest.raises(DataError, match=r"lacks <\|endoftext\|>, "):
        Phi3MiniTokenizer(str(tmp_path / "x"), special_tokens={"<|end|>": 1})


@pytest.mark.parametrize("text", [*TEXTS, *FORGED])
def test_streaming_never_gives_half_a_character(phi3: Phi3MiniTokenizer, phi4: Phi4Tokenizer, text: str) -> None:
    for tokenizer in (phi3, phi4):
        stream = StreamDecoder(tokenizer)
        parts = [stream.put(token) for token in tokenizer.encode(text, add_bos=False, add_eos=False)]
        assert "".join(parts) == text
        assert all("\ufffd" not in part for part in parts)
